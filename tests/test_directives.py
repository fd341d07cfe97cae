"""The `#|` lines of every notebook, as three programs read them: Quarto, nbdev and our tools."""

from pathlib import Path

import nbformat
import pytest
import yaml
from nbdev.process import extract_directives

from tools import lint, notebooks

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "nbs").glob("*.ipynb"))


def with_directives(path: Path) -> list[dict]:
    return [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code" and cell.source.startswith("#|")]


def as_quarto(cell: dict) -> object:
    "What Quarto makes of a cell's options: the leading `#|` lines, as one document of YAML."
    lines = []
    for line in cell["source"].splitlines():
        if not line.startswith("#|"): break
        lines.append(line.removeprefix("#|").removeprefix(" "))
    return yaml.safe_load("\n".join(lines))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_options_of_every_cell_are_yaml(path: Path):
    "A word, or names with values; `slow` above `code-fold: true`, without a colon of its own, is neither."
    for cell in with_directives(path):
        read = as_quarto(cell)
        assert isinstance(read, dict) if cell.source.splitlines()[1:2] and cell.source.splitlines()[1].startswith("#|") else isinstance(read, (dict, str)), cell.source[:80]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_nbdev_and_our_tools_read_the_same_names(path: Path):
    for cell in with_directives(path):
        theirs = extract_directives(nbformat.NotebookNode(cell), remove=False)
        assert {name.rstrip(":") for name in theirs} == set(notebooks.directives(cell))


def test_nbdev_would_skip_every_cell_that_we_call_slow():
    "Its tests look for the bare name among the directives, with a colon behind it or not."
    slow = [cell for path in NOTEBOOKS for cell in with_directives(path) if notebooks.slow(cell)]
    assert len(slow) > 20 and all("slow" in extract_directives(nbformat.NotebookNode(cell), remove=False) for cell in slow)


@pytest.mark.parametrize("source, fine", [("#| slow\n#| code-fold: true\n1", False), ("#| slow:\n#| code-fold: true\n1", True), ("#| slow\n1", True), ("#| hide\n#| slow\n1", False)])
def test_lint_refuses_what_quarto_cannot_read(source: str, fine: bool):
    cell = {"cell_type": "code", "source": source.splitlines(True), "metadata": {}, "outputs": [], "execution_count": None, "id": "a"}
    import ast

    found = [problem for problem in lint.cell_problems(cell, ast.parse("1")) if "Quarto" in problem]
    assert bool(found) != fine
