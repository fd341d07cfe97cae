"""The sort run: its data, its split, its score, its file, and a small run of it from start to end."""

import os
import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from shapes import unenforced
from torch import Tensor

from minigpt import sorting
from minigpt.generation import generate
from minigpt.model import GPT, GPTConfig
from minigpt.sorting import HELD_OUT, TRAIN, VALIDATION, Run, SortTask, all_rows, exactly_sorted, load_sorter, part_of, random_rows, replacing, save_sorter, shipped_sorter, sorter_origin, sorting_batch, train_sorter
from minigpt.training import TrainConfig

TASK = SortTask(length=3, base=5, batch_size=32)
TINY = GPTConfig(vocab_size=5, context_length=5, d_model=32, n_heads=2, n_layers=2, dropout=0.0)


def settings(steps: int) -> TrainConfig: return TrainConfig(steps=steps, lr=5e-3, warmup=20, betas=(0.9, 0.99))


@pytest.fixture(scope="module")
def beginner() -> Run:
    "A sorter in the middle of its training, which gets some rows right and some wrong."
    return train_sorter(0, TASK, settings(30), TINY, every=12)


@pytest.fixture(scope="module")
def learned() -> Run:
    with unenforced(): return train_sorter(0, TASK, settings(250), TINY)


def generated(model: GPT, rows: Tensor) -> Tensor:
    "Whether each row is sorted by real generation, digit after digit."
    return (generate(model, rows, rows.shape[1], temperature=0)[:, rows.shape[1] :] == rows.sort(-1).values).all(-1)


def test_all_rows_are_all_rows():
    "Protects what 'every input' means: base ** length different rows in counting order."
    assert all_rows(2, 3).tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2], [2, 0], [2, 1], [2, 2]]
    assert all_rows().shape == (10**6, 6) and all_rows()[123456].tolist() == [1, 2, 3, 4, 5, 6]


def test_a_batch_asks_for_the_sorted_tail_only():
    "Protects the task: the input is the digits and all but the last of the answer, the targets count from the answer's first digit on."
    idx, targets = sorting_batch(torch.tensor([[3, 1, 2], [0, 0, 4]]))
    assert idx.tolist() == [[3, 1, 2, 1, 2], [0, 0, 4, 0, 0]]
    assert targets.tolist() == [[-100, -100, 1, 2, 3], [-100, -100, 0, 0, 4]]


@pytest.mark.parametrize("repeats, few", [(0.0, False), (1.0, True)])
def test_random_rows_repeat_digits_when_told_to(repeats: float, few: bool):
    "Protects the data that cures the last errors: rows of few different digits are rare without `repeats` and common with it."
    rows = random_rows(4000, 6, 10, repeats, torch.Generator().manual_seed(0))
    assert rows.shape == (4000, 6) and rows.unique().tolist() == list(range(10))
    assert (((rows == rows[:, :1]).all(-1).float().mean() > 0.05) == few) and rows.float().mean().item() == pytest.approx(4.5, abs=0.15)


@pytest.mark.parametrize("by", ["sequence", "multiset"])
@pytest.mark.parametrize("repeats", [0.0, 0.9])
def test_no_batch_holds_a_row_of_another_part(by: str, repeats: float):
    "Protects the held-out rows: over many steps and seeds, every row drawn is a training row, and nearly all of those are drawn."
    task = SortTask(length=3, base=6, batch_size=32, repeats=repeats, by=by)
    drawn = {tuple(row) for seed in (0, 1) for step in range(100) for row in task.batch_at(step, seed)[0][:, :3].tolist()}
    train, others = ({tuple(row) for part in parts for row in task.rows(part).tolist()} for parts in ((TRAIN,), (VALIDATION, HELD_OUT)))
    assert drawn <= train and not drawn & others and len(train) + len(others) == 6**3 and len(drawn) > 0.95 * len(train)


def test_a_batch_is_a_function_of_step_and_seed():
    "Protects resuming: a batch depends on nothing that came before, and leaves the global generator as it was."
    state = torch.get_rng_state()
    later, first = TASK.batch_at(7, 3), TASK.batch_at(0, 3)
    torch.manual_seed(123)
    assert torch.equal(TASK.batch_at(7, 3)[0], later[0]) and torch.equal(TASK.batch_at(0, 3)[1], first[1])
    torch.set_rng_state(state)
    TASK.batch_at(1)
    assert torch.equal(torch.get_rng_state(), state)
    assert len({str(TASK.batch_at(step, seed)[0].tolist()) for step in range(20) for seed in range(-3, 4)}) == 20 * 7


def test_a_stricter_split_keeps_answers_apart():
    "Protects the split by multiset: no sorted answer of a held-out row occurs among the training rows; by sequence, most do."
    for by, shared in (("multiset", False), ("sequence", True)):
        train, held_out = ({tuple(row) for row in SortTask(4, 6, by=by).rows(part).sort(-1).values.tolist()} for part in (TRAIN, HELD_OUT))
        assert bool(train & held_out) == shared


def test_one_pass_says_what_generation_would_do(beginner: Run):
    "Protects the score: teacher-forced exactness is exactness of greedy generation, row by row, right ones and wrong ones."
    rows = all_rows(3, 5)
    exact = exactly_sorted(beginner.model, rows, batch_size=50)
    assert 0.1 < exact.float().mean() < 0.9, "the check needs rows of both kinds"
    assert torch.equal(exact, generated(beginner.model, rows)) and torch.equal(exact, exactly_sorted(beginner.model, rows))


def test_a_small_run_learns_to_sort(learned: Run):
    "Protects the learning: 250 steps on three digits of five, and not one held-out row is wrong."
    held_out = TASK.rows(HELD_OUT)
    assert len(held_out) > 20 and exactly_sorted(learned.model, held_out).all() and generated(learned.model, held_out).all()
    assert learned.losses[0] > 1.3 and learned.losses[-1] < 0.05 and not learned.model.training


@pytest.mark.unenforced
def test_a_small_run_learns_on_the_stricter_split():
    "Protects the stricter split: with whole multisets unseen, the small run still sorts most of their rows."
    task = SortTask(length=3, base=6, batch_size=32, by="multiset")
    model = train_sorter(0, task, settings(200), GPTConfig(**{**vars(TINY), "vocab_size": 6})).model
    assert exactly_sorted(model, task.rows(HELD_OUT)).float().mean() > 0.5


def test_a_run_tells_its_story(beginner: Run):
    "Protects the curve: accuracy on validation rows at step 0, every so often, and at the end."
    assert list(beginner.accuracy) == [0, 12, 24, 30] and len(beginner.losses) == 30 and beginner.seed == 0
    assert beginner.accuracy[0] < 0.2 < beginner.accuracy[30]
    assert beginner.accuracy[30] == exactly_sorted(beginner.model, TASK.rows(VALIDATION)).float().mean().item()


def test_the_end_is_measured_where_it_falls_between_two_measurements():
    "Protects the last point of the curve."
    assert train_sorter(0, TASK, settings(25), TINY, every=10).accuracy.keys() == {0, 10, 20, 25}


def test_a_run_depends_on_its_seed_alone(beginner: Run):
    "Protects repeatability: the same weights from any state of the global generator, which stays as it was; others from another seed."
    torch.manual_seed(4711)
    state = torch.get_rng_state()
    again, other = train_sorter(0, TASK, settings(30), TINY, every=1000), train_sorter(1, TASK, settings(30), TINY)
    assert torch.equal(torch.get_rng_state(), state)
    assert again.losses == beginner.losses and all(torch.equal(a, b) for a, b in zip(again.model.parameters(), beginner.model.parameters()))
    assert other.losses != beginner.losses


def test_held_out_rows_have_no_say_in_the_run(beginner: Run, monkeypatch):
    "Protects the final score: nothing that happens before it looks at a held-out row."
    def rows_of_other_parts(task: SortTask, part: int) -> Tensor:
        assert part != HELD_OUT, "a run looked at held-out rows"
        every = all_rows(task.length, task.base)
        return every[part_of(every, task.by) == part]

    monkeypatch.setattr(SortTask, "rows", rows_of_other_parts)
    score, scored = sorting.exactly_answered, []
    monkeypatch.setattr(sorting, "exactly_answered", lambda model, rows, *args: (scored.append(rows), score(model, rows, *args))[1])
    train_sorter(0, TASK, settings(30), TINY, every=10)
    assert len(scored) == 4 and all((part_of(rows) == VALIDATION).all() for rows in scored)


def test_a_sorter_survives_its_file(beginner: Run, tmp_path: Path):
    "Protects the shipped file's format: the same weights, config and answers, with its origin beside them."
    save_sorter(beginner, tmp_path / "a.safetensors", stamp="abc")
    save_sorter(beginner, str(tmp_path / "b.safetensors"), stamp="abc")
    loaded = load_sorter(tmp_path / "a.safetensors")
    assert loaded.config == TINY and not loaded.training
    assert loaded.state_dict().keys() == beginner.model.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), beginner.model.state_dict().values()))
    assert torch.equal(loaded(all_rows(3, 5)), beginner.model(all_rows(3, 5)))
    origin = sorter_origin(tmp_path / "a.safetensors")
    assert (origin["seed"], origin["steps"], origin["stamp"]) == (0, 30, "abc") and origin["config"] == vars(TINY)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


@pytest.fixture(scope="module")
def shipped() -> GPT:
    assert shipped_sorter().exists(), f"{shipped_sorter().name} is missing: make refresh makes it"
    return load_sorter()


def test_the_shipped_sorter_sorts_what_it_never_saw(shipped: GPT):
    "Protects the file that everybody gets: at most 5 errors on 5,000 held-out rows, and real generation agrees on 200 of them."
    held_out = SortTask().rows(HELD_OUT)
    rows = held_out[torch.randperm(len(held_out), generator=torch.Generator().manual_seed(0))[:5000]]
    exact = exactly_sorted(shipped, rows)
    assert (~exact).sum() <= 5 and torch.equal(generated(shipped, rows[:200]), exact[:200])


def test_the_shipped_sorter_knows_where_it_comes_from(shipped: GPT):
    "Protects the record in the file: seed, steps, config and the stamp of the code that made it."
    origin = sorter_origin()
    assert {"seed", "steps", "config", "stamp"} <= origin.keys() and origin["steps"] == sorting.SORT_CONFIG.steps and origin["errors"] == 0


# Files


def things_that_are_no_files(folder: Path) -> list[Path]:
    "A folder, a pipe, a socket, links to them, and a device: what a program must not replace by a file."
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as listener: listener.bind(os.path.relpath(folder / "socket"))
    for name in ("folder", "pipe", "socket"): (folder / f"link to {name}").symlink_to(folder / name)
    (folder / "link to a device").symlink_to("/dev/full")
    return sorted(folder.iterdir())


def test_nothing_but_a_regular_file_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    "As root, a rename over /dev/null makes a file of the device, and little works any more."
    monkeypatch.chdir(tmp_path)
    for place in things_that_are_no_files(tmp_path):
        before = place.lstat()
        with pytest.raises(ValueError, match=f"^{re.escape(os.path.realpath(place))} is no regular file"):
            with replacing(place): raise AssertionError("nothing may be written")
        after = place.lstat()
        assert (before.st_mode, before.st_ino, before.st_rdev) == (after.st_mode, after.st_ino, after.st_rdev)
    assert not list(tmp_path.glob(".new-*"))


def test_a_link_to_a_file_stays_a_link_and_its_file_is_replaced(tmp_path: Path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with replacing(tmp_path / "link") as new: new.write_text("new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "new"


def test_what_breaks_off_while_it_is_written_replaces_nothing(tmp_path: Path):
    (tmp_path / "file").write_text("old")
    with pytest.raises(KeyboardInterrupt):
        with replacing(tmp_path / "file") as new:
            new.write_text("half")
            raise KeyboardInterrupt
    assert (tmp_path / "file").read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["file"]
    with pytest.raises(FileNotFoundError, match="there is no folder .*nowhere"):
        with replacing(tmp_path / "nowhere" / "file"): pass


@pytest.mark.unenforced
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("wrap", [lambda model: model, torch.compile], ids=["plain", "compiled"])
def test_a_sorter_is_saved_whatever_is_wrapped_around_it_and_tied_in_it(tied: bool, wrap, tmp_path: Path):
    model = GPT(replace(TINY, tied_head=tied))
    save_sorter(Run(wrap(model), [], {}, 0, 0.0), tmp_path / "m.safetensors")
    loaded, rows = load_sorter(tmp_path / "m.safetensors"), torch.zeros(1, 5, dtype=torch.long)
    assert torch.equal(loaded(rows), model(rows)) and (loaded.lm_head.weight is loaded.token_embedding.weight) == tied


def test_a_sorter_that_cannot_be_read_back_replaces_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = Run(GPT(TINY), [], {}, 0, 0.0)
    save_sorter(run, tmp_path / "m.safetensors")
    before = (tmp_path / "m.safetensors").read_bytes()
    monkeypatch.setattr(sorting, "weights_to_save", lambda model: {"a": torch.zeros(1)})
    with pytest.raises(RuntimeError): save_sorter(run, tmp_path / "m.safetensors")
    assert (tmp_path / "m.safetensors").read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_a_model_of_nan_sorts_nothing():
    "Zeros used to be right for it: `argmax` finds the first index in a row of NaN."
    model = GPT(TINY)
    with torch.no_grad(): model.ln_f.weight.fill_(float("nan"))
    assert not exactly_sorted(model, torch.zeros(4, 3, dtype=torch.long)).any()
