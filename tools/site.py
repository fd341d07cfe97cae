"""The website: stage the notebooks with nbdev, render them with Quarto or smalldocs, even both out into the same pages.

    python -m tools.site            # build into _docs/
    python -m tools.site --serve    # build, then serve on http://127.0.0.1:8000
"""
from __future__ import annotations

import argparse, ast, base64, functools, hashlib, http.server, json, os, re, shutil, statistics, subprocess, sys, tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import yaml
from bs4 import BeautifulSoup

from . import reference
from .notebooks import settings
from .pages import WIDGET, Book, Chapter, Page, SiteError, dead_links, frame, not_found, read_symbols, search_script
from .terms import read_terms

HERE = Path(__file__).parent
_STAGE = 'from nbdev.serve import proc_nbs; proc_nbs(n_workers=0, force=True)'


def _say(text): print(text, file=sys.stderr)


# -- what there is to build ------------------------------------------------------------------------------------------

def check_link(root: Path):
    "nbs/_quarto.yml has to be the file at the top, by a link; a checkout without symlinks leaves a text file there."
    top, link = root / '_quarto.yml', root / 'nbs' / '_quarto.yml'
    if not top.is_file(): raise SiteError(f'{top} is missing')
    if not link.exists() or link.read_bytes() != top.read_bytes():
        raise SiteError('nbs/_quarto.yml is not the file ../_quarto.yml: this checkout has no symbolic links. '
                        'Copy _quarto.yml over nbs/_quarto.yml, or check out with `git config core.symlinks true`.')


def _front(notebook):
    "The front matter that nbdev put into a staged notebook."
    cells = json.loads(notebook.read_text(encoding='utf-8'))['cells']
    first = ''.join(cells[0]['source']) if cells else ''
    m = re.match(r'---\n(.*?)\n---', first, re.S)
    front = yaml.safe_load(m[1]) if m else {}
    for key in ('title', 'output-file'):
        if not front.get(key):
            raise SiteError(f'{notebook.name}: its first cell must be Markdown that starts with `# Title` and a line `> description`')
    return front


def read_book(root: Path, staged: Path) -> Book:
    "The chapters in the order of `_quarto.yml`, with the titles the notebooks give themselves."
    about = settings(root)
    site = yaml.safe_load((root / '_quarto.yml').read_text(encoding='utf-8'))['website']
    notebooks = {p.name: p for p in sorted(staged.glob('*.ipynb'))}
    groups, seen, pages = [], set(), {}
    for part in site['sidebar']['contents']:
        chapters = []
        for name in part['contents']:
            if name in seen: raise SiteError(f'_quarto.yml lists {name} twice')
            seen.add(name)
            if name not in notebooks: _say(f'site: _quarto.yml lists {name}, which does not exist (left out)'); continue
            front = _front(notebooks[name])
            page = front['output-file']
            if page in pages: raise SiteError(f'{name} and {pages[page]} would both become {page}')
            pages[page] = name
            chapters.append(Chapter(name, page, str(front['title']), str(front.get('description') or ''), part['section']))
        groups.append((part['section'], chapters))
    if missing := sorted(notebooks.keys() - seen): raise SiteError(f'the sidebar in _quarto.yml does not list {", ".join(missing)}')
    modidx = root / about.get('lib_path', about['lib_name']) / '_modidx.py'
    symbols = {}
    if modidx.is_file():
        tree = ast.parse(modidx.read_text(encoding='utf-8'))
        value = next(n.value for n in tree.body if isinstance(n, ast.Assign) and n.targets[0].id == 'd')
        symbols = read_symbols(ast.literal_eval(value))
    return Book(site['title'], site.get('description', ''), about['version'], about['lib_name'], about.get('license', '').upper(),
                about.get('git_url', ''), groups, symbols, branch=about.get('branch') or 'main', base=about.get('doc_baseurl', ''), notebooks=about['nbs_path'])


# -- stage and render ------------------------------------------------------------------------------------------------

def _run(command, cwd, what):
    env = os.environ | {'OMP_NUM_THREADS': '1', 'PYTHONUTF8': '1', 'QUARTO_PYTHON': sys.executable}
    done = subprocess.run(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding='utf-8', errors='replace')
    if done.returncode: raise SiteError(f'{what} failed (code {done.returncode}):\n{done.stdout.strip()[-4000:]}')
    return done.stdout


def stage(root: Path, work: Path) -> Path:
    "The notebooks as nbdev prepares them for a renderer, in `work`/_proc; no cell is run, and nothing in the repository is touched."
    (work / 'nbs').mkdir(parents=True)
    shutil.copy(root / 'settings.ini', work)
    for p in (root / 'nbs').iterdir():
        if p.is_file() and not p.name.startswith('.'): shutil.copy(p, work / 'nbs')  # follows the link to _quarto.yml
    _run([sys.executable, '-c', _STAGE], work, 'nbdev, which prepares the notebooks,')
    return work / '_proc'


def find_quarto():
    "Quarto's command where there is one: on the PATH, or beside this Python."
    return shutil.which('quarto') or shutil.which('quarto', path=str(Path(sys.executable).parent))


def leave_formulas(settings: Path) -> None:
    "Have Quarto leave formulas as TeX in the staged book, so that one program draws all of them, whichever renderer is at work."
    settings.write_text(re.sub(r'(?m)^(\s*html-math-method:).*$', r'\1 mathjax', settings.read_text(encoding='utf-8')), encoding='utf-8')


def render(staged: Path, renderer: str) -> Path:
    "Let the renderer turn the staged notebooks into HTML; returns the folder it wrote."
    out = staged / yaml.safe_load((staged / '_quarto.yml').read_text(encoding='utf-8'))['project']['output-dir']
    shutil.rmtree(out, ignore_errors=True)
    if renderer == 'quarto':
        leave_formulas(staged / '_quarto.yml')
        said = _run([find_quarto(), 'render', '--no-execute', '--no-cache'], staged, 'quarto render')
        warnings = [line for line in re.sub('\x1b\\[[0-9;]*m', '', said).splitlines() if re.search(r'^\W*WARN', line)]
        _say(f'site: Quarto gave {len(warnings)} warnings' + ''.join(f'\n    {line.strip()}' for line in warnings))
    else: _run([sys.executable, '-m', 'smalldocs.cli', 'render', '--quiet', '.'], staged, 'smalldocs render')
    if not out.is_dir(): raise SiteError(f'{renderer} wrote no {out.name}/')
    return out


# -- even out --------------------------------------------------------------------------------------------------------

_CHROME = re.compile(r'site_libs/|search\.json$|sitemap\.xml$|styles\.css$|robots\.txt$|\.html$')


def weights_script(path: Path) -> str:
    "The trained sorter as a script, with weights of 16 bits: a page opened from a folder may load a script, but not fetch a file."
    from safetensors import safe_open
    if not path.is_file(): raise SiteError(f'{path} is missing: the page with the sorter needs it; `make refresh` trains it')
    with safe_open(path, 'np') as file:
        origin = json.loads(file.metadata()['origin'])
        tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
    data = b''.join(tensor.astype('<f2').tobytes() for tensor in tensors.values())
    parts = dict(config=origin.pop('config'), origin=origin, shapes={name: list(t.shape) for name, t in tensors.items()}, data=base64.b64encode(data).decode())
    return 'window.minigptWeights = ' + json.dumps(parts, separators=(',', ':')) + ';\n'


def finish(rendered: Path, book: Book, root: Path, font: bytes | None = None) -> dict:
    "All files of the site, name -> bytes, from what the renderer wrote."
    from .mathml import math_font
    files, entries, texts = {}, [], {}
    chapters = book.chapters
    for chapter in chapters:
        written = [p for p in (rendered / chapter.page, rendered / chapter.source.replace('.ipynb', '.html')) if p.is_file()]
        if not written: raise SiteError(f'{chapter.source}: the renderer wrote no page for it')
        texts[chapter.page] = written[0].read_text(encoding='utf-8')
    book.terms = [term for page, text in texts.items() if 'mg-glossary' in text for term in read_terms(BeautifulSoup(text, 'html.parser'), page)]
    made = reference.make(root, book)
    for chapter in chapters:
        page = Page(texts[chapter.page], chapter, book)
        files[chapter.page] = frame(page).encode()
        if page.widget:
            files['assets/weights.js'] = weights_script(root / book.package / 'sorter.safetensors').encode()
            files |= {f'assets/{name}': (HERE / name).read_bytes() for name in WIDGET[1:]}
        entries += page.search_entries()
    for name, (chapter, seen, body) in made.items():
        page = Page(f'<main>{body}</main>', chapter, seen)
        files[name] = frame(page).encode()
        entries += page.search_entries()
    for p in sorted(rendered.rglob('*')):
        name = p.relative_to(rendered).as_posix()
        if p.is_file() and not _CHROME.search(name): files[name] = p.read_bytes()
    files |= {f'notebooks/{c.source}': (root / 'nbs' / c.source).read_bytes() for c in chapters}
    files['404.html'] = not_found(book).encode()
    files['styles.css'] = (root / 'nbs' / 'styles.css').read_bytes()
    files['assets/site.js'] = (HERE / 'site.js').read_bytes()
    files['assets/search.js'] = search_script(entries).encode()
    files['assets/math.css'] = (b'/* STIX Two Math, a subset, under the SIL Open Font License 1.1: https://openfontlicense.org */\n'
                                b'@font-face { font-family: "Book Math"; src: url("math.woff2") format("woff2"); font-display: swap; }\n')
    files['assets/math.woff2'] = font or math_font()
    files['.nojekyll'] = b''
    return files


def weigh(sizes: dict) -> dict:
    "What a reader has to load, in kB: the files that all pages share, and the pages themselves. The sorter's files belong to its page."
    own = [f'assets/{name}' for name in WIDGET]
    pages = {n: size for n, size in sizes.items() if n.endswith('.html') and n != '404.html'}
    pages = {n: size + sum(sizes.get(o, 0) for o in own) * (n == 'watch.html') for n, size in pages.items()}
    shared = sum(size for n, size in sizes.items() if n == 'styles.css' or n.startswith('assets/') and n not in own)
    largest = max(pages, key=pages.get)
    return dict(shared=round(shared / 1000), median=round(statistics.median(pages.values()) / 1000), largest=largest, most=round(pages[largest] / 1000))


# -- build -----------------------------------------------------------------------------------------------------------

def _version(name):
    try: return version(name)
    except PackageNotFoundError: return ''


def _digest(paths, *words):
    h = hashlib.sha256(json.dumps(words).encode())
    for p in sorted(paths): h.update(f'\0{p.name}\0'.encode() + p.read_bytes())
    return h.hexdigest()


def _inputs(root, renderer):
    "A hash of everything a page depends on."
    paths = [p for p in (root / 'nbs').iterdir() if p.is_file() and not p.name.startswith('.')]
    paths += [root / 'settings.ini', *(root / settings(root)['lib_path']).glob('*.py'), *root.glob('*/sorter.safetensors')]
    paths += [HERE / n for n in ('site.py', 'pages.py', 'reference.py', 'terms.py', 'mathml.py', 'site.js', *WIDGET[1:])]
    versions = [_version(n) for n in ('nbdev', 'smalldocs', 'markdown-it-py', 'latex2mathml', 'beautifulsoup4', 'pygments', 'ziamath', 'fonttools')]
    return _digest(paths, renderer, str(find_quarto()) if renderer == 'quarto' else '', versions)


def build(root: Path,  # the repository
          out: Path | None = None,  # where the site goes; `_docs/` in the repository if not given
          renderer: str = 'auto',  # 'quarto', 'smalldocs', or 'auto': Quarto where there is one
          ) -> Path:  # the folder of the finished site
    "Build the website. With nothing changed since the last build, nothing is done."
    root = Path(root).resolve()
    out = Path(out).resolve() if out else root / '_docs'
    if renderer not in ('auto', 'quarto', 'smalldocs'): raise SiteError(f"renderer must be 'auto', 'quarto' or 'smalldocs', not {renderer!r}")
    if renderer == 'auto': renderer = 'quarto' if find_quarto() else 'smalldocs'
    if renderer == 'quarto' and not find_quarto(): raise SiteError('quarto is neither on the PATH nor beside this Python')
    check_link(root)
    record, inputs = out / '.built.json', _inputs(root, renderer)
    font_key = _digest([HERE / 'mathml.py'], _version('ziamath'), _version('fonttools'))
    old = json.loads(record.read_text()) if record.is_file() else {}
    if old.get('inputs') == inputs and all((out / n).is_file() and (out / n).stat().st_size == s for n, s in old['files'].items()):
        _say(f'site: nothing has changed since the last build of {out}')
        return out
    if not old and any(p.is_file() for p in out.rglob('*')):
        if out != root / '_docs': raise SiteError(f'{out} is not empty and was not built by this command; remove it first')
        shutil.rmtree(out)  # what nbdev_docs wrote there
    font = next(filter(None, (_kept_font(folder, font_key) for folder in (out, root / '_docs'))), None)
    with tempfile.TemporaryDirectory(prefix='minigpt-site-') as work:
        staged = stage(root, Path(work) / root.name)
        book = read_book(root, staged)
        _trim(staged, book)
        files = finish(render(staged, renderer), book, root, font)
    for problem in dead_links(_texts(files), book.base): _say(f'site: dead link in {problem}')
    for name in old.get('files', {}).keys() - files.keys(): (out / name).unlink(missing_ok=True)
    for name, data in files.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(data)
    record.write_text(json.dumps(dict(inputs=inputs, font=font_key, renderer=renderer, files={n: len(d) for n, d in sorted(files.items())})))
    weights = weigh({n: len(d) for n, d in files.items()})
    _say(f'site: {len(book.pages)} pages rendered with {renderer} in {out}; {weights["shared"]:,} kB that pages share, a page {weights["median"]:,} kB at the median, '
         f'the largest, {weights["largest"]}, {weights["most"]:,} kB')
    return out


def _kept_font(folder, key):
    "The font of an earlier build, which takes longer to make than everything else."
    record, font = folder / '.built.json', folder / 'assets' / 'math.woff2'
    return font.read_bytes() if record.is_file() and font.is_file() and json.loads(record.read_text()).get('font') == key else None


def _texts(files): return {n: d.decode('utf-8', 'replace') if n.endswith('.html') else '' for n, d in files.items()}


def _trim(staged, book):
    "Take chapters that are not there (yet) out of the staged `_quarto.yml`, so that no renderer stumbles over them."
    path = staged / '_quarto.yml'
    config = yaml.safe_load(path.read_text(encoding='utf-8'))
    here = {c.source for c in book.chapters}
    contents = [dict(part, contents=[n for n in part['contents'] if n in here]) for part in config['website']['sidebar']['contents']]
    if contents != config['website']['sidebar']['contents']:
        config['website']['sidebar']['contents'] = [p for p in contents if p['contents']]
        path.write_text(yaml.safe_dump(config, sort_keys=False), encoding='utf-8')


def serve(root: Path,  # the repository
          port: int = 8000):
    "A plain server for `_docs/`, on this machine only, until it is stopped with Ctrl-C."
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(Path(root) / '_docs'))
    with http.server.ThreadingHTTPServer(('127.0.0.1', port), handler) as server:
        _say(f'site: http://127.0.0.1:{port}/ (stop with Ctrl-C)')
        try: server.serve_forever()
        except KeyboardInterrupt: pass


def main(argv=None):
    parser = argparse.ArgumentParser(prog='python -m tools.site', description='Build the website of the book.')
    parser.add_argument('--root', type=Path, default=HERE.parent, help='the repository')
    parser.add_argument('--out', type=Path, help='where the site goes (default: _docs/)')
    parser.add_argument('--renderer', default='auto', choices=['auto', 'quarto', 'smalldocs'])
    parser.add_argument('--serve', action='store_true', help='serve the site afterwards')
    parser.add_argument('--port', type=int, default=8000)
    args = parser.parse_args(argv)
    try: build(args.root, args.out, args.renderer)
    except SiteError as e: sys.exit(f'site: {e}')
    if args.serve: serve(args.root, args.port)


if __name__ == '__main__': main()
