"""Checkpoints: a resumed run ends with the same bits, a checkpoint is complete or not there, and whatever is damaged or foreign is refused with one sentence."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from messages import refuses
from safetensors.torch import load_file, save_file

from minigpt import GPT, GPTConfig
from minigpt.ablations import ABLATIONS
from minigpt.checkpoints import MODEL, STATE, TRAINING, CheckpointError, checkpoints, fingerprint, keep, load_checkpoint, load_newest, locked, newest, read_state, save_checkpoint, seal
from minigpt.language import Muon
from minigpt.rotary import RotaryPositions
from minigpt.speed import fused
from minigpt.training import TrainConfig, new_optimizer, train

SMALL = GPTConfig(11, 16, 16, 2, 2, dropout=0.2)
SETTINGS = TrainConfig(steps=12, warmup=3, lr=1e-2)


def batch_at(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(11, (4, 9), generator=torch.Generator().manual_seed(step))
    return ids[:, :-1], ids[:, 1:]


def fresh(make=GPT, optimizer=new_optimizer, **how):
    torch.manual_seed(5)
    model = make(GPTConfig(**vars(SMALL) | how))
    return model, optimizer(model, SETTINGS)


def equal(a: GPT, b: GPT) -> bool: return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, optimizer = fresh()
    train(model, batch_at, SETTINGS, optimizer, stop=2)
    return save_checkpoint(tmp_path_factory.mktemp("sound"), model, optimizer, 2, note="é")


@pytest.fixture
def copied(sound: Path, tmp_path: Path) -> Path: return Path(shutil.copytree(sound, tmp_path / sound.name))


# Going on


@pytest.mark.parametrize("make, optimizer, how", [
    (GPT, new_optimizer, {}), (lambda c: GPT(c, positions=RotaryPositions), new_optimizer, {}), (GPT, Muon, {}), (GPT, new_optimizer, {"tied_head": True, "gelu": "tanh"}),
    (lambda c: fused(GPT(c)), new_optimizer, {})], ids=["plain", "rotary", "Muon", "tied", "fused"])
@pytest.mark.parametrize("at", [1, 7])
def test_resuming_gives_the_same_bits(tmp_path: Path, make, optimizer, how: dict, at: int):
    whole, its = fresh(make, optimizer, **how)
    losses = train(whole, batch_at, SETTINGS, its)
    half, its = fresh(make, optimizer, **how)
    train(half, batch_at, SETTINGS, its, stop=at)
    save_checkpoint(tmp_path, half, its, at)
    torch.manual_seed(99)
    found = load_checkpoint(newest(tmp_path))
    assert found.step == at and equal(found.model, half)
    model = fused(found.model) if "fused" in str(type(half)).lower() else found.model
    its = optimizer(model, SETTINGS)
    found.restore(its)
    assert train(model, batch_at, SETTINGS, its, start=at) == losses[at:] and equal(model, whole)


def test_by_hand_and_fused_go_on_from_each_others_checkpoints(tmp_path: Path):
    "The optimizer's averages have one format; the runs agree to rounding."
    ends = []
    for first, second in ((lambda m: m, fused), (fused, lambda m: m)):
        torch.manual_seed(5)
        model = first(GPT(GPTConfig(**vars(SMALL) | {"dropout": 0.0})))
        optimizer = new_optimizer(model, SETTINGS)
        train(model, batch_at, SETTINGS, optimizer, stop=6)
        found = load_checkpoint(save_checkpoint(tmp_path / str(len(ends)), model, optimizer, 6))
        model = second(found.model)
        optimizer = new_optimizer(model, SETTINGS)
        found.restore(optimizer)
        ends.append(train(model, batch_at, SETTINGS, optimizer, start=6)[-1])
    assert abs(ends[0] - ends[1]) < 1e-4


def test_compiled_models_load_in_uncompiled_ones_and_the_other_way_round(tmp_path: Path):
    model, _ = fresh()
    compiled = torch.compile(model)  # wraps it; nothing is compiled before it is called
    plain = load_checkpoint(save_checkpoint(tmp_path / "a", compiled)).model
    assert equal(plain, model) and type(plain) is GPT
    again = torch.compile(load_checkpoint(save_checkpoint(tmp_path / "b", model)).model)
    assert equal(again, model) and set(again.state_dict()) == {f"_orig_mod.{name}" for name in model.state_dict()}


def test_a_double_model_stays_one(tmp_path: Path):
    model = GPT(SMALL).double()
    assert load_checkpoint(save_checkpoint(tmp_path, model)).model.lm_head.weight.dtype == torch.float64


def test_what_cannot_be_made_again_is_not_saved(tmp_path: Path):
    with pytest.raises(ValueError, match="positions"): save_checkpoint(tmp_path, ABLATIONS["no positions"].model(SMALL))
    assert list(tmp_path.iterdir()) == []


# In one piece


@pytest.mark.parametrize("step", range(4))
def test_an_interrupted_save_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, step: int):
    "Whatever breaks while it writes, the earlier checkpoint is the newest, and no litter remains."
    model, optimizer = fresh()
    before = save_checkpoint(tmp_path, model, optimizer, 1)
    calls = []
    def broken(handle):
        calls.append(handle)
        if len(calls) > step: raise OSError(28, "No space left on device")
    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="No space left"): save_checkpoint(tmp_path, model, optimizer, 2)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == [before] and newest(tmp_path) == before and load_checkpoint(before).step == 1


def test_a_second_checkpoint_of_a_step_neither_replaces_nor_is_lost(tmp_path: Path):
    model, optimizer = fresh()
    first = save_checkpoint(tmp_path, model, optimizer, 4)
    assert save_checkpoint(tmp_path, model, optimizer, 4) == first
    with torch.no_grad(): model.lm_head.weight.add_(1)
    with pytest.raises(FileExistsError, match="another checkpoint of this step"): save_checkpoint(tmp_path, model, optimizer, 4)
    assert list(tmp_path.iterdir()) == [first] and not equal(load_checkpoint(first).model, model)


def test_without_an_optimizer_there_is_nothing_to_go_on_from(tmp_path: Path):
    model, optimizer = fresh()
    found = load_checkpoint(save_checkpoint(tmp_path, model))
    with pytest.raises(CheckpointError, match="no optimizer was saved"): found.restore(optimizer)


def test_stray_files_are_ignored(copied: Path):
    folder = copied.parent
    for name in ("step-x", "step-00000009", ".new-abc", "notes"): (folder / name).mkdir()
    (folder / "step-00000099").write_text("a file")
    (copied / "notes.txt").write_text("mine")
    assert checkpoints(folder) == [copied] and load_checkpoint(newest(folder)).step == 2
    keep(folder)
    assert not (folder / ".new-abc").exists() and (folder / "notes").exists()


def test_the_newest_are_kept(tmp_path: Path):
    model, optimizer = fresh()
    for step in (3, 20, 100): save_checkpoint(tmp_path, model, optimizer, step)
    keep(tmp_path, 2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000020", "step-00000100"]


# Refused


def resealed(path: Path, **changes: object) -> None:
    "Change what state.json says, as somebody would who wants to be believed."
    state = {k: v for k, v in (read_state(path) | changes).items() if v is not ...}
    (path / STATE).write_text(json.dumps(state | {"sha256": seal(state)}))


CONFIG = {"vocab_size": 11, "context_length": 16, "d_model": 16, "n_heads": 2, "n_layers": 2, "dropout": 0.2, "gelu": "none", "tied_head": False}


@pytest.mark.unenforced
@pytest.mark.parametrize("damage, parts", [
    (lambda p: (p / STATE).unlink(), [STATE, "No such file"]), (lambda p: (p / MODEL).unlink(), [MODEL, "No such file"]), (lambda p: (p / TRAINING).unlink(), [TRAINING, "No such file"]),
    (lambda p: (p / STATE).write_text("[1]"), [STATE, "object"]), (lambda p: (p / STATE).write_text("{"), [STATE, "JSON"]), (lambda p: (p / STATE).write_text("[" * 100_000), [STATE, "JSON"]),
    (lambda p: (p / STATE).write_bytes(b"\xff\xfe"), [STATE, "JSON"]), (lambda p: (p / STATE).write_text(" " * 2**25), [STATE, "larger"]),
    (lambda p: resealed(p, step=...), [STATE, "'step'", "nothing"]), (lambda p: resealed(p, step="2"), [STATE, "'step'", "int", "'2'"]), (lambda p: resealed(p, format=2), [STATE, "'format'", "1", "2"]),
    (lambda p: (p / STATE).write_text((p / STATE).read_text().replace('"step": 2', '"step": 3')), [STATE, "'sha256'", "changed"]),
    (lambda p: resealed(p, parts={}), [STATE, "'parts'", MODEL]), (lambda p: (p / MODEL).write_bytes((p / MODEL).read_bytes() + b"x"), [MODEL, "bytes"]),
    (lambda p: resealed(p, config=CONFIG | {"d_model": 32}), [MODEL, "shape"]), (lambda p: resealed(p, config=CONFIG | {"n_layers": 10**9}), [STATE, "'config'", "n_layers=1000000000"]),
    (lambda p: resealed(p, config=CONFIG | {"n_layers": 1}), [MODEL, "blocks.1", "no part"]), (lambda p: resealed(p, config=CONFIG | {"n_layers": 3}), [MODEL, "blocks.2", "missing"]),
    (lambda p: resealed(p, config=CONFIG | {"context_length": 10**8}), [STATE, "context_length=100000000"]), (lambda p: resealed(p, config=CONFIG | {"width": 3}), [STATE, "'config'", "width"]),
    (lambda p: resealed(p, config=CONFIG | {"vocab_size": "many"}), [STATE, "'config'", "vocab_size"]), (lambda p: resealed(p, positions={"kind": "spiral"}), [STATE, "'positions'", "spiral"]),
    (lambda p: resealed(p, config=CONFIG | {"vocab_size": 10**12}), [MODEL, "shape"]),
])
def test_one_sentence_names_the_part_and_the_field(copied: Path, damage, parts: list[str]):
    damage(copied)
    start = time.perf_counter()
    with pytest.raises(CheckpointError) as caught: load_checkpoint(copied)
    assert time.perf_counter() - start < 5 and all(part in str(caught.value) for part in parts), caught.value
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_foreign_file_with_its_own_fingerprint_is_refused_by_its_header(copied: Path):
    (copied / MODEL).write_bytes(b"\xff" * 8 + b"not tensors")
    resealed(copied, parts={name: fingerprint(copied / name) for name in (MODEL, TRAINING)})
    with pytest.raises(CheckpointError, match="safetensors"): load_checkpoint(copied)


def mutated(content: bytes, dice: random.Random) -> bytes:
    how, at = dice.randrange(5), dice.randrange(len(content))
    if how == 0: return content[:at]
    if how == 1: return content[:at] + bytes([content[at] ^ 1 << dice.randrange(8)]) + content[at + 1:]
    if how == 2: return content[:at] + dice.randbytes(dice.randrange(1, 40)) + content[at:]
    if how == 3: return content[:at] + dice.randbytes(8) + content[at + 8:]
    return dice.randbytes(dice.randrange(200))


def fuzz(copied: Path, n: int, seed: int) -> int:
    "Load mutated checkpoints; return how many were refused. The others must be what was saved, as after a change of blanks in state.json."
    dice, refused = random.Random(seed), 0
    contents = {name: (copied / name).read_bytes() for name in (MODEL, TRAINING, STATE)}
    want = load_checkpoint(copied).model
    for _ in range(n):
        name = dice.choice(list(contents))
        changed = mutated(contents[name], dice)
        (copied / name).write_bytes(changed)
        start = time.perf_counter()
        try: assert equal(load_checkpoint(copied).model, want)
        except CheckpointError as error:
            refused += 1
            assert "\n" not in str(error) and name in str(error), error
        assert time.perf_counter() - start < 5
        (copied / name).write_bytes(contents[name])
    return refused


def test_mutated_files(copied: Path): assert fuzz(copied, 150, seed=0) > 140


@pytest.mark.slow
def test_two_thousand_mutated_files(copied: Path, capsys: pytest.CaptureFixture):
    refused = fuzz(copied, 2000, seed=1)
    with capsys.disabled(): print(f"\n2,000 mutated files: {refused:,} refused, {2000 - refused} harmless")
    assert refused > 1950


def test_nothing_is_ever_executed(copied: Path):
    "No pickle: the source of the module does not know the word, and a pickle in a file's place is refused."
    source = Path(sys.modules["minigpt.checkpoints"].__file__).read_text(encoding="utf-8")
    assert not re.search(r"pickle|torch\.load|torch\.save", source.split('"""', 2)[2])
    torch.save({"a": 1}, copied / MODEL)
    with pytest.raises(CheckpointError): load_checkpoint(copied)


# Killed


RUN = [sys.executable, "-m", "minigpt", "train", "sort", "--steps", "120", "--every", "20", "--save-every", "5"]


@pytest.mark.slow
def test_killed_at_fifty_moments(tmp_path: Path, capsys: pytest.CaptureFixture):
    "SIGKILL at random moments; the newest checkpoint always loads, and the run ends with the bits of one that was left alone."
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*RUN, "--out", str(tmp_path / "alone")], check=True, capture_output=True, env=environment)
    whole, dice, out, kills, done = load_checkpoint(newest(tmp_path / "alone")).model, random.Random(0), tmp_path / "killed", 0, 0
    while kills < 50:
        resume = ["--resume"] if out.exists() and checkpoints(out) else []
        process = subprocess.Popen([*RUN, "--out", str(out), *resume], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)
        try: process.wait(timeout=dice.uniform(1.0, 6.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            kills += 1
            if out.exists() and checkpoints(out): load_checkpoint(newest(out))
            continue
        assert process.returncode == 0, process.stderr.read()
        done += 1
        assert equal(load_checkpoint(newest(out)).model, whole)
        shutil.rmtree(out)
    with capsys.disabled(): print(f"\n50 kills, {done} runs came to their end in between, all with the same bits")
    if out.exists(): subprocess.run([*RUN, "--out", str(out), *(["--resume"] if checkpoints(out) else [])], check=True, capture_output=True, env=environment)
    else: subprocess.run([*RUN, "--out", str(out)], check=True, capture_output=True, env=environment)
    assert equal(load_checkpoint(newest(out)).model, whole)


def test_what_was_said_beside_a_model_is_read_back_as_json_has_it(tmp_path: Path):
    "Integer keys become strings on the way, and sort otherwise; the seal must not mind."
    model, optimizer = fresh()
    saved = save_checkpoint(tmp_path, model, optimizer, step=1, vocabulary={2: "a", 10: "b"}, pair=(1, 2))
    about = load_checkpoint(saved).about
    assert about["vocabulary"] == {"2": "a", "10": "b"} and about["pair"] == [1, 2]
    assert save_checkpoint(tmp_path, model, optimizer, step=1, vocabulary={2: "a", 10: "b"}, pair=(1, 2)) == saved
    with pytest.raises(FileExistsError): save_checkpoint(tmp_path, model, optimizer, step=1, vocabulary={2: "c"})


def test_names_of_the_format_are_refused_and_so_is_what_json_cannot_hold(tmp_path: Path):
    for name in ("config", "format", "minigpt", "positions", "parts", "sha256"): refuses(lambda name=name: save_checkpoint(tmp_path, fresh()[0], **{name: 1}), [repr(name), "state.json"])
    with pytest.raises(TypeError): save_checkpoint(tmp_path, fresh()[0], thing=object())
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_checkpoint_of_the_same_step_does_not_swallow_a_new_one(tmp_path: Path):
    model, optimizer = fresh()
    saved = save_checkpoint(tmp_path, model, optimizer, step=1)
    content = bytearray((saved / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (saved / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="SHA-256"): save_checkpoint(tmp_path, model, optimizer, step=1)


def believed(path: Path) -> None:
    "Make the fingerprints fit what the files have become."
    resealed(path, parts={name: fingerprint(path / name) for name in (MODEL, TRAINING)})


def test_forged_files_are_refused_by_what_they_are(copied: Path):
    "With fingerprints that fit: integers for weights, a file without the state of the random numbers, a context whose masks fill the memory."
    weights, training = load_file(copied / "model.safetensors"), load_file(copied / "training.safetensors")
    save_file({k: v.long() for k, v in weights.items()}, copied / "model.safetensors")
    believed(copied)
    refuses(lambda: load_checkpoint(copied), ["model.safetensors", "must be floats", "I64"], CheckpointError)
    save_file(weights, copied / "model.safetensors")
    save_file({k: v for k, v in training.items() if k != "random.cpu"}, copied / "training.safetensors")
    believed(copied)
    refuses(lambda: load_checkpoint(copied), ["training.safetensors", "random.cpu is missing"], CheckpointError)
    save_file({k: v for k, v in training.items() if not k.startswith("averages.3.")}, copied / "training.safetensors")
    believed(copied)
    found = load_checkpoint(copied)
    with pytest.raises((CheckpointError, ValueError)): found.restore(new_optimizer(found.model, TrainConfig()))


def test_a_rotary_context_that_no_tensor_shows_is_limited_all_the_same(tmp_path: Path):
    model = GPT(GPTConfig(11, 16, 16, 2, 2), positions=RotaryPositions)
    saved = save_checkpoint(tmp_path, model, step=1)
    resealed(saved, config=dict(json.loads((saved / "state.json").read_text())["config"], context_length=2**17))
    refuses(lambda: load_checkpoint(saved), ["state.json", "context_length=131072"], CheckpointError)


def test_steps_are_ordered_as_numbers_and_at_least_one_is_kept(tmp_path: Path):
    model = fresh()[0]
    for step in (99_999_999, 100_000_000, 5): save_checkpoint(tmp_path, model, step=step)
    assert [int(p.name.removeprefix("step-")) for p in checkpoints(tmp_path)] == [5, 99_999_999, 100_000_000]
    for n in (0, -1): refuses(lambda n=n: keep(tmp_path, n), ["n must be at least 1", str(n)])
    assert len(checkpoints(tmp_path)) == 3


# Several at a time


def test_a_folder_name_of_other_digits_is_no_checkpoint(tmp_path: Path):
    saved = save_checkpoint(tmp_path, fresh()[0], step=5)
    shutil.copytree(saved, tmp_path / "step-\u0663\u0663")
    assert newest(tmp_path) == saved


def test_a_checkpoint_may_be_read_by_whom_the_umask_allows(tmp_path: Path):
    before = os.umask(0o022)
    try: saved = save_checkpoint(tmp_path, fresh()[0], step=5)
    finally: os.umask(before)
    assert saved.stat().st_mode & 0o777 == 0o755 and all(part.stat().st_mode & 0o777 == 0o644 for part in saved.iterdir())


def test_a_folder_is_held_by_one_at_a_time(tmp_path: Path):
    with locked(tmp_path / "run"):
        with pytest.raises(CheckpointError, match="run: another run is writing into this folder"):
            with locked(tmp_path / "run"): pass
    assert not (tmp_path / "run").exists(), "it was made for the lock, and nothing came into it"
    with locked(tmp_path / "run"): (tmp_path / "run" / "log.csv").touch()
    assert (tmp_path / "run" / "log.csv").exists()


def test_the_lock_of_a_killed_process_is_gone(tmp_path: Path):
    code = "import sys, time; from minigpt.checkpoints import locked\nwith locked(sys.argv[1]): print('held', flush=True); time.sleep(100)"
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    with pytest.raises(CheckpointError, match="another run"):
        with locked(tmp_path): pass
    process.kill()
    process.communicate(timeout=60)
    with locked(tmp_path): pass


def test_keep_spares_what_is_being_written_and_removes_what_was_left(tmp_path: Path):
    for name in (".new-dead", ".new-alive"):
        (tmp_path / name).mkdir()
        (tmp_path / name / MODEL).write_text("half")
    with locked(tmp_path / ".new-alive"): keep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".new-alive"] and (tmp_path / ".new-alive" / MODEL).read_text() == "half"
    keep(tmp_path)
    assert not list(tmp_path.iterdir())


def test_two_that_save_and_keep_in_one_folder_lose_nothing(tmp_path: Path):
    "Each removes what an interrupted save has left, and never what the other one is writing."
    model, failed = fresh()[0], []

    def work(start: int) -> None:
        try:
            for step in range(start, start + 30):
                save_checkpoint(tmp_path, model, step=step)
                keep(tmp_path, 100)
        except BaseException as error: failed.append(error)

    threads = [threading.Thread(target=work, args=(start,)) for start in (0, 1000)]
    for thread in threads: thread.start()
    for thread in threads: thread.join(120)
    assert not failed and len(checkpoints(tmp_path)) == 60 and not list(tmp_path.glob(".new-*"))


def test_a_reader_always_gets_a_whole_checkpoint_while_one_is_written_and_another_removed(tmp_path: Path):
    model, over, failed = fresh()[0], threading.Event(), []
    save_checkpoint(tmp_path, model, step=0)

    def write() -> None:
        try:
            for step in range(1, 60):
                save_checkpoint(tmp_path, model, step=step)
                keep(tmp_path, 1)
        except BaseException as error: failed.append(error)
        finally: over.set()

    writer, steps = threading.Thread(target=write), []
    writer.start()
    while not over.is_set() or not steps: steps.append(load_newest(tmp_path).step)
    writer.join(60)
    assert not failed and steps == sorted(steps) and load_newest(tmp_path).step == 59


def test_a_folder_is_empty_only_when_it_is_seen_so_more_than_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    "A list made while one checkpoint is added and another removed may show neither."
    saved, looks = save_checkpoint(tmp_path, fresh()[0], step=1), iter([[], []])
    monkeypatch.setattr("minigpt.checkpoints.checkpoints", lambda folder: next(looks, [saved]))
    assert load_newest(tmp_path).step == 1
    monkeypatch.setattr("minigpt.checkpoints.checkpoints", lambda folder: [])
    with pytest.raises(CheckpointError, match="no checkpoint in this folder"): newest(tmp_path)


def test_a_checkpoint_that_is_removed_while_it_is_summed_up_makes_way_for_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, summed = fresh()[0], fingerprint

    def late(path: Path) -> dict:
        "The next checkpoint is there and this one gone, between its size and its sum."
        if path.parent.name == "step-00000001":
            patch.undo()
            save_checkpoint(tmp_path, model, step=2)
            shutil.rmtree(path.parent)
        return summed(path)

    save_checkpoint(tmp_path, model, step=1)
    with monkeypatch.context() as patch:
        patch.setattr("minigpt.checkpoints.fingerprint", late)
        assert load_newest(tmp_path).step == 2


def test_the_newest_is_read_anew_when_it_was_removed_meanwhile_and_refused_when_it_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = fresh()[0]
    old, new = (save_checkpoint(tmp_path, model, step=step) for step in (1, 2))
    with monkeypatch.context() as patch:
        seen = iter([old, new])
        patch.setattr("minigpt.checkpoints.newest", lambda folder: next(seen))
        shutil.rmtree(old)
        assert load_newest(tmp_path).step == 2
    (new / MODEL).write_bytes(b"")
    with pytest.raises(CheckpointError, match="must have"): load_newest(tmp_path)
