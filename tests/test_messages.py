"""Bad input gets an error that names the field, the value, and what would be right.

Shapes in signatures are not enforced here: in use nobody enforces them, and the messages are ours."""

import dataclasses
import math
import re

import pytest
import torch

from minigpt.attention import MultiHeadAttention, causal_mask, split_heads
from minigpt.generation import NonFiniteLogits, at_temperature, draw, generate, keep_top_k, keep_top_p, sample
from minigpt.layers import GELU, Dropout, Embedding, LayerNorm, Linear, dropout, embedding
from minigpt.model import GPT, GPTConfig, cross_entropy, next_token_loss
from minigpt.sorting import SortTask, all_rows, part_of, train_sorter
from minigpt.training import AdamW, NonFiniteLoss, TrainConfig, decay_groups, evaluate, train

pytestmark = pytest.mark.unenforced

CONFIG = GPTConfig(vocab_size=7, context_length=5, d_model=8, n_heads=2, n_layers=1, dropout=0.0)
IDX = torch.tensor([[1, 2, 3]])
LOGITS = torch.zeros(3, 4)


def model() -> GPT: return GPT(CONFIG)
def ids(*numbers: int) -> torch.Tensor: return torch.tensor([numbers])


# Each case: what is done, the kind of error, and what the message must hold, in this order.
CASES = {
    # A width that heads do not divide
    "heads that do not divide the width": (lambda: GPTConfig(d_model=10, n_heads=4), ValueError, ["n_heads=4", "divide", "d_model=10"]),
    "the same in attention": (lambda: MultiHeadAttention(10, 4, 8), ValueError, ["n_heads=4", "divide", "d_model=10"]),
    "the same where heads are split": (lambda: split_heads(torch.zeros(1, 2, 10), 4), ValueError, ["n_heads=4", "divide", "10"]),
    # Zero or negative sizes, and sizes that are no integers
    **{f"{field} = {bad}": (lambda field=field, bad=bad: GPTConfig(**{field: bad}), ValueError, [field, "at least 1", str(bad)])
       for field in ("vocab_size", "context_length", "d_model", "n_heads", "n_layers") for bad in (0, -3)},
    **{f"{field} = {bad!r}": (lambda field=field, bad=bad: GPTConfig(**{field: bad}), TypeError, [field, "integer", repr(bad)])
       for field in ("vocab_size", "context_length", "d_model", "n_heads", "n_layers") for bad in (8.0, "8", None, True)},
    **{f"dropout = {bad}": (lambda bad=bad: GPTConfig(dropout=bad), ValueError, ["dropout", "0", "below 1", str(bad)]) for bad in (1, 1.5, -0.1, math.nan)},
    "a linear layer without inputs": (lambda: Linear(0, 3), ValueError, ["d_in", "at least 1", "0"]),
    "a linear layer without outputs": (lambda: Linear(3, -1), ValueError, ["d_out", "at least 1", "-1"]),
    "a linear layer half a number wide": (lambda: Linear(3, 1.5), TypeError, ["d_out", "integer", "1.5"]),
    "a table without rows": (lambda: Embedding(0, 3), ValueError, ["n", "at least 1", "0"]),
    "a table without columns": (lambda: Embedding(3, 0), ValueError, ["d", "at least 1", "0"]),
    "a norm of nothing": (lambda: LayerNorm(0), ValueError, ["d", "at least 1", "0"]),
    "dropout of everything": (lambda: Dropout(1.0), ValueError, ["dropout", "0", "below 1", "1.0"]),
    "dropout of everything, as a function": (lambda: dropout(torch.ones(3), 1.0), ValueError, ["dropout", "0", "below 1", "1.0"]),
    "dropout below nothing, as a function": (lambda: dropout(torch.ones(3), -0.5), ValueError, ["dropout", "0", "below 1", "-0.5"]),
    "attention in no context": (lambda: MultiHeadAttention(8, 2, 0), ValueError, ["context_length", "at least 1", "0"]),
    "attention with too much dropout": (lambda: MultiHeadAttention(8, 2, 4, dropout=2), ValueError, ["dropout", "below 1", "2"]),
    "a mask of nothing": (lambda: causal_mask(0), ValueError, ["n_queries", "at least 1", "0"]),
    "more queries than keys": (lambda: causal_mask(4, 3), ValueError, ["n_keys", "at least", "4", "3"]),
    "an unknown GELU": (lambda: GELU("fast"), ValueError, ["approximate", "'none'", "'tanh'", "'fast'"]),
    # Ids
    "an id above the vocabulary": (lambda: model()(ids(1, 7, 2)), ValueError, ["ids", "0..6", "7"]),
    "a negative id": (lambda: model()(ids(1, -1, 2)), ValueError, ["ids", "0..6", "-1"]),
    "an id above a table": (lambda: embedding(ids(3), torch.zeros(3, 2)), ValueError, ["ids", "0..2", "3"]),
    "a prompt with an unknown id": (lambda: generate(model(), ids(1, 7), 2), ValueError, ["ids", "0..6", "7"]),
    **{f"ids of {dtype}": (lambda dtype=dtype: model()(IDX.to(dtype)), TypeError, ["ids", "integers", "torch.long", str(dtype)])
       for dtype in (torch.float32, torch.float64, torch.bool, torch.complex64, torch.uint8, torch.int16)},
    "a prompt of floats": (lambda: generate(model(), IDX.float(), 2), TypeError, ["ids", "integers", "torch.long", "torch.float32"]),
    # Shapes of input
    "a sequence longer than the context": (lambda: model()(torch.zeros(1, 6, dtype=torch.long)), ValueError, ["idx", "context_length=5", "6"]),
    "attention beyond its context": (lambda: MultiHeadAttention(8, 2, 4)(torch.zeros(1, 5, 8)), ValueError, ["5", "context_length=4"]),
    "a sequence of nothing": (lambda: model()(IDX[:, :0]), ValueError, ["idx", "at least one"]),
    "a sequence without a batch": (lambda: model()(IDX[0]), ValueError, ["idx", "(B, T)", "(3,)"]),
    "an empty prompt": (lambda: generate(model(), IDX[:, :0], 2), ValueError, ["idx", "at least one", "(1, 0)"]),
    "a prompt without a batch": (lambda: generate(model(), IDX[0], 2), ValueError, ["idx", "(B, T)", "(3,)"]),
    # Targets
    "targets of another length": (lambda: next_token_loss(model(), IDX, IDX[:, :2]), ValueError, ["targets", "(1, 3)", "(1, 2)"]),
    "targets of another batch": (lambda: next_token_loss(model(), IDX, IDX.repeat(2, 1)), ValueError, ["targets", "(1, 3)", "(2, 3)"]),
    "targets that do not fit the logits": (lambda: cross_entropy(LOGITS, torch.zeros(2).long()), ValueError, ["targets", "(3,)", "(2,)"]),
    "targets that would broadcast": (lambda: cross_entropy(LOGITS, torch.zeros(3, 1).long()), ValueError, ["targets", "(3,)", "(3, 1)"]),
    "a target above the vocabulary": (lambda: cross_entropy(LOGITS, torch.tensor([0, 4, 1])), ValueError, ["targets", "0..3", "4"]),
    "a negative target": (lambda: cross_entropy(LOGITS, torch.tensor([0, -1, 1])), ValueError, ["targets", "0..3", "-1"]),
    "targets of floats": (lambda: cross_entropy(LOGITS, torch.zeros(3)), TypeError, ["targets", "integers", "torch.long", "torch.float32"]),
    "nothing to evaluate on": (lambda: evaluate(model(), []), ValueError, ["no targets"]),
    "targets that all do not count": (lambda: evaluate(model(), [(IDX, torch.full_like(IDX, -100))]), ValueError, ["no targets"]),
    # Sampling
    **{f"temperature = {bad}": (lambda bad=bad: generate(model(), IDX, 2, temperature=bad), ValueError, ["temperature", "0", str(bad)]) for bad in (-1, -0.5, math.nan, math.inf)},
    "dividing by a temperature of 0": (lambda: at_temperature(LOGITS, 0), ValueError, ["temperature", "above 0", "0"]),
    **{f"top_k = {bad}": (lambda bad=bad: generate(model(), IDX, 2, top_k=bad), ValueError, ["top_k", "at least 1", str(bad)]) for bad in (0, -1)},
    **{f"top_k = {bad!r}": (lambda bad=bad: generate(model(), IDX, 2, top_k=bad), TypeError, ["top_k", "integer", repr(bad)]) for bad in (2.5, "2")},
    **{f"top_p = {bad}": (lambda bad=bad: generate(model(), IDX, 2, top_p=bad), ValueError, ["top_p", "(0, 1]", str(bad)]) for bad in (0, -0.1, 1.1, math.nan)},
    "a bad top_k is told when greedy, too": (lambda: generate(model(), IDX, 2, temperature=0, top_k=0), ValueError, ["top_k", "at least 1", "0"]),
    "top_k by its function": (lambda: keep_top_k(LOGITS, 0), ValueError, ["top_k", "at least 1", "0"]),
    "top_p by its function": (lambda: keep_top_p(LOGITS, 0), ValueError, ["top_p", "(0, 1]", "0"]),
    "fewer than no tokens": (lambda: generate(model(), IDX, -1), ValueError, ["n_tokens", "at least 0", "-1"]),
    "half a token": (lambda: generate(model(), IDX, 2.5), TypeError, ["n_tokens", "integer", "2.5"]),
    "logits that are no numbers": (lambda: sample(LOGITS * math.nan), NonFiniteLogits, ["logits", "finite", "nan", "row 0"]),
    "weights that are all zero": (lambda: draw(torch.zeros(1, 3)), ValueError, ["weights"]),
    # Training
    **{f"{field} = {bad}": (lambda field=field, bad=bad: TrainConfig(**{field: bad}), ValueError, [field, word, str(bad)])
       for field, word, bad in [("steps", "at least 1", 0), ("lr", "at least 0", -1), ("lr", "at least 0", math.nan), ("warmup", "at least 0", -1), ("floor", "at least 0", -0.1),
                                ("weight_decay", "at least 0", -1), ("clip", "above 0", 0), ("clip", "above 0", math.nan), ("betas", "[0, 1)", (0.9, 1.0)), ("betas", "[0, 1)", (-0.1, 0.9)),
                                ("lr", "finite", math.inf), ("floor", "finite", math.inf), ("weight_decay", "finite", math.inf), ("betas", "two numbers", (0.9,)),
                                ("betas", "two numbers", (0.9, 0.95, 0.99)), ("betas", "two numbers", 0.9), ("betas", "two numbers", None)]},
    **{f"{field} = {bad!r}": (lambda field=field, bad=bad: TrainConfig(**{field: bad}), TypeError, [field, "number", repr(bad)])
       for field, bad in [("lr", "1e-3"), ("floor", None), ("weight_decay", True), ("clip", "1"), ("clip", None)]},
    "betas of texts": (lambda: TrainConfig(betas=("0.9", 0.95)), TypeError, ["betas", "number", "'0.9'"]),
    **{f"AdamW({field}={bad!r})": (lambda field=field, bad=bad: AdamW([], **{field: bad}), ValueError, [field, word])
       for field, word, bad in [("eps", "at least 0", -1), ("eps", "finite", math.inf), ("lr", "finite", math.inf), ("lr", "finite", math.nan), ("betas", "two numbers", (0.9, 0.9, 0.9))]},
    "AdamW with a decay that pushes away": (lambda: AdamW([{"params": [], "weight_decay": -0.1}]), ValueError, ["weight_decay", "at least 0", "-0.1"]),
    "AdamW with a text for a rate": (lambda: AdamW([], lr="1e-3"), TypeError, ["lr", "number", "'1e-3'"]),
    "a dropout that is none": (lambda: GPTConfig(dropout=None), TypeError, ["dropout", "number", "None"]),
    "a temperature that is a text": (lambda: generate(model(), IDX, 2, temperature="0.8"), TypeError, ["temperature", "number", "'0.8'"]),
    "half a step": (lambda: TrainConfig(steps=1.5), TypeError, ["steps", "integer", "1.5"]),
    "half a step of warmup": (lambda: TrainConfig(warmup=1.5), ValueError, ["warmup", "integer", "1.5"]),
    "AdamW uphill": (lambda: AdamW([], lr=-1), ValueError, ["lr", "at least 0", "-1"]),
    "AdamW with betas of 1": (lambda: AdamW([], betas=(0.9, 1.0)), ValueError, ["betas", "[0, 1)", "(0.9, 1.0)"]),
    "a rule that does not decide": (lambda: decay_groups(model(), 0.1, lambda name, p: None), ValueError, ["decays", "True or False", "token_embedding.weight"]),
    "a state of other parameters": (lambda: AdamW([{"params": [torch.zeros(3)], "weight_decay": 0.0}]).load_state_dict(AdamW([{"params": [torch.zeros(4)], "weight_decay": 0.0}]).state_dict()),
                                    ValueError, ["state", "(3,)", "(4,)"]),
    # Sorting
    "a task without a row to validate on": (lambda: train_sorter(task=SortTask(length=1, base=3)), ValueError, ["length=1", "base=3", "validate"]),
    "a measurement on no rows": (lambda: train_sorter(n_validation=0), ValueError, ["n_validation", "at least 1", "0"]),
    "a measurement every 0 steps": (lambda: train_sorter(every=0), ValueError, ["every", "at least 1", "0"]),
    "a split by something else": (lambda: part_of(all_rows(2, 2), "length"), ValueError, ["by", "'sequence'", "'multiset'", "'length'"]),
    **{f"SortTask({field}={bad!r})": (lambda field=field, bad=bad: SortTask(**{field: bad}), ValueError, [field, word, str(bad)])
       for field, word, bad in [("length", "at least 1", 0), ("base", "at least", 0), ("batch_size", "at least 1", 0), ("repeats", "0", 1.5), ("repeats", "0", -0.1), ("by", "'sequence'", "length")]},
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_answered_with_field_value_and_what_is_right(case: str):
    "Protects a user who made a mistake: the right kind of error, from us and not from the depths, and all three things in its message."
    call, kind, pieces = CASES[case]
    with pytest.raises(kind) as caught: call()
    assert type(caught.value) is kind, f"{type(caught.value).__name__} is somebody else's"
    message = str(caught.value)
    missing = [piece for piece in pieces if not re.search(rf"(?<![\w.]){re.escape(piece)}(?![\w])" if piece[0].isalnum() else re.escape(piece), message)]
    assert not missing, f"{message!r} does not say {missing}"
    assert len(message) < 300 and "\n" not in message


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_told_with_its_step(bad: float):
    "Protects a long run: training stops, and the message holds the loss and the step."
    spoilt = model()
    hook = spoilt.register_forward_hook(lambda module, args, out: out * (bad if torch.is_grad_enabled() and steps[-1:] == [3] else 1))
    steps = []
    with pytest.raises(ValueError, match=r"nan at step 3\b|inf at step 3\b") as caught:
        train(spoilt, lambda step: (steps.append(step), (IDX, IDX))[1], TrainConfig(steps=9))
    hook.remove()
    assert type(caught.value) is NonFiniteLoss


# What sounds like a mistake and is none


def test_temperature_zero_is_greedy():
    "Protects a promise: 0, as an integer or not, takes the most probable token and no random number."
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]]).repeat(100, 1)
    for zero in (0, 0.0): assert (sample(logits, zero) == 1).all()
    text = generate(model(), IDX, 4, temperature=0)
    assert text.shape == (1, 7)


@pytest.mark.parametrize("options", [{"top_k": 7}, {"top_k": 10**9}, {"top_p": 1}, {"top_p": 1.0}, {"temperature": 1}])
def test_settings_that_restrict_nothing_change_nothing(options: dict):
    "Protects a promise: top_k above the vocabulary is the vocabulary, top_p of one is everything, integers are numbers."
    gpt = model()
    assert torch.equal(generate(gpt, IDX, 9, seed=1, **options), generate(gpt, IDX, 9, seed=1))


def test_shorter_integers_are_ids():
    "Protects people who store tokens as int32: the same logits, the same loss."
    gpt, targets = model(), torch.tensor([0, 1, 2])
    assert torch.equal(gpt(IDX.int()), gpt(IDX)) and torch.equal(cross_entropy(LOGITS, targets.int()), cross_entropy(LOGITS, targets))


def test_nothing_to_append_and_an_empty_batch_are_fine():
    "Protects the edges: no token appended gives the prompt, a batch of no sequences gives no logits."
    assert torch.equal(generate(model(), IDX, 0), IDX) and model()(IDX[:0]).shape == (0, 3, 7)


def test_a_config_cannot_be_changed_behind_its_checks():
    "Protects a checked config: it is frozen, and `dataclasses.replace` checks again."
    with pytest.raises(dataclasses.FrozenInstanceError): CONFIG.n_heads = 3
    with pytest.raises(ValueError, match="n_heads=3"): dataclasses.replace(CONFIG, n_heads=3)
