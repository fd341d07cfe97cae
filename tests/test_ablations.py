"""Ablations: nothing changed is nothing changed, each change is what its name says, leaks, scores against generation, and a study in small."""

from dataclasses import replace

import pytest
import torch

from minigpt.ablations import ABLATION_CONFIG, ABLATIONS, BUGS, Ablation, KernelAttention, NoNorm, ablate, ablation_study
from minigpt.attention import causal_mask, sdpa
from minigpt.generation import generate
from minigpt.model import GPT, PRESETS, GPTConfig
from minigpt.sorting import SortTask, exactly_answered
from minigpt.training import seeded

SORTER = PRESETS["sorter"]
EVERY = ABLATIONS | BUGS
TASK = SortTask(length=3, batch_size=16)
SMALL = replace(SORTER, d_model=16, n_heads=2, context_length=5)
SHORT = replace(ABLATION_CONFIG, steps=12, warmup=4)
LEAKS = {"no mask", "mask too late", "mask off by one", "view on the wrong axis", "transpose skipped"}


def made(change: Ablation, config: GPTConfig = SORTER) -> GPT:
    with seeded(0): return change.model(config).eval()


def test_nothing_changed_is_the_model_of_the_book():
    with seeded(0): plain = GPT(SORTER).eval()
    recipe = made(Ablation())
    idx = torch.randint(10, (3, 11))
    assert type(recipe.blocks[0]) is type(plain.blocks[0]) and torch.equal(plain(idx), recipe(idx))
    attention = made(Ablation(kernel=lambda q, k, v, mask, dropout: sdpa(q, k, v, mask, None, dropout)))
    assert isinstance(attention.blocks[0].attn, KernelAttention)
    attention.load_state_dict(plain.state_dict())
    assert torch.equal(plain(idx), attention(idx))


@pytest.mark.parametrize("name", EVERY)
def test_each_change_does_something_and_trains(name: str):
    "Every model is another function than the one as built (but for post-norm's warmup), finite, and gives a gradient to all that it uses."
    idx = torch.randint(10, (3, 11))
    model = made(replace(EVERY[name], std=0.2))
    if name not in ("as built", "N(0, 1)"):
        assert not torch.allclose(model(idx), made(Ablation(std=0.2))(idx), atol=1e-4)
    logits = model(idx)
    logits.square().mean().backward()
    assert torch.isfinite(logits).all() and all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("name", EVERY)
def test_who_sees_the_future(name: str):
    "Protects the table of leaks: exactly these change an earlier output when a later token changes."
    model = made(replace(EVERY[name], std=0.2))
    idx = torch.randint(10, (3, 11))
    other = idx.clone()
    other[:, -1] = (idx[:, -1] + 1) % 10
    assert (name in LEAKS) == (not torch.allclose(model(idx)[:, :-1], model(other)[:, :-1], atol=1e-6))


def test_the_blocks_are_the_formulas():
    for name, formula in {
        "no residuals": lambda b, x: b.ff(b.ln_2(b.attn(b.ln_1(x)))),
        "post-norm": lambda b, x: (lambda y: b.ln_2(y + b.ff(y)))(b.ln_1(x + b.attn(x))),
        "neither": lambda b, x: b.ff(b.attn(x)),
        "no norms": lambda b, x: (lambda y: y + b.ff(y))(x + b.attn(x)),
    }.items():
        block, x = made(ABLATIONS[name]).blocks[0], torch.randn(2, 5, 64)
        torch.testing.assert_close(block(x), formula(block, x))


def test_where_norms_are():
    for name, norms in {"as built": 7, "no norms": 0, "neither": 0, "post-norm": 6, "no residuals": 7}.items():
        model = made(ABLATIONS[name])
        assert sum(type(m).__name__ == "LayerNorm" for m in model.modules()) == norms
    x = torch.randn(2, 3)
    assert NoNorm()(x) is x and not [*NoNorm().parameters()]


def test_initial_weights():
    assert abs(made(ABLATIONS["N(0, 1)"]).blocks[0].ff.fc.weight.std().item() - 1.0) < 0.05
    assert abs(made(ABLATIONS["as built"]).blocks[0].ff.fc.weight.std().item() - 0.02) < 0.002


def test_the_kernels_against_loops():
    q, k, v = torch.randn(3, 2, 2, 4, 8, dtype=torch.float64)
    mask = causal_mask(4)
    def by_hand(scale, may_look, zero=lambda i, j: False):
        out = torch.zeros_like(v)
        for b in range(2):
            for h in range(2):
                for i in range(4):
                    weights = torch.stack([(q[b, h, i] @ k[b, h, j] * scale).exp() if may_look(i, j) else torch.zeros((), dtype=torch.float64) for j in range(4)])
                    weights = weights / weights.sum()
                    out[b, h, i] = sum(weights[j] * v[b, h, j] for j in range(4) if not zero(i, j))
        return out
    expected = {
        "no scale": by_hand(1.0, lambda i, j: j <= i),
        "scale 1/d": by_hand(1 / 8, lambda i, j: j <= i),
        "no mask": by_hand(8**-0.5, lambda i, j: True),
        "mask too late": by_hand(8**-0.5, lambda i, j: True, zero=lambda i, j: j > i),
        "mask off by one": by_hand(8**-0.5, lambda i, j: j <= i + 1),
    }
    for name, out in expected.items():
        torch.testing.assert_close(EVERY[name].kernel(q, k, v, mask, dropout=None), out)


@pytest.mark.parametrize("name", ["as built", "no mask", "view on the wrong axis"])
def test_outcomes_are_what_generation_gives(name: str):
    "Protects both scores: for a causal model they agree row by row; generation never looks at the answer."
    outcome = ablate(EVERY[name], 2, 1, SHORT, TASK, SMALL, n=40)
    assert outcome == ablate(EVERY[name], 2, 1, SHORT, TASK, SMALL, n=40) != ablate(EVERY[name], 2, 2, SHORT, TASK, SMALL, n=40)
    assert outcome.steps == 12 and 0 <= outcome.generated <= 1
    model = made(replace(EVERY[name], std=0.5), SMALL)
    rows, answers = TASK.validation(60)
    out = generate(model, rows, 3, temperature=0)[:, 3:]
    agree = (out == answers).all(-1) == exactly_answered(model, rows, answers)
    assert agree.all() or name != "as built"


def test_the_global_generator_is_left_alone():
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    ablate(Ablation(), 1, 0, SHORT, TASK, SMALL, n=10)
    assert torch.equal(torch.rand(2), expected)


def test_a_run_that_explodes_is_an_outcome():
    outcome = ablate(Ablation(norms=False, std=1e12), 2, 0, SHORT, TASK, SMALL, n=10)
    assert outcome.steps < 12 and outcome.generated <= 0.2


def test_without_warmup_the_first_step_is_a_full_one():
    warm, cold = (ablate(ABLATIONS[name], 1, 0, replace(SHORT, steps=2, lr=0.05), TASK, SMALL, n=10) for name in ("post-norm", "post-norm, cold"))
    assert warm.loss != cold.loss


def test_a_study_has_every_run_once():
    names = {name: ABLATIONS[name] for name in ("as built", "no scale")}
    study = ablation_study(names, {1: (0, 1), 2: (3,)}, replace(SHORT, steps=2))
    assert {name: [(o.n_layers, o.seed) for o in found] for name, found in study.items()} == dict.fromkeys(names, [(1, 0), (1, 1), (2, 3)])
    assert study["as built"][2] == ablate(Ablation(), 2, 3, replace(SHORT, steps=2))


@pytest.mark.unenforced
def test_a_cache_is_refused():
    with pytest.raises(ValueError, match="cache must be None"):
        made(ABLATIONS["no mask"]).blocks[0](torch.zeros(1, 3, 64), None, lambda k, v: (k, v))
