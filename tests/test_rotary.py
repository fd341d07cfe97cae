"""Rotary positions: equal to two independent implementations, blind to everything but distance; and the tasks of the experiment draw what they say."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from messages import refuses
from minigpt.generation import generate
from minigpt.model import GPT, GPTConfig, LearnedPositions, evaluating
from minigpt.rotary import LENGTH_CONFIG, LENGTH_MODEL, POSITIONS, LengthTask, MovedPositions, NoPositions, RotaryPositions
from minigpt.rotary import accuracy_at, length_experiment, random_choice, random_offset, rotate, rotation_angles, sort_question, train_at_lengths, uniform_rows
from minigpt.sorting import HELD_OUT, TRAIN, VALIDATION, part_of

bounded = settings(derandomize=True, max_examples=40, deadline=None, database=None)
CONFIG = GPTConfig(vocab_size=11, context_length=24, d_model=24, n_heads=3, n_layers=2, dropout=0.0)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Against other implementations


@pytest.mark.parametrize("width, rotated", [(8, 8), (16, 4), (64, 64), (2, 2)])
def test_equals_gpt_j_as_transformers_computes_it(width: int, rotated: int):
    "Protects values: GPT-J turns neighbouring channels, and some of them only, as ours can."
    from transformers.models.gptj import modeling_gptj as gptj

    q, positions = numbers(2, 3, 50, width), torch.arange(50)
    sin, cos = gptj.create_sinusoidal_positions(50, rotated).double().chunk(2, dim=-1)
    theirs = gptj.apply_rotary_pos_emb(q[..., :rotated].transpose(1, 2), sin[None], cos[None]).transpose(1, 2)
    ours = rotate(q, rotation_angles(positions, rotated))
    torch.testing.assert_close(ours[..., :rotated], theirs, rtol=0, atol=1e-4)  # its angles are float32
    assert torch.equal(ours[..., rotated:], q[..., rotated:])


@pytest.mark.parametrize("base", [10_000.0, 500_000.0, 10.0])
def test_equals_llama_as_transformers_computes_it(base: float):
    "Protects values and gradients: Llama pairs channel i with i + d/2, so channels are put in another order first and back afterwards."
    from transformers import LlamaConfig
    from transformers.models.llama import modeling_llama as llama

    config = LlamaConfig(hidden_size=48, num_attention_heads=3, rope_parameters={"rope_type": "default", "rope_theta": base})
    q, k, positions = numbers(2, 3, 20, 16).requires_grad_(), numbers(2, 3, 20, 16, seed=1), torch.arange(20)
    cos, sin = llama.LlamaRotaryEmbedding(config)(q, positions[None])
    halves = torch.cat([torch.arange(0, 16, 2), torch.arange(1, 16, 2)])  # ours -> theirs
    back = halves.argsort()
    theirs = [x[..., back] for x in llama.apply_rotary_pos_emb(q[..., halves], k[..., halves], cos, sin)]
    ours = [rotate(x, rotation_angles(positions, 16, base)) for x in (q, k)]
    for a, b in zip(ours, theirs): torch.testing.assert_close(a, b, rtol=0, atol=2e-5)  # its angles are float32
    weights = numbers(2, 3, 20, 16, seed=2)
    gradients = [torch.autograd.grad((x * weights).sum(), q)[0] for x in (ours[0], theirs[0])]
    torch.testing.assert_close(*gradients, rtol=0, atol=2e-5)


# The printed formula is the code that ran


@bounded
@given(st.integers(1, 8), st.integers(0, 100_000), st.floats(1.5, 1e6))
def test_angles_are_the_formula(pairs: int, position: int, base: float):
    "Protects the speeds: base ** (-2 i / d) per position, in double precision."
    angles = rotation_angles(torch.tensor([position]), 2 * pairs, base)[0]
    for i, angle in enumerate(angles.tolist()): assert math.isclose(angle, position * base ** (-2 * i / (2 * pairs)), rel_tol=1e-12)


@bounded
@given(st.integers(1, 6), st.integers(0, 2**31))
def test_rotation_is_complex_multiplication(pairs: int, seed: int):
    "Protects sign and pairing, one number at a time, with Python's complex numbers."
    x, angles = numbers(1, 1, 2, 2 * pairs, seed=seed), 10 * numbers(2, pairs, seed=seed + 1)
    turned = rotate(x, angles)
    for t in range(2):
        for i in range(pairs):
            a, b = x[0, 0, t, 2 * i : 2 * i + 2].tolist()
            angle = angles[t, i].item()
            z = complex(a, b) * complex(math.cos(angle), math.sin(angle))
            assert abs(turned[0, 0, t, 2 * i].item() - z.real) < 1e-12 and abs(turned[0, 0, t, 2 * i + 1].item() - z.imag) < 1e-12


@bounded
@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 10_000), st.integers(0, 2**31))
def test_scores_depend_on_the_distance_alone(m: int, n: int, shift: int, seed: int):
    "Protects the property that rotary positions are for."
    q, k = numbers(1, 1, 1, 16, seed=seed), numbers(1, 1, 1, 16, seed=seed + 1)
    def score(m, n): return (rotate(q, rotation_angles(torch.tensor([m]), 16)) * rotate(k, rotation_angles(torch.tensor([n]), 16))).sum()
    assert abs(score(m, n) - score(m + shift, n + shift)) < 1e-9


@bounded
@given(st.integers(0, 100_000), st.integers(0, 2**31))
def test_norms_are_kept(position: int, seed: int):
    x = numbers(2, 2, 1, 12, seed=seed)
    assert (rotate(x, rotation_angles(torch.tensor([position]), 12)).norm(dim=-1) - x.norm(dim=-1)).abs().max() < 1e-12


def test_the_whole_model_sees_distances_only():
    "Protects the way into the model: moved as a whole, a text gives the same logits; with a gap in it, others."
    model = GPT(CONFIG, positions=RotaryPositions).double().eval()
    idx = torch.randint(11, (2, 9), generator=torch.Generator().manual_seed(0))
    inner, moves = model.position_embedding, {"moved": lambda p: p + 7, "gap": lambda p: p + 3 * (p > 4)}

    class Moved(NoPositions):
        def rotation(self, positions): return inner.rotation(self.move(positions))

    with torch.no_grad():
        expected, model.position_embedding = model(idx), Moved(CONFIG)
        model.position_embedding.move = moves["moved"]
        assert (model(idx) - expected).abs().max() < 1e-12
        model.position_embedding.move = moves["gap"]
        assert (model(idx) - expected).abs().max() > 1e-5


def test_rotary_positions_have_no_parameters_and_no_table_that_ends():
    model = GPT(CONFIG, positions=RotaryPositions)
    assert not list(model.position_embedding.parameters()) and not list(model.position_embedding.buffers())
    assert len(list(GPT(CONFIG).parameters())) == len(list(model.parameters())) + 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rotation_keeps_the_dtype_and_loses_nothing_at_large_positions(dtype: torch.dtype):
    "Protects half precision: angles are computed exactly and rounded once, so position 50,000 is as good as position 5."
    x = numbers(1, 2, 1, 8).to(dtype)
    angles = rotation_angles(torch.tensor([50_000]), 8)
    turned = rotate(x, angles)
    assert turned.dtype == dtype
    assert (turned.double() - rotate(x.double(), angles)).abs().max() < 4 * torch.finfo(dtype).eps


@pytest.mark.unenforced
@pytest.mark.parametrize("call, holds", [
    (lambda: rotation_angles(torch.arange(3), 7), ["width", "even", "7"]),
    (lambda: rotation_angles(torch.arange(3), 0), ["width", "even", "0"]),
    (lambda: rotation_angles(torch.arange(3), 4, 0.0), ["base", "above 0", "0.0"]),
    (lambda: rotate(torch.zeros(1, 1, 3, 5), torch.zeros(3, 3)), ["3 pairs", "6 channels", "5"]),
    (lambda: GPT(replace(CONFIG, d_model=27), positions=RotaryPositions), ["rotated", "even", "head_dim=9", "9"]),
    (lambda: RotaryPositions(CONFIG, rotated=3), ["rotated", "even", "head_dim=8", "3"]),
    (lambda: RotaryPositions(CONFIG, rotated=0), ["rotated", "even", "0"]),
    (lambda: RotaryPositions(CONFIG, rotated=10), ["rotated", "head_dim=8", "10"]),
    (lambda: RotaryPositions(CONFIG, base=math.inf), ["base", "above 0", "inf"]),
    (lambda: LengthTask(()), ["lengths", "at least one"]),
    (lambda: LengthTask((3, 0)), ["lengths", "at least 1", "0"]),
    (lambda: LengthTask(repeats=-0.1), ["repeats", "[0, 1]", "-0.1"]),
    (lambda: accuracy_at(GPT(LENGTH_MODEL), [30], n=2), ["context_length=40", "60"]),
], ids=range(13))
def test_bad_input_is_named(call, holds: list[str]):
    "Protects the messages, the odd width among them."
    refuses(call, holds)


# Moved positions


def test_offsets_and_choices_draw_what_they_say():
    "Protects both tricks: increasing, within the range, all of it used, each sequence its own."
    positions = torch.arange(5)
    offsets, choices = random_offset(positions, 20_000, 12), random_choice(positions, 20_000, 12)
    assert (offsets.diff() == 1).all() and (choices.diff() >= 1).all()
    for drawn in (offsets, choices):
        assert drawn.shape == (20_000, 5) and drawn.min() == 0 and drawn.max() == 11
        assert len(drawn.unique(dim=0)) == (8 if drawn is offsets else math.comb(12, 5))
    assert (torch.bincount(offsets[:, 0], minlength=8) / 20_000 - 1 / 8).abs().max() < 0.01
    assert torch.equal(random_offset(positions, 3, 5), positions.expand(3, -1))  # no room, no offset


@pytest.mark.parametrize("kind", [LearnedPositions, RotaryPositions])
def test_moved_positions_move_in_training_only(kind):
    "Protects evaluation, and one draw for all layers in training."
    moved = partial(MovedPositions, positions=kind, move=random_choice)
    torch.manual_seed(0)
    model, plain = GPT(CONFIG, positions=moved).double(), GPT(CONFIG, positions=kind).double()
    plain.load_state_dict({name.replace(".inner", ""): p for name, p in model.state_dict().items()})
    idx = torch.randint(11, (3, 10))
    with torch.no_grad():
        assert torch.equal(model.eval()(idx), plain.eval()(idx))
        assert (model.train()(idx) - plain(idx)).abs().amax((1, 2)).min() > 1e-6  # every sequence
        torch.manual_seed(5)
        drawn = random_choice(torch.arange(10), 3, CONFIG.context_length)
        torch.manual_seed(5)
        x = numbers(3, 10, 24)
        if kind is LearnedPositions:
            assert torch.equal(model.position_embedding.add(x, torch.arange(10)), x + model.position_embedding.inner.weight[drawn])
        else:
            rotate_both, q = model.position_embedding.rotation(torch.arange(10)), numbers(3, 3, 10, 8)
            first, second = rotate_both(q, q)[0], rotate_both(q, q)[1]
            assert torch.equal(first, second) and torch.equal(first, rotate(q, rotation_angles(drawn, 8)))


def test_offsets_mean_nothing_to_rotary_positions():
    "Protects the reason why one row of the experiment is left out."
    torch.manual_seed(0)
    model = GPT(CONFIG, positions=partial(MovedPositions, positions=RotaryPositions)).double()
    idx = torch.randint(11, (3, 10))
    with torch.no_grad(): assert (model.train()(idx) - model.eval()(idx)).abs().max() < 1e-12


def test_without_positions_the_question_is_a_bag():
    "Protects `NoPositions` from knowing more than the mask says: in one layer, the last position cannot tell the order of those before."
    model = GPT(replace(CONFIG, n_layers=1), positions=NoPositions).double().eval()
    idx = torch.tensor([[3, 1, 4, 1, 5, 9]])
    with torch.no_grad(): assert (model(idx)[0, -1] - model(idx[:, [2, 4, 1, 0, 3, 5]])[0, -1]).abs().max() < 1e-14


# The task and its small experiment


def test_the_length_task_draws_training_rows_of_its_lengths():
    "Protects the split: nothing held out is trained on, and a batch is a function of step and seed."
    task, seen = LengthTask((2, 4, 5), batch_size=16), set()
    for step in range(60):
        idx, targets = task.batch_at(step, seed=2)
        n = idx.shape[1] // 2
        seen.add(n)
        rows = idx[:, :n]
        assert (part_of(rows) == TRAIN).all() and (idx[:, n] == 10).all() and (targets[:, :n] == -100).all()
        assert torch.equal(targets[:, n:], rows.sort(-1).values)
        assert torch.equal(idx, task.batch_at(step, seed=2)[0])
    assert seen == {2, 4, 5}
    questions, answers = task.validation(50)
    assert (part_of(questions[:, :5]) == VALIDATION).all() and torch.equal(questions[:, :5].sort(-1).values, answers)
    assert (part_of(uniform_rows(7, 300)) == HELD_OUT).all()


def test_accuracy_is_what_generation_does():
    "Protects the score of the experiment: real generation gives the same share, for a model that makes mistakes."
    config = GPTConfig(vocab_size=5, context_length=12, d_model=32, n_heads=2, n_layers=2, dropout=0.0)
    run = train_at_lengths((2, 3), RotaryPositions, config=replace(LENGTH_CONFIG, steps=80, lr=4e-3, warmup=10), model_config=config)
    shares = accuracy_at(run.model, [2, 3, 4], n=60)
    for n, share in shares.items():
        questions, answers = sort_question(uniform_rows(n, 60, base=4), 4)
        written = generate(run.model, questions, n, temperature=0)[:, n + 1 :]
        assert share == (written == answers).all(-1).float().mean().item()
    assert 0 < shares[3] < 1


def test_the_experiment_covers_its_grid_and_leaves_random_numbers_alone():
    "Protects the shape of the table, and that a run depends on its seed alone."
    config = GPTConfig(vocab_size=6, context_length=8, d_model=8, n_heads=2, n_layers=1, dropout=0.0)
    settings = {"config": replace(LENGTH_CONFIG, steps=3, warmup=1), "model_config": config, "lengths": [3, 4]}
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    rows = length_experiment(regimes=[(3,), (3, 4)], seeds=[0, 1], **settings)
    assert torch.equal(torch.rand(3), expected)
    assert [(r["positions"], r["trained on"], r["seed"]) for r in rows] == [(k, g, s) for g in ((3,), (3, 4)) for k in POSITIONS for s in (0, 1)]
    again = length_experiment({"rotary": RotaryPositions}, [(3, 4)], [1], **settings)[0]
    same = next(r for r in rows if (r["positions"], r["trained on"], r["seed"]) == ("rotary", (3, 4), 1))
    assert again["run"].losses == same["run"].losses and again["accuracy"] == same["accuracy"]
