"""The package as its sources say: what each module defines and imports, what a piece of code needs of it, and the data files it reads.

A piece of code depends on single definitions, not on whole modules: on the functions, classes and values that it names, on all that
these name in turn, and on whatever the modules do when they are imported. So a new picture makes no experiment out of date."""

import ast
import hashlib
import re
import textwrap
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from .syntax import (DOCUMENTED, PACKAGE, alias_name, bound_names, called_name, changed_names, digest, imports_of, mentioned, nodes, outer, strings,
                     tree_hash, used_names, without_docstrings)

HARMLESS = {"dataclass", "cache", "contextmanager"}  # decorators that do nothing but to what they decorate
REFLECTIVE = {"globals", "vars", "eval", "exec"}  # whoever calls these may need anything of its module
IMPORTS = (ast.Import, ast.ImportFrom)


class Statement:
    "A statement at the top of a module: what it binds, what it names, and whether it does more than to bind."

    def __init__(self, node: ast.stmt):
        self.node = node
        self.tree = ast.Module([node], [])
        self.imports = isinstance(node, IMPORTS)
        self.binds = bound_names(self.tree)

    @cached_property
    def names(self) -> set[str]:
        return used_names(self.tree) | {text for text in strings(self.tree) if text.isidentifier()}

    @cached_property
    def acts(self) -> bool:
        "Whether importing the module does something here that a name alone does not show: it changes something, calls something, or imports everything."
        if self.imports: return any(alias.name == "*" for alias in self.node.names) or getattr(self.node, "module", "") == "__future__"
        if isinstance(self.node, DOCUMENTED): return not {called_name(ast.Call(getattr(d, "func", d))) for d in self.node.decorator_list} <= HARMLESS
        calls = any(isinstance(node, ast.Call) for node in outer(self.tree))
        return calls or not isinstance(self.node, (ast.Assign, ast.AnnAssign)) or bool(changed_names(self.tree))

    def only(self, name: str) -> ast.Module:
        "This import, of one name alone."
        node = self.node
        aliases = [alias for alias in node.names if alias_name(alias) == name]
        return ast.Module([ast.Import(aliases) if isinstance(node, ast.Import) else ast.ImportFrom(node.module, aliases, node.level)], [])


class Modules:
    "The modules of the package as their sources say: what each defines, imports and reads."

    def __init__(self, root: Path):
        folder = root / PACKAGE
        self.trees = {p.stem: without_docstrings(ast.parse(p.read_text(encoding="utf-8")), module=True)
                      for p in sorted(folder.glob("*.py")) if p.stem != "_modidx" and not p.name.startswith(".")}
        self.hashes = {name: tree_hash(tree) for name, tree in self.trees.items()}
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

    def reached(self, tree: ast.AST, inside: bool = False, names: set[str] | None = None) -> set[tuple[str, str]]:
        """What this code imports (only for names in `names`, if given), wherever the import stands: pairs of a module and a name, `*` for all of
        the module. `inside` says that the code stands in the package itself, so that `from .` means it."""
        found: set[tuple[str, str]] = set()
        packages: set[str] = set()
        for node in nodes(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    package, _, module = alias.name.partition(".")
                    if package != PACKAGE or (names is not None and alias_name(alias) not in names): continue
                    if module: found |= self.whole(self.home(module.split(".")[0]))
                    if not module or not alias.asname: packages.add(alias_name(alias))
            elif isinstance(node, ast.ImportFrom):
                module = node.module or ""
                if node.level and not inside or node.level > 1: continue
                if not node.level:
                    package, _, module = module.partition(".")
                    if package != PACKAGE: continue
                for alias in node.names:
                    if names is None or alias.name == "*" or alias_name(alias) in names: found |= self.member(module.split(".")[0], alias.name)
            elif isinstance(node, ast.Call) and called_name(node) in ("import_module", "__import__") and node.args:
                target = node.args[0].value if isinstance(node.args[0], ast.Constant) else ""
                if isinstance(target, str) and target.split(".")[0] == PACKAGE: found |= self.whole(self.home((target.split(".") + ["__init__"])[1]))
        return found | self.through_package(tree, packages) | self.in_strings(tree)

    @staticmethod
    def whole(modules: Iterable[str]) -> set[tuple[str, str]]:
        return {(m, "*") for m in modules}

    def member(self, module: str, name: str) -> set[tuple[str, str]]:
        "What `from minigpt.module import name` reaches, or `from minigpt import name` where `module` is empty."
        if module: return {(m, name if m == module and name in self.binds[m] else "*") for m in self.home(module)}
        if name == "*": return self.whole(self.trees)
        return {(m, "*" if m == name or name not in self.binds[m] else name) for m in self.home(name)}

    def reached_by(self, cells: Iterable["Cell"], names: set[str] | None = None) -> set[tuple[str, str]]:  # noqa: F821
        "What cells import, also by an IPython line that names a module."
        tree = ast.Module([node for c in cells for node in c.tree.body], [])
        in_magics = {found for c in cells for line in c.magics for found in re.findall(rf"\b{PACKAGE}\.(\w+)(?:\.(\w+))?", line)}
        return self.reached(tree, names=names).union(*(self.member(module, name or "*") for module, name in in_magics))

    def through_package(self, tree: ast.AST, packages: set[str]) -> set[tuple[str, str]]:
        "What is reached as attributes of the package; the bare package stands for all of it."
        if not packages: return set()
        attributes = [n for n in nodes(tree) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id in packages]
        bare = sum(isinstance(n, ast.Name) and n.id in packages for n in nodes(tree)) - len(attributes)
        return self.whole(self.trees) if bare else set().union(*(self.member("", n.attr) for n in attributes))

    def in_strings(self, tree: ast.AST) -> set[tuple[str, str]]:
        "What is imported by programs that stand in strings, as for a subprocess."
        found: set[tuple[str, str]] = set()
        for text in strings(tree):
            if PACKAGE not in text or "import" not in text: continue
            try: found |= self.reached(ast.parse(textwrap.dedent(text)))
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
                self._closures[name] = set() if name == "__init__" else {m for m, _ in self.reached(self.trees[name], inside=True)}
            todo |= self._closures[name] - found
        return found

    @cached_property
    def statements(self) -> dict[str, list[Statement]]:
        return {name: [Statement(node) for node in tree.body] for name, tree in self.trees.items()}

    def needed(self, pairs: Iterable[tuple[str, str]]) -> list[str]:
        "The definitions behind these names of modules, with all that they need in turn and all that the modules do when they are imported: a line for each."
        found: set[tuple[str, int, str]] = set()
        todo, seen = set(pairs), set()
        while todo:
            module, name = todo.pop()
            seen.add((module, name))
            more = {(m, "") for m in self.closure([module])}  # these are imported, too
            for i, statement in enumerate(self.statements[module]):
                if name in ("*", *statement.binds) or module == "__init__" or statement.acts:
                    one = statement.only(name) if statement.imports and name in statement.binds and not statement.acts else statement.tree
                    found.add((module, i, tree_hash(one)))
                    more |= self.reached(one, inside=True) if module != "__init__" else set()
                    if not statement.imports: more |= {(module, n) for n in statement.names if n in self.binds[module]}
                    if statement.names & REFLECTIVE: more.add((module, "*"))
            todo |= more - seen
        return [f"{module} {hashed}" for module, i, hashed in sorted(found)]

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

    def sources(self, closure: set[str]) -> list[str]:
        return [f"{name} {self.hashes[name]}" for name in sorted(closure)]

    def contents(self, data: set[str]) -> list[str]:
        return [f"{name} {self.data.get(name, 'missing')}" for name in sorted(data)]
