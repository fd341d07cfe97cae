"""The generated modules under a type checker: nothing to complain about, so that who uses the package is told the truth."""

import subprocess
import sys
from pathlib import Path


def test_the_modules_are_clean_under_mypy(root: Path, tmp_path: Path):
    command = [sys.executable, "-m", "mypy", "--ignore-missing-imports", "--cache-dir", str(tmp_path / "cache"), "minigpt"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert (root / "minigpt" / "py.typed").exists()


def test_a_mistake_would_be_found(root: Path, tmp_path: Path):
    (tmp_path / "wrong.py").write_text("from minigpt.model import GPTConfig\n\nsize: str = GPTConfig(d_model=8, n_heads=1).d_model\n")
    command = [sys.executable, "-m", "mypy", "--ignore-missing-imports", "--follow-imports", "silent", "--cache-dir", str(tmp_path / "cache"), str(tmp_path / "wrong.py")]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 1 and 'expression has type "int", variable has type "str"' in done.stdout
