"Seeds of any size: a date with its time, one that needs more than 64 bits, one below zero."

import pytest
import torch

from minigpt import AddTask, ModularTask, SortTask, TextTask
from minigpt.generation import generate
from minigpt.grokking import batch_of
from minigpt.model import GPT, GPTConfig
from minigpt.rotary import LengthTask
from minigpt.training import random_at, seeded

LARGE = [20261203123456, 2**63, 2**64 - 1, 10**30, -7]
PAIRS = torch.cartesian_prod(torch.arange(97), torch.arange(97))
BATCHES = {
    "sort": SortTask().batch_at,
    "add": AddTask().batch_at,
    "length": LengthTask((3, 4)).batch_at,
    "text": TextTask("any text that is long enough for a batch, " * 40, context_length=8, batch_size=4).batch_at,
    "modular": lambda step, seed: batch_of(PAIRS, ModularTask(), step, seed),
}


@pytest.mark.parametrize("seed", LARGE)
@pytest.mark.parametrize("name", BATCHES)
def test_batches_have_seeds_of_any_size(name: str, seed: int):
    first, again, other = (torch.cat([part.flatten() for part in BATCHES[name](3, seed=s)]) for s in (seed, seed, seed + 1))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_random_at_is_the_step_and_the_seed():
    assert random_at(5, 2).initial_seed() == 2_000_011 and random_at(0).initial_seed() == 0
    assert len({random_at(step, seed).initial_seed() for step in range(20) for seed in [0, 1, *LARGE]}) == 20 * 7


@pytest.mark.parametrize("seed", LARGE)
def test_seeded_takes_seeds_of_any_size(seed: int):
    with seeded(seed): first = torch.rand(3)
    with seeded(seed): assert torch.equal(torch.rand(3), first)


@pytest.mark.parametrize("seed", LARGE)
def test_generate_takes_seeds_of_any_size(seed: int):
    model, ids = GPT(GPTConfig(n_layers=1, d_model=16)), torch.zeros(1, 1, dtype=torch.long)
    assert torch.equal(generate(model, ids, 5, seed=seed), generate(model, ids, 5, seed=seed))
