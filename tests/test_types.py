"""The generated modules under a type checker: nothing to complain about, so that who uses the package is told the truth."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def complaints(root: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    "What mypy says of the modules and of a user's file with a mistake, in one run, which has to find out about torch only once."
    folder = tmp_path_factory.mktemp("mypy")
    (folder / "wrong.py").write_text("from minigpt.model import GPTConfig\n\nsize: str = GPTConfig(d_model=8, n_heads=1).d_model\n")
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--cache-dir", folder / "cache", "minigpt", folder / "wrong.py"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 1 and not done.stderr, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_the_modules_are_clean_under_mypy(complaints: list[str], root: Path):
    assert [line for line in complaints if "wrong.py" not in line] == []
    assert (root / "minigpt" / "py.typed").exists()


def test_a_mistake_would_be_found(complaints: list[str]):
    assert any("wrong.py:3: error: " in line and 'expression has type "int", variable has type "str"' in line for line in complaints)
