"""The pages in a browser, opened from the folder: nothing is asked of any network, nothing fails, nothing sticks out, everyone can use them."""

import functools
import os

import pytest
from site_fixtures import built, pages
from test_site import OF_NOTEBOOKS

from tools.browser import find

NO_BROWSER = os.environ.get("MINIGPT_NO_BROWSER") == "1"
pytestmark = pytest.mark.skipif(NO_BROWSER, reason="MINIGPT_NO_BROWSER=1")

FLAGS = ("--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update "
         "--disable-sync").split()
WIDE, PHONE = dict(width=1400, height=900), dict(width=390, height=844)


@pytest.fixture(scope="module")
def browser():
    try: path = find()
    except LookupError as error: pytest.skip(str(error))
    from playwright.sync_api import sync_playwright
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


def watched(browser, problems: list[str], **options):
    "A page of a context of its own; what fails and what is asked from elsewhere is noted."
    page = browser.new_context(**options).new_page()
    page.on("console", lambda m: problems.append(f"console: {m.text}") if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda e: problems.append(f"error: {e}"))
    page.on("request", lambda r: problems.append(f"request: {r.url}") if not r.url.startswith(("file://", "data:")) else None)
    page.on("requestfailed", lambda r: problems.append(f"failed: {r.url}"))
    return page


@pytest.fixture
def visit(browser):
    "Opens pages from the folder; at the end, nothing may have failed and nothing may have been asked from elsewhere."
    opened, problems = [], []

    def open_page(size=WIDE, theme="light", **options):
        opened.append(watched(browser, problems, viewport=size, color_scheme=theme, **options))
        return opened[-1]

    yield open_page
    for page in opened: page.context.close()
    assert problems == []


@pytest.fixture(scope="module")
def turned(browser):
    "One page for all that are only looked at, and what went wrong in it."
    problems: list[str] = []
    page = watched(browser, problems)
    page.add_init_script(SHIFTS)
    yield page, problems
    page.context.close()


# how much of the page has moved by itself since it began to load
SHIFTS = """window.shifted = []; new PerformanceObserver((list) => list.getEntries().forEach((e) => window.shifted.push([e.value,
  ...e.sources.map((s) => s.node && (s.node.outerHTML || s.node.textContent).slice(0, 60))]))).observe({type: 'layout-shift', buffered: true});"""

SETTLED = "document.fonts.ready.then(() => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 50))))"

# the weakest contrast of a figure's text with the page
WEAKEST = """() => {
  const parts = (c) => (c.match(/[\\d.]+/g) || [0, 0, 0]).slice(0, 3).map((v) => (c.startsWith('color(') ? +v : v / 255));
  const light = (c) => parts(c).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)).reduce((s, v, i) => s + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = light(getComputedStyle(document.body).backgroundColor) + 0.05;
  return [...document.querySelectorAll('main figure svg text')].map((t) => {
    const ink = light(getComputedStyle(t).fill) + 0.05;
    return [Math.max(ink, ground) / Math.min(ink, ground), t.textContent];
  }).sort((a, b) => a[0] - b[0])[0] || [21, ''];
}"""


PAGES = [*OF_NOTEBOOKS, "reference.html", "reference-model.html", "reference-pictures.html"]  # one module's page is like another's


def url(name: str) -> str: return (built() / name).as_uri()


# what is left for the checker of accessibility, which takes a millisecond for each element: one of several that are alike
FEWER = r"""(everywhere) => {
  const drop = (elements, n) => [...elements].slice(n).forEach((e) => e.remove());
  drop([...document.querySelectorAll('.cell')].filter((e) => !e.querySelector('figure, table')), 6);
  document.querySelectorAll('table').forEach((e) => drop(e.querySelectorAll('tr'), 5));
  if (!everywhere) document.querySelectorAll('.mg-side, .mg-toc').forEach((e) => drop(e.querySelectorAll('li'), 4));
  document.querySelectorAll('figure svg :is(path, use, circle, rect, line, polyline, polygon, image)').forEach((e) => e.remove());
  document.querySelectorAll('figure svg g').forEach((e) => e.textContent.trim() || e.remove());
  const seen = new Set();
  document.querySelectorAll('pre span').forEach((e) => {
    if (seen.has(e.className) && !e.children.length) e.replaceWith(...e.childNodes);
    seen.add(e.className);
  });
}"""


def violations(page, everywhere: bool = True) -> list[str]:
    "What a checker of accessibility finds fault with. `everywhere` keeps the whole navigation, which is the same on all pages."
    from axe_playwright_python.sync_playwright import Axe
    page.evaluate(FEWER, everywhere)
    if not page.evaluate("'axe' in window"): page.evaluate(Axe().axe_script)
    found = page.evaluate("axe.run({preload: false, resultTypes: ['violations']}).then((r) => r.violations)")  # preload would fetch the style sheets, which a page opened from a folder must not
    return [f"{one['id']}: {one['help']}: {node['html'][:150]}" for one in found for node in one["nodes"][:3]]


def figures_are_readable(page, theme: str) -> None:
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).every(v => v < 60)")
    assert dark == (theme == "dark")
    ratio, text = page.evaluate(WEAKEST)
    assert ratio >= 4.5, f"the words {text!r} in a figure have a contrast of {ratio:.1f} in the {theme} theme"


def fits(page, width: int) -> None:
    figures = page.evaluate("[...document.querySelectorAll('main figure svg')].filter(s => s.getBoundingClientRect().right > innerWidth).length")
    assert figures == 0, f"{figures} figures are cut off"
    assert page.evaluate("document.documentElement.scrollWidth") <= width, f"it is wider than {width} pixels"
    beyond = page.evaluate("""(width) => [...document.querySelectorAll('main *')].filter(e => !e.closest('pre, .mg-scroll, .mg-eq, svg, math, .mg-code')
        && e.getBoundingClientRect().right > width + 1 && getComputedStyle(e).display !== 'none').map(e => e.outerHTML.slice(0, 100))""", width)
    assert beyond == []


@pytest.mark.parametrize("name", [*PAGES, "404.html"])
def test_every_page(turned, name: str):
    "Opened wide and light, and narrow and dark; in both, what is checked is checked in either theme or for either width, where that can make a difference."
    page, problems = turned
    problems.clear()
    for size, theme, other in ((WIDE, "light", "dark"), (PHONE, "dark", "light")):
        page.set_viewport_size(size)
        page.emulate_media(color_scheme=theme)
        page.goto(url(name))
        page.evaluate(SETTLED)
        assert sum(shift[0] for shift in page.evaluate("window.shifted")) < 0.02, f"it moves while it loads: {page.evaluate('window.shifted')}"
        fits(page, size["width"])
        assert page.locator("h1").is_visible()
        assert page.evaluate("[...document.querySelectorAll('math')].length == 0 || document.fonts.check('16px \"Book Math\"')")
        figures_are_readable(page, theme)
        page.emulate_media(color_scheme=other)
        figures_are_readable(page, other)
    for size, theme in (WIDE, "light"), (PHONE, "dark"):
        page.set_viewport_size(size)
        page.emulate_media(color_scheme=theme)
        page.evaluate(SETTLED)
        assert violations(page, everywhere=name == "index.html") == []
    assert problems == []


SPOILT = {
    "a token of a colour too pale": "document.querySelector('main pre span').style.color = '#ccc'",
    "pale words in a table": "document.querySelector('main td').style.color = '#ddd'",
    "a button without a name": "document.querySelector('main').append(document.createElement('button'))",
    "a figure without a description": "document.querySelectorAll('main figure svg').forEach(e => { e.setAttribute('role', 'img'); e.removeAttribute('aria-label'); e.removeAttribute('aria-labelledby'); e.querySelectorAll('title, desc').forEach(t => t.remove()); })",
    "a heading that skips a level": "document.querySelector('main h2').outerHTML = '<h5>x</h5>'",
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_what_is_wrong_with_a_page_is_found(visit, spoil: str):
    page = visit()
    page.goto(url("attention.html"))
    page.evaluate(spoil)
    assert violations(page, everywhere=False)


def test_search_from_a_folder(visit):
    page = visit()
    page.goto(url("layers.html"))
    page.keyboard.press("/")
    page.keyboard.type("softmax")
    first = page.locator(".mg-results a").first
    first.wait_for()
    assert first.get_attribute("href") == "layers.html#softmax" and "defined in" in first.inner_text()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_url("**/layers.html#softmax")
    box = page.locator("#softmax").bounding_box()
    assert -200 < box["y"] < 900
    # a phrase of prose, from another page, on a phone
    page = visit(PHONE)
    page.goto(url("pictures.html"))
    phrase = " ".join(page.locator("main > p").first.inner_text().split()[:5]).strip(".,:;")
    page.goto(url("layers.html"))
    page.fill("#search", phrase)
    page.locator(".mg-results a").first.wait_for()
    assert page.locator(".mg-results a").first.get_attribute("href").startswith("pictures.html")
    assert page.locator(".mg-results mark").count() > 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.keyboard.press("Escape")
    assert page.locator(".mg-results").is_hidden()
    page.fill("#search", "qwertzuiop")  # on no page, whatever is written there
    page.locator(".mg-results p").wait_for()
    assert page.locator(".mg-results").inner_text() == "Nothing found"


def test_dark_theme_is_remembered(visit):
    page = visit()
    page.goto(url("layers.html"))
    ground = functools.partial(page.evaluate, "getComputedStyle(document.body).backgroundColor")
    light, toggle = ground(), page.get_by_role("button", name="Dark theme")
    assert toggle.get_attribute("aria-pressed") == "false"
    toggle.click()
    dark = ground()
    assert dark != light and toggle.get_attribute("aria-pressed") == "true"
    page.wait_for_timeout(500)  # the browser hands what was stored to another page's process a moment later
    page.goto(url("attention.html"))
    assert ground() == dark and page.get_by_role("button", name="Dark theme").get_attribute("aria-pressed") == "true"
    page.get_by_role("button", name="Dark theme").click()
    page.wait_for_timeout(500)
    page.reload()
    assert ground() == light


def test_menu_and_contents_on_a_phone(visit):
    page = visit(PHONE)
    page.goto(url("attention.html"))
    side, menu = page.locator(".mg-side"), page.get_by_role("button", name="Chapters")
    assert side.is_hidden() and page.locator(".mg-toc ul").is_hidden()
    menu.focus()
    page.keyboard.press("Enter")
    assert side.is_visible() and menu.get_attribute("aria-expanded") == "true"
    page.keyboard.press("Escape")
    assert side.is_hidden() and page.evaluate("document.activeElement.className") == "mg-menu"
    menu.click()
    page.locator(".mg-side a", has_text="layers").first.click()
    page.wait_for_url("**/layers.html")
    page.locator(".mg-toc summary").click()
    link = page.locator(".mg-toc a").nth(1)
    link.click()
    assert page.url.endswith(link.get_attribute("href"))


def test_code_is_copied(visit):
    page = visit(permissions=["clipboard-read", "clipboard-write"])
    page.goto(url("layers.html"))
    block = page.locator(".mg-exported").first
    block.hover()
    block.locator(".mg-copy").click()
    page.wait_for_function("document.querySelector('.mg-exported .mg-copy').textContent === 'Copied'")
    assert page.evaluate("navigator.clipboard.readText()").replace("\r\n", "\n") == block.locator("pre").text_content()


def test_the_text_needs_no_script(browser):
    context = browser.new_context(viewport=WIDE, java_script_enabled=False)
    page = context.new_page()
    page.goto(url("attention.html"))
    assert page.locator("h1").is_visible() and page.locator(".mg-side a").first.is_visible() and page.locator(".mg-toc a").first.is_visible()
    assert page.locator(".mg-copy").first.is_hidden() and page.locator(".mg-search").is_hidden()
    context.close()


def test_keyboard_reaches_the_text_first(visit):
    page = visit()
    page.goto(url("attention.html"))
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the text"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "content"
    stuck = page.evaluate("""[...document.querySelectorAll('pre, .mg-scroll, .mg-eq')]
        .filter(e => e.scrollWidth > e.clientWidth + 1 && e.tabIndex < 0).length""")
    assert stuck == 0


def test_a_printed_chapter(visit):
    "On paper there is no navigation; code is wrapped, not cut, and figures are not split; the page is light whatever the screen was."
    page = visit(theme="dark")
    page.goto(url("attention.html"))
    page.emulate_media(media="print")
    page.set_viewport_size(dict(width=700, height=1000))  # as wide as a sheet of paper
    for hidden in (".mg-top", ".mg-side", ".mg-toc", ".mg-step", ".mg-about", ".mg-copy"): assert page.locator(hidden).first.is_hidden(), hidden
    cut = page.evaluate("[...document.querySelectorAll('main pre, main figure, main table, main .mg-eq')].filter(e => e.scrollWidth > e.clientWidth + 1 || e.getBoundingClientRect().right > innerWidth).map(e => e.outerHTML.slice(0, 90))")
    assert cut == []
    split = page.evaluate("[...document.querySelectorAll('main figure, main .mg-code, main table')].filter(e => getComputedStyle(e).breakInside !== 'avoid').length")
    assert split == 0
    ink = page.evaluate("[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor].map(c => c.match(/\\d+/g).slice(0, 3).map(Number))")
    assert max(ink[0]) < 80 and min(ink[1]) > 240
    assert len(page.pdf(format="A4", print_background=True)) > 50_000


def test_every_page_was_opened(): assert {*PAGES, *(name for name in pages() if name.startswith("reference-"))} == set(pages())
