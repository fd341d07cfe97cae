"""Code as the stamps see it: its canonical form, and the names that it binds, changes and uses. Nothing is imported or run."""

import ast
import hashlib
import re
from collections.abc import Callable, Iterable
from functools import wraps

PACKAGE = "minigpt"
DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def remembered(look: Callable) -> Callable:
    "Keep with a tree what was found out about it: the same definitions are asked after for every slow cell. Trees do not change once they are read."
    @wraps(look)
    def found(tree: ast.AST) -> object:
        kept = vars(tree).setdefault("found", {})
        if look.__name__ not in kept: kept[look.__name__] = look(tree)
        return kept[look.__name__]
    return found


@remembered
def nodes(tree: ast.AST) -> list[ast.AST]: return list(ast.walk(tree))


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


@remembered
def tree_hash(tree: ast.AST) -> str: return digest(dump(tree))


def digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


# Names: who binds what, and who uses it


@remembered
def bound_names(tree: ast.AST) -> set[str]:
    "Names that running this code gives a value; what is bound inside functions is theirs."
    names: set[str] = set()
    for node in outer(tree):
        if isinstance(node, DOCUMENTED): names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)): names |= imported_names(node)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load): names.add(node.id)
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name: names.add(node.name)
    return names


@remembered
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
    return words | {node.id for node in nodes(tree) if isinstance(node, ast.Name)}


@remembered
def mentioned(tree: ast.AST) -> set[str]:
    "Names by which this code could reach for something: bare, as attributes, imported, in a string, or in a program in a string."
    found = {node.id for node in nodes(tree) if isinstance(node, ast.Name)} | {node.attr for node in nodes(tree) if isinstance(node, ast.Attribute)}
    found |= {alias.name for node in nodes(tree) if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names}
    programs = [text for text in strings(tree) if PACKAGE in text and "import" in text]
    return found | {text for text in strings(tree) if text.isidentifier()} | {word for text in programs for word in re.findall(r"\w+|\*", text)}


@remembered
def strings(tree: ast.AST) -> set[str]:
    return {node.value for node in nodes(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def called_name(call: ast.Call) -> str:
    return getattr(call.func, "id", getattr(call.func, "attr", ""))
