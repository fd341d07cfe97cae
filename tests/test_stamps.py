"""Stamps: what makes a page stale and what does not, that stale and broken pages are found, and that a run stores the same file twice."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from tools import chapters, notebooks, stamps, syntax

SAME = "2.13.0"


def cell(source: str, kind: str = "code", **metadata) -> dict:
    made = {"cell_type": kind, "id": stamps.digest(source)[:8], "metadata": metadata, "source": source.splitlines(True)}
    return made | ({"outputs": [], "execution_count": None} if kind == "code" else {})


def write(root: Path, name: str, *cells: str | dict) -> Path:
    path = root / "nbs" / f"{name}.ipynb"
    made = [c if isinstance(c, dict) else cell(c) for c in cells]
    path.write_text(notebooks.text({"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}), encoding="utf-8")
    return path


def edit(path: Path, old: str, new: str) -> None:
    "Change code in a notebook or module; the change must be one."
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        nb = json.loads(text)
        for c in nb["cells"]: c["source"] = notebooks.source(c).replace(old, new).splitlines(True)
        changed = notebooks.text(nb)
    else: changed = text.replace(old, new)
    assert changed != text
    path.write_text(changed, encoding="utf-8")


@pytest.fixture(scope="session")
def small_template(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Path:
    made = tmp_path_factory.mktemp("book") / "small"
    (made / "nbs").mkdir(parents=True)
    shutil.copy(root / "settings.ini", made)
    write(made, "00_start", "#| default_exp __init__", "#| exports\ndef __getattr__(name):\n    import importlib\n    return getattr(importlib.import_module('.second', __name__), name)")
    write(made, "01_first", cell("# First\n\n> One.", "markdown"), "#| default_exp first", '#| exports\ndef one():\n    "One."\n    return 1  # one', "one()")
    write(made, "02_second", cell("# Second\n\n> Two.", "markdown"), "#| default_exp second", "#| exports\nfrom minigpt.first import one",
          "#| exports\ndef two(): return one() + one()", "two()", "#| slow\nthree = two() + one()\nthree", "#| slow\nthree + 1", "print('a')\nprint('b')")
    write(made, "03_alone", "#| default_exp alone", "#| exports\nALONE = 1")
    write(made, "index", "import minigpt", "minigpt.two()")
    chapters.export(made)
    return made


@pytest.fixture(scope="session")
def ran_template(tmp_path_factory: pytest.TempPathFactory, small_template: Path) -> Path:
    made = Path(shutil.copytree(small_template, tmp_path_factory.mktemp("ran") / "small"))
    chapters.make(made, say=lambda _: None)
    assert stamps.problems(made) == []
    return made


@pytest.fixture
def small(tmp_path: Path, small_template: Path) -> Path:
    "A book of four chapters: `second` builds on `first`, the index on both, through the lazy package; it needs no torch to run."
    return Path(shutil.copytree(small_template, tmp_path / "small"))


@pytest.fixture
def ran(tmp_path: Path, ran_template: Path) -> Path:
    "The small book after a run."
    return Path(shutil.copytree(ran_template, tmp_path / "small"))


def state(root: Path, torch: str = SAME) -> dict[str, str]:
    return {c.name: c.stamp for c in stamps.book(root, torch)}


def stale(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {name for name in after if before.get(name) != after[name]}


# What counts


@pytest.mark.parametrize("a, b", [
    ("x = 1", "x = 1  # one"),
    ("def f(x):\n    'Doc.'\n    return x", "def f( x ):\n    '''Other\n    doc.'''\n\n    return (x)"),
    ("class A:\n    'Doc.'\n    n: int  # how many", "class A:\n    n: int"),
    ('f"a{x}b" "c"', "f'a{x}' 'bc'"),
    ("%time x = 1\ny", "%time x = 1\ny  # y"),
])
def test_comments_docstrings_and_layout_change_nothing(a: str, b: str):
    assert stamps.Cell(0, cell(a)).hash == stamps.Cell(0, cell(b)).hash


@pytest.mark.parametrize("a, b", [
    ("x = 1", "x = 2"),
    ("x = 1", "x = 1.0"),
    ("x", "#| echo: false\nx"),
    ("#| fig-cap: one\nx", "#| fig-cap: two\nx"),
    ("'a value that is shown'", "'another value'"),
    ("%time x", "%timeit x"),
    ("!ls", "!ls -a"),
    ("f'{x:.2f}'", "f'{x:.3f}'"),
    ("f'{x!r}'", "f'{x!s}'"),
    ("f(a, *b)", "f(a, b)"),
    ("{**a}", "{None: a}"),
    ("def f(x: int): return x", "def f(x: float): return x"),
])
def test_code_and_directives_count(a: str, b: str):
    assert stamps.Cell(0, cell(a)).hash != stamps.Cell(0, cell(b)).hash


def test_every_python_computes_the_same_stamp():
    "A literal, so that the two Pythons of continuous integration must agree on it."
    code = "@dataclass(frozen=True)\nclass A(B, metaclass=C):\n"
    code += "    x: int = 1\n    async def f(self, /, a, *b, c=None, **d) -> 'é☃\\n': return f'{a!r:>{b}}{c=}' 'x', {**d}, lambda: (yield), a[1:2, ...], 1e-8, 3j, b'\\xff'\n"
    code += "match x:\n    case {'a': [1, *rest], **more} if (y := x): pass\ntry: pass\nexcept* ValueError as e: del e"
    assert stamps.Cell(0, cell(code)).hash == "0c77a7de15193b2d"


def test_a_change_makes_dependants_stale_and_no_other(small: Path):
    before = state(small)
    edit(small / "minigpt" / "first.py", "return 1", "return 10")
    assert stale(before, state(small)) == {"02_second", "index"}
    edit(small / "minigpt" / "first.py", "return 10  # one", "return 1")
    edit(small / "minigpt" / "first.py", '"One."', '"""Another docstring."""')
    assert stale(before, state(small)) == set()
    edit(small / "minigpt" / "alone.py", "ALONE = 1", "ALONE = 2")
    assert stale(before, state(small)) == set()
    edit(small / "nbs" / "03_alone.ipynb", "ALONE = 1", "ALONE = 2")
    assert stale(before, state(small)) == {"03_alone"}


def test_torch_counts_by_its_public_version(small: Path):
    before = state(small)
    assert stale(before, state(small, "2.13.0+cpu")) == set()
    assert stale(before, state(small, "2.13.1")) == set(before)


def test_a_data_file_counts_where_its_name_stands(small: Path):
    (small / "minigpt" / "weights.safetensors").write_bytes(b"1")
    edit(small / "nbs" / "01_first.ipynb", "return 1", "return open('weights.safetensors')")
    chapters.export(small)
    before = state(small)
    (small / "minigpt" / "weights.safetensors").write_bytes(b"2")
    assert stale(before, state(small)) == {"01_first", "02_second", "index"}
    book = {c.name: c for c in stamps.book(small, SAME)}
    assert [c.name for c in chapters.after(book["02_second"], list(book.values()))] == ["01_first"]
    assert chapters.after(book["01_first"], list(book.values())) == []


@pytest.mark.parametrize("code, reads", [
    ("from minigpt.reading import plain", False),
    ("from minigpt.reading import load", True),
    ("from minigpt.reading import loads_too", True),
    ("from minigpt.reading import *", True),
    ("from minigpt import reading\nreading.load()", True),
    ("from minigpt import reading\nreading.plain()", False),
    ("from minigpt import reading\ngetattr(reading, 'load')", True),
    ("from minigpt import reading\nPROGRAM = 'from minigpt.reading import load'", True),
    ("from minigpt.through import one", True),
    ("from minigpt.reading import plain\nopen('weights.safetensors')", True),
])
def test_a_data_file_counts_where_code_can_reach_it(small: Path, code: str, reads: bool):
    "Protects long experiments from being run again because a file changed that they cannot read."
    (small / "minigpt" / "weights.safetensors").write_bytes(b"1")
    (small / "minigpt" / "reading.py").write_text(
        "def path(): return 'weights.safetensors'\ndef load(): return open(path())\ndef loads_too(): return load()\ndef plain(): return 1\n")
    (small / "minigpt" / "through.py").write_text("from .reading import load\ndef one(): return load()\n")
    write(small, "04_reader", code)
    before = state(small)
    (small / "minigpt" / "weights.safetensors").write_bytes(b"2")
    assert stale(before, state(small)) == ({"04_reader"} if reads else set())
    (small / "minigpt" / "reading.py").write_text((small / "minigpt" / "reading.py").read_text() + "STORED = open('weights.safetensors')\n")
    before = state(small)
    (small / "minigpt" / "weights.safetensors").write_bytes(b"3")
    assert stale(before, state(small)) >= {"04_reader"}


@pytest.mark.parametrize("code, found", [
    ("from minigpt import two", {"__init__", "second", "first"}),
    ("from minigpt import first", {"first"}),
    ("from minigpt.first import *", {"first"}),
    ("import minigpt.first as f", {"first"}),
    ("import minigpt as m\nm.one", {"__init__", "first"}),
    ("import minigpt\nminigpt.__version__", {"__init__"}),
    ("import minigpt\nprint(minigpt)", {"__init__", "first", "second", "alone"}),
    ("from minigpt import unknown", {"__init__", "first", "second", "alone"}),
    ("def f():\n    from minigpt.alone import ALONE", {"alone"}),
    ("import importlib\nimportlib.import_module('minigpt.alone')", {"alone"}),
    ("run([python, '-c', 'from minigpt.alone import ALONE'])", {"alone"}),
    ("%jaxtyping.typechecker minigpt.alone.check", {"alone"}),
    ("import torch\nfrom minigpt_other import one", set()),
])
def test_imports_are_followed(small: Path, code: str, found: set[str]):
    modules = stamps.Modules(small)
    assert modules.closure(m for m, _ in modules.reached_by([stamps.Cell(0, cell(code))])) == found


def test_a_slow_cell_depends_on_what_it_uses(tmp_path: Path):
    cells = ["#| exports\ndef f(): return 1", "from minigpt.a import a", "x = 1", "y = x", "z = 1", "y.append(2)", "#| slow\ns = y + a()", "#| slow\ns", "x"]
    changed = {"exported": (0, "#| exports\ndef f(): return 2"), "import": (1, "from minigpt.b import a"), "another import": (1, "from minigpt.a import a, b"), "behind": (2, "x = 2"), "bound": (3, "y = x + 1"),
               "in place": (5, "y.append(3)"), "itself": (6, "#| slow\ns = y - a()"), "unrelated": (4, "z = 2"), "later": (8, "x + 1")}

    def slow_stamps(sources: list[str]) -> list[str]:
        chapter = stamps.Chapter.__new__(stamps.Chapter)
        chapter.modules, chapter.torch, chapter.cells = stamps.Modules(tmp_path), SAME, [stamps.Cell(i, cell(s)) for i, s in enumerate(sources)]
        return [chapter.slow_stamp(c) for c in chapter.cells if c.slow]

    before = slow_stamps(cells)
    moved = {what: slow_stamps(cells[:i] + [new] + cells[i + 1:]) for what, (i, new) in changed.items()}
    assert {what for what, now in moved.items() if now[0] != before[0]} == {"exported", "import", "behind", "bound", "in place", "itself"}
    assert {what for what, now in moved.items() if now[1] != before[1]} == {"exported", "import", "behind", "bound", "in place", "itself"}


TOOLS = """from dataclasses import dataclass
from . import alone
from .first import one, other
from .second import two as renamed
LIMIT = 3
TABLE = {}
def direct(): return helper() + LIMIT
def helper(): return one()
def unused(): return other() + renamed()
@dataclass
class Base: x: int = 1
class Child(Base): pass
def through(): return alone.ALONE
def locally():
    from .second import two
    return two()
def by_name(): return "Child"
def anything(): return globals()["helper"]()
TABLE[1] = 1
"""


@pytest.mark.parametrize("code, needs", [
    ("from minigpt.more import direct\n#\ndirect()", {"direct", "helper", "LIMIT", "one", "TABLE"}),
    ("from minigpt.more import direct, unused\n#\ndirect()", {"direct", "helper", "LIMIT", "one", "TABLE"}),
    ("from minigpt.more import Child\n#\nChild()", {"Child", "Base", "TABLE"}),
    ("from minigpt.more import by_name\n#\nby_name()", {"by_name", "Child", "Base", "TABLE"}),
    ("from minigpt.more import through\n#\nthrough()", {"through", "ALONE", "TABLE"}),
    ("from minigpt.more import locally\n#\nlocally()", {"locally", "two", "one", "TABLE"}),
    ("from minigpt.more import unused\n#\nunused()", {"unused", "other", "two", "one", "TABLE"}),
    ("from minigpt import more\n#\nmore.direct()", "all"),
    ("import minigpt\n#\nminigpt.direct()", {"direct", "helper", "LIMIT", "one", "TABLE"}),
    ("from minigpt.more import *\n#\ndirect()", "all"),
    ("from minigpt.more import anything\n#\nanything()", "all"),
    ("x = 1\n#\nsubprocess.run([python, '-c', 'from minigpt.more import Child'])", {"Child", "Base", "TABLE"}),
])
def test_a_slow_cell_depends_on_the_definitions_it_needs(small: Path, code: str, needs: set[str] | str):
    "Protects long experiments from being run again because of a function they never reach, and from not being run again because of one they do."
    first = small / "minigpt" / "first.py"
    first.write_text(first.read_text() + "def other(): return 1\n")
    (small / "minigpt" / "more.py").write_text(TOOLS)
    imports, work = code.split("\n#\n")
    path = write(small, "04_more", imports, f"#| slow\n{work}")
    def slow() -> list[str]: return [c.slow_stamp(s) for c in stamps.book(small, SAME) if c.path == path for s in c.cells if s.slow]
    before = slow()
    changes = {"direct": ("more", "+ LIMIT", "- LIMIT"), "helper": ("more", "return one()", "return 2 * one()"), "LIMIT": ("more", "LIMIT = 3", "LIMIT = 4"),
               "unused": ("more", "other() +", "other() -"), "Base": ("more", "x: int = 1", "x: int = 2"), "Child": ("more", "(Base): pass", "(Base): y = 1"),
               "through": ("more", "alone.ALONE", "-alone.ALONE"), "locally": ("more", "return two()", "return -two()"), "by_name": ("more", "def by_name():", "def by_name(x=1):"),
               "anything": ("more", "globals()[", "vars()["), "TABLE": ("more", "] = 1", "] = 2"), "one": ("first", "return 1  # one", "return 3"),
               "other": ("first", "other(): return 1", "other(): return 2"), "two": ("second", "one() + one()", "one() - one()"), "ALONE": ("alone", "ALONE = 1", "ALONE = 2")}
    moved = set()
    for name, (module, old, new) in changes.items():
        file = small / "minigpt" / f"{module}.py"
        text = file.read_text()
        edit(file, old, new)
        if slow() != before: moved.add(name)
        file.write_text(text)
    assert slow() == before and moved == (set(changes) if needs == "all" else needs)


# What is found, and what a run stores


def found(root: Path, name: str) -> str:
    return "\n".join(p for c in stamps.book(root) if c.name == name for p in c.problems())


def shown(root: Path, name: str) -> list[str]:
    return ["".join(o.get("text") or o["data"]["text/plain"]) for c in notebooks.read(root / "nbs" / f"{name}.ipynb")["cells"] for o in c.get("outputs", [])]


def test_a_run_stores_outputs_records_and_stamps(ran: Path):
    assert shown(ran, "02_second") == ["2", "3", "4", "a\nb\n"] and shown(ran, "index") == ["2"]
    path = ran / "nbs" / "02_second.ipynb"
    text = path.read_text(encoding="utf-8")
    assert '"execution_count": null' in text and text == notebooks.text(notebooks.read(path))


@pytest.mark.long
def test_only_what_is_stale_runs_and_slow_outputs_are_kept(ran: Path):
    path = ran / "nbs" / "02_second.ipynb"
    nb = notebooks.read(path)
    slow = [c for c in nb["cells"] if notebooks.slow(c)]
    slow[0]["outputs"][0]["data"]["text/plain"] = ["kept"]
    slow[0]["metadata"]["minigpt"]["gave"] = stamps.Cell(0, slow[0]).shown
    path.write_text(notebooks.text(nb), encoding="utf-8")
    edit(path, "print('a')", "print('c')")
    said: list[str] = []
    chapters.make(ran, say=said.append)
    assert said[0] == "running 02_second" and said[-1] == "every chapter is up to date" and shown(ran, "02_second") == ["2", "kept", "4", "c\nb\n"]
    edit(path, "three + 1", "three + 2")
    chapters.make(ran, say=said.append)
    assert shown(ran, "02_second") == ["2", "3", "5", "c\nb\n"], "a stale slow cell runs with the slow cells behind it"
    edit(path, "return one() + one()", "return one() + 4")
    chapters.make(ran, slow="none", say=said.append)
    assert shown(ran, "02_second") == ["5", "3", "5", "c\nb\n"] and "slow cell" in found(ran, "02_second") and shown(ran, "index") == ["5"]
    chapters.make(ran, refresh=True, say=said.append)
    assert shown(ran, "02_second") == ["5", "6", "8", "c\nb\n"] and stamps.problems(ran) == []


def test_a_timed_cell_runs_alone():
    "Protects what is timed: it starts when the others' cells have ended, and while it waits or runs no other cell starts; others overlap."
    log: list[str] = []

    async def cell(name: str, gate, ends: asyncio.Event) -> None:
        async with gate:
            log.append(f"{name} starts")
            await ends.wait()
            log.append(f"{name} ends")

    async def story() -> None:
        quiet, ends = chapters.Quiet(), {name: asyncio.Event() for name in "abtcu"}
        tasks = []
        for name in "abtcu":
            tasks.append(asyncio.create_task(cell(name, quiet.by_itself() if name in "tu" else quiet.with_others(), ends[name])))
            for _ in range(5): await asyncio.sleep(0)
        for name in "batcu":
            ends[name].set()
            for _ in range(20): await asyncio.sleep(0)
        await asyncio.wait_for(asyncio.gather(*tasks), 10)

    asyncio.run(story())
    assert log[:6] == ["a starts", "b starts", "b ends", "a ends", "t starts", "t ends"]
    assert sorted(log[6:]) == ["c ends", "c starts", "u ends", "u starts"] and log[6][0] == log[7][0]


def test_a_timed_cell_that_fails_lets_the_others_go_on():
    async def story() -> None:
        quiet = chapters.Quiet()
        with pytest.raises(ZeroDivisionError):
            async with quiet.by_itself(): 1 / 0
        with pytest.raises(ZeroDivisionError):
            async with quiet.with_others(): 1 / 0
        async with quiet.by_itself(): pass
        async with quiet.with_others(): pass

    asyncio.run(asyncio.wait_for(story(), 10))


@pytest.mark.long
def test_equal_code_gives_equal_files(ran: Path):
    first = {p.name: p.read_bytes() for p in notebooks.paths(ran)}
    chapters.make(ran, refresh=True, say=lambda _: None)
    assert {p.name: p.read_bytes() for p in notebooks.paths(ran)} == first


@pytest.mark.long
def test_equal_code_gives_equal_figures(project: Path):
    path = project / "nbs" / "90_pictures.ipynb"
    made = []
    for _ in range(2):
        chapters.make(project, [path.stem], refresh=True, say=lambda _: None)
        made.append(path.read_bytes())
    assert b"<svg" in made[0] and made[0] == made[1]


@pytest.mark.long
def test_a_failing_chapter_is_left_as_it_was(ran: Path):
    path = ran / "nbs" / "01_first.ipynb"
    edit(path, "return 1", "return 1 / 0")
    before = path.read_bytes()
    with pytest.raises(chapters.Failed, match="(?s)01_first failed.*ZeroDivisionError"): chapters.make(ran, say=lambda _: None)
    assert path.read_bytes() == before


@pytest.mark.long
def test_a_dying_kernel_is_one_sentence(ran: Path):
    path = ran / "nbs" / "01_first.ipynb"
    edit(path, "return 1", "return __import__('os')._exit(3)")
    before = path.read_bytes()
    with pytest.raises(chapters.Failed, match="01_first: the kernel died"): chapters.make(ran, say=lambda _: None)
    assert path.read_bytes() == before


def test_a_chapter_edited_while_it_runs_keeps_the_edit(ran: Path):
    path = ran / "nbs" / "03_alone.ipynb"
    edit(path, "ALONE = 1", "ALONE = open('03_alone.ipynb', 'a').write(' ')")
    with pytest.raises(chapters.Failed, match="edited while it ran"): chapters.make(ran, say=lambda _: None)
    assert path.read_text(encoding="utf-8").endswith("} ") or path.read_text(encoding="utf-8").endswith("}\n ")


def test_export_removes_modules_without_a_notebook(small: Path):
    (small / "nbs" / "03_alone.ipynb").unlink()
    assert chapters.export(small) == ["_modidx.py", "alone.py (removed: no notebook makes it)"] and not (small / "minigpt" / "alone.py").exists()


def made(root: Path) -> str:
    said: list[str] = []
    chapters.make(root, say=said.append)
    return said[-1]


def test_with_an_address_the_first_cell_installs_the_package(ran: Path):
    path, settings = ran / "nbs" / "02_second.ipynb", (ran / "settings.ini").read_text()
    before = path.read_text()
    (ran / "settings.ini").write_text(settings.replace("git_url =", "git_url = https://github.com/someone/book"))
    assert made(ran) == "every chapter is up to date"  # the cell makes nothing stale
    first = next(c for c in notebooks.read(path)["cells"] if c["cell_type"] == "code")
    assert "%pip install -q git+https://github.com/someone/book" in notebooks.source(first) and not notebooks.runs(first)
    assert sum(notebooks.INSTALL == c["id"] for c in notebooks.read(path)["cells"]) == 1
    assert made(ran) == "every chapter is up to date" and stamps.problems(ran) == []
    (ran / "settings.ini").write_text(settings)
    assert made(ran) == "every chapter is up to date" and path.read_text() == before


def test_a_cell_that_cannot_be_exported_is_named(small: Path):
    edit(small / "nbs" / "03_alone.ipynb", "ALONE = 1", "ALONE = = 1")
    with pytest.raises(chapters.Failed, match="03_alone.ipynb, cell 1"): chapters.export(small)


def sabotage_output(output: dict):
    def change(nb: dict) -> None: nb["cells"][-1]["outputs"] = [output]
    return change


@pytest.mark.parametrize("what, change", [
    ("has no record", lambda nb: nb["cells"][-1]["metadata"].clear()),
    ("does not show what its run gave", lambda nb: nb["cells"][-1]["outputs"].clear()),
    ("does not show what its run gave", lambda nb: nb["cells"][-1]["outputs"][0].update(text="c\n")),
    ("does not show what its run gave", lambda nb: nb["cells"][4]["outputs"][0]["data"].update({"text/plain": "20"})),
    ("slow cell 5 is out of date", lambda nb: nb["cells"][5]["outputs"].clear()),
    ("has no stamp", lambda nb: nb["metadata"].pop("minigpt")),
    ("changed since it ran", lambda nb: nb["cells"][-1].update(source=["two() + 0"])),
    ("directive", lambda nb: nb["cells"][-1]["source"].insert(0, "#| echo: false\n")),
    ("cells were removed or moved", lambda nb: nb["cells"].pop()),
    ("slow cell 5 is out of date", lambda nb: nb["cells"][5]["metadata"]["minigpt"].pop("stamp")),
    ("shows an error: NameError", sabotage_output({"output_type": "error", "ename": "NameError", "evalue": "x", "traceback": []})),
    ("wrote to stderr", sabotage_output({"output_type": "stream", "name": "stderr", "text": ["a warning"]})),
    ("skip_exec", lambda nb: nb["cells"].insert(0, cell("---\nskip_exec: true\n---", "raw"))),
    ("never runs", lambda nb: nb["cells"][-1]["source"].insert(0, "#| eval: false\n")),
])
def test_what_must_not_be_published_is_found(ran: Path, what: str, change):
    path = ran / "nbs" / "02_second.ipynb"
    nb = notebooks.read(path)
    change(nb)
    path.write_text(notebooks.text(nb), encoding="utf-8")
    assert (what if what != "directive" else "changed since it ran") in found(ran, "02_second")


# The checkout


def test_every_page_of_the_book_is_fresh(root: Path):
    found = stamps.problems(root)
    assert len(stamps.book(root)) > 1 and not found, "make book brings them up to date:\n" + "\n".join(found[:30])


def test_attention_makes_its_dependants_stale_and_no_other(project: Path):
    before = {c.name: c for c in stamps.book(project)}
    edit(project / "minigpt" / "attention.py", "import torch\n", "import torch\nassert True\n")
    expected = {name for name, c in before.items() if "attention" in c.imported}
    assert stale({n: c.stamp for n, c in before.items()}, {c.name: c.stamp for c in stamps.book(project)}) == expected
    assert "03_model" in expected and not expected & {"01_layers", "91_checks"}
