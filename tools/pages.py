"""From what a renderer wrote to the pages a reader gets: the same markup, links, search and frame, whichever renderer it was."""
from __future__ import annotations

import ast, html, json, posixpath, re
from dataclasses import dataclass, field
from urllib.parse import unquote, urlencode

from bs4 import BeautifulSoup, Comment, NavigableString, Tag
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

from .mathml import MathError, to_mathml
from .terms import coloured_axes, first_uses, shape


class SiteError(Exception):
    "Something a page must not be published with; the message names the page and says what to do."


@dataclass
class Chapter:
    source: str  # the notebook, such as 02_attention.ipynb
    page: str  # its page, such as attention.html
    title: str  # from its first heading
    description: str = ''  # from the line that starts with >
    group: str = ''  # the part of the book it stands in
    under: list = field(default_factory=list)  # pages that the sidebar shows below this one, while a reader is there

    @property
    def number(self):
        "The chapter's number, or '' for a page outside the numbered ones."
        m = re.match(r'(\d+)_', self.source)
        return str(int(m[1])) if m and 0 < int(m[1]) < 90 else ''

    @property
    def generated(self):
        "Whether no notebook stands behind it, as for the pages of the reference."
        return not self.source

    @property
    def label(self): return f'Chapter {self.number}' if self.number else 'Appendix' if re.match(r'9\d_', self.source) else ''


@dataclass
class Book:
    title: str
    description: str
    version: str
    package: str
    license: str = ''
    git_url: str = ''  # public address of the repository; '' as long as it has none
    groups: list = field(default_factory=list)  # [(name, [Chapter, ...]), ...] in reading order
    symbols: dict = field(default_factory=dict)  # 'sdpa' -> [(module, page, fragment), ...]
    branch: str = 'main'
    base: str = ''  # path under which the site is published, such as /minigpt
    notebooks: str = 'nbs'  # their folder in the repository
    terms: list = field(default_factory=list)  # the glossary's, see `terms.Term`

    @property
    def chapters(self): return [c for _, cs in self.groups for c in cs]

    @property
    def pages(self):
        "All pages in reading order, those below others included."
        return [page for c in self.chapters for page in (c, *c.under)]

    def colab(self, source):
        "Where a notebook opens in Google's Colab, which reads from GitHub alone; '' for a repository anywhere else."
        m = re.match(r'https://github\.com/([^/]+/[^/]+?)(\.git)?/?$', self.git_url)
        return f'https://colab.research.google.com/github/{m[1]}/blob/{self.branch}/{self.notebooks}/{source}' if m else ''


def read_symbols(modidx: dict) -> dict:
    "The names that the package defines, as nbdev lists them in `_modidx.py`."
    out = {}
    for module, names in modidx.get('syms', {}).items():
        for full, (target, _) in names.items():
            page, _, fragment = target.partition('#')
            out.setdefault(full.removeprefix(module + '.'), []).append((module, page, fragment))
    return out


# -- one page --------------------------------------------------------------------------------------------------------

_KEPT = re.compile(r'<svg\b.*?</svg>|<math\b.*?</math>', re.S)
_PRE = re.compile(r'(<pre\b[^>]*>)(.*?)(</pre>)', re.S)
_COLOURED = re.compile(r'</?span\b[^>]*>|<a\b[^>]*aria-hidden="true"[^>]*></a>')
_FORMAT = HtmlFormatter(nowrap=True)
_OWN_IDS = ('fig-', 'tbl-', 'lst-', 'eq-', 'sec-')
_BLOCKS = {'div', 'section', 'ul', 'ol', 'li', 'table', 'thead', 'tbody', 'tr', 'figure', 'details', 'blockquote', 'dl'}
_LEFTOVER = re.compile(r'\$[^$\n]*\\[A-Za-z]+[^$\n]*\$|\$\$|\\[(\[]|:::|(?<!\w)@(?:fig|eq|tbl|sec|lst)-\w+|^#\||\{[#.][\w-]+[^}]*\}', re.M)
_GOALS = 'what you will be able to do'


def _classes(tag): return tag.get('class') or []


def _code(text, language):
    try: lexer = get_lexer_by_name(language, stripnl=False, ensurenl=False) if language else None
    except ClassNotFound: lexer = None
    if lexer is None: return html.escape(text, quote=False)
    # `match(...)` is a call, which Pygments takes for the statement
    return coloured_axes(re.sub(r'<span class="k">(match|case|type)</span>(?=<span class="p">\()', r'\1', highlight(text, lexer, _FORMAT).rstrip('\n')))


class Page:
    "One page's content, evened out."
    def __init__(self,
                 rendered: str,  # the whole page as the renderer wrote it
                 chapter: Chapter,
                 book: Book):
        self.chapter, self.book = chapter, book
        m = re.search(r'<main\b[^>]*>(.*?)</main>', rendered, re.S)
        if not m: raise SiteError(f'{chapter.source}: the renderer wrote a page without <main>')
        self.kept = []
        plain = _PRE.sub(lambda p: p[1] + _COLOURED.sub('', p[2]) + p[3], m[1])  # each renderer colours code its own way
        self.soup = BeautifulSoup(_KEPT.sub(lambda m: self._picture(m[0]) if m[0].startswith('<svg') else self._formula(m[0]), plain), 'html.parser')
        self.title = html.escape(chapter.title)
        self.lead = html.escape(chapter.description)
        for step in (self._strip, self._head, self._sections, self._math, self._cells, self._callouts, self._tabs, self._notes, self._tables,
                     self._links, self._leftovers, self._names, self._terms, self._axes, self._anchors): step()

    # Pictures, formulas and coloured code do not go through the HTML parser, which would be slow and change their attributes:
    # an empty element stands for each, and `content` puts them back.
    def _keep(self, markup, text=''):
        self.kept.append((markup, text))
        return f'<mg-kept n="{len(self.kept)-1}"></mg-kept>'

    def _picture(self, svg): return self._keep(svg).replace('<mg-kept', '<mg-kept class="picture"')

    def _formula(self, mathml):
        mathml = re.sub(r'<annotation\b.*?</annotation>', '', mathml, flags=re.S).replace(' xmlns="http://www.w3.org/1998/Math/MathML"', '')
        return self._keep(f'<span class="mg-eq">{mathml}</span>' if re.match(r'<math\b[^>]*display="block"', mathml) else mathml)

    def _restore(self, text): return re.sub(r'<mg-kept\b[^>]*\bn="(\d+)"[^>]*></mg-kept>', lambda m: self.kept[int(m[1])][0], text)

    def _parse(self, markup): return BeautifulSoup(markup, 'html.parser')

    def _new(self, name, *content, **attrs):
        tag = self.soup.new_tag(name, attrs={k.rstrip('_').replace('_', '-'): v for k, v in attrs.items()})
        for c in content: tag.append(c)
        return tag

    def _strip(self):
        for c in self.soup.find_all(string=lambda s: isinstance(s, Comment)): c.extract()
        for sel in ('nav', 'script', '#quarto-back-to-top', '.code-copy-button', 'i.bi', '.anchorjs-link', 'link', 'style'):
            for t in self.soup.select(sel):
                if not t.find_parent('figure'): t.decompose()

    def _head(self):
        head = self.soup.find(id='title-block-header')
        if head is None: return
        if h1 := head.find('h1'): self.title = h1.decode_contents().strip()
        if lead := head.find(class_='description'):
            paragraphs = lead.find_all('p')
            self.lead = (paragraphs[0] if len(paragraphs) == 1 else lead).decode_contents().strip()
        head.decompose()

    def _sections(self):
        "The fragment belongs to the heading itself."
        for s in self.soup.select('section[class*="level"]'):
            heading = s.find(re.compile('^h[1-6]$'), recursive=False)
            if heading is not None and s.get('id'): heading['id'] = s['id']
            s.unwrap()
        for h in self.soup.find_all(re.compile('^h[1-6]$')):
            if not h.get('id') and h.get('data-anchor-id'): h['id'] = h['data-anchor-id']
            for a in ('class', 'data-anchor-id', 'data-number'): h.attrs.pop(a, None)

    def _math(self):
        for span in self.soup.select('span.math'):
            display = 'display' in _classes(span)
            tex = re.sub(r'^\s*(?:\\[(\[]|\${1,2})|(?:\\[)\]]|\${1,2})\s*$', '', span.get_text())
            try: mathml = to_mathml(tex, display)
            except MathError as e:
                raise SiteError(f'{self.chapter.source or self.chapter.page}: the formula ${tex.strip()}$ cannot be drawn: {e}') from None
            after = re.match(r'[,.;:!?)]+', span.next_sibling) if isinstance(span.next_sibling, NavigableString) and not display else None
            formula = self._parse(self._formula(mathml))
            if after:  # no line may begin with the comma behind a formula
                span.next_sibling.replace_with(span.next_sibling[after.end():])
                formula = self._new('span', formula, after[0], class_='mg-together')
            span.replace_with(formula)

    def _block(self, text, language):
        "One block of code with its copy button."
        code = self._new('code', self._parse(self._keep(_code(text, language), text)))
        if language: code['class'] = [f'language-{language}']
        return self._new('div', self._new('pre', code), self._new('button', 'Copy', class_='mg-copy', type='button', aria_label='Copy this code'),
                         class_='mg-code')

    def _cells(self):
        for pre in self.soup.select('pre'):
            if pre.find_parent(class_='cell-output') or pre.find_parent('figure') or pre.find_parent(class_='mg-code'): continue
            code = pre.find('code') or pre
            known = [c for c in _classes(pre) + _classes(code) if c not in ('sourceCode', 'code-with-copy', 'cell-code', 'numberSource')]
            language = next((c.removeprefix('language-') for c in known), '')
            outer = pre
            while outer.parent is not None and set(_classes(outer.parent)) & {'sourceCode', 'code-copy-outer-scaffold'}: outer = outer.parent
            block = self._block(code.get_text().rstrip('\n'), language)
            outer.replace_with(block)
            if language == 'python': self._define(block, code.get_text())
        for cell in self.soup.select('div.cell'):
            label = cell.get('id') or ''
            cell.attrs = {'class': ['cell']} | ({'id': label} if label.startswith(_OWN_IDS) else {})
            if not cell.find(True): cell.decompose()
        for out in self.soup.select('.cell-output'):
            out.attrs = {'class': [c for c in _classes(out) if c.startswith('cell-output')]}
        for d in self.soup.select('details.code-fold'): d.attrs = {'class': ['code-fold']} | ({'open': ''} if d.has_attr('open') or d.has_attr('show') else {})

    def _define(self, block, source):
        "Mark a cell whose definitions are in the package, and give each of them a fragment of its own."
        if self.chapter.generated: return  # a page of the reference has no cells
        try: body = ast.parse(source).body
        except SyntaxError: return
        names = []
        for node in body:
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)): continue
            names.append(node.name)
            if isinstance(node, ast.ClassDef):
                names += [f'{node.name}.{n.name}' for n in node.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
        here = [(n, module, fragment) for n in names for module, page, fragment in self.book.symbols.get(n, ()) if page == self.chapter.page]
        if not here: return
        module = here[0][1]
        block['class'] = ['mg-code', 'mg-exported']
        block['data-names'] = ' '.join(n for n, _, _ in here if '.' not in n)
        block.insert(0, self._new('p', module, class_='mg-from', title=f'This cell is part of the module {module}'))
        for _, _, fragment in here:
            if not self.soup.find(id=fragment): block.insert(0, self._new('span', id=fragment, class_='mg-target'))

    def _callouts(self):
        for c in self.soup.select('div.callout'):
            kind = next((k.removeprefix('callout-') for k in _classes(c) if k in ('callout-note', 'callout-tip', 'callout-warning', 'callout-important',
                                                                                 'callout-caution')), 'note')
            box = c.find(class_='callout-title-container')
            if box is not None:
                for s in box.select('.screen-reader-only'):
                    if box.get_text().strip() != s.get_text().strip(): s.decompose()
            title = self._parse(box.decode_contents().strip() if box is not None else kind.capitalize())
            body = c.find(class_='callout-body-container') or c.find(class_='callout-body') or c
            inner = body.find(True, recursive=False)
            if inner is not None and _classes(inner) == ['callout-body'] and len(body.find_all(True, recursive=False)) == 1: body = inner
            folded = c.find(class_='callout-collapse')
            goals = title.get_text().strip().lower().startswith(_GOALS)
            classes = ['callout', f'callout-{kind}'] + ['mg-goals'] * goals
            content = self._new('div', *[x.extract() for x in list(body.contents)], class_='callout-body')
            if folded is not None:
                new = self._new('details', self._new('summary', title, class_='callout-title'), content, class_=classes)
                if 'show' in _classes(folded): new['open'] = ''
            else: new = self._new('div', self._new('p', title, class_='callout-title'), content, class_=classes, role='note')
            if c.get('id') and not re.match(r'callout-\d+$', c['id']): new['id'] = c['id']
            c.replace_with(new)

    def _tabs(self):
        for n, tabset in enumerate(self.soup.select('div.panel-tabset')):
            titles = [t.get_text().strip() for t in tabset.select('[role=tab]')]
            panes = tabset.select('.tab-pane')
            bar, new = self._new('div', class_='mg-tabs', role='tablist'), self._new('div', class_='panel-tabset')
            new.append(bar)
            for i, (title, pane) in enumerate(zip(titles, panes)):
                bar.append(self._new('button', title, type='button', role='tab', id=f'tab-{n}-{i}', aria_controls=f'pane-{n}-{i}',
                                     aria_selected='false' if i else 'true', tabindex='-1' if i else '0'))
                box = self._new('div', *[x.extract() for x in list(pane.contents)], class_='mg-pane', role='tabpanel', id=f'pane-{n}-{i}',
                                aria_labelledby=f'tab-{n}-{i}')
                if i: box['hidden'] = ''
                new.append(box)
            tabset.replace_with(new)

    def _notes(self):
        "Footnotes: one list at the end of the page, a small number at each place."
        items = self.soup.select('li[id^="fn"]')
        for ref in self.soup.select('a[id^="fnref"]'):
            n = re.search(r'\d+', ref['href'])[0]
            target = ref.parent if ref.parent.name == 'sup' else ref
            target.replace_with(self._new('sup', self._new('a', n, href=ref['href'], id=ref['id'], role='doc-noteref', aria_label=f'Footnote {n}')))
        listing = self._new('ol')
        for li in items:
            for back in li.select('a.footnote-backref, a.footnote-back'):
                back.attrs = {'href': back['href'], 'role': 'doc-backlink', 'aria-label': 'Back to the text'}
            listing.append(self._new('li', *[x.extract() for x in list(li.contents)], id=li['id']))
        for old in self.soup.select('hr.footnotes-sep, section.footnotes, #quarto-appendix'): old.decompose()
        if items: self.soup.append(self._new('section', listing, class_='mg-notes', role='doc-endnotes', aria_label='Footnotes'))
        for aside in self.soup.select('.column-margin, .aside'):
            aside.attrs = {'class': ['column-margin'], 'role': 'note'}
            if aside.name == 'span': continue
            aside.name = 'div'

    def _tables(self):
        "What is wider than the page scrolls in a box of its own."
        for table in self.soup.find_all('table'):
            if table.find_parent(class_='mg-scroll') or table.find_parent('table'): continue
            for t in table.find_all('style'): t.decompose()
            if 'dataframe' in _classes(table): table['class'] = ['mg-table']
            table.attrs.pop('border', None)
            table.attrs.pop('data-quarto-postprocess', None)
            if 'mg-table' not in _classes(table): table['class'] = ['mg-prose-table', *({'mg-names'} & set(_classes(table)))]
            for cell in table.find_all(['th', 'td']):
                if align := re.search(r'text-align:\s*(left|right|center)', cell.get('style') or ''): cell['style'] = f'text-align: {align[1]}'
                else: cell.attrs.pop('style', None)
            self._numbers(table)
            for corner in table.select('thead th'):
                if not corner.get_text().strip(): corner.name = 'td'  # nothing is headed by nothing
            table.wrap(self._new('div', class_='mg-scroll'))

        for picture in self.soup.select('figure > .picture'): picture.wrap(self._new('div', class_='mg-scroll'))

    def _numbers(self, table):
        "Mark the columns that hold numbers, headings too, so that they stand to the right."
        rows = [tr.find_all(['th', 'td'], recursive=False) for tr in table.find_all('tr')]
        head, body = [r for r in rows if r and r[0].find_parent('thead')], [r for r in rows if r and not r[0].find_parent('thead')]
        for column in range(max(map(len, rows), default=0)):
            cells = [r[column] for r in body if len(r) > column]
            texts = [c.get_text().strip() for c in cells]
            if any(texts) and all('number' in _classes(c) or re.fullmatch(r'([-−+]?[\d.,]+(e[-+]?\d+)?( ?%)?)?|nan|[-−]?inf', t) for c, t in zip(cells, texts)):
                for c in cells + [r[column] for r in head if len(r) > column]:
                    if not c.get('style'): c['class'] = ['number']

    def _links(self):
        pages = {c.source: c.page for c in self.book.chapters} | {c.source.replace('.ipynb', '.html'): c.page for c in self.book.chapters}
        for a in self.soup.find_all('a', href=True):
            href = a['href']
            a.attrs = {k: v for k, v in a.attrs.items() if k in ('href', 'id', 'role', 'title', 'aria-label')}
            if '/blob/' in href and not re.match(r'[a-z]+://', href): a.unwrap(); continue
            if re.match(r'[a-zA-Z][\w+.-]*:|//', href):
                # nbdev links any name in backticks that some installed library documents; that is not what our text means
                if len(a.contents) == 1 and getattr(a.contents[0], 'name', '') == 'code' and re.search(r'//[^/]*(fast\.ai|answer\.ai|github\.io)/', href): a.unwrap()
                continue
            if href.startswith(('#', '?')): continue
            path, _, tail = href.partition('#')
            path = posixpath.normpath(unquote(path).lstrip('/') or 'index.html')
            a['href'] = pages.get(path, path) + (f'#{tail}' if tail else '')
            if a['href'].startswith(self.chapter.page + '#'): a['href'] = a['href'][len(self.chapter.page):]

    def _leftovers(self):
        "Markup that the renderer did not understand would stand on the page as text."
        for text in self.soup.find_all(string=_LEFTOVER):
            if text.find_parent(['code', 'pre']) or text.find_parent('td') and text.find_parent(class_='mg-table'): continue  # such a cell holds a result, not markup
            m = _LEFTOVER.search(text)
            raise SiteError(f'{self.chapter.source or self.chapter.page}: {m[0].strip()!r} is left on the page as text, in: {" ".join(text.split())[:120]}')

    def _target(self, name):
        "Where a name of the package is defined, as a link from this page, or ''."
        name = name.removesuffix('()')
        found = self.book.symbols.get(name)
        if found is None:
            found = [f for n, fs in self.book.symbols.items() for f in fs if name == f'{f[0]}.{n}' or name == f'{f[0]}.{n}'.split('.', 1)[1]]
        pages = {c.page for c in self.book.pages}
        found = [f for f in found or () if f[1] in pages]
        if not found: return ''
        _, page, fragment = next((f for f in found if f[1] == self.chapter.page), found[0])
        return f'#{fragment}' if page == self.chapter.page else f'{page}#{fragment}'

    def _names(self):
        "The first mention of a name in each section links to its definition."
        seen = set()
        for t in self.soup.find_all(['h2', 'code']):
            if t.name == 'h2': seen.clear(); continue
            if t.find_parent(['pre', 'h1', 'h2', 'h3', 'h4', 'figure', 'summary', 'button']) or t.find_parent(class_=['cell', 'callout-title', 'mg-names']): continue
            link, target = t.find_parent('a'), self._target(t.get_text())
            if not target: continue
            if link is not None and link.get_text() != t.get_text(): continue
            if link is not None: link.unwrap()
            if target in seen: continue
            seen.add(target)
            t.wrap(self._new('a', href=target, class_='mg-name'))

    def _terms(self):
        "The first mention of a term of the glossary links to it."
        if any(t.target.startswith(self.chapter.page + '#') for t in self.book.terms): return
        out = ['a', 'code', 'pre', 'h1', 'h2', 'h3', 'h4', 'figure', 'summary', 'button', 'math', 'mg-kept']
        texts = [t for block in self.soup.find_all(['p', 'li']) for t in block.find_all(string=True)
                 if t.find_parent(['p', 'li']) is block and not t.find_parent(out) and not t.find_parent(class_=['cell', 'callout', 'mg-notes'])]
        uses = first_uses([str(t) for t in texts], self.book.terms)
        for i, node in enumerate(texts):
            parts, at = [], 0
            for start, end, target in [u[1:] for u in uses if u[0] == i]:
                parts += [NavigableString(node[at:start]), self._new('a', node[start:end], href=target, class_='mg-term')]
                at = end
            if parts: node.replace_with(*parts, NavigableString(node[at:]))

    def _axes(self):
        "The letters of a shape in the text have the colours of their axes, as in every figure."
        for code in self.soup.find_all('code'):
            if code.find_parent('pre') or (inner := shape(code.get_text())) is None: continue
            code.clear()
            code.append(self._parse(inner))

    def _anchors(self):
        self.outline = []
        for h in self.soup.find_all(['h2', 'h3', 'h4']):
            if not h.get('id'): continue
            text = h.get_text().strip()
            if h.name != 'h4' and not h.find_parent(class_=['callout', 'panel-tabset', 'cell']): self.outline.append((h.name, h['id'], h.decode_contents().strip()))
            h.append(self._new('a', '#', class_='mg-anchor', href=f"#{h['id']}", aria_label=f'Link to the section {text}'))

    @property
    def widget(self):
        "Whether the sorter runs on this page."
        return self.soup.find(id='watch') is not None

    @property
    def content(self): return self._restore(self.soup.decode(formatter='minimal')).strip()

    def _text(self, node):
        "The words under `node`, code included, drawings and formulas not."
        if isinstance(node, NavigableString): return str(node)
        if node.name == 'mg-kept': return self.kept[int(node['n'])][1]
        if node.name == 'button' or {'mg-from', 'mg-anchor'} & set(_classes(node)): return ''
        return ' '.join(map(self._text, node.children)) if node.name in _BLOCKS else ''.join(map(self._text, node.children))

    def search_entries(self):
        "What the search finds on this page: its definitions, then its sections with their text."
        c, out = self.chapter, []
        if c.generated:  # the definitions are found where they are explained; a page of the reference is one entry
            names = ' '.join(t.get_text() for t in self.soup.select('h2 > code'))
            return [dict(p=c.title if c.under else f'{c.group}: {c.title}', h='', u=c.page, t=f'{c.description} {names}'.strip())]
        for block in self.soup.select('.mg-exported'):
            module = block.find(class_='mg-from').get_text()
            for name in block['data-names'].split():
                fragment = next((f for m, p, f in self.book.symbols[name] if m == module and p == c.page), '')
                out.append(dict(d=name, p=c.title, u=f'{c.page}#{fragment}', t=self._text(block)))
        heading, anchor, words = '', '', [c.description]
        def flush():
            text = ' '.join(words).strip()
            if text or not heading: out.append(dict(p=c.title, h=heading, u=c.page + (f'#{anchor}' if anchor else ''), t=text))
        for node in self.soup.contents:
            if isinstance(node, Tag) and node.name in ('h2', 'h3') and node.get('id'):
                flush()
                heading, anchor, words = self._text(node).strip(), node['id'], []
            else: words.append(self._text(node))
        flush()
        for e in out: e['t'] = re.sub(r'\s+', ' ', e['t']).strip()
        return out


# -- the frame around it ---------------------------------------------------------------------------------------------

_ICON = ("data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E%3Cpath d='M2 2h4v4H2zm0 6h4v4H2zm6 0h4v4H8z' "
         "fill='%231f5fae' transform='translate(1 1)'/%3E%3C/svg%3E")
_EARLY = ("(function(d){try{var t=localStorage.getItem('minigpt-theme');if(t==='dark'||t==='light')d.dataset.theme=t}catch(e){}"
          "d.classList.add('js')})(document.documentElement)")

# where the list of sections stands above the text, it is folded before anything is drawn, so that nothing moves
_FOLD = "if(!matchMedia('(min-width: 75rem)').matches)document.currentScript.previousElementSibling.open=false"


WIDGET = ('weights.js', 'sorter.js', 'watch.js')  # the first is made from the trained sorter


def frame(page: Page) -> str:
    "The whole HTML document of a page."
    c, book, esc = page.chapter, page.book, html.escape
    chapters = book.pages
    at = chapters.index(c)
    of = f'{c.group}: ' if c.generated and not c.under else ''
    full = c.title if c.page == 'index.html' else f'{of}{c.title} – {book.title}'
    def entry(x):
        number = f'<span class="mg-n">{x.number}</span> ' if x.number else ''
        here = ' aria-current="page"' if x is c else ''
        below = '\n<ul>\n' + '\n'.join(map(entry, x.under)) + '\n</ul>\n' if x.under and c in (x, *x.under) else ''
        return f'<li><a href="{esc(x.page)}"{here}>{number}<span>{esc(x.title)}</span></a>{below}</li>'
    groups = '\n'.join(f'<p>{esc(name)}</p>\n<ul>\n' + '\n'.join(map(entry, cs)) + '\n</ul>' for name, cs in book.groups if cs)
    toc = ''
    if len(page.outline) > 1:
        items = '\n'.join(f'<li class="{tag}"><a href="#{esc(i)}">{text}</a></li>' for tag, i, text in page.outline)
        toc = (f'<nav class="mg-toc" aria-label="On this page">\n<details open><summary>On this page</summary>\n<ul>\n{items}\n</ul>\n</details>\n<script>{_FOLD}</script>\n</nav>')
    step = ''
    if at > 0: step += f'<a rel="prev" href="{esc(chapters[at-1].page)}"><small>Previous</small> <span>{esc(chapters[at-1].title)}</span></a>'
    if at < len(chapters)-1: step += f'<a rel="next" href="{esc(chapters[at+1].page)}"><small>Next</small> <span>{esc(chapters[at+1].title)}</span></a>'
    label = f'<p class="mg-label">{c.label}</p>\n' if c.label else ''
    lead = f'<p class="mg-lead">{page.lead}</p>\n' if page.lead else ''
    scripts = ''.join(f'\n<script src="assets/{name}" defer></script>' for name in WIDGET) if page.widget else ''
    about = [f'<a href="notebooks/{esc(c.source)}" download>Download the notebook</a>'] if not c.generated else []
    if book.git_url and not c.generated:
        issue = urlencode(dict(title=f'{c.title}: '))
        if colab := book.colab(c.source): about.append(f'<a href="{esc(colab)}">Run it on Colab</a>')
        about += [f'<a href="{esc(book.git_url)}/blob/{esc(book.branch)}/{esc(book.notebooks)}/{esc(c.source)}">View its source</a>',
                  f'<a href="{esc(book.git_url)}/issues/new?{esc(issue)}">Report a problem</a>']
    about = f'<p class="mg-about">{" · ".join(about)}</p>\n' if about else ''
    foot = [f'{esc(book.package)} {esc(book.version)}'] + ([f'{esc(book.license)} licence'] if book.license else [])
    if book.git_url: foot.append(f'<a href="{esc(book.git_url)}">source</a>')
    return f'''<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{esc(full)}</title>
<meta name="description" content="{esc(c.description or book.description)}">
<meta property="og:type" content="article">
<meta property="og:site_name" content="{esc(book.title)}">
<meta property="og:title" content="{esc(c.title)}">
<meta property="og:description" content="{esc(c.description or book.description)}">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="{_ICON}">
<script>{_EARLY}</script>
<link rel="stylesheet" href="styles.css">
<link rel="stylesheet" href="assets/math.css">
<script src="assets/site.js" defer></script>{scripts}
</head>
<body class="mg-page">
<a class="mg-skip" href="#content">Skip to the text</a>
<header class="mg-top">
<button class="mg-menu" type="button" aria-expanded="false" aria-controls="chapters">Chapters</button>
<a class="mg-home" href="index.html">{esc(book.title)}</a>
<form class="mg-search" role="search">
<input id="search" type="search" placeholder="Search" aria-label="Search the book" autocomplete="off" spellcheck="false">
<div class="mg-results" role="region" aria-label="Search results" hidden></div>
</form>
<button class="mg-theme" type="button" aria-pressed="false" aria-label="Dark theme" title="Dark theme"><svg viewBox="0 0 20 20" width="20" height="20" aria-hidden="true"><circle cx="10" cy="10" r="7" fill="none" stroke="currentColor" stroke-width="1.6"/><path d="M10 3a7 7 0 0 1 0 14z" fill="currentColor"/></svg></button>
</header>
<div class="mg-frame">
<nav class="mg-side" id="chapters" aria-label="Chapters">
{groups}
</nav>
{toc}
<main id="content" tabindex="-1">
<header class="mg-title">
{label}<h1>{page.title}</h1>
{lead}</header>
{page.content}
{about}<nav class="mg-step" aria-label="Previous and next page">{step}</nav>
</main>
</div>
<footer class="mg-foot">{' · '.join(foot)}</footer>
</body>
</html>
'''


def not_found(book: Book) -> str:
    "The page that a server shows for an address that is none. Its links start from where the book is published, as far as the settings say."
    esc, base = html.escape, book.base.rstrip('/') + '/' if book.base else ''
    items = '\n'.join(f'<li><a href="{esc(base + c.page)}">{esc(c.title)}</a></li>' for c in book.chapters)
    return f'''<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Not found – {esc(book.title)}</title>
<meta name="color-scheme" content="light dark">
<link rel="icon" href="{_ICON}">
<style>body {{ max-width: 40rem; margin: 3rem auto; padding: 0 1rem; font: 1.0625rem/1.65 system-ui, sans-serif; background: light-dark(#fdfdfb, #14171b); color: light-dark(#20242a, #dde1e6); }}
:root {{ color-scheme: light dark; }} a {{ color: light-dark(#1a5b94, #82b9ec); }}</style>
</head>
<body>
<main>
<h1>This page does not exist</h1>
<p>The address may be old, or mistyped. These are the pages of the book:</p>
<ul>
{items}
</ul>
</main>
</body>
</html>
'''


def search_script(entries: list) -> str:
    "The search index as a script: a page opened from a folder may load a script, but not fetch a file."
    return 'window.minigptSearch = ' + json.dumps(entries, ensure_ascii=False, separators=(',', ':')).replace('</', '<\\/') + ';\n'


# -- the links of a finished site ------------------------------------------------------------------------------------

def dead_links(pages: dict,  # name -> HTML, a whole site
               base: str = '',  # path under which it is published, with which a link may begin
               ) -> list:
    "Every internal link to a page, file or fragment that is not there, as 'page: link'."
    base = base.rstrip('/') + '/' if base else ''
    ids = {name: set(re.findall(r'\sid="([^"]+)"', text)) for name, text in pages.items() if name.endswith('.html')}
    out = []
    for name, text in pages.items():
        if not name.endswith('.html'): continue
        for href in re.findall(r'<a\b[^>]*?\shref="([^"]*)"', text):
            href = html.unescape(href)
            if re.match(r'[a-zA-Z][\w+.-]*:', href): continue
            if base: href = href.removeprefix(base)
            path, _, fragment = href.partition('#')
            if href.startswith('/'): out.append(f'{name}: {href} (not relative)'); continue
            target = posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) if path else name
            if target not in pages: out.append(f'{name}: {href} (no such page)')
            elif fragment and unquote(fragment) not in ids.get(target, ()): out.append(f'{name}: {href} (no such section)')
    return sorted(set(out))
