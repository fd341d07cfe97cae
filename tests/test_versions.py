"""The torches that `pyproject.toml` allows: the oldest and the newest, each in an empty environment, with the wheel of the checkout. Needs a registry."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_package import wheel  # noqa: F401  (a fixture)

pytestmark = pytest.mark.slow
LOSS = 2.0  # that the text model below is under after its 200 steps; with a softmax of wrong gradients, a training like it ended at 4.66


def python_of(minor: int) -> str | None:
    "A Python 3 of this minor version that runs: this one, or one on the PATH."
    if sys.version_info[1] == minor: return sys.executable
    found = shutil.which(f"python3.{minor}")
    return found if found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0 else None


@pytest.mark.parametrize("torch, minor", [("oldest", 10), ("pinned", 11), ("newest", 13)])
def test_the_wheel_works_with_the_torch(torch: str, minor: int, wheel: Path, root: Path, tmp_path: Path):  # noqa: F811
    python = python_of(minor)
    if python is None: pytest.skip(f"no Python 3.{minor} here")
    oldest = re.search(r'"torch>=([\d.]+)"', (root / "pyproject.toml").read_text(encoding="utf-8"))[1]
    pinned = re.search(r"(?m)^torch==([\d.]+)", (root / "requirements-dev.txt").read_text(encoding="utf-8"))[1]
    wanted = {"oldest": f"torch=={oldest}.0", "pinned": f"torch=={pinned}", "newest": "torch"}[torch]
    subprocess.run([python, "-m", "venv", tmp_path / "venv"], check=True)
    bin, numpy = tmp_path / "venv" / "bin", ["numpy<2.4"] if torch == "oldest" else []
    subprocess.run([bin / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wanted, wheel, "pytest", "hypothesis", "beartype", *numpy], check=True)

    def minigpt(*words: str) -> str:
        return subprocess.run([bin / "minigpt", *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    assert minigpt("verify").count("equal") == 12 and minigpt("sort", "314159").strip() == "1 1 3 4 5 9"
    (tmp_path / "text").write_text("The quick brown fox jumps over the lazy dog, which does not mind.\n" * 200)
    for how in ((), ("--fused",)):
        minigpt("train", "text", "--text", "text", "--steps", "200", "--every", "200", "--out", f"run{len(how)}", *how)
        loss = float((tmp_path / f"run{len(how)}" / "log.csv").read_text().splitlines()[-1].split(",")[1])
        assert loss < LOSS
    checks = [root / "tests" / f"test_{name}.py" for name in ("gradients", "precision")]
    ran = subprocess.run([bin / "python", "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", root, "-p", "no:cacheprovider", *checks], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-3000:]
