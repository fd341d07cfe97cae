"""The API reference: an overview and a page for each module, from the signatures, comments and docstrings of the generated package.

Nothing is imported or run. What a page says is what the module's source says, laid out for those who look something up."""
from __future__ import annotations

import ast, html, io, re, tokenize
from dataclasses import dataclass, replace
from pathlib import Path

from markdown_it import MarkdownIt

from .pages import Book, Chapter

OVERVIEW = 'reference.html'
LEAD = 'Every public name of the package: its signature with shapes and units, what it does, what it raises, and the chapter that builds it.'
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Entry:
    name: str  # sdpa, or GPT.forward
    code: str  # its signature with its comments, or the whole source of a constant
    doc: str
    line: int  # where it stands in its module
    members: tuple[Entry, ...] = ()  # the methods of a class

    @property
    def summary(self) -> str:
        "The first sentence of its docstring."
        text = ' '.join(self.doc.split('\n\n')[0].split())
        return re.split(r'(?<=[.!?])\s+(?=[A-Z`"])', text)[0]


@dataclass(frozen=True)
class Module:
    name: str
    doc: str
    notebook: str
    entries: tuple[Entry, ...]

    @property
    def page(self) -> str: return f'reference-{self.name}.html'


# From source to entries


def _lines(source: str, first: int, last: int) -> str:
    "Lines of a source, counted from 1, moved to the left edge."
    lines = source.splitlines()[first - 1:last]
    margin = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return '\n'.join(line[margin:] for line in lines)


def _header(source: str, node: ast.AST) -> str:
    "A definition with its decorators, up to the colon that ends its signature; a comment behind the colon stays."
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    text, depth = _lines(source, first, node.end_lineno), 0
    begun = False
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME and token.string in ('def', 'class') and not depth: begun = True
        if token.type != tokenize.OP: continue
        depth += (token.string in '([{') - (token.string in ')]}')
        if token.string == ':' and not depth and begun:
            lines = text.splitlines()[:token.end[0]]
            rest = lines[-1][token.end[1]:]
            lines[-1] = lines[-1][:token.start[1]] + (rest if rest.lstrip().startswith('#') else '')
            return '\n'.join(lines)
    raise ValueError(f'{text.splitlines()[0]!r} has no end')


def _doc(node: ast.AST) -> str: return ast.get_docstring(node) or ''


def _is_public(name: str) -> bool: return not name.startswith('_') or bool(re.fullmatch(r'__(?!init|post_init|new)\w+__', name))


def _class(source: str, node: ast.ClassDef) -> Entry:
    "A class: its first line, its fields, how it is made, and its public methods."
    parts = [_header(source, node) + ':']
    for statement in node.body:
        made = isinstance(statement, _FUNCTIONS) and statement.name == '__init__'
        if made or isinstance(statement, (ast.AnnAssign, ast.Assign)):
            text = _header(source, statement) if made else _lines(source, statement.lineno, statement.end_lineno)
            parts.append('\n'.join('    ' + line if line else '' for line in text.splitlines()))
    members = (Entry(f'{node.name}.{f.name}', _header(source, f), _doc(f), f.lineno) for f in node.body if isinstance(f, _FUNCTIONS) and _is_public(f.name))
    code = '\n'.join(parts)
    return Entry(node.name, code if len(parts) > 1 else code[:-1], _doc(node), node.lineno, tuple(members))


def _value(tree: ast.Module, name: str, default: object = ()) -> object:
    "The literal that a module gives to a name."
    return next((ast.literal_eval(n.value) for n in tree.body if isinstance(n, ast.Assign) and getattr(n.targets[0], 'id', '') == name), default)


def _assigned(node: ast.AST) -> list[str]:
    "The names to which a statement assigns."
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [t.id for target in targets for t in (target.elts if isinstance(target, ast.Tuple) else [target]) if isinstance(t, ast.Name)]


def _constant(source: str, node: ast.AST) -> tuple[str, str]:
    "The source of a constant and what is said of it: the comment on its first line, or the lines of comment above it."
    lines, first = source.splitlines(), node.lineno
    while lines[first - 2].startswith('# ') and not lines[first - 2].startswith('# %%'): first -= 1
    above = ' '.join(line.removeprefix('# ') for line in lines[first - 1:node.lineno - 1])
    tokens = tokenize.generate_tokens(io.StringIO(_lines(source, node.lineno, node.end_lineno)).readline)
    beside = next((t.string.lstrip('# ') for t in tokens if t.type == tokenize.COMMENT and t.start[0] == 1), '')
    text = above or beside
    return _lines(source, node.lineno, node.end_lineno), text[:1].upper() + text[1:] + '.' * bool(text and text[-1] not in '.!?')


def read_module(path: Path) -> Module:
    "The public names of a generated module, in the order in which the notebook defines them."
    source = path.read_text(encoding='utf-8')
    tree = ast.parse(source)
    public, entries = set(_value(tree, '__all__')), []
    for node in tree.body:
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)) and node.name in public:
            entries.append(_class(source, node) if isinstance(node, ast.ClassDef) else Entry(node.name, _header(source, node), _doc(node), node.lineno))
        for name in (n for n in _assigned(node) if n in public): entries.append(Entry(name, *_constant(source, node), node.lineno))
    notebook = re.search(r'File to edit: \S*?([^/\s]+\.ipynb)', source)
    return Module(path.stem, _doc(tree), notebook[1] if notebook else '', tuple(entries))


def read_package(folder: Path, order: list[str]) -> tuple[list[Module], dict[str, str]]:
    """The modules in the order of their notebooks, and the names that the package itself hands on: name -> module.

    A method without a docstring that overrides one of the package is said to do the same."""
    if not (folder / '__init__.py').is_file(): return [], {}
    modules = [read_module(p) for p in sorted(folder.glob('*.py')) if not p.name.startswith('_')]
    modules = sorted((m for m in modules if m.notebook in order), key=lambda m: order.index(m.notebook))
    methods = {e.name for m in modules for c in m.entries for e in c.members}
    modules = [replace(m, entries=tuple(replace(c, members=tuple(_inherited(c, e, methods) for e in c.members)) for c in m.entries)) for m in modules]
    public = _value(ast.parse((folder / '__init__.py').read_text(encoding='utf-8')), '_PUBLIC', {})
    return modules, {name: module for module, names in public.items() for name in names.split()}


def _inherited(owner: Entry, method: Entry, known: set[str]) -> Entry:
    "A method with a word on where its description stands, if it has none itself."
    bases = re.search(r'^class \w+\(([^)]*)\)', owner.code, re.M)
    name = method.name.split('.')[-1]
    found = [f'{base.strip()}.{name}' for base in bases[1].split(',') if f'{base.strip()}.{name}' in known] if bases else []
    return replace(method, doc=f'As `{found[0]}`.') if found and not method.doc else method


# From entries to pages

_markdown = MarkdownIt('commonmark', {'html': False})


def _block(code: str) -> str: return f'<div class="sourceCode"><pre class="sourceCode python"><code class="sourceCode python">{html.escape(code, quote=False)}</code></pre></div>'


def _code(text: str) -> str: return f'<code>{html.escape(text, quote=False)}</code>'


def _entry(entry: Entry, level: int, where: str) -> str:
    head = f'<h{level} id="{entry.name}">{_code(entry.name.split(".")[-1])}</h{level}>'
    return '\n'.join([head, _block(entry.code), _markdown.render(entry.doc) + where, *(_entry(m, level + 1, '') for m in entry.members)])


def _module_page(module: Module, book: Book, chapter: Chapter, top: dict[str, str]) -> str:
    "The body of a module's page."
    parts = []
    for entry in module.entries:
        fragment = next((f for m, p, f in book.symbols.get(entry.name, ()) if p == chapter.page and m == f'{book.package}.{module.name}'), '')
        label = f'{chapter.label}, {chapter.title}' if chapter.number else chapter.title
        facts = [f'Built in <a href="{chapter.page}{"#" * bool(fragment)}{fragment}">{html.escape(label)}</a>']
        if top.get(entry.name) == module.name: facts.append(f'also {_code(f"{book.package}.{entry.name}")}')
        if book.git_url: facts.append(f'<a href="{html.escape(book.git_url)}/blob/{book.branch}/{book.package}/{module.name}.py#L{entry.line}">source</a>')
        parts.append(_entry(entry, 2, f'<p class="mg-where">{"; ".join(facts)}.</p>'))
    return '\n'.join(parts)


def _table(heads: list[str], rows: list[list[str]]) -> str:
    def row(tag, cells): return '<tr>' + ''.join(f'<{tag}>{c}</{tag.split()[0]}>' for c in cells) + '</tr>'
    return '<table class="mg-names"><thead>' + row('th scope="col"', heads) + '</thead><tbody>' + '\n'.join(row('td', r) for r in rows) + '</tbody></table>'


def _overview_page(modules: list[Module], top: dict[str, str], book: Book) -> str:
    entries = {(m.name, e.name): e for m in modules for e in m.entries}
    def link(module, name): return f'<a href="reference-{module}.html#{name}">{_code(name)}</a>'
    names = [[link(m, n), _markdown.renderInline(entries[m, n].summary)] for n, m in top.items() if (m, n) in entries]
    pages = [[f'<a href="{m.page}">{_code(m.name)}</a>', _markdown.renderInline(m.doc), str(len(m.entries))] for m in modules]
    return (f'<h2 id="top">What {_code(book.package)} itself hands on</h2>\n<p>These names can be imported from {_code(book.package)}. '
            f'Each is fetched from its module when it is asked for, so that the import alone loads nothing heavy, PyTorch included.</p>\n{_table(["name", "what it is"], names)}\n'
            f'<h2 id="modules">The modules</h2>\n<p>One chapter writes one module. Everything that its page defines for the package can be imported from it.</p>\n'
            f'{_table(["module", "what is in it", "names"], pages)}')


def make(root: Path, book: Book) -> dict[str, tuple[Chapter, Book, str]]:
    """The pages of the reference, page -> (its entry in the list of pages, the book as it sees it, its body); adds them to the book's list.

    On these pages a name in the text leads to its entry here, on all others to the chapter that explains it."""
    modules, top = read_package(root / book.package, [c.source for c in book.chapters])
    if not modules: return {}
    chapters = {c.source: c for c in book.chapters}
    pages = [Chapter('', m.page, m.name, m.doc, 'Reference') for m in modules]
    overview = Chapter('', OVERVIEW, 'API reference', LEAD, 'Reference', under=pages)
    book.groups.append(('Reference', [overview]))
    symbols: dict[str, list] = {}
    for m in modules:
        for e in (entry for one in m.entries for entry in (one, *one.members)): symbols.setdefault(e.name, []).append((f'{book.package}.{m.name}', m.page, e.name))
    seen = replace(book, symbols=symbols)
    made = {OVERVIEW: (overview, seen, _overview_page(modules, top, book))}
    return made | {m.page: (c, seen, _module_page(m, book, chapters[m.notebook], top)) for m, c in zip(modules, pages)}
