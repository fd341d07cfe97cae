"""Stamps: is what a page shows what its code would show today?

A notebook's stamp is a hash of its code cells and of every `minigpt` module it imports, transitively. It is taken over the syntax
tree, so comments and docstrings change nothing; `#|` lines and the version of torch count. So do the bytes of a data file in
`minigpt/` that a cell names in a string, or that a module names, if code outside that module mentions a function through which
the file is reached. Nothing is imported or run to compute it.

What is stored, in metadata that `nbdev_clean` keeps:

- in the notebook, `minigpt.stamp`: its stamp when it last ran;
- in each code cell, `minigpt.ran`: a hash of the code that made its outputs, and if there are any, `minigpt.gave`: a hash of them;
- in each `#| slow` cell, also `minigpt.stamp`: a stamp of its own, over the cell, the exported cells of the notebook, the earlier cells that
  bind a name it uses (and those behind them), the imports of these names, and the definitions of the package that they need.
"""

import ast
from collections.abc import Collection, Iterable
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

from . import notebooks
from .modules import Modules, Statement
from .syntax import PACKAGE, bound_names, changed_names, digest, dump, imports_of, parse, used_names, without_docstrings


# Notebooks


class Cell:
    "One code cell that a run executes: its canonical form, and the names it binds and uses."

    def __init__(self, index: int, cell: dict):
        self.index, self.cell = index, cell
        bodies, code = notebooks.split(cell)
        self.magics, tree = parse(code)
        self.tree = without_docstrings(tree, module=False)
        self.hash = digest("\n".join(bodies), "\n".join(self.magics), dump(self.tree))
        self.slow, self.exported = notebooks.slow(cell), notebooks.exported(cell)
        self.timed = "timed" in notebooks.directives(cell)
        self.setup = all(isinstance(n, (ast.Import, ast.ImportFrom, ast.Pass)) for n in self.tree.body)  # imports, IPython lines
        self.first_line = next((line.strip() for line in code.splitlines() if line.strip() and not line.lstrip().startswith("#")), "")

    @cached_property
    def binds(self) -> set[str]: return bound_names(self.tree)

    @cached_property
    def changes(self) -> set[str]: return changed_names(self.tree)

    @cached_property
    def uses(self) -> set[str]: return used_names(self.tree, self.magics)

    def import_hash(self, names: set[str]) -> str:
        "A hash of an import cell that counts only the imports of these names."
        used = [statement.only(name) for statement in map(Statement, self.tree.body) if statement.imports for name in sorted(statement.binds & names)]
        return digest("\n".join(self.magics), *map(dump, used))

    @property
    def record(self) -> dict: return self.cell.get("metadata", {}).get(PACKAGE, {})

    @property
    def shown(self) -> str | None:
        "A hash of the outputs; None if there are none."
        text = notebooks.shown(self.cell)
        return digest(text) if text else None

    def new_record(self) -> dict: return {"ran": self.hash} | ({"gave": self.shown} if self.shown else {})


class Chapter:
    "A notebook with what its stamps are made of."

    def __init__(self, path: Path, modules: Modules, torch: str):
        self.path, self.modules, self.torch = path, modules, torch
        self.original = path.read_bytes()
        self.nb = notebooks.read(path)
        self.cells = [Cell(i, c) for i, c in enumerate(self.nb["cells"]) if notebooks.runs(c)]

    @property
    def name(self) -> str: return self.path.stem

    @cached_property
    def imported(self) -> set[str]:
        "Every module of the package that the notebook depends on."
        return self.modules.closure(m for m, _ in self.modules.reached_by(self.cells))

    @cached_property
    def data(self) -> set[str]:
        "Every data file of the package that the notebook depends on."
        return self.modules.read_by([c.tree for c in self.cells], self.imported)

    @cached_property
    def owned(self) -> set[str]:
        "Data files that the notebook's own exported cells name: it may be the one that writes them."
        return self.modules.named_in(c.tree for c in self.cells if c.exported)

    @cached_property
    def stamp(self) -> str:
        return digest(f"torch {self.torch}", *(c.hash for c in self.cells), *self.modules.sources(self.imported), *self.modules.contents(self.data))

    def behind(self, cell: Cell) -> list[Cell]:
        "The earlier cells that bind (or may change the value of) a name this one uses, and the ones behind those."
        imports = set().union(*(imports_of(c.tree) for c in self.cells))
        found: set[int] = set()
        todo = [cell]
        while todo:
            user = todo.pop()
            for c in self.cells:
                if c.index >= user.index: break
                if c.index not in found and (c.binds | c.changes - imports) & user.uses:
                    found.add(c.index)
                    todo.append(c)
        return [c for c in self.cells if c.index in found]

    def slow_stamp(self, cell: Cell) -> str:
        behind = {c.index for c in self.behind(cell)}
        covered = [c for c in self.cells if c is cell or c.exported or c.setup or c.index in behind]
        names = set().union(*(c.uses for c in covered))
        reached = self.modules.reached_by(covered, names)
        data = self.modules.read_by([c.tree for c in covered], self.modules.closure(m for m, _ in reached)) - self.owned  # or a refresh would never end
        hashes = [c.import_hash(names) if c.setup and not c.exported else c.hash for c in covered]
        return digest(f"torch {self.torch}", *hashes, *self.modules.needed(reached), *self.modules.contents(data))

    def stale_slow(self) -> list[Cell]:
        "Slow cells whose outputs are missing or out of date."
        return [c for c in self.cells if c.slow and (c.record.get("ran") != c.hash or c.record.get("gave") != c.shown or c.record.get("stamp") != self.slow_stamp(c))]

    def why_stale(self, slow: bool = True) -> list[str]:
        "Why the notebook has to run again; nothing if what it shows is what it would show today. `slow=False` overlooks slow cells."
        old = {c.index for c in self.stale_slow()}
        reasons = [f"slow cell {c.index} is out of date: {c.first_line}" for c in self.cells if c.index in old and slow]
        for c in self.cells:
            if c.index in old or (c.record.get("ran"), c.record.get("gave")) == (c.hash, c.shown): continue
            what = "has no record of a run" if "ran" not in c.record else "changed since it ran" if c.record["ran"] != c.hash else "does not show what its run gave"
            reasons.append(f"cell {c.index} {what}: {c.first_line}")
        stored = self.nb["metadata"].get(PACKAGE, {}).get("stamp")
        if not stored: reasons.insert(0, "it has no stamp")
        elif stored != self.stamp and not reasons:
            reasons.append(f"cells were removed or moved, or a module it imports ({', '.join(sorted(self.imported)) or 'none'}), its data or torch's version changed")
        return reasons

    def problems(self) -> list[str]:
        "Everything about the stored notebook that must not be published."
        found = self.why_stale()
        if "skip_exec" in notebooks.front_matter(self.nb): found.append("its front matter says skip_exec, so no test runs it")
        executed = {c.index for c in self.cells}
        for i, cell in enumerate(self.nb["cells"]):
            if cell["cell_type"] != "code": continue
            for output in cell.get("outputs", []):
                if output["output_type"] == "error": found.append(f"cell {i} shows an error: {output.get('ename')}: {output.get('evalue')}")
                if output.get("name") == "stderr": found.append(f"cell {i} shows what it wrote to stderr: {''.join(output['text'])[:100]!r}")
            if i not in executed and (cell.get("outputs") or PACKAGE in cell.get("metadata", {})): found.append(f"cell {i} never runs, and has outputs or a record of a run")
        return found


def book(root: Path, torch: str | None = None, only: Collection[str] = ()) -> list[Chapter]:
    "The chapters of the book, or those of these names, read afresh."
    modules = Modules(root)
    torch = (torch or version("torch")).split("+")[0]
    return [Chapter(path, modules, torch) for path in notebooks.paths(root) if not only or path.stem in only]


def problems(root: Path) -> list[str]:
    return [f"{c.path.relative_to(root)}: {problem}" for c in book(root) for problem in c.problems()]
