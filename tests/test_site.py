"""The website: complete, without dead links or outside requests, without leftovers of any notation."""

import configparser
import json
import re
import sys

import pytest
import yaml
from bs4 import BeautifulSoup
from site_fixtures import ROOT, built, notebook, pages, project, soup
from tools import notebooks, site
from tools.mathml import MathError, to_mathml
from tools.pages import Book, Chapter, Page, SiteError, dead_links, frame, not_found
from tools.terms import Term, first_uses

NOTEBOOKS = sorted(p.name for p in (ROOT / "nbs").glob("*.ipynb"))
OF_NOTEBOOKS = [re.sub(r"^\d+[a-zA-Z0-9]*_", "", n.lower()).replace(".ipynb", ".html") for n in NOTEBOOKS]  # nbdev's rule
REFERENCE = ["reference.html", *(f"reference-{p.stem}.html" for p in sorted((ROOT / "minigpt").glob("*.py")) if p.name[0] != "_")]
PAGES = OF_NOTEBOOKS + REFERENCE


def prose(name: str) -> str:
    "What a reader sees on a page outside code, outputs and drawings."
    page = BeautifulSoup(pages()[name], "html.parser")
    for tag in page.find_all(["pre", "code", "svg", "script", "style", "math"]) + page.select("table.mg-table td"): tag.decompose()
    return page.get_text("\n")


# -- the site of the book -----------------------------------------------------------------------------------------------

def test_every_notebook_and_every_module_has_its_page():
    assert sorted(pages()) == sorted(PAGES) and len(set(PAGES)) == len(NOTEBOOKS) + len(REFERENCE) and len(REFERENCE) > 15


@pytest.mark.parametrize("name", PAGES)
def test_sidebar_lists_every_page_once(name):
    "Those of single modules only where the reader is among them."
    links = [a["href"] for a in soup(name).select("nav.mg-side a")]
    assert sorted(links) == sorted(PAGES if name in REFERENCE else [*OF_NOTEBOOKS, "reference.html"])
    assert [a["href"] for a in soup(name).select("nav.mg-side a[aria-current=page]")] == [name]


def test_no_dead_link_or_fragment():
    files = {p.relative_to(built()).as_posix(): "" for p in built().rglob("*") if p.is_file()} | pages()
    assert dead_links(files) == []


@pytest.mark.parametrize("name", PAGES)
def test_previous_and_next_follow_the_sidebar(name):
    order = [a["href"] for a in soup(name).select("nav.mg-side a")]
    steps = {a["rel"][0]: a["href"] for a in soup(name).select("nav.mg-step a")}
    at = order.index(name)
    assert steps == ({"prev": order[at - 1]} if at else {}) | ({"next": order[at + 1]} if at + 1 < len(order) else {})


@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_loaded_from_elsewhere(name):
    loaded = [t.get(a) for t in soup(name).find_all(True) for a in ("src", "srcset", "data", "poster") if t.get(a)]
    loaded += [t["href"] for t in soup(name).find_all("link") if t.get("href")]
    loaded += [t.get(a) for t in soup(name).select("image, use") for a in ("href", "xlink:href") if t.get(a)]
    loaded += re.findall(r"url\(\s*['\"]?([^'\")]+)", pages()[name])
    assert [u for u in loaded if not u.startswith(("data:", "#")) and re.match(r"[a-z]+:|/", u)] == []
    local = [u for u in loaded if not u.startswith(("data:", "#"))]
    assert local and all((built() / u).is_file() for u in local)


def test_styles_and_scripts_ask_for_nothing_elsewhere():
    for path in [*built().rglob("*.css"), *built().rglob("*.js")]:
        if path.name == "search.js": continue
        text = path.read_text(encoding="utf-8")
        for u in re.findall(r"url\(\s*['\"]?([^'\")]+)", text): assert (path.parent / u).is_file(), (path, u)
        assert "@import" not in text and "fetch(" not in text and "XMLHttpRequest" not in text, path
        assert [u for u in re.findall(r"https?://[^\s'\")]+", text) if "openfontlicense" not in u] == [], path


@pytest.mark.parametrize("name", PAGES)
def test_no_notation_is_left_over(name):
    text = prose(name)
    for pattern in (r"\$\$", r"\\[a-zA-Z]{2,}", r"\\[()\[\]]", r"(?<!\w)@(fig|eq|tbl|sec|lst)-", r":::", r"\{#", r"\{\.", r"#\|", r"\*\*\w", r"^#+ ",
                    r"\]\(", r"\[\^\w+\]", r"```", r"\$\w+\$", r"WARNING: THIS FILE"):
        assert (found := re.search(pattern, text, re.M)) is None, (pattern, text[max(0, found.start() - 60):found.end() + 60])
    assert not soup(name).select(".math, mg-kept, .quarto-unresolved-ref, .cell-output-error")
    code = [t.get_text() for t in soup(name).select(".mg-code pre")]
    assert not [c for c in code if re.search(r"^\s*#\|", c, re.M)]
    assert "Traceback (most recent call last)" not in "".join(t.get_text() for t in soup(name).select(".cell-output"))


@pytest.mark.parametrize("name", PAGES)
def test_headings_are_in_order(name):
    levels = [int(h.name[1]) for h in soup(name).find_all(re.compile("^h[1-6]$"))]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(b <= a + 1 for a, b in zip(levels, levels[1:])), levels


@pytest.mark.parametrize("name", PAGES)
def test_ids_are_unique(name):
    ids = re.findall(r'\sid="([^"]+)"', pages()[name])
    assert sorted(ids) == sorted(set(ids))


@pytest.mark.parametrize("name", PAGES)
def test_pictures_say_what_is_to_be_seen(name):
    for picture in soup(name).select("main svg:not(svg svg), main img"):
        text = picture.get("aria-label") or picture.get("alt") or ""
        assert len(text.strip()) > 10 or picture.get("aria-hidden") == "true", str(picture)[:200]
        white = re.search(r"(?:fill|stroke|background)(?:=\"|:\s*)(?:#fff\b|#ffffff|white)", str(picture))
        assert white is None, f"{white[0]} in a drawing is a white patch on a dark page: {str(picture)[:120]}"
    for figure in soup(name).select("figure.mg-figure"): assert figure.figcaption is not None and figure.figcaption.get_text().strip()


@pytest.mark.parametrize("name", PAGES)
def test_the_version_of_the_package_is_shown(name):
    settings = configparser.ConfigParser(interpolation=None)
    settings.read(ROOT / "settings.ini", encoding="utf-8")
    footer = soup(name).select_one("footer.mg-foot").get_text()
    assert f"{settings['DEFAULT']['lib_name']} {settings['DEFAULT']['version']}" in footer


@pytest.mark.parametrize("source, name", list(zip(NOTEBOOKS, OF_NOTEBOOKS)))
def test_every_shown_output_is_on_its_page(source, name):
    "A notebook that was stripped of its outputs would publish as a page without results, and no renderer says so."
    cells = json.loads((ROOT / "nbs" / source).read_text(encoding="utf-8"))["cells"]
    shown = [c for c in cells if c["cell_type"] == "code" and not re.search(r"^#\|\s*(hide|export|exporti|default_exp)\b|include:\s*false|output:\s*false",
                                                                            "".join(c["source"]), re.M)]
    stored = sum(bool([o for o in c["outputs"] if o.get("data") or "".join(o.get("text", [])).strip()]) for c in shown)
    on_page = sum(bool(c.select(".cell-output")) for c in soup(name).select(".cell"))
    assert on_page == stored
    assert stored > 0 or len([c for c in shown if "#| exports" not in "".join(c["source"])]) < 3, f"{source} has no stored output at all"


@pytest.mark.parametrize("source, name", list(zip(NOTEBOOKS, OF_NOTEBOOKS)))
def test_every_exported_definition_is_shown_and_has_its_fragment(source, name):
    namespace = {}
    exec((ROOT / "minigpt" / "_modidx.py").read_text(encoding="utf-8"), namespace)
    wanted = {target.split("#")[1] for names in namespace["d"]["syms"].values() for target, _ in names.values() if target.split("#")[0] == name}
    exported = "\n".join("".join(c["source"]) for c in json.loads((ROOT / "nbs" / source).read_text(encoding="utf-8"))["cells"]
                         if re.search(r"^#\|\s*exports\b", "".join(c["source"]), re.M))
    wanted = {w for w in wanted if re.search(rf"(def|class) {re.escape(w.split('.')[-1])}\b", exported, re.I)}
    ids = set(re.findall(r'\sid="([^"]+)"', pages()[name]))
    assert wanted <= ids, sorted(wanted - ids)


def test_search_index_holds_definitions_and_prose():
    text = (built() / "assets" / "search.js").read_text(encoding="utf-8")
    entries = json.loads(text.removeprefix("window.minigptSearch = ").rstrip().rstrip(";"))
    assert {e["u"].split("#")[0] for e in entries} == set(PAGES)
    assert {e["d"] for e in entries if "d" in e} >= {"softmax", "sdpa"}
    for e in entries: assert "<" not in e["u"] and e["p"]


def test_quarto_yml_suits_real_quarto():
    config = yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8"))
    page = config["format"]["html"]
    assert config["project"]["type"] == "website" and config["project"]["output-dir"] == "_docs"
    assert page["html-math-method"] == "mathml" and page["css"] == "styles.css" and "ipynb-filters" not in json.dumps(config)
    assert set(page["theme"].values()) <= {"default", "cerulean", "litera", "pulse", "quartz", "slate"}, "other themes load a web font"


# -- the colours --------------------------------------------------------------------------------------------------------

def luminance(colour: str) -> float:
    parts = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_colours_are_legible_on_both_themes():
    css = (ROOT / "nbs" / "styles.css").read_text(encoding="utf-8")
    colours = {n: (light, dark) for n, light, dark in re.findall(r"--mg-([\w-]+): light-dark\((#\w{6}), (#\w{6})\);", css)}
    inks = ["text", "muted", "accent", *"123456", *(f"axis-{a}" for a in "BTCHV")]
    for ink in inks:
        for theme in (0, 1):
            for ground in ("bg", "fill"): assert contrast(colours[ink][theme], colours[ground][theme]) >= 4.5, (ink, ground, theme)
    for theme in (0, 1): assert contrast(colours["text"][theme], colours["mark"][theme]) >= 4.5
    assert len({colours[f"axis-{a}"] for a in "BTCHV"}) == 5 and len({colours[n] for n in "123456"}) == 6


# -- formulas -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("tex", [
    r"\operatorname{softmax}\left(\frac{q k^\top}{\sqrt{d}} + M\right) v", r"x \in \mathbb{R}^{T \times d_\text{head}}", r"\sum_{t=1}^{T} x_t", r"\hat{m}_t",
    r"\begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix}", r"\begin{cases} 0 & j \le i \\ -\infty & \text{otherwise} \end{cases}", r"\lfloor x \rfloor",
    r"\begin{aligned} a &= b \\ c &= d \end{aligned}", r"\operatorname*{arg\,max}_i z_i", r"\mathrm{head}_1", r"\mathbf{W}_{qkv}", r"\lVert x \rVert_2",
    r"\theta \leftarrow \theta - \eta \, \nabla \mathcal{L}", r"\underbrace{a + b}_{c}", r"10^{-15}", r"1, \dots, T", r"\text{d\_model}"])
def test_tex_becomes_mathml(tex):
    for display in (False, True):
        out = to_mathml(tex, display)
        text = re.sub(r"<[^>]*>", "", out)
        assert out.startswith("<math") and "\\" not in text and "{" not in text.replace("{", "", 1) and "xmlns" not in out
        assert ("display" in out.split(">")[0]) == display


def test_spacing_of_formulas():
    assert to_mathml(r"\log p").count("<mspace") == 1 and "<mspace" not in to_mathml(r"\log(p)")
    assert '<mo form="prefix">−</mo>' in to_mathml(r"x = -\infty") and 'form="prefix"' not in to_mathml("x - y")
    assert "<mi>head</mi>" in to_mathml(r"\mathrm{head}_1")
    assert '<mo lspace="0" rspace="0">/</mo>' in to_mathml("a/b"), "a slash stands close to what it divides"
    assert '<mi class="fn">gelu</mi>' in to_mathml(r"\operatorname{gelu_{tanh}}(x)") and "<mi>tanh</mi>" in to_mathml(r"\operatorname{gelu_{tanh}}(x)"), "upright, with an upright index"
    assert to_mathml(r"\ln 2") == to_mathml(r"\ln2") and "<mspace" in to_mathml(r"\ln2") and "<mspace" in to_mathml(r"a\cos\varphi")


def test_a_bar_is_as_wide_as_what_it_covers():
    "As a border: the font's own bar would cover one letter."
    bar = to_mathml(r"\overline{k e^{i\theta}}")
    assert "<mover" not in bar and "border-top" in bar and bar.index("border-top") < bar.index("<mi>k</mi>")


@pytest.mark.parametrize("mark", [",", ".", ").", "?"])
def test_no_line_begins_with_what_follows_a_formula(mark):
    html = content(f"<p>so <span class='math inline'>\\(x\\)</span>{mark} and</p>")
    together = BeautifulSoup(str(html), "html.parser").select_one(".mg-together")
    assert together.get_text() == f"x{mark}" and "nowrap" in (ROOT / "nbs/styles.css").read_text(encoding="utf-8").partition(".mg-together")[2][:40]


@pytest.mark.parametrize("tex, why", [
    ("", "empty"), (r"\frac{a}{b", "braces"), (r"\foo{x}", r"\\foo"), (r"\left( x", r"\\left and"), ("x^2^3", "Double"), (r"\frac{1}", "argument"),
    (r"\begin{pmatrix} 1 \end{bmatrix}", r"\\begin and"), ("a & b", "."), (r"x_{\unknowncommand}", r"\\unknowncommand"), ("a_", ".")])
def test_bad_tex_is_refused(tex, why):
    with pytest.raises(MathError, match=why): to_mathml(tex)


# -- one page, from either renderer -------------------------------------------------------------------------------------

LAYERS, ATTENTION = Chapter("01_layers.ipynb", "layers.html", "Layers", "The <parts>."), Chapter("02_attention.ipynb", "attention.html", "Attention")
BOOK = Book("minigpt", "A book.", "9.8.7", "minigpt", "MIT", "", [("The book", [LAYERS, ATTENTION])],
            {"softmax": [("minigpt.layers", "layers.html", "softmax")], "Linear.forward": [("minigpt.layers", "layers.html", "linear.forward")]})


def content(body: str, chapter: Chapter = ATTENTION) -> str:
    return Page(f"<html><main id='quarto-document-content'>{body}</main></html>", chapter, BOOK).content


SMALLDOCS = """<header id="title-block-header" class="quarto-title-block default"><div class="quarto-title"><h1 class="title">Attention</h1></div></header>
<section id="one" class="level2">
<h2 class="anchored" data-anchor-id="one">One</h2>
<p>Text with a note.<sup class="footnote-ref"><a href="#fn1" id="fnref1">[1]</a></sup> See <a href="01_layers.html#one">there</a> and <code>softmax</code>.</p>
<div id="cell-3" class="cell">
<div class="code-copy-outer-scaffold"><div class="sourceCode" id="cb1"><pre class="sourceCode python code-with-copy cell-code"><code class="sourceCode python"><span class="kw">def</span> f(x):
    <span class="cf">return</span> x</code></pre></div><button title="Copy to Clipboard" class="code-copy-button"><i class="bi"></i></button></div>
<div class="cell-output cell-output-display">
<pre><code>1 &lt; 2</code></pre>
</div>
</div>
<div class="callout callout-style-default callout-tip callout-titled"><div class="callout-header d-flex align-content-center"><div class="callout-icon-container"><i class="callout-icon"></i></div><div class="callout-title-container flex-fill">A tip</div></div><div class="callout-body-container callout-body">
<p>Short.</p>
</div></div>
<hr class="footnotes-sep" />
<section class="footnotes">
<ol class="footnotes-list">
<li id="fn1" class="footnote-item"><p>A footnote. <a href="#fnref1" class="footnote-backref">↩︎</a></p>
</li>
</ol>
</section>
</section>
<nav class="page-navigation"></nav>"""

QUARTO = """<header id="title-block-header" class="quarto-title-block default">
<div class="quarto-title"><h1 class="title">Attention</h1></div>
<div class="quarto-title-meta"></div>
</header>
<section id="one" class="level2">
<h2 class="anchored" data-anchor-id="one">One</h2>
<p>Text with a note.<a href="#fn1" class="footnote-ref" id="fnref1" role="doc-noteref"><sup>1</sup></a> See <a href="./layers.html#one">there</a> and <code>softmax</code>.</p>
<div id="cell-3" class="cell" data-execution_count="2">
<div class="code-copy-outer-scaffold"><div class="sourceCode cell-code" id="cb1"><pre class="sourceCode python code-with-copy"><code class="sourceCode python"><span id="cb1-1"><a href="#cb1-1" aria-hidden="true" tabindex="-1"></a><span class="kw">def</span> f(x):</span>
<span id="cb1-2"><a href="#cb1-2" aria-hidden="true" tabindex="-1"></a>    <span class="cf">return</span> x</span></code></pre></div><button title="Copy to Clipboard" class="code-copy-button"><i class="bi"></i></button></div>
<div class="cell-output cell-output-display" data-execution_count="2">
<pre><code>1 &lt; 2</code></pre>
</div>
</div>
<div class="callout callout-style-default callout-tip callout-titled">
<div class="callout-header d-flex align-content-center">
<div class="callout-icon-container">
<i class="callout-icon"></i>
</div>
<div class="callout-title-container flex-fill">
<span class="screen-reader-only">Tip</span>A tip
</div>
</div>
<div class="callout-body-container callout-body">
<p>Short.</p>
</div>
</div>
</section>
<div id="quarto-appendix" class="default"><section id="footnotes" class="footnotes footnotes-end-of-document" role="doc-endnotes"><h2 class="anchored quarto-appendix-heading">Footnotes</h2>
<ol>
<li id="fn1"><p>A footnote. <a href="#fnref1" class="footnote-back" role="doc-backlink">↩︎</a></p></li>
</ol>
</section></div>"""


def test_both_renderers_give_the_same_page():
    squeeze = lambda text: re.sub(r">\s+", ">", re.sub(r"\s+<", "<", text))  # noqa: E731
    assert squeeze(content(SMALLDOCS)) == squeeze(content(QUARTO))


def test_links_become_relative():
    text = content('<p><a href="/layers.html#softmax">a</a> <a href="01_layers.html">b</a> <a href="./layers.html">c</a> <a href="02_attention.html#x">d</a>'
                   '<a href="/blob/main/minigpt/layers.py">source</a> <a href="https://example.org/x">e</a> <a href="01_layers.ipynb#y">f</a></p>')
    assert re.findall(r'href="([^"]*)"', text) == ["layers.html#softmax", "layers.html", "layers.html", "#x", "https://example.org/x", "layers.html#y"]
    assert "source" in text


def test_names_link_to_their_definition_once_per_section():
    text = content("<p><code>softmax</code> <code>softmax()</code> <code>minigpt.layers.softmax</code> <code>Linear.forward</code> <code>other</code></p>"
                   '<h2 id="b">B</h2><p><code>softmax</code> <a href="https://fastcore.fast.ai/x.html"><code>L</code></a></p>')
    assert re.findall(r'href="([^"]*)"', text) == ["layers.html#softmax", "layers.html#linear.forward", "#b", "layers.html#softmax"]
    assert "fast.ai" not in text


def test_exported_cell_is_marked_and_can_be_linked():
    cell = '<div class="cell" id="cell-1"><div class="sourceCode"><pre class="sourceCode python"><code class="sourceCode python">{}</code></pre></div></div>'
    text = content(cell.format("def softmax(x):\n    return x"), LAYERS)
    assert 'id="softmax"' in text and "minigpt.layers" in text and "mg-exported" in text
    assert "mg-exported" not in content(cell.format("def softmax(x): return x"), ATTENTION)
    heading = content('<section id="softmax" class="level2"><h2>Softmax</h2>' + cell.format("def softmax(x): return x") + "</section>", LAYERS)
    assert heading.count('id="softmax"') == 1


def test_drawings_pass_through_untouched():
    svg = '<svg viewBox="0 0 1 1" width="300pt"><linearGradient id="G"/><text fill="currentColor">a &lt; b</text></svg>'
    text = content(f'<div class="cell"><div class="cell-output"><figure class="mg-figure">{svg}<figcaption>c</figcaption></figure></div></div>')
    assert svg in text


def test_columns_of_numbers_are_marked():
    table = ('<table class="mg-table"><thead><tr><th>part</th><th>shape</th><th>share</th></tr></thead><tbody>'
             '<tr><td>a</td><td>(1, 2)</td><td>1,024</td></tr><tr><td>b</td><td></td><td class="number">3.1e-16</td></tr></tbody></table>')
    page = BeautifulSoup(content(f'<div class="cell"><div class="cell-output">{table}</div></div>'), "html.parser")
    assert [c.get_text() for c in page.select(".number")] == ["share", "1,024", "3.1e-16"]
    assert page.table.parent["class"] == ["mg-scroll"]


def test_indentation_and_characters_of_code_survive():
    source = "def f(a, b):\n    if a &lt; b:\n\n        return '&amp;'\n"
    page = BeautifulSoup(content(f'<pre class="sourceCode python"><code class="sourceCode python">{source}</code></pre>'), "html.parser")
    assert page.pre.get_text() == "def f(a, b):\n    if a < b:\n\n        return '&'"
    assert page.select_one("button.mg-copy") is not None
    assert content('<pre class="sourceCode python"><code>match(f, lambda x: x)</code></pre>').count('class="k"') == 1  # lambda


def test_tabs_and_folded_notes_need_no_library():
    tabs = ('<div class="panel-tabset"><ul class="nav nav-tabs" role="tablist"><li><a role="tab" href="">A</a></li><li><a role="tab" href="">B</a></li></ul>'
            '<div class="tab-content"><div class="tab-pane active"><p>one</p></div><div class="tab-pane"><p>two</p></div></div></div>')
    page = BeautifulSoup(content(tabs), "html.parser")
    assert [b.get_text() for b in page.select("button[role=tab]")] == ["A", "B"] and [p.has_attr("hidden") for p in page.select("[role=tabpanel]")] == [False, True]
    note = ('<div class="callout callout-note"><div class="callout-header collapsed" data-bs-toggle="collapse"><div class="callout-title-container">Solution</div></div>'
            '<div id="callout-1-contents" class="callout-collapse collapse"><div class="callout-body-container callout-body"><p>x</p></div></div></div>')
    page = BeautifulSoup(content(note), "html.parser")
    assert page.details is not None and not page.details.has_attr("open") and page.summary.get_text() == "Solution" and page.details.p.get_text() == "x"


def test_bad_formula_names_page_and_formula():
    with pytest.raises(SiteError, match=r"02_attention.ipynb: the formula \$\\foo\{x\}\$ cannot be drawn: \\foo is not known"):
        content(r'<p><span class="math inline">\(\foo{x}\)</span></p>')


@pytest.mark.parametrize("text", [r"a $\frac{1}$ b", "$$ x $$", "see @fig-map", "::: {.callout-note}", "## One {#one}"])
def test_markup_that_was_not_understood_is_refused(text):
    with pytest.raises(SiteError, match="02_attention.ipynb: .* is left on the page as text"): content(f"<p>{text}</p>")
    assert text in content(f"<p><code>{text}</code></p>") and text in content(f"<table class='mg-table'><tr><td>{text}</td></tr></table>")


def test_frame_escapes_and_shows_the_version():
    text = frame(Page("<main><p>x</p></main>", LAYERS, BOOK))
    assert "The &lt;parts&gt;." in text and "minigpt 9.8.7" in text and "<title>Layers – minigpt</title>" in text


@pytest.mark.parametrize("source, name", list(zip(NOTEBOOKS, OF_NOTEBOOKS)))
def test_the_notebook_can_be_downloaded(source, name):
    link = soup(name).select_one("p.mg-about a[download]")
    assert (built() / link["href"]).read_bytes() == (ROOT / "nbs" / source).read_bytes()
    assert len(soup(name).select("p.mg-about a")) == (3 if notebooks.settings(ROOT)["git_url"] else 1)


def test_links_to_the_repository_point_at_files_that_exist():
    "With a test address; without one no page shows such a link (see above)."
    address = "https://github.com/someone/book"
    for source, name in zip(NOTEBOOKS, OF_NOTEBOOKS):
        book = Book("minigpt", "A book.", "1", "minigpt", git_url=address, groups=[("", [Chapter(source, name, 'A & "B"')])], branch="main")
        text = frame(Page("<main><p>x</p></main>", book.chapters[0], book))
        links = [a["href"] for a in BeautifulSoup(text, "html.parser").select("p.mg-about a:not([download])")]
        colab, view, report = links
        opened = "https://colab.research.google.com/github/someone/book/blob/main/"
        assert colab.startswith(opened) and (ROOT / colab.removeprefix(opened)).is_file()
        assert view.startswith(f"{address}/blob/main/") and (ROOT / view.removeprefix(f"{address}/blob/main/")).is_file()
        assert report == f"{address}/issues/new?title=A+%26+%22B%22%3A+"


@pytest.mark.parametrize("address, path", [("", ""), ("https://example.org/someone/book", ""), ("https://github.com/someone/book.git", "someone/book"), ("https://github.com/someone/book/", "someone/book")])
def test_colab_opens_what_stands_on_github(address: str, path: str):
    link = Book("b", "", "1", "b", git_url=address).colab("01_layers.ipynb")
    assert link == (f"https://colab.research.google.com/github/{path}/blob/main/nbs/01_layers.ipynb" if path else "")


def test_an_address_that_is_none():
    text = (built() / "404.html").read_text(encoding="utf-8")
    links = [a["href"] for a in BeautifulSoup(text, "html.parser").select("a")]
    assert sorted(links) == sorted([*OF_NOTEBOOKS, "reference.html"]) and "does not exist" in text
    based = not_found(Book("minigpt", "", "1", "minigpt", groups=[("", [LAYERS])], base="/book/"))
    assert 'href="/book/layers.html"' in based and set(links) <= set(pages())


@pytest.mark.parametrize("name", PAGES)
def test_cards_for_those_who_share_a_page(name):
    cards = {tag["property"]: tag["content"] for tag in soup(name).select("meta[property]")}
    assert cards["og:title"] == soup(name).h1.get_text() and len(cards["og:description"]) > 20 and cards["og:site_name"] == "minigpt"


def test_dead_links_are_found():
    site_files = {"a.html": '<a href="b.html#x">1</a><a href="c.html">2</a><a href="/b.html">3</a><a href="#no">4</a><a href="https://x.org">5</a>',
                  "b.html": '<p id="x">'}
    assert dead_links(site_files) == ["a.html: #no (no such section)", "a.html: /b.html (not relative)", "a.html: c.html (no such page)"]
    assert dead_links({"404.html": '<a href="/book/b.html">1</a><a href="/book/c.html">2</a>', "b.html": ""}, "/book") == ["404.html: c.html (no such page)"]


# -- the glossary, the colours of the axes, the weight -----------------------------------------------------------------

TERMS = [Term(("attention",), "glossary.html#attention"), Term(("attention weights",), "glossary.html#weights"), Term(("mask", "masks"), "glossary.html#mask")]


def test_the_longest_term_wins_and_each_is_found_once():
    found = first_uses(["The attention\nweights, unmasked.", "Attention: a mask, Masks, attention."], TERMS)
    assert found == [(0, 4, 21, "glossary.html#weights"), (1, 0, 9, "glossary.html#attention"), (1, 13, 17, "glossary.html#mask")]
    assert first_uses(["attention"], []) == []


def test_terms_are_linked_in_the_text_alone():
    book = Book("b", "", "1", "b", groups=[("", [LAYERS])], terms=TERMS)
    text = "<h2 id='a'>A mask</h2><p><code>mask</code> <a href='#a'>mask</a> and <em>a mask</em>, the mask.</p><figure><figcaption>attention</figcaption></figure>"
    page = Page(f"<main>{text}</main>", LAYERS, book)
    links = page.soup.select("a.mg-term")
    assert [a.get_text() for a in links] == ["mask"] and links[0].parent.name == "em" and page.soup.p.get_text() == "mask mask and a mask, the mask."


def test_every_term_of_the_glossary_is_linked_from_a_page_and_links_to_its_chapter():
    listed = soup("glossary.html").select("dl.mg-glossary dt[id]")
    linked = {a["href"] for name in PAGES for a in soup(name).select("a.mg-term")}
    assert len(listed) > 40 and {f"glossary.html#{dt['id']}" for dt in listed} == linked
    assert all(dd.select("a")[-1]["href"] in PAGES for dd in soup("glossary.html").select("dl.mg-glossary dd"))
    for name in PAGES:
        links = [a["href"] for a in soup(name).select("a.mg-term")]
        assert len(links) == len(set(links)) and (name in REFERENCE or bool(links) == (name != "glossary.html")), name


@pytest.mark.parametrize("code, coloured", [
    ('x: Float[Tensor, "*B Tq C"]', ["B", "Tq", "C"]), ('"B side"', []), ("y = x  # B T H d -> B H T d", ["B", "T", "H", "d", "B", "H", "T", "d"]), ("# a B", []),
    ('Float[Tensor, "N length"]', []), ("B = T", [])])
def test_axis_names_in_code_are_coloured(code: str, coloured: list[str]):
    page = Page(f"<main><div class='cell'><pre><code class='language-python'>{code}</code></pre></div></main>", LAYERS, Book("b", "", "1", "b", groups=[("", [LAYERS])]))
    found = BeautifulSoup(page.content, "html.parser")
    assert [b.get_text() for b in found.select("b[class^=mg-axis-]")] == coloured and found.pre.get_text() == code


@pytest.mark.parametrize("text, coloured", [("(B, T, 128)", "BT"), ("V", "V"), ("x", ""), ("(1, 2)", ""), ("sdpa", ""), ("B, side", "")])
def test_shapes_in_the_text_are_coloured(text: str, coloured: str):
    page = Page(f"<main><p><code>{text}</code></p></main>", LAYERS, Book("b", "", "1", "b", groups=[("", [LAYERS])]))
    assert "".join(b.get_text() for b in page.soup.select("b")) == coloured and page.soup.get_text() == text


def test_pages_weigh_little():
    weights = site.weigh({p.relative_to(built()).as_posix(): p.stat().st_size for p in built().rglob("*") if p.is_file()})
    assert 100 < weights["shared"] <= 1500 and 50 < weights["median"] <= 400


# -- building -----------------------------------------------------------------------------------------------------------

SMALL = {"index.ipynb": notebook("# Small\n\n> A small book.", "See [layers](01_layers.ipynb#softmax)."),
         "01_layers.ipynb": notebook("# Layers\n\n> Parts.", ("#| default_exp layers",), ("#| hide\nsecret = 1",), "## One\n\nWith $x^2$.",
                                     ("#| exports\ndef softmax(x): return x",), ("#| slow\nsoftmax(1)", {"text/plain": "1"}))}


def test_build_twice_and_again(tmp_path, capsys):
    root = project(tmp_path / "book", SMALL)
    out = site.build(root, renderer="smalldocs")
    assert out == root / "_docs" and not (root / "_proc").exists()
    first = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    page = (out / "layers.html").read_text(encoding="utf-8")
    assert "secret" not in page and "#|" not in page and "<math>" in page and 'id="softmax"' in page
    capsys.readouterr()
    site.build(root, renderer="smalldocs")
    assert "nothing has changed" in capsys.readouterr().err
    for p in first: p.unlink()
    site.build(root, renderer="smalldocs")
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == first
    (root / "nbs" / "01_layers.ipynb").unlink()
    site.build(root, renderer="smalldocs")
    assert not (out / "layers.html").exists() and (out / "index.html").exists()


def test_quarto_is_preferred_and_called_on_the_staged_folder(tmp_path, monkeypatch, capsys):
    root = project(tmp_path / "book", SMALL)
    fake, says = tmp_path / "bin" / "quarto", tmp_path / "says.py"
    fake.parent.mkdir()
    fake.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{says}" "$@"\n', encoding="utf-8")  # a path after #! may have no space
    body = QUARTO.replace("layers.html#one", "layers.html")
    says.write_text("import json, pathlib, sys\n"
                    f"pathlib.Path({str(tmp_path / 'call.json')!r}).write_text(json.dumps([sys.argv[1:], sorted(p.name for p in pathlib.Path().iterdir()), pathlib.Path('_quarto.yml').read_text()]))\n"
                    "print('\\x1b[33mWARN: something\\x1b[39m'); print('fine', flush=True); print('[WARNING] a div is unclosed', file=sys.stderr)\n"
                    "out = pathlib.Path('_docs'); out.mkdir()\n"
                    f"for name in ('index', 'layers'): (out / (name + '.html')).write_text('<html><main>' + {body!r} + '</main></html>', encoding='utf-8')\n"
                    "(out / 'site_libs').mkdir(); (out / 'site_libs' / 'x.js').write_text(''); (out / 'search.json').write_text('[]')\n", encoding="utf-8")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(fake.parent), prepend=":")
    out = site.build(root)
    args, seen, settings = json.loads((tmp_path / "call.json").read_text())
    assert args == ["render", "--no-execute", "--no-cache"]
    assert yaml.safe_load(settings)["format"]["html"]["html-math-method"] == "mathjax", "formulas are left to the program that draws them for both renderers"
    assert "Quarto gave 2 warnings\n    WARN: something\n    [WARNING] a div is unclosed" in capsys.readouterr().err
    assert {"_quarto.yml", "index.ipynb", "01_layers.ipynb", "styles.css"} <= set(seen)
    assert json.loads((out / ".built.json").read_text())["renderer"] == "quarto"
    assert sorted(p.name for p in out.iterdir()) == [".built.json", ".nojekyll", "404.html", "assets", "index.html", "layers.html", "notebooks", "styles.css"]


def test_a_checkout_without_links_is_told_so(tmp_path):
    root = project(tmp_path / "book", SMALL)
    (root / "nbs" / "_quarto.yml").unlink()
    (root / "nbs" / "_quarto.yml").write_text("../_quarto.yml")
    with pytest.raises(SiteError, match="no symbolic links"): site.build(root)


def test_a_foreign_folder_is_not_overwritten(tmp_path):
    root = project(tmp_path / "book", SMALL)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(SiteError, match="was not built by this command"): site.build(root, tmp_path / "mine", "smalldocs")


@pytest.mark.parametrize("change, why", [
    (dict(new="07_extra.ipynb"), "does not list 07_extra.ipynb"), (dict(untitled="01_layers.ipynb"), "01_layers.ipynb: its first cell must be")])
def test_what_cannot_be_a_book_is_refused(tmp_path, change, why):
    root = project(tmp_path / "book", SMALL)
    if "new" in change: (root / "nbs" / change["new"]).write_text(notebook("# Extra\n\n> More."))
    else: (root / "nbs" / change["untitled"]).write_text(notebook("no title"))
    with pytest.raises(SiteError, match=why): site.build(root, renderer="smalldocs")
    with pytest.raises(SiteError, match="renderer must be"): site.build(root, renderer="word")
