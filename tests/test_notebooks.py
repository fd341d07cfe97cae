"""`nbdev_test` on every notebook, and a count of what it really ran."""

import hashlib
import json
import subprocess
import time
from pathlib import Path

import pytest
from forked import Forks

from tools import chapters, notebooks

# nbdev_test, which says nothing of how much it ran, with a note per notebook of the cells that were executed.
COUNTED = """
import json, sys
from pathlib import Path
from execnb.shell import CaptureShell
from nbdev.test import nbdev_test

run_all = CaptureShell.run_all

def counted(self, nb, *args, **kwargs):
    ran = []
    try: return run_all(self, nb, *args, postproc=lambda cell: ran.append(cell.id), **kwargs)
    finally: (Path(sys.argv[1]) / Path(nb.path_).name).write_text(json.dumps(ran))

CaptureShell.run_all = counted
if __name__ == "__main__": nbdev_test.__wrapped__(sys.argv[2], n_workers=0, flags=sys.argv[3])
"""


def nbdev_test(forks: Forks, notebook: Path, into: Path, flags: str = "") -> tuple[list[str], subprocess.CompletedProcess]:
    "Run `nbdev_test` on a notebook; return the ids of the cells that ran, and the process."
    into.mkdir()
    script, root = into.parent / "counted.py", notebook.parent.parent
    script.write_text(COUNTED, encoding="utf-8")
    run = forks.run([script, into, notebook, flags], root, chapters.environment(root))
    ran = into / notebook.name
    return json.loads(ran.read_text()) if ran.exists() else [], run


def code_cells(path: Path, slow: bool) -> list[str]:
    "The ids of all code cells that hold code, whether or not something switches them off, but for the two kinds that must not run here."
    return [c["id"] for c in notebooks.read(path)["cells"] if c["cell_type"] == "code" and notebooks.split(c)[1].strip() and (slow or not notebooks.slow(c)) and not elsewhere(c)]


def elsewhere(cell: dict) -> bool:
    "Whether a cell is for other places: what a module does as a program (a notebook is called `__main__`, too), and the installation on Colab."
    code = notebooks.split(cell)[1].strip()
    return cell["id"] == notebooks.INSTALL or code.startswith('if __name__ == "__main__": ') and "\n" not in code


def state(root: Path) -> dict[str, str]:
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for folder in ("nbs", "minigpt") for p in (root / folder).iterdir() if p.is_file()}


def check(forks: Forks, notebook: Path, tmp_path: Path, summary: list[str], flags: str) -> None:
    root = notebook.parent.parent
    before, start = state(root), time.perf_counter()
    ran, run = nbdev_test(forks, notebook, tmp_path / "ran", flags)
    seconds = time.perf_counter() - start
    assert run.returncode == 0, run.stdout + run.stderr
    code = {c["id"]: notebooks.split(c)[1].strip() for c in notebooks.read(notebook)["cells"] if c["cell_type"] == "code"}
    ran = [i for i in ran if code.get(i)]
    assert ran == code_cells(notebook, slow=bool(flags)), "a cell did not run: skip_exec, eval: false or a flag switches it off"
    assert state(root) == before, "a notebook under test changed a file of the book"
    summary.append(f"nbdev_test{' with slow cells' if flags else ''}: {notebook.stem}, {len(ran)} cells ran in {seconds:.0f} s")


BOOK = notebooks.paths(Path(__file__).resolve().parent.parent)
LONGEST_FIRST = sorted(BOOK, key=lambda path: (path.stem not in ("06_sorting", "12_ablations", "14_speed", "11_language", "17_distributed", "15_command_line"), path.stem))


@pytest.mark.parametrize("notebook", LONGEST_FIRST, ids=lambda path: path.stem)
def test_a_chapter_passes(forks: Forks, notebook: Path, tmp_path: Path, summary: list[str]):
    check(forks, notebook, tmp_path, summary, "")


@pytest.mark.slow
@pytest.mark.parametrize("notebook", LONGEST_FIRST, ids=lambda path: path.stem)
def test_a_chapter_passes_with_its_slow_cells(forks: Forks, notebook: Path, tmp_path: Path, summary: list[str]):
    check(forks, notebook, tmp_path, summary, "slow")


def test_no_slow_cell_exports(root: Path):
    assert [path.name for path in notebooks.paths(root) for c in notebooks.read(path)["cells"] if notebooks.slow(c) and notebooks.exported(c)] == []


def sample(root: Path, tmp_path: Path, source: str) -> Path:
    "A book of one notebook with one cell of code."
    made = tmp_path / "book"
    for folder in ("nbs", "minigpt"): (made / folder).mkdir(parents=True)
    (made / "settings.ini").write_bytes((root / "settings.ini").read_bytes())
    cells = [{"cell_type": "code", "id": f"c{i}", "metadata": {}, "outputs": [], "execution_count": None, "source": s.splitlines(True)} for i, s in enumerate(["#| default_exp a", source])]
    (made / "nbs" / "00_a.ipynb").write_text(notebooks.text({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}), encoding="utf-8")
    return made / "nbs" / "00_a.ipynb"


@pytest.mark.parametrize("source", ["#| hide\n1", "#| slow\n1"])
def test_a_cell_that_runs_is_counted(forks: Forks, root: Path, tmp_path: Path, source: str):
    check(forks, sample(root, tmp_path, source), tmp_path, said := [], "slow")
    assert "00_a, 1 cells ran" in said[0]


@pytest.mark.parametrize("source, what", [("#| eval: false\n1", "a cell did not run"), ("assert 1 == 2", "assert 1 == 2"), ("open('new.txt', 'w').write('x')", "changed a file")])
def test_a_run_that_proves_nothing_fails(forks: Forks, root: Path, tmp_path: Path, source: str, what: str):
    with pytest.raises(AssertionError, match=what): check(forks, sample(root, tmp_path, source), tmp_path, [], "")


def test_an_empty_run_fails(forks: Forks, root: Path, tmp_path: Path):
    made = sample(root, tmp_path, "1")
    nb = notebooks.read(made)
    nb["cells"].insert(0, {"cell_type": "raw", "id": "r", "metadata": {}, "source": ["---\n", "skip_exec: true\n", "---"]})
    made.write_text(notebooks.text(nb), encoding="utf-8")
    with pytest.raises(AssertionError, match="a cell did not run"): check(forks, made, tmp_path, [], "")
