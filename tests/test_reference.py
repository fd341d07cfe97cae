"""The API reference: complete, true to the code, and nothing public without a word on what it does and what it raises."""

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
from pathlib import Path

import pytest
from site_fixtures import ROOT, pages, soup

import minigpt
from tools.reference import OVERVIEW, Entry, Module, read_module, read_package

MODULES = {m.name: m for m in read_package(ROOT / "minigpt", sorted(p.name for p in (ROOT / "nbs").glob("*.ipynb")))[0]}
ENTRIES = [(m, e) for m in MODULES.values() for one in m.entries for e in (one, *one.members)]
BY_NAME = [pytest.param(m, e, id=f"{m.name}.{e.name}") for m, e in ENTRIES]


def test_every_public_name_has_its_entry():
    for name, module in MODULES.items():
        assert {e.name for e in module.entries} == set(importlib.import_module(f"minigpt.{name}").__all__)
        page = soup(module.page)
        assert [h["id"] for h in page.select("main h2")] == [e.name for e in module.entries]
        assert {h["id"] for h in page.select("main h3")} == {m.name for e in module.entries for m in e.members}
    assert len(ENTRIES) > 400


def test_the_overview_lists_what_the_package_hands_on_and_every_module():
    page = soup(OVERVIEW)
    handed, modules = ([row.select_one("a") for row in table.select("tbody tr")] for table in page.select("main table"))
    assert [a.get_text() for a in handed] == list(minigpt._HOME)
    assert [a["href"] for a in handed] == [f"reference-{module}.html#{name}" for name, module in minigpt._HOME.items()]
    assert sorted(a["href"] for a in modules) == sorted(m.page for m in MODULES.values())
    assert all(len(cell.get_text()) > 10 for cell in page.select("main table:first-of-type tbody td:nth-child(2)"))


def found(module: Module, entry: Entry) -> object:
    "The object that an entry is about, as it stands in its module or class."
    thing: object = importlib.import_module(f"minigpt.{module.name}")
    for part in entry.name.split("."): thing = inspect.getattr_static(thing, part)
    for inner in ("__func__", "fget", "func"): thing = getattr(thing, inner, None) or thing  # of class methods, properties, cached properties
    return thing


@pytest.mark.parametrize("module, entry", [p for p in BY_NAME if inspect.isfunction(inspect.unwrap(found(*p.values)))])
def test_signatures_are_those_of_the_code(module: Module, entry: Entry):
    "What the page shows is parsed again, and compared with what Python says of the imported function."
    arguments = ast.parse(re.sub(r"(\s*#.*)?$", ": ...", entry.code, count=1) if "#" not in entry.code.splitlines()[-1] else entry.code.rsplit("  #", 1)[0] + ": ...").body[0].args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, arguments.vararg, *arguments.kwonlyargs, arguments.kwarg) if a]
    assert names == list(inspect.signature(inspect.unwrap(found(module, entry))).parameters)


@pytest.mark.parametrize("module, entry", [p for p in BY_NAME if inspect.isclass(found(*p.values))])
def test_classes_show_their_fields_and_how_they_are_made(module: Module, entry: Entry):
    thing = found(module, entry)
    shown = {line.split(":")[0].strip() for line in entry.code.splitlines() if re.match(r"    \w+: ", line)}
    if dataclasses.is_dataclass(thing): assert {f.name for f in dataclasses.fields(thing) if f.name in thing.__annotations__} <= shown
    if "__init__" in vars(thing) and not dataclasses.is_dataclass(thing): assert set(inspect.signature(thing).parameters) <= set(re.findall(r"\w+", entry.code))


@pytest.mark.parametrize("module, entry", BY_NAME)
def test_every_entry_says_something(module: Module, entry: Entry):
    """A docstring, or for a constant a comment. Special methods, such as `forward` and `__len__`, and properties that its docstring names are
    explained by their class."""
    owner, _, called = entry.name.rpartition(".")
    about = next((e.doc for e in module.entries if e.name == owner), "")
    assert entry.summary or called == "forward" or called.startswith("__") or f"`{called}`" in about


def raised(node: ast.AST) -> set[str]:
    "Names of the exceptions that this code raises, but for those that it catches itself."
    caught = {t.id for n in ast.walk(node) if isinstance(n, ast.ExceptHandler) and n.type for t in ast.walk(n.type) if isinstance(t, ast.Name)}
    calls = (n.exc.func if isinstance(n.exc, ast.Call) else n.exc for n in ast.walk(node) if isinstance(n, ast.Raise) and n.exc is not None)
    return {call.id for call in calls if isinstance(call, ast.Name) and call.id[0].isupper()} - caught


@pytest.mark.parametrize("module", [*MODULES, "__main__"])
def test_what_is_raised_is_written_down(module: str):
    "Each exception in the code of a public function or method is named in its docstring or its class's."
    silent = []
    for node in ast.parse((ROOT / "minigpt" / f"{module}.py").read_text(encoding="utf-8")).body:
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)): continue
        about = ast.get_docstring(node) or ""
        for part in (f for f in node.body if isinstance(f, ast.FunctionDef)) if isinstance(node, ast.ClassDef) else [node]:
            text = about + (ast.get_docstring(part) or "")
            silent += [f"{node.name}.{part.name}: {error}" for error in raised(part) if error not in text]
    assert not silent


def test_a_docstring_that_sends_to_another_name_sends_to_one_that_raises():
    "`Raises as f does` is worth something only if f is public and says what it raises."
    known = {e.name: e.doc for _, e in ENTRIES}
    sent = [(m.name, e.name, name) for m, e in ENTRIES for said in re.findall(r"[Rr]aises?(?: [^.]*?)? as (`[^.]*)", " ".join(e.doc.split())) for name in re.findall(r"`(\w+)`", said) if not name.endswith("Error")]
    assert len(sent) > 10
    assert not [(module, entry, name) for module, entry, name in sent if "aise" not in known.get(name, "")]


def test_shapes_are_in_the_signatures():
    "A tensor in a public signature says its shape, or its docstring does; a few functions take tensors of any shape."
    any_shape = {"adamw_update", "matrices_only", "check_alike", "check_dense", "muon_update", "hidden_matrix", "largest_difference", "match_modules", "weighted_gradients"}
    bare = set()
    for module, entry in ENTRIES:
        for node in ast.walk(ast.parse((ROOT / "minigpt" / f"{module.name}.py").read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef) or node.lineno != entry.line: continue
            given = [*node.args.args, *node.args.kwonlyargs, *filter(None, [node.args.vararg, node.args.kwarg])]
            shown = entry.doc.startswith("As `") or re.search(r"\([A-Z]\w*(, \w+)+\)", entry.doc)
            if any(a.annotation is not None and ast.unparse(a.annotation) == "Tensor" for a in given) and not shown: bare.add(entry.name)
    assert bare <= any_shape


def test_an_entry_leads_to_the_chapter_that_builds_it_and_names_on_the_page_to_entries():
    page = soup("reference-attention.html")
    where = page.find("h2", id="sdpa").find_next("p", class_="mg-where")
    assert where.a["href"] == "attention.html#sdpa" and "minigpt.sdpa" in where.get_text() and where.a.get_text() == "Chapter 2, Attention"
    assert page.select_one("main a.mg-name[href='#attention_weights']") is not None
    assert {a["href"] for a in page.select("nav.mg-side li li a")} == {m.page for m in MODULES.values()} and not soup("attention.html").select("nav.mg-side li li a")


def test_axes_have_their_colours_here_as_well():
    assert {b["class"][0] for b in soup("reference-attention.html").select("main pre b")} >= {"mg-axis-B", "mg-axis-T", "mg-axis-C", "mg-axis-H"}


def test_odd_code_is_read_right(tmp_path: Path):
    (tmp_path / "odd.py").write_text(textwrap.dedent('''
        "What it is about."
        # AUTOGENERATED! DO NOT EDIT! File to edit: ../nbs/05_odd.ipynb.
        __all__ = ['f', 'g', 'C', 'K']
        def f(x: dict[str, int] = {"a:b": 1}, *, y=lambda z: z) -> int:  # a number: of things
            "First sentence, e.g. this. Second."
            return 1
        @wrap(lambda: 3)
        def g(): return {1: 2}
        def hidden(): ...
        class C(A, metaclass=B):
            """Things.

            Raises `ValueError` for less than <1>."""
            size: int = 3  # how large: in cm
            _secret = 1
            def __init__(self, a: int): self.a = a
            def __len__(self) -> int: return 3
            def _own(self): ...
            @property
            def twice(self) -> int: return 6
        K = {"a": 1}  # what it holds
    '''))
    module = read_module(tmp_path / "odd.py")
    f, g, C, K = module.entries
    assert module.notebook == "05_odd.ipynb" and module.doc == "What it is about."
    assert f.code == 'def f(x: dict[str, int] = {"a:b": 1}, *, y=lambda z: z) -> int  # a number: of things' and f.summary == "First sentence, e.g. this."
    assert g.code == "@wrap(lambda: 3)\ndef g()" and K.code == 'K = {"a": 1}  # what it holds' and K.summary == "What it holds."
    assert C.code.splitlines()[:2] == ["class C(A, metaclass=B):", "    size: int = 3  # how large: in cm"] and C.code.splitlines()[-1] == "    def __init__(self, a: int)"
    assert [m.name for m in C.members] == ["C.__len__", "C.twice"] and C.members[1].code == "@property\ndef twice(self) -> int"


def test_the_pages_are_generated(): assert {OVERVIEW, *(m.page for m in MODULES.values())} <= set(pages())
