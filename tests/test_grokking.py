"""Modular arithmetic: the table against Python's integers, honest splits, waves against numpy's Fourier transform, and a run in small."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from messages import refuses
from minigpt.grokking import GROK_CONFIG, OPERATIONS, ModularTask, batch_of, frequency_shares, grok, only_frequencies, score, split_pairs, wave_basis
from minigpt.model import GPT, GPTConfig

SMALL = ModularTask(p=11, fraction=0.8, batch_size=64)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("p", [2, 7, 53])
def test_answers_are_those_of_python(operation: str, p: int):
    task = ModularTask(p=p, operation=operation, fraction=0.5)
    pairs = torch.cartesian_prod(torch.arange(p), torch.arange(p))
    expected = [{"-": a - b, "+": a + b, "*": a * b}[operation] % p for a, b in pairs.tolist()]
    assert task.answers(pairs).tolist() == expected


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("fraction", [0.3, 0.5, 0.9])
def test_the_split_has_every_pair_once_and_no_mirror_across(operation: str, fraction: float):
    "Protects the held-out score: nothing in common, and where a * b is b * a, both are on one side."
    task = ModularTask(p=23, operation=operation, fraction=fraction)
    shown, held_out = (set(map(tuple, pairs.tolist())) for pairs in task.pairs())
    assert not shown & held_out and len(shown | held_out) == 23**2 and abs(len(shown) - fraction * 23**2) <= 1
    across = sum((b, a) in held_out for a, b in shown if a != b)
    assert across > 20 if operation == "-" else across == 0
    assert not torch.equal(split_pairs(23, 0.5, True, key=1)[0], split_pairs(23, 0.5, True)[0])


def test_batches_come_from_the_training_side():
    shown, held_out = SMALL.pairs()
    seen = set()
    for step in range(40):
        idx, targets = batch_of(shown, SMALL, step, seed=1)
        seen |= set(map(tuple, idx.tolist()))
        assert (targets[:, 0] == -100).all() and torch.equal(targets[:, 1], SMALL.answers(idx))
    assert seen == set(map(tuple, shown.tolist())) and torch.equal(batch_of(shown, SMALL, 3, 1)[0], batch_of(shown, SMALL, 3, 1)[0])


def test_a_small_run_and_its_history():
    "Protects the experiment at a size that runs every time; it depends on its seed alone."
    config = replace(GROK_CONFIG, steps=120)
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    run = grok(3, SMALL, config, every=50)
    assert torch.equal(torch.rand(2), expected)
    assert [row["steps"] for row in run.history] == [0, 50, 100, 120] == list(run.tables)
    assert run.history[-1]["loss, train"] < run.history[0]["loss, train"]
    assert run.reached(0.0) == 0 and run.reached(2.0) is None
    shown, held_out = SMALL.pairs()
    last = run.history[-1]
    assert (last["accuracy, train"], last["loss, train"]) == score(run.model, shown, SMALL)
    assert (last["accuracy, held out"], last["loss, held out"]) == score(run.model, held_out, SMALL)
    total = math.sqrt(sum(p.detach().square().sum() for p in run.model.parameters()))
    assert math.isclose(math.hypot(last["norm, matrices"], last["norm, vectors"]), total, rel_tol=1e-5)
    assert torch.equal(run.tables[120], run.model.token_embedding.weight)
    assert grok(3, SMALL, config, every=50).history == run.history != grok(4, SMALL, config, every=50).history


def test_all_parameters_decay():
    "Protects the one thing that decides the experiment: with a decay alone, without a gradient, every weight shrinks."
    config = replace(GROK_CONFIG, steps=1, lr=0.1, floor=0.1, warmup=0, weight_decay=5.0)
    run = grok(0, SMALL, config, every=1)
    other = grok(0, SMALL, replace(config, weight_decay=0.0), every=1)
    for (name, p), q in zip(run.model.named_parameters(), other.model.parameters()):
        if name.endswith("weight"): assert not torch.equal(p, q), name


@pytest.mark.parametrize("p", [3, 11, 53])
def test_waves_are_those_of_the_fourier_transform(p: int):
    "Protects basis and shares, against numpy's transform."
    waves = wave_basis(p)
    assert torch.allclose(waves @ waves.T, torch.eye(p, dtype=torch.float64), atol=1e-12)
    table = torch.randn(p, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    power = (np.abs(np.fft.rfft(table.numpy(), axis=0)) ** 2).sum(1)[1:]
    torch.testing.assert_close(frequency_shares(table), torch.tensor(power / power.sum()), rtol=0, atol=1e-12)


def test_frequencies_are_kept_and_removed():
    table = torch.randn(11, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    some = only_frequencies(table, [2, 5])
    assert frequency_shares(some)[[0, 2, 3]].max() < 1e-12 and torch.allclose(some.mean(0), table.mean(0))
    assert torch.allclose(only_frequencies(some, [2, 5]), some) and torch.allclose(only_frequencies(table, range(1, 6)), table)
    assert torch.allclose(only_frequencies(table, []), table.mean(0).expand(11, -1))
    assert only_frequencies(table.float(), [1]).dtype == torch.float32


@pytest.mark.unenforced
@pytest.mark.parametrize("call, holds", [
    (lambda: ModularTask(operation="/"), ["operation", "'-'", "'/'"]),
    (lambda: ModularTask(fraction=0.0), ["fraction", "0.0"]),
    (lambda: ModularTask(fraction=1.0), ["fraction", "1.0"]),
    (lambda: ModularTask(p=0), ["p", "at least 1", "0"]),
    (lambda: wave_basis(10), ["p", "odd", "10"]),
    (lambda: only_frequencies(torch.zeros(11, 2), [6]), ["frequencies", "1..5", "[6]"]),
    (lambda: only_frequencies(torch.zeros(11, 2), [0]), ["frequencies", "1..5", "[0]"]),
], ids=range(7))
def test_bad_input_is_named(call, holds: list[str]):
    refuses(call, holds)


def test_a_model_of_nan_answers_nothing():
    model, pairs = GPT(GPTConfig(11, 2, 16, 2, 1)), torch.zeros(4, 2, dtype=torch.long)
    with torch.no_grad(): model.ln_f.weight.fill_(math.nan)
    assert SMALL.answers(pairs).tolist() == [0] * 4 and score(model, pairs, SMALL)[0] == 0
