"""What a program can find: the library's layers in by-hand code, breaches of the house style, traces of somebody's machine."""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

from . import notebooks, stamps

LINES = 30  # at most, in an exported cell

# By hand: only these come from torch.nn, and nothing from torch.optim. The reference to check against stands in cells that are not exported.
ALLOWED = {"torch.nn.Module", "torch.nn.ModuleList", "torch.nn.Parameter", "torch.nn.parallel", "torch.nn.parallel.DistributedDataParallel"}  # the last is an engine, no part of a GPT
FORBIDDEN = ("torch.nn.", "torch.optim", "torch.ops", "torch._C", "torch.ao", "torch.jit", "torch._refs")
SHORTCUTS = {"softmax", "log_softmax", "softmin", "_softmax", "_log_softmax", "layer_norm", "native_layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm",
             "gelu", "gelu_", "cross_entropy", "cross_entropy_loss", "nll_loss", "dropout", "dropout_", "native_dropout", "feature_dropout", "alpha_dropout", "embedding",
             "scaled_dot_product_attention", "multi_head_attention_forward", "clip_grad_norm_"}
TENSOR_METHODS = {"softmax", "log_softmax"}

SWITCH = "speed"  # the one module that holds the library's versions, once ours have matched them

# Written so that this file does not match itself.
TRACES = {
    "a path of somebody's machine": re.compile(r"(?<![\w.:/~-])/(?:work|root|home|Users|opt|mnt)/[\w.]+|/tmp/ipy[k]ernel_|[.]py[e]nv\b"),
    "a package registry's address": re.compile(r"(?i)\b(?:pypi[.]org|pypi[.]python[.]org|pythonhosted[.]org|download[.]pytorch[.]org|npmjs[.]org|anaconda[.]org)|--(?:extra-)?index[-]url|--find[-]links"),
}


def problems(root: Path) -> list[str]:
    "Everything found in the project at `root`, one line each."
    found = [f"{path.relative_to(root)}: {problem}" for path in sorted((root / stamps.PACKAGE).glob("*.py")) if path.stem not in ("_modidx", SWITCH)
             for problem in library_uses(ast.parse(path.read_text(encoding="utf-8")))]
    found += [f"{path.relative_to(root)}: {problem}" for path in notebooks.paths(root) for problem in notebook_problems(path)]
    return found + [f"{path.relative_to(root)}: {problem}" for path in tracked(root) for problem in traces(path)]


# The library's layers


def library_uses(tree: ast.AST, names: dict[str, str] | None = None) -> list[str]:
    "Uses of what should be written by hand, with the lines they stand in. `names`: what names of other cells stand for."
    names = dict(names or {}) | aliases(tree)
    bases = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute)} | {id(n.value) for n in ast.walk(tree) if isinstance(n, (ast.Assign, ast.AnnAssign))}
    bases |= {id(n.args[0]) for n in ast.walk(tree) if is_getattr(n)}
    found = {(node.lineno, problem) for node in ast.walk(tree) for problem in library_use(node, names, bases)}
    return [f"line {line} uses {problem}; by-hand code does not" for line, problem in sorted(found)]


def library_use(node: ast.AST, names: dict[str, str], bases: set[int]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if forbidden(alias.name))
    elif isinstance(node, ast.ImportFrom) and not node.level:
        full = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (name for name in full if forbidden(name) or name in ("torch.nn.*", "torch.*"))
    elif isinstance(node, (ast.Attribute, ast.Name, ast.Call)):
        name = dotted(node, names)
        if name and forbidden(name): yield name
        elif name in ("torch.nn", "torch.optim") and id(node) not in bases: yield f"{name} as a value"
        elif isinstance(node, ast.Attribute) and node.attr in TENSOR_METHODS and not name and not is_self(node.value): yield f"the tensor method .{node.attr}"
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"torch\.(nn|optim)(\.\w+)*", node.value):
        if node.value not in ALLOWED: yield f"the name {node.value!r}"


def forbidden(name: str) -> bool:
    "Whether a dotted name is something that the book writes by hand, or a module that holds such things."
    if name in ALLOWED: return False
    if name.startswith(FORBIDDEN): return True
    return name.startswith("torch.") and name.rpartition(".")[2] in SHORTCUTS


def aliases(tree: ast.AST) -> dict[str, str]:
    "What the names in a module stand for, by its imports and plain assignments: `F` -> `torch.nn.functional`."
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for a in node.names: names[a.asname or a.name.split(".")[0]] = a.name if a.asname else a.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom):
            for a in node.names: names[a.asname or a.name] = f"{'.' * node.level}{node.module or ''}.{a.name}"
    for _ in range(3):  # an alias of an alias of an alias
        for node in ast.walk(tree):
            if not isinstance(node, ast.Assign): continue
            value = dotted(node.value, names)
            if value and value.split(".")[0] == "torch": names.update({t.id: value for t in node.targets if isinstance(t, ast.Name)})
    return names


def dotted(node: ast.AST, names: dict[str, str]) -> str:
    "The full name that an expression stands for, or nothing if it does not start from an import."
    if isinstance(node, ast.Name): return names.get(node.id, "")
    if isinstance(node, ast.Attribute): base, attribute = dotted(node.value, names), node.attr
    elif is_getattr(node): base, attribute = dotted(node.args[0], names), node.args[1].value
    else: return ""
    return f"{base}.{attribute}" if base else ""


def is_getattr(node: ast.AST) -> bool:
    "`getattr(x, 'name')`, which is `x.name`."
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr" and len(node.args) > 1 and isinstance(node.args[1], ast.Constant)


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


# Notebooks


def notebook_problems(path: Path) -> list[str]:
    nb = notebooks.read(path)
    code = [(i, c) for i, c in enumerate(nb["cells"]) if c["cell_type"] == "code"]
    trees = {i: stamps.parse(notebooks.split(c)[1])[1] for i, c in code}
    names = {k: v for tree in trees.values() for k, v in aliases(tree).items()}
    module = next((value for _, c in code if (value := notebooks.directives(c).get("default_exp"))), "")
    found = [f"cell {i}: source is not a list of lines" for i, c in enumerate(nb["cells"]) if not is_lines(c["source"])]
    for i, cell in code:
        found += [f"cell {i}: {problem}" for problem in cell_problems(cell, trees[i])]
        if notebooks.exported(cell) and module != SWITCH: found += [f"cell {i}: {problem}" for problem in library_uses(trees[i], names)]
    return found + list(slow_problems(nb))


def cell_problems(cell: dict, tree: ast.Module) -> Iterator[str]:
    bodies, _ = notebooks.split(cell)
    if len(bodies) > 1: yield from (f"`#| {body}` beside other directives: write `#| {body}:`, which Quarto can read" for body in bodies if ":" not in body)
    imports = [isinstance(n, (ast.Import, ast.ImportFrom)) for n in tree.body]
    if any(imports) and not all(imports): yield "imports and work in one cell"
    lines = [line for line in notebooks.source(cell).splitlines() if line.strip() and not notebooks.DIRECTIVE.match(line)]
    if notebooks.exported(cell) and len(lines) > LINES: yield f"an exported cell of {len(lines)} lines, at most {LINES} are allowed"
    if notebooks.exported(cell) and notebooks.slow(cell): yield "exported and slow: tests skip it, and the cells below miss what it defines"
    if not notebooks.exported(cell):
        yield from ("prints an f-string; end the cell in the bare value" for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "print"
                    and any(isinstance(part, ast.JoinedStr) for a in n.args for part in ast.walk(a)))
    yield from (f"a divider: {comment}" for comment in comments(notebooks.split(cell)[1]) if re.search(r"[-=*~_#]{4,}", comment))


def slow_problems(nb: dict) -> Iterator[str]:
    "Cells that need what only slow cells define: they fail whenever the slow ones are skipped."
    cells = [stamps.Cell(i, c) for i, c in enumerate(nb["cells"]) if notebooks.runs(c)]
    quick = set().union(*(c.binds for c in cells if not c.slow))
    for c in cells:
        missing = set().union(*(s.binds for s in cells if s.slow and s.index < c.index)) & c.uses - quick
        if missing and not c.slow: yield f"cell {c.index}: uses {', '.join(sorted(missing))}, which only slow cells define"


def comments(code: str) -> list[str]:
    try: return [t.string for t in tokenize.generate_tokens(io.StringIO(code + "\n").readline) if t.type == tokenize.COMMENT]
    except (tokenize.TokenError, SyntaxError): return [line.strip() for line in code.splitlines() if line.lstrip().startswith("#")]


def is_lines(source: object) -> bool:
    return isinstance(source, list) and "".join(source).splitlines(True) == source


# Files


def tracked(root: Path) -> list[Path]:
    "Files that are in the repository or would be added to it; without git, every file outside of hidden and built folders."
    listed = subprocess.run(["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"], capture_output=True)
    if listed.returncode == 0: files = [root / name for name in listed.stdout.decode().split("\0") if name]
    else: files = [p for p in root.rglob("*") if not {"_docs", "_proc", "build", "dist", "__pycache__"} & set(p.parts) and not any(part.startswith(".") for part in p.relative_to(root).parts)]
    return sorted(p for p in files if p.is_file() and not p.is_symlink())


def traces(path: Path) -> Iterator[str]:
    "Paths and addresses that mean something on one machine only."
    try: text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError: return
    for what, pattern in TRACES.items():
        for found in list(pattern.finditer(text))[:3]: yield f"line {text.count(chr(10), 0, found.start()) + 1} holds {what}: {found[0]}"
