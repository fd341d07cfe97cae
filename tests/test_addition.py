"""Sums: digits and carries against Python's integers, a split that keeps a + b and b + a together, and a small adder."""

from dataclasses import replace

import pytest
import torch

from messages import refuses
from shapes import unenforced
from minigpt.addition import AddTask, add, adder_config, carries, part_of_sum, random_pairs, spelled, sum_question, sums_of, to_digits, to_numbers, train_adder
from minigpt.sorting import HELD_OUT, SORT_CONFIG, TRAIN, VALIDATION, all_rows, exactly_answered, part_of


def read(pairs: torch.Tensor, base: int) -> list[tuple[int, int]]:
    "The numbers of each pair, by Python's own reading of digits."
    text = ["".join("0123456789abcdef"[d] for d in row) for row in pairs.tolist()]
    return [(int(row[: len(row) // 2], base), int(row[len(row) // 2 :], base)) for row in text]


@pytest.mark.parametrize("n_digits, base", [(1, 10), (2, 10), (3, 10), (5, 10), (3, 2), (2, 16), (4, 3)])
@pytest.mark.parametrize("order", ["reversed", "plain"])
def test_questions_and_answers_are_sums(n_digits: int, base: int, order: str):
    "Protects the task itself: what the model is taught is addition, in every base and order."
    pairs = sums_of(TRAIN, 200, n_digits, base, chains=0.5) if base**n_digits > 8 else all_rows(2 * n_digits, base)
    questions, answers = sum_question(pairs, base, order)
    for (a, b), question, answer in zip(read(pairs, base), questions, answers):
        left, right = spelled(question, base)[:-1].split("+")
        digits = spelled(answer, base)
        assert (int(left, base), int(right, base)) == (a, b) and len(digits) == n_digits + 1
        assert int(digits[::-1] if order == "reversed" else digits, base) == a + b


def test_digits_and_numbers_are_each_others_inverse():
    numbers = torch.arange(1000)
    assert torch.equal(to_numbers(to_digits(numbers, 3)), numbers) and torch.equal(to_numbers(to_digits(numbers, 12, 2), 2), numbers)


@pytest.mark.parametrize("base", [10, 2, 7])
def test_carries_are_those_of_adding_on_paper(base: int):
    "Protects the measure of difficulty: how many columns carry, and how far one carry goes."
    pairs = random_pairs(500, 5, base, 0.7, torch.Generator().manual_seed(0))
    counts, chains = carries(pairs, base)
    for row, count, longest in zip(pairs.tolist(), counts.tolist(), chains.tolist()):
        a, b = row[:5][::-1], row[5:][::-1]
        outs, carry = [], 0
        for x, y in zip(a, b):
            carry = int(x + y + carry >= base)
            outs.append(carry)
        far = []
        for i, (x, y) in enumerate(zip(a, b)):
            if x + y < base: continue
            j = i + 1
            while j < 5 and a[j] + b[j] == base - 1: j += 1
            far.append(j - i)
        assert count == sum(outs) and longest == max(far, default=0)


def test_both_orders_of_a_sum_are_in_the_same_part():
    "Protects the split from its mirror: b + a is not trained on where a + b is held out."
    every = all_rows(4)
    parts = part_of_sum(every)
    assert torch.equal(parts, part_of_sum(every.roll(2, dims=1)))
    assert torch.equal(parts[::7], torch.cat([part_of_sum(row[None]) for row in every[::7]]))  # whatever else is asked about
    assert not torch.equal(part_of(every), part_of(every.roll(2, dims=1)))
    shares = [(parts == p).float().mean().item() for p in (TRAIN, VALIDATION, HELD_OUT)]
    assert abs(shares[2] - 0.25) < 0.02 and abs(shares[1] - 1 / 16) < 0.01


def test_training_never_draws_a_held_out_sum():
    task = AddTask(n_digits=2)
    idx = torch.cat([task.batch_at(step, seed=s)[0] for step in range(100) for s in (0, 1)])
    pairs = torch.cat([idx[:, :2], idx[:, 3:5]], dim=1)
    assert (part_of_sum(pairs) == TRAIN).all()
    assert torch.equal(task.batch_at(3, 1)[0], task.batch_at(3, 1)[0]) and not torch.equal(task.batch_at(3, 1)[0], task.batch_at(3)[0])
    targets = task.batch_at(0)[1]
    assert (targets[:, :5] == -100).all() and (targets[:, 5:] >= 0).all()


def test_long_chains_are_practised():
    "Protects the drawing: with `chains`, columns of nine are common; without, as common as chance has them."
    plain, rich = (random_pairs(20_000, 4, 10, chains, torch.Generator().manual_seed(1)) for chains in (0.0, 1.0))
    nines = [((p[:, :4] + p[:, 4:]) == 9).float().mean().item() for p in (plain, rich)]
    assert abs(nines[0] - 0.1) < 0.01 and abs(nines[1] - 0.55) < 0.01


@pytest.fixture(scope="module")
def adder():
    task = AddTask(n_digits=1)
    with unenforced(): return train_adder(1, task, replace(SORT_CONFIG, steps=300, lr=6e-3, warmup=20), replace(adder_config(task), d_model=32, n_layers=2), every=50)


def test_a_small_adder_learns_and_one_pass_says_what_it_writes(adder):
    "Protects the experiment at a size that runs every time, and the claim that one pass scores as generation does."
    task, sums = AddTask(n_digits=1), all_rows(2)
    right = exactly_answered(adder.model, *task.questions(sums))
    assert right.float().mean() > 0.5
    assert torch.equal(add(adder.model, sums, task) == sums.sum(-1), right)
    best = max(adder.accuracy.values())
    assert adder.reached(2.0) is None and adder.reached(0.0) == 0 and adder.accuracy[adder.reached(best)] == best


def test_a_run_depends_on_its_seed_alone():
    task, config = AddTask(n_digits=1), replace(SORT_CONFIG, steps=5, warmup=1)
    torch.manual_seed(1)
    first = train_adder(1, task, config)
    torch.rand(3)
    assert train_adder(1, task, config).losses == first.losses != train_adder(2, task, config).losses


def test_the_adder_has_room_for_its_task():
    for n_digits in (1, 3, 5):
        task = AddTask(n_digits=n_digits)
        assert task.batch_at(0)[0].shape[1] == adder_config(task).context_length


@pytest.mark.unenforced
@pytest.mark.parametrize("call, holds", [
    (lambda: AddTask(n_digits=0), ["n_digits", "at least 1", "0"]),
    (lambda: AddTask(base=1), ["base", "at least 2", "1"]),
    (lambda: AddTask(batch_size=0), ["batch_size", "at least 1", "0"]),
    (lambda: AddTask(chains=1.5), ["chains", "[0, 1]", "1.5"]),
    (lambda: AddTask(order="up"), ["order", "'reversed'", "'plain'", "'up'"]),
    (lambda: to_digits(torch.tensor([100]), 2), ["numbers", "[0, 100)", "n_digits=2"]),
    (lambda: to_digits(torch.tensor([-1]), 2), ["numbers", "[0, 100)"]),
    (lambda: sum_question(torch.zeros(1, 5, dtype=torch.long)), ["pairs", "two numbers", "5 digits"]),
    (lambda: AddTask(n_digits=19), ["pairs", "2 ** 62", "38 digits"]),
    (lambda: add(None, torch.zeros(1, 5, dtype=torch.long)), ["pairs", "(N, 6)", "(1, 5)"]),
], ids=range(10))
def test_bad_input_is_named(call, holds: list[str]):
    refuses(call, holds)
