"""The generated modules under a type checker: nothing to complain about, so that who uses the package is told the truth."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def mypy(root: Path, tmp_path_factory: pytest.TempPathFactory):
    "Run mypy in the checkout; what one run finds out about torch, the next has from the cache."
    cache = str(tmp_path_factory.mktemp("cache"))

    def run(file: Path | str) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, "-m", "mypy", "--ignore-missing-imports", "--cache-dir", cache, str(file)], cwd=root, capture_output=True, text=True)

    return run


def test_the_modules_are_clean_under_mypy(mypy, root: Path):
    done = mypy("minigpt")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert (root / "minigpt" / "py.typed").exists()


def test_a_mistake_would_be_found(mypy, tmp_path: Path):
    (tmp_path / "wrong.py").write_text("from minigpt.model import GPTConfig\n\nsize: str = GPTConfig(d_model=8, n_heads=1).d_model\n")
    done = mypy(tmp_path / "wrong.py")
    assert done.returncode == 1 and 'expression has type "int", variable has type "str"' in done.stdout
