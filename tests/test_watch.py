"""The sorter in its page, driven as a person does; and its numbers against PyTorch's."""

import base64
import json
import re
import statistics

import pytest
import torch
from site_fixtures import ROOT, built
from test_browser import PHONE, WIDE, browser, pytestmark, url, violations, visit  # noqa: F401

from minigpt import generate, load_sorter
from tools.site import WIDGET


@pytest.fixture(scope="module")
def rounded():
    "The sorter with the weights of the page."
    model = load_sorter()
    with torch.no_grad():
        for weight in model.parameters(): weight.copy_(weight.half())
    return model


def opened(visit, size=WIDE, theme="light"):
    page = visit(size, theme)
    page.goto(url("watch.html"))
    page.locator(".mg-tape li").first.wait_for()
    return page


def tape(page) -> str: return "".join(text or "·" for text in page.locator(".mg-tape b").all_inner_texts())


def shares(page) -> list[float]:
    return [float(re.search(r"[\d.]+", text)[0]) for text in page.locator(".mg-bars small").all_inner_texts()]


def test_the_files_of_the_page():
    "Protects the download: one script with the weights, 450 kB at most, and a forward pass that can be read beside the book."
    folder = built() / "assets"
    weights, forward = (folder / WIDGET[0]).read_text("utf-8"), (folder / WIDGET[1]).read_text("utf-8")
    assert len(weights.encode()) <= 450_000 and len(forward.splitlines()) <= 300
    parts = json.loads(weights.removeprefix("window.minigptWeights = ").rstrip().rstrip(";"))
    assert len(base64.b64decode(parts["data"])) == 2 * sum(p.numel() for p in load_sorter().parameters())
    assert not re.search(r"https?://(?!www\.w3\.org)|import |fetch\(", forward + (folder / WIDGET[2]).read_text("utf-8"))
    others = [p.name for p in built().glob("*.html") if p.name != "watch.html" and "assets/weights.js" in p.read_text("utf-8")]
    assert others == []


def test_logits_and_sequences_are_pytorchs(visit, rounded, summary):
    "500 random inputs: logits to 1e-4; and for 200 rows the very same sequences."
    page = opened(visit)
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(10, (int(torch.randint(1, 12, (), generator=generator)),), generator=generator).tolist() for _ in range(500)]
    found = page.evaluate("texts => texts.map(ids => Array.from(minigptSorter.forward(ids).logits))", texts)
    worst = 0.0
    for length in range(1, 12):
        asked, answers = (torch.tensor([one for one, ids in zip(ones, texts) if len(ids) == length]) for ones in (texts, found))
        with torch.no_grad(): worst = max(worst, (answers.view(len(asked), length, -1) - rounded(asked)).abs().max().item())
    rows = torch.randint(10, (200, 6), generator=generator)
    written = page.evaluate("rows => rows.map(ids => minigpt.generate(minigptSorter, ids, 6, 0))", rows.tolist())
    assert worst < 1e-4 and written == generate(rounded, rows, 6, temperature=0).tolist()
    times = page.evaluate("""rows => rows.map(ids => { const start = performance.now(); minigptSorter.forward(ids); return performance.now() - start; })""",
                          torch.randint(10, (50, 11), generator=generator).tolist())
    summary.append(f"the sorter in its page: logits within {worst:.1e} of PyTorch's, a forward pass of 11 positions {statistics.median(times):.1f} ms at the median")


def test_attention_is_pytorchs(visit, rounded):
    from minigpt import attention_maps
    page = opened(visit)
    ids = [3, 1, 4, 1, 5, 9, 1, 1, 3]
    maps = torch.tensor(page.evaluate("ids => minigptSorter.forward(ids).attention_maps", ids))
    torch.testing.assert_close(maps, attention_maps(rounded, torch.tensor([ids]))[:, 0], rtol=0, atol=1e-5)


def test_step_by_step(visit):
    "Typing, stepping with the keyboard, bars, sentences and the verdict."
    page = opened(visit)
    page.get_by_label("Six digits").fill("271828")
    assert tape(page) == "271828······"
    for n, digit in enumerate("122788", 1):
        assert len(shares(page)) == 10 and shares(page)[int(digit)] == max(shares(page)) and 99 < sum(shares(page)) < 102
        page.get_by_label("Six digits").press("Enter")
        sentence = page.locator(".mg-watch-status").inner_text()
        assert sentence.startswith(f"Digit {n} of 6: the model writes {digit}, with a probability of")
        assert page.locator(".mg-hidden[role=status]").text_content().startswith(sentence)
        assert page.locator(".mg-tape li").nth(5 + n).inner_text().split() == ["written", digit, str(5 + n)]
    assert page.locator(".mg-watch-verdict").inner_text() == "Sorted without a mistake." and tape(page) == "271828122788"
    page.get_by_role("button", name="Step").click(force=True)  # nothing is left to do, and nothing is lost
    assert tape(page) == "271828122788" and page.get_by_role("button", name="Step").get_attribute("aria-disabled") == "true"
    page.get_by_role("button", name="Start again").click()
    assert tape(page) == "271828······" and page.locator(".mg-watch-verdict").inner_text() == ""


def test_a_mistake_is_called_one(visit):
    page = opened(visit)
    page.evaluate("minigpt.sample = () => 7")
    for _ in range(6): page.get_by_role("button", name="Step").click()
    assert tape(page) == "314159777777" and page.locator(".mg-watch-verdict").inner_text() == "Not sorted: it should be 1 1 3 4 5 9."


def test_play_pause_and_start_again(visit):
    page = opened(visit)
    page.get_by_role("button", name="Shuffle").click()
    given = tape(page)[:6]
    page.get_by_role("button", name="Play").click()
    page.wait_for_function("document.querySelectorAll('.mg-written').length >= 2")
    page.get_by_role("button", name="Pause").click()
    held = tape(page)
    page.wait_for_timeout(900)
    assert tape(page) == held and held.startswith(given)
    page.get_by_role("button", name="Play").click()
    page.wait_for_function("document.querySelectorAll('.mg-written').length == 6", timeout=15000)
    assert tape(page) == given + "".join(sorted(given)) and page.get_by_role("button", name="Play").is_visible()
    page.get_by_role("button", name="Start again").click()
    assert tape(page) == given + "······"


@pytest.mark.parametrize("text, holds", [("", "Type six digits"), ("12a456", "“a”"), ("1234", "these are four"), ("1234567", "these are seven"), ("7", "this is one"),
                                         ("<b>", "“<”"), ("١٢٣٤٥٦", "“١”"), ("123456123456123456", "these are 18")])
def test_bad_input_gets_a_sentence(visit, text: str, holds: str):
    page = opened(visit)
    field, alert = page.get_by_label("Six digits"), page.get_by_role("alert")
    field.fill(text)
    unfinished = len(text) < 6 and (not text or text.isdigit())
    assert alert.inner_text() == "" and page.locator(".mg-watch-hint").inner_text() == f"{len(text)} of 6 digits" if unfinished else holds in alert.inner_text()
    for press in (lambda: field.press("Enter"), lambda: page.get_by_role("button", name="Step").click(force=True), lambda: page.get_by_role("button", name="Play").click(force=True)):
        press()
        assert holds in alert.inner_text() and field.get_attribute("aria-invalid") == "true" and tape(page) == "·" * 12
    field.fill("6, 5 4;3 ２ 1")
    assert alert.inner_text() == "" and tape(page) == "654321······" and field.get_attribute("aria-invalid") == "false"


def test_temperature(visit):
    page = opened(visit)
    sure = max(shares(page))
    slider = page.get_by_label("Temperature")
    assert sure > 99 and slider.get_attribute("aria-valuetext").startswith("0, always")
    slider.focus()
    for _ in range(20): page.keyboard.press("ArrowRight")
    assert slider.input_value() == "2" and max(shares(page)) < sure
    assert page.locator(".mg-watch output").inner_text() == "2.0"


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["1400", "390"])
def test_nothing_moves(visit, size):
    "The page is as tall before its script has run as after, at each step, and for bad input."
    page = opened(visit, size)
    height = lambda: page.evaluate("document.getElementById('watch').getBoundingClientRect().height")
    tall = [height()]
    for _ in range(6):
        page.get_by_role("button", name="Step").click()
        tall.append(height())
    page.get_by_label("Six digits").fill("12a")
    tall.append(height())
    assert max(tall) - min(tall) < 1, tall
    reserved = page.evaluate("getComputedStyle(document.getElementById('watch')).minHeight")
    assert 0 <= tall[0] - float(reserved.removesuffix("px")) < 40, (tall[0], reserved)


def test_attention_by_pointer_and_by_key(visit):
    page = opened(visit)
    assert page.locator(".mg-maps button").count() == 12
    heads = page.get_by_role("button", name="Layer 0, head 1")
    heads.scroll_into_view_if_needed()
    box = heads.locator("svg").bounding_box()
    cell = lambda row, column: (box["x"] + (column + 0.5) / 11 * box["width"], box["y"] + (row + 0.5) / 11 * box["height"])
    page.mouse.move(*cell(5, 0))
    readout = page.locator(".mg-readout")
    weights = page.evaluate("minigptSorter.forward([3, 1, 4, 1, 5, 9]).attention_maps[0][1]")
    assert readout.inner_text() == f"Layer 0, head 1: position 5, the given 9, looks at position 0, the given 3, with weight {weights[5][0]:.3f}."
    page.mouse.move(*cell(0, 5))
    assert "cannot look at position 5" in readout.inner_text()
    marked = page.locator(".mg-query b, .mg-key b").all_inner_texts()
    assert marked == ["3"]  # position 0, which may not look at position 5
    heads.focus()
    page.keyboard.press("Enter")
    assert heads.get_attribute("aria-pressed") == "true" and page.evaluate("document.activeElement.ariaLabel") == "Layer 0, head 1"
    table = page.locator(".mg-weights")
    assert table.locator("caption").inner_text().startswith("Layer 0, head 1")
    assert table.locator("tbody tr").nth(5).locator("td").first.inner_text() == f"{weights[5][0]:.2f}"
    table.locator("tbody tr").nth(4).locator("td").nth(2).click()
    assert "position 4, the given 5, looks at position 2, the given 4," in readout.inner_text()


def test_by_touch(visit):
    page = visit(PHONE, "dark", has_touch=True)
    page.goto(url("watch.html"))
    page.get_by_role("button", name="Step").tap()
    assert page.locator(".mg-written").count() == 1
    page.get_by_role("button", name="Layer 2, head 3").tap()
    assert page.get_by_role("button", name="Layer 2, head 3").get_attribute("aria-pressed") == "true"
    assert page.locator(".mg-readout").inner_text().startswith("Layer 2, head 3: position ")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize("size, theme", [(WIDE, "light"), (PHONE, "dark")])
def test_accessible(visit, size, theme):
    page = opened(visit, size, theme)
    for _ in range(3): page.get_by_role("button", name="Step").click()
    assert violations(page) == []


def test_the_page_says_which_run_it_is():
    from minigpt.sorting import sorter_origin
    text = (built() / "watch.html").read_text("utf-8")
    assert f'{sorter_origin()["held_out"]:,}' in text and "if your browser runs scripts" in text and (ROOT / "minigpt" / "sorter.safetensors").is_file()
