"""What all tests share: one thread, enforced shapes, the checkout and copies of it."""

import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import tools.typecheck  # noqa: E402
from tools.chapters import ONE_THREAD  # noqa: E402

os.environ.update(ONE_THREAD)  # before torch is imported, here and in every process that a test starts

import jaxtyping  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)
jaxtyping.install_import_hook("minigpt", "tools.typecheck.typechecked")

SUMMARY = pytest.StashKey[list[str]]()

# The quick checks of the checkout come first: what they find explains what fails later.
FIRST = ("test_lint", "test_stamps", "test_sync", "test_readme", "test_package")
LAST = ("test_site", "test_browser", "test_notebooks")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        name = item.path.stem
        return FIRST.index(name) - len(FIRST) if name in FIRST else LAST.index(name) + 1 if name in LAST else 0

    items.sort(key=place)


@pytest.fixture(autouse=True)
def same_start(request: pytest.FixtureRequest):
    "Every test starts from the same seed and dtype; shapes in signatures are checked unless it is marked `unenforced`."
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    jaxtyping.config.update("jaxtyping_disable", request.node.get_closest_marker("unenforced") is not None)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def summary(request: pytest.FixtureRequest) -> list[str]:
    "Lines that a test wants to stand at the end of the report."
    return request.config.stash.setdefault(SUMMARY, [])


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    for line in config.stash.get(SUMMARY, []): terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def root() -> Path:
    "The checkout. Tests read it and never change it."
    return ROOT


@pytest.fixture
def project(tmp_path: Path) -> Path:
    "A copy of what the builder works on, to be changed at will."
    return copy(tmp_path / "project")


def copy(into: Path) -> Path:
    into.mkdir()
    for name in ("settings.ini", "pyproject.toml", "_quarto.yml", "README.md", "LICENSE"):
        if (ROOT / name).exists(): shutil.copy(ROOT / name, into)
    skip = shutil.ignore_patterns("__pycache__", ".*")
    for name in ("nbs", "minigpt"): shutil.copytree(ROOT / name, into / name, symlinks=True, ignore=skip)
    return into
