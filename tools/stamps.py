"""Stamps: is what a page shows what its code would show today?

A notebook's stamp is a hash of its code cells and of every `minigpt` module it imports, transitively. It is taken over the syntax
tree, so comments and docstrings change nothing; `#|` lines and the version of torch count. So do the bytes of a data file in
`minigpt/` that a cell names in a string, or that a module names, if code outside that module mentions a function through which
the file is reached. Nothing is imported or run to compute it.

What is stored, in metadata that `nbdev_clean` keeps:

- in the notebook, `minigpt.stamp`: its stamp when it last ran;
- in each code cell, `minigpt.ran`: a hash of the code that made its outputs, and if there are any, `minigpt.gave`: a hash of them;
- in each `#| slow` cell, also `minigpt.stamp`: a stamp of its own, over the cell, the exported cells and import cells of the
  notebook, the earlier cells that bind a name it uses (and those behind them), and the modules that these take names from.
"""

import ast
import hashlib
import re
import textwrap
from collections.abc import Iterable
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

from . import notebooks

PACKAGE = "minigpt"
DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


# The canonical form of code


def without_docstrings(tree: ast.Module, module: bool) -> ast.Module:
    "Drop docstrings; a notebook cell keeps a leading string of its own, which is a value it shows."
    for node in ast.walk(tree):
        if not isinstance(node, DOCUMENTED + ((ast.Module,) if module else ())) or not node.body: continue
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str): node.body = node.body[1:]
    return tree


def dump(node: object) -> str:
    "A syntax tree as text that is the same on every supported Python."
    if isinstance(node, list): return "[" + ",".join(map(dump, node)) + "]"
    if isinstance(node, str): return ascii(node)
    if not isinstance(node, ast.AST): return repr(node)
    fields = dict(ast.iter_fields(node))
    if isinstance(node, ast.JoinedStr): fields["values"] = merged(node.values)
    if isinstance(fields.get("format_spec"), ast.JoinedStr) and not merged(fields["format_spec"].values): del fields["format_spec"]
    kept = [f"{k}={dump(v)}" for k, v in fields.items() if k not in ("ctx", "kind", "type_comment") and v is not None and v != []]
    return f"{type(node).__name__}({','.join(kept)})"


def merged(values: list) -> list:
    "The parts of an f-string, with neighbouring constants joined, which Pythons do differently."
    out: list = []
    for value in values:
        if not isinstance(value, ast.Constant): out.append(value)
        elif out and isinstance(out[-1], ast.Constant): out[-1] = ast.Constant(out[-1].value + value.value)
        elif value.value: out.append(value)
    return out


def parse(code: str) -> tuple[list[str], ast.Module]:
    "The IPython lines of a cell as text, and the tree of the rest. Code that is no Python even then counts as text."
    try: return [], ast.parse(code)
    except SyntaxError: pass
    magics, rest = [], []
    for line in code.splitlines():
        bare = line.lstrip()
        if bare[:1] in ("%", "!"):
            magics.append(bare.rstrip())
            rest.append(line[: len(line) - len(bare)] + "pass")
        else: rest.append(line)
    try: return magics, ast.parse("\n".join(rest))
    except SyntaxError: return [code], ast.parse("")


def digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


# Names: who binds what, and who uses it


def bound_names(tree: ast.AST) -> set[str]:
    "Names that running this code gives a value; what is bound inside functions is theirs."
    names: set[str] = set()
    for node in outer(tree):
        if isinstance(node, DOCUMENTED): names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)): names |= imported_names(node)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load): names.add(node.id)
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name: names.add(node.name)
    return names


def changed_names(tree: ast.AST) -> set[str]:
    "Names whose value this code may change in place: `a` of `a.b = 1`, of `a[0] += 1` and of the statement `a.b.c()`."
    names: set[str] = set()
    for node in outer(tree):
        if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load): target = node
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call): target = node.value.func
        else: continue
        if isinstance(target, ast.Name): continue
        while isinstance(target, (ast.Attribute, ast.Subscript)): target = target.value
        if isinstance(target, ast.Name): names.add(target.id)
    return names


def outer(tree: ast.AST) -> Iterable[ast.AST]:
    "Every node, without going into functions, classes and lambdas."
    for child in ast.iter_child_nodes(tree):
        yield child
        if not isinstance(child, (*DOCUMENTED, ast.Lambda)): yield from outer(child)


def alias_name(alias: ast.alias) -> str:
    return alias.asname or alias.name.split(".")[0]


def imported_names(node: ast.Import | ast.ImportFrom) -> set[str]:
    return {alias_name(alias) for alias in node.names}


def imports_of(tree: ast.Module) -> set[str]:
    "Names that the top level of this code imports."
    return set().union(*(imported_names(n) for n in tree.body if isinstance(n, (ast.Import, ast.ImportFrom))))


def used_names(tree: ast.AST, magics: Iterable[str] = ()) -> set[str]:
    words = {word for line in magics for word in line.replace(".", " ").split() if word.isidentifier()}
    return words | {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def mentioned(tree: ast.AST) -> set[str]:
    "Names by which this code could reach for something: bare, as attributes, imported, in a string, or in a program in a string."
    found = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} | {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    found |= {alias.name for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names}
    programs = [text for text in strings(tree) if PACKAGE in text and "import" in text]
    return found | {text for text in strings(tree) if text.isidentifier()} | {word for text in programs for word in re.findall(r"\w+|\*", text)}


def strings(tree: ast.AST) -> set[str]:
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


# Modules


class Modules:
    "The modules of the package as their sources say: what each defines, imports and reads."

    def __init__(self, root: Path):
        folder = root / PACKAGE
        self.trees = {p.stem: without_docstrings(ast.parse(p.read_text(encoding="utf-8")), module=True)
                      for p in sorted(folder.glob("*.py")) if p.stem != "_modidx" and not p.name.startswith(".")}
        self.hashes = {name: digest(dump(tree)) for name, tree in self.trees.items()}
        self.data = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.glob("*")) if p.is_file() and p.suffix not in (".py", ".pyc", ".typed") and p.name[0] != "."}
        self.files = set(self.data) | {text for tree in self.trees.values() for text in strings(tree) if re.fullmatch(r"\w+\.safetensors", text)}
        self.binds = {name: bound_names(tree) for name, tree in self.trees.items()}
        self.defines = {name: self.binds[name] - imports_of(tree) for name, tree in self.trees.items()}
        self._closures: dict[str, set[str]] = {}

    def home(self, name: str) -> set[str]:
        "The modules that `from minigpt import name` may read; all of them if that cannot be told."
        if name in self.trees: return {name}
        if name in self.defines.get("__init__", ()): return {"__init__"}
        found = {m for m, names in self.defines.items() if name in names} or {m for m, names in self.binds.items() if name in names}
        return found | ({"__init__"} & set(self.trees)) if found else set(self.trees)

    def imported(self, tree: ast.AST, inside: bool = False, names: set[str] | None = None) -> set[str]:
        "Modules that this code imports (only for names in `names`, if given), wherever the import stands."
        found: set[str] = set()
        packages: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    package, _, module = alias.name.partition(".")
                    if package != PACKAGE or (names is not None and alias_name(alias) not in names): continue
                    if module: found |= self.home(module.split(".")[0])
                    if not module or not alias.asname: packages.add(alias_name(alias))
            elif isinstance(node, ast.ImportFrom):
                module = node.module or ""
                if node.level and not inside or node.level > 1: continue
                if not node.level:
                    package, _, module = module.partition(".")
                    if package != PACKAGE: continue
                wanted = [a for a in node.names if names is None or a.name == "*" or alias_name(a) in names]
                if module and wanted: found |= self.home(module.split(".")[0])
                else: found |= {m for a in wanted for m in (self.trees if a.name == "*" else self.home(a.name))}
            elif isinstance(node, ast.Call) and called_name(node) in ("import_module", "__import__") and node.args:
                target = node.args[0].value if isinstance(node.args[0], ast.Constant) else ""
                if isinstance(target, str) and target.split(".")[0] == PACKAGE: found |= self.home((target.split(".") + ["__init__"])[1])
        return found | self.through_package(tree, packages) | self.in_strings(tree)

    def imported_by(self, cells: Iterable["Cell"], names: set[str] | None = None) -> set[str]:
        "Modules that cells import, also by an IPython line that names one."
        tree = ast.Module([node for c in cells for node in c.tree.body], [])
        in_magics = {m for c in cells for line in c.magics for name in re.findall(rf"\b{PACKAGE}\.(\w+)", line) for m in self.home(name)}
        return self.imported(tree, names=names) | in_magics

    def through_package(self, tree: ast.AST, packages: set[str]) -> set[str]:
        "Modules reached as attributes of the package; the bare package stands for all of them."
        if not packages: return set()
        attributes = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id in packages]
        bare = sum(isinstance(n, ast.Name) and n.id in packages for n in ast.walk(tree)) - len(attributes)
        return set(self.trees) if bare else {m for n in attributes for m in self.home(n.attr)}

    def in_strings(self, tree: ast.AST) -> set[str]:
        "Modules imported by programs that stand in strings, as for a subprocess."
        found: set[str] = set()
        for text in strings(tree):
            if PACKAGE not in text or "import" not in text: continue
            try: found |= self.imported(ast.parse(textwrap.dedent(text)))
            except SyntaxError: continue
        return found

    def closure(self, names: Iterable[str]) -> set[str]:
        "These modules and all that they import. What the lazy `__init__` could import is not counted: `home` finds the module itself."
        found: set[str] = set()
        todo = set(names)
        while todo:
            name = todo.pop()
            found.add(name)
            if name not in self._closures:
                self._closures[name] = set() if name == "__init__" else self.imported(self.trees[name], inside=True)
            todo |= self._closures[name] - found
        return found

    def named_in(self, trees: Iterable[ast.AST]) -> set[str]:
        "Data files of the package that this code names, also weights that a module reads and nobody has saved yet."
        return {name for tree in trees for name in strings(tree) if name in self.files}

    def readers(self, module: str, file: str) -> set[str]:
        "Names of a module through which it reaches a data file; `*` if it does so when it is imported."
        statements = [ast.Module([node], []) for node in self.trees[module].body]
        found: set[str] = set()
        reading = [s for s in statements if file in strings(s)]
        while reading:
            found |= set().union(*(bound_names(s) for s in reading))
            if any(isinstance(node, ast.Call) for s in reading for node in outer(s)): found.add("*")
            statements = [s for s in statements if s not in reading]
            reading = [s for s in statements if used_names(s) & found]
        return found

    def read_by(self, trees: list[ast.AST], closure: set[str]) -> set[str]:
        "Data files that this code reads, itself or through the modules that it needs."
        found = self.named_in(trees)
        for module in closure:
            for file in self.named_in([self.trees[module]]):
                names = self.readers(module, file)
                others = [*trees, *(self.trees[m] for m in closure if m != module)]
                if "*" in names or any(mentioned(tree) & {*names, "*"} for tree in others): found.add(file)
        return found

    def parts(self, closure: set[str], data: set[str]) -> list[str]:
        return [f"{name} {self.hashes[name]}" for name in sorted(closure)] + [
            f"{name} {self.data.get(name, 'missing')}" for name in sorted(data)]


def called_name(call: ast.Call) -> str:
    return getattr(call.func, "id", getattr(call.func, "attr", ""))


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
        return self.modules.closure(self.modules.imported_by(self.cells))

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
        return digest(f"torch {self.torch}", *(c.hash for c in self.cells), *self.modules.parts(self.imported, self.data))

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
        closure = self.modules.closure(self.modules.imported_by(covered, names=set().union(*(c.uses for c in covered))))
        data = self.modules.read_by([c.tree for c in covered], closure) - self.owned  # or a refresh would never end
        return digest(f"torch {self.torch}", *(c.hash for c in covered), *self.modules.parts(closure, data))

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


def book(root: Path, torch: str | None = None) -> list[Chapter]:
    "The chapters of the book, read afresh."
    modules = Modules(root)
    torch = (torch or version("torch")).split("+")[0]
    return [Chapter(path, modules, torch) for path in notebooks.paths(root)]


def problems(root: Path) -> list[str]:
    return [f"{c.path.relative_to(root)}: {problem}" for c in book(root) for problem in c.problems()]
