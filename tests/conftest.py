"""What all tests share: one thread, enforced shapes, the checkout and copies of it; and how two workers share the tests."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import tools.typecheck  # noqa: E402
from forked import Forks  # noqa: E402
from shapes import unenforced  # noqa: E402
from tools.chapters import ONE_THREAD, environment  # noqa: E402

os.environ.update(ONE_THREAD)  # before torch is imported, here and in every process that a test starts

import jaxtyping  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)
jaxtyping.install_import_hook("minigpt", "tools.typecheck.typechecked")

SUMMARY = pytest.StashKey[list[str]]()
TEMPORARY = pytest.StashKey[str]()

# The quick checks of the checkout come first: what they find explains what fails later. Then what takes longest, so that no
# worker is left with it at the end. `make test-fast` leaves the long ones out, and single tests of others that are marked so.
FIRST = ("test_lint", "test_stamps", "test_sync", "test_readme", "test_directives")
LONG = ("test_notebooks", "test_browser", "test_cli", "test_watch", "test_site", "test_distributed", "test_traps", "test_package", "test_language", "test_types",
        "test_speed", "test_sorting", "test_training", "test_threads", "test_devices", "test_checkpoints", "test_addition", "test_grokking", "test_ablations", "test_rotary",
        "test_gpt2", "test_properties", "test_reference")
ORDER = (*LONG, "test_cache")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    "Set the order and mark what is long."
    def place(item: pytest.Item) -> int:
        name = item.path.stem
        return FIRST.index(name) - len(FIRST) if name in FIRST else ORDER.index(name) if name in ORDER else len(ORDER)

    items.sort(key=place)
    for item in items:
        if item.path.stem in LONG: item.add_marker("long")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """Keep each module's tests, which share fixtures, in one worker; but notebooks are run one by one. This is not left to groups:
    pytest-xdist 3.8 writes a test's group into a field that pytest 9.2 no longer reads, and then every test is a group of its own."""
    from xdist.scheduler import LoadFileScheduling

    class ByModule(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str: return nodeid if "test_notebooks" in nodeid else super()._split_scope(nodeid)

    return ByModule(config, log)


def is_worker(config: pytest.Config) -> bool: return hasattr(config, "workerinput")


def pytest_configure(config: pytest.Config) -> None:
    """One folder for everything temporary, which workers and all that tests start inherit by its name: torch's launcher and compiler
    would leave hundreds of files behind. Its name is short because a socket's path may have no more than 103 bytes. It is removed
    whatever happens; who wants to see what a failed test has left gives pytest a `--basetemp`."""
    if is_worker(config): return
    tempfile.tempdir = os.environ["TMPDIR"] = config.stash[TEMPORARY] = tempfile.mkdtemp(prefix="mg-")
    os.environ["MINIGPT_TEST_SITE"] = tempfile.mkdtemp(prefix="built-")
    os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)


def pytest_unconfigure(config: pytest.Config) -> None:
    "Remove the folder, if it was made: where another plugin stops pytest before that, TMPDIR is still the user's."
    if folder := config.stash.get(TEMPORARY, None): shutil.rmtree(folder, ignore_errors=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    "A worker hands its lines on. Where nothing may be skipped, as in continuous integration, a skipped test is a failure."
    if is_worker(session.config): session.config.workeroutput["summary"] = session.config.stash.get(SUMMARY, [])
    elif os.environ.get("MINIGPT_NO_SKIPS") == "1" and skipped(session.config): session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error) -> None:
    lines = node.config.stash.setdefault(SUMMARY, [])
    lines += getattr(node, "workeroutput", {}).get("summary", [])


def skipped(config: pytest.Config) -> list[str]:
    "Why tests were skipped, each reason with the number of tests."
    reports = config.pluginmanager.get_plugin("terminalreporter").stats.get("skipped", [])
    reasons = [report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr) for report in reports]
    return [f"{reasons.count(reason)} for {reason.removeprefix('Skipped: ')!r}" for reason in dict.fromkeys(reasons)]


@pytest.fixture(autouse=True)
def same_start(request: pytest.FixtureRequest):
    "Every test starts from the same seed and dtype; shapes in signatures are checked unless it is marked `unenforced`."
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    with unenforced(request.node.get_closest_marker("unenforced") is not None): yield


@pytest.fixture
def summary(request: pytest.FixtureRequest) -> list[str]:
    "Lines that a test wants to stand at the end of the report."
    return request.config.stash.setdefault(SUMMARY, [])


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    for line in config.stash.get(SUMMARY, []): terminalreporter.write_line(line)
    if reasons := skipped(config): terminalreporter.write_line(f"skipped: {', '.join(reasons)}")


@pytest.fixture(scope="session")
def root() -> Path:
    "The checkout. Tests read it and never change it."
    return ROOT


@pytest.fixture(scope="session")
def forks():
    "Runs programs that find what takes longest to import already there: as the notebooks are run, without the checkout on their path."
    forks = Forks(["torch._dynamo", "sympy", "matplotlib.pyplot", "nbdev.test"], environment(ROOT, PYTHONPATH=""))
    yield forks
    forks.close()


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


@pytest.fixture
def plain(tmp_path: Path) -> tuple[str, str]:
    """This Python and the checkout, by links whose names are ASCII. Under `LC_ALL=C` a Python without its UTF-8 mode can spell no
    others, and torch stops at them while it is imported."""
    environment, checkout = tmp_path / "environment", tmp_path / "checkout"
    environment.symlink_to(sys.prefix)
    checkout.symlink_to(ROOT)
    return str(environment / "bin" / Path(sys.executable).name), str(checkout)
