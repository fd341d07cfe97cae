"""Every layer over many shapes and dtypes: against the library's version, or a property that must hold whatever the numbers are."""

import math

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from minigpt.attention import attention_weights, causal_mask, join_heads, sdpa, split_heads
from minigpt.checks import match
from minigpt.generation import at_temperature, draw, keep_top_k, keep_top_p, sample
from minigpt.layers import dropout, embedding, gelu, gelu_tanh, layer_norm, linear, softmax
from minigpt.model import cross_entropy
from minigpt.sorting import HELD_OUT, TRAIN, VALIDATION, part_of, stable_hash
from minigpt.training import AdamW, adamw_update, clip_gradients, lr_at

# The same examples in every run, so that a failure is a change of the code and can be repeated.
bounded = settings(derandomize=True, max_examples=30, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}  # per unit of the numbers that enter
dtypes = st.sampled_from(list(TOLERANCE))
sizes = st.integers(1, 7)
seeds = st.integers(0, 2**32)
batches = st.lists(st.integers(0, 4), max_size=3).map(tuple)


def numbers(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64, size: float = 1.0) -> Tensor:
    return (size * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).to(dtype)


def assert_near(ours: Tensor, exact: Tensor, dtype: torch.dtype, unit: float = 1.0) -> None:
    "Our result has the dtype asked for, and is as near to the one computed in float64 as that dtype allows."
    assert ours.dtype == dtype and ours.shape == exact.shape
    torch.testing.assert_close(ours.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * unit)


# Layers


@bounded
@given(st.lists(sizes, min_size=1, max_size=4).map(tuple), seeds, dtypes, st.sampled_from([1e-3, 1.0, 30.0, 1e4]), st.floats(0, 0.9), st.data())
def test_softmax(shape, seed, dtype, size, hidden, data):
    "Protects softmax along any dimension, for scores of any size and with -inf among them."
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    x = numbers(shape, seed, dtype, size)
    x = x.masked_fill(torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < hidden, -torch.inf)
    exact = torch.softmax(x.double(), dim)
    assert_near(softmax(x, dim), exact.nan_to_num(0), dtype)  # a row of only -inf: zeros, where torch's has NaN
    sums = softmax(x.double(), dim).sum(dim)
    assert ((sums - 1).abs() < 1e-12).logical_or(x.isinf().all(dim) & (sums == 0)).all()


@bounded
@given(st.lists(sizes, min_size=1, max_size=3).map(tuple), seeds, st.sampled_from([1.0, 30.0]), st.floats(-1e6, 1e6))
def test_softmax_gradients_and_shifts(shape, seed, size, shift):
    "Protects the gradient through the subtracted maximum, and that a common shift of the scores changes nothing."
    x = numbers(shape, seed, size=size)
    match(softmax, lambda x: torch.softmax(x, -1), x)
    torch.testing.assert_close(softmax(x + shift), softmax(x), rtol=1e-8, atol=1e-8)


@bounded
@given(batches, sizes, sizes, st.booleans(), seeds, dtypes)
def test_linear(batch, d_in, d_out, with_bias, seed, dtype):
    "Protects the linear map over any leading dimensions, empty ones included."
    x, weight, bias = (numbers(s, seed + i, dtype) for i, s in enumerate([(*batch, d_in), (d_out, d_in), (d_out,)]))
    args = (x, weight, bias) if with_bias else (x, weight)
    assert_near(linear(*args), F.linear(*(a.double() for a in args)), dtype, unit=d_in + 1)
    match(linear, F.linear, *args)


@bounded
@given(batches, sizes, sizes, seeds, st.sampled_from([torch.int64, torch.int32]), dtypes)
def test_embedding(batch, n, d, seed, ids_dtype, dtype):
    "Protects the lookup: exact rows, and gradients that add up where an id occurs twice."
    ids = torch.randint(n, batch, generator=torch.Generator().manual_seed(seed), dtype=ids_dtype)
    weight = numbers((n, d), seed, dtype)
    assert torch.equal(embedding(ids, weight), F.embedding(ids, weight))
    assert match(lambda w: embedding(ids, w), lambda w: F.embedding(ids, w), weight).values == 0


@bounded
@given(batches, st.integers(1, 40), st.booleans(), seeds, dtypes, st.sampled_from([1e-3, 1.0, 100.0]), st.sampled_from([0.0, 1.0, 1e4]), st.sampled_from([1e-5, 1e-2]))
def test_layer_norm(batch, d, with_bias, seed, dtype, size, mean, eps):
    "Protects layer norm at every width, spread and mean; a large mean costs digits, by as much as its size and no more."
    x = (numbers((*batch, d), seed, size=size) + mean).to(dtype)
    weight, bias = numbers((d,), seed + 1, dtype), numbers((d,), seed + 2, dtype) if with_bias else None
    exact = F.layer_norm(x.double(), (d,), weight.double(), None if bias is None else bias.double(), eps)
    lost = 1 + x.double().abs().amax().item() / math.sqrt(x.double().var(-1, correction=0).amin().item() + eps) if x.numel() else 1
    assume(TOLERANCE[dtype] * lost < 0.1)  # past that, no digit is left to compare
    assert_near(layer_norm(x, weight, bias, eps), exact, dtype, unit=4 * lost)


@bounded
@given(batches, st.integers(1, 9), seeds, st.floats(-100, 100), st.floats(0.5, 100))
def test_layer_norm_gradients_and_invariance(batch, d, seed, shift, stretch):
    "Protects its gradients, its mean and variance, and that shifting and stretching the input changes nothing (eps apart)."
    x, weight, bias = numbers((*batch, d), seed), numbers((d,), seed + 1), numbers((d,), seed + 2)
    match(layer_norm, lambda x, w, b: F.layer_norm(x, (d,), w, b), x, weight, bias, tolerance=1e-9)
    if d == 1: return  # a single number has no variance to bring to 1
    y = layer_norm(x, torch.ones(d, dtype=x.dtype), eps=0.0)
    torch.testing.assert_close(y.mean(-1), torch.zeros_like(y.mean(-1)), rtol=0, atol=1e-9)
    torch.testing.assert_close(y.square().mean(-1), torch.ones_like(y.mean(-1)), rtol=0, atol=1e-9)
    torch.testing.assert_close(layer_norm(x * stretch + shift, torch.ones(d, dtype=x.dtype), eps=0.0), y, rtol=1e-6, atol=1e-6)


@bounded
@given(batches, seeds, dtypes, st.sampled_from([1e-3, 1.0, 5.0, 100.0]), st.sampled_from([(gelu, "none"), (gelu_tanh, "tanh")]))
def test_gelu(batch, seed, dtype, size, variant):
    "Protects both forms of the GELU, far into both tails, and the identity gelu(x) - gelu(-x) = x."
    ours, approximate = variant
    x = numbers(batch, seed, dtype, size)
    assert_near(ours(x), F.gelu(x.double(), approximate=approximate), dtype, unit=max(1, x.double().abs().max().item() if x.numel() else 1))
    match(ours, lambda x: F.gelu(x, approximate=approximate), x)
    torch.testing.assert_close(ours(x.double()) - ours(-x.double()), x.double(), rtol=1e-12, atol=1e-12)


@bounded
@given(batches, seeds, dtypes, st.floats(0, 0.95))
def test_dropout(batch, seed, dtype, p):
    "Protects what dropout does to each number (zero, or divided by 1 - p), to its gradient, and that it does nothing when off."
    x = numbers(batch, seed, dtype).requires_grad_()
    y = dropout(x, p)
    kept = y != 0
    assert y.dtype == dtype and y.shape == x.shape
    torch.testing.assert_close(y, torch.where(kept, x / (1 - p), 0), rtol=2 * torch.finfo(dtype).eps, atol=0)
    gradient = torch.autograd.grad(y.sum(), x)[0] if p else torch.where(kept, 1 / (1 - p), 0)
    assert torch.equal(gradient != 0, kept | (x == 0) & (gradient != 0))
    assert torch.equal(dropout(x, p, training=False), x) and torch.equal(dropout(x, 0.0), x)


@pytest.mark.parametrize("dtype", [*TOLERANCE, torch.float16])
@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_dropout_drops_the_share_it_is_told(dtype, p):
    "Protects the probability itself, also in dtypes with few digits and for small p: within six standard deviations."
    n = 200_000
    dropped = (dropout(torch.ones(n, dtype=dtype), p) == 0).sum().item()
    assert abs(dropped - n * p) < 6 * math.sqrt(n * p * (1 - p))


# Attention


heads = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 6), st.integers(1, 6), st.integers(1, 6), st.integers(1, 6))  # B H Tq Tk d e


def qkv(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    B, H, Tq, Tk, d, e = shape
    return [numbers(s, seed + i, dtype) for i, s in enumerate([(B, H, Tq, d), (B, H, Tk, d), (B, H, Tk, e)])]


@bounded
@given(heads, seeds, dtypes, st.sampled_from([None, 0.3, 2.0]))
def test_sdpa_without_a_mask(shape, seed, dtype, scale):
    "Protects attention of any number of queries to any number of keys, values of another width included."
    tensors = qkv(shape, seed, dtype)
    assert_near(sdpa(*tensors, scale=scale), F.scaled_dot_product_attention(*(x.double() for x in tensors), scale=scale), dtype, unit=8)
    match(lambda q, k, v: sdpa(q, k, v, scale=scale), lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=scale), *tensors)


@bounded
@given(heads, seeds, st.floats(0, 1))
def test_sdpa_with_any_mask(shape, seed, share):
    "Protects the mask, whatever it hides: values and gradients, rows in which everything is hidden included."
    tensors = qkv(shape, seed)
    mask = torch.rand(shape[2], shape[3], generator=torch.Generator().manual_seed(seed)) < share
    match(lambda q, k, v: sdpa(q, k, v, mask), lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask), *tensors)
    weights = attention_weights(*tensors[:2], mask)
    assert (weights[..., ~mask] == 0).all() and torch.allclose(weights.sum(-1), mask.any(-1).double().expand(weights.shape[:-1]))


@bounded
@given(sizes, sizes)
def test_causal_mask(n_queries, extra):
    "Protects the alignment: query i of n sees the keys up to its own, the last query sees all."
    mask = causal_mask(n_queries, n_queries + extra)
    assert mask.tolist() == [[key <= query + extra for key in range(n_queries + extra)] for query in range(n_queries)]


@bounded
@given(sizes, sizes, sizes, sizes, seeds, dtypes)
def test_split_and_join_heads(B, T, H, d, seed, dtype):
    "Protects the view: head h is channels h*d to (h+1)*d, no number is copied or lost, and joining undoes it."
    x = numbers((B, T, H * d), seed, dtype)
    parts = split_heads(x, H)
    assert parts.shape == (B, H, T, d) and parts.data_ptr() == x.data_ptr()
    assert all(torch.equal(parts[:, h], x[..., h * d : (h + 1) * d]) for h in range(H))
    assert torch.equal(join_heads(parts), x)


# Loss


@bounded
@given(st.integers(1, 20), st.integers(1, 20), seeds, dtypes, st.sampled_from([1.0, 50.0, 1e4]), st.sampled_from([-100, -1, 0]), st.floats(0, 0.9))
def test_cross_entropy(n, n_tokens, seed, dtype, size, ignore_index, ignored):
    "Protects the loss for logits of any size, with any share of the targets left out."
    generator = torch.Generator().manual_seed(seed)
    logits = numbers((n, n_tokens), seed, dtype, size)
    targets = torch.randint(n_tokens, (n,), generator=generator).masked_fill(torch.rand(n, generator=generator) < ignored, ignore_index)
    assume((targets != ignore_index).any())
    theirs = lambda x: F.cross_entropy(x, targets, ignore_index=ignore_index)  # noqa: E731
    assert_near(cross_entropy(logits, targets, ignore_index), theirs(logits.double()), torch.promote_types(dtype, torch.float32), unit=max(1, size))
    match(lambda x: cross_entropy(x, targets, ignore_index), theirs, logits, tolerance=1e-12 * max(1, size))


def test_cross_entropy_of_nothing_is_nan_as_in_the_library():
    "Protects a choice: a batch with no target that counts has no mean loss; NaN stops training, where 0 would hide it."
    targets = torch.full((3,), -100)
    assert cross_entropy(torch.zeros(3, 4), targets).isnan() and F.cross_entropy(torch.zeros(3, 4), targets).isnan()


# Sampling


logits_of = st.tuples(st.integers(1, 4), st.integers(1, 30), seeds, st.booleans())


def logits_with_ties(case) -> Tensor:
    B, V, seed, ties = case
    x = numbers((B, V), seed, size=2.0)
    return x.round() if ties else x


@bounded
@given(logits_of, st.integers(1, 40))
def test_keep_top_k(case, k):
    "Protects the number kept: k, ties or not; none dropped is better than one kept; kept values are untouched."
    x = logits_with_ties(case)
    y = keep_top_k(x, k)
    kept = y > -torch.inf
    assert (kept.sum(-1) == min(k, x.shape[-1])).all() and torch.equal(y[kept], x[kept])
    assert (x.masked_fill(kept, -torch.inf).amax(-1) <= x.masked_fill(~kept, torch.inf).amin(-1)).all()
    assert torch.equal(keep_top_k(y, k), y) and torch.equal(keep_top_k(x, 1).argmax(-1), x.argmax(-1))


@bounded
@given(logits_of, st.floats(0.001, 1))
def test_keep_top_p(case, p):
    "Protects the nucleus: it reaches p, without its least member it would not, and none outside is better than one inside."
    x = logits_with_ties(case)
    y = keep_top_p(x, p)
    kept, shares = y > -torch.inf, softmax(x)
    mass, least = (shares * kept).sum(-1), shares.masked_fill(~kept, torch.inf).amin(-1)
    assert torch.equal(y[kept], x[kept]) and kept.any(-1).all()
    assert (mass >= p - 1e-12).all() and (mass - least < p).all()
    assert (shares.masked_fill(kept, 0).amax(-1) <= least).all()


@bounded
@given(logits_of)
def test_keep_top_p_of_one_keeps_everything(case):
    "Protects p = 1, where rounding of the running sum must not cost the rarest tokens."
    x = logits_with_ties(case).float() * 20
    assert torch.equal(keep_top_p(x, 1.0), x) and torch.equal(keep_top_p(x, 1), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_keep_top_p_among_many_tokens(dtype):
    "Protects the running sum in dtypes with few digits: of 10,000 equal tokens, half of them reach one half."
    kept = (keep_top_p(torch.zeros(1, 10_000, dtype=dtype), 0.5) > -torch.inf).sum().item()
    assert kept == pytest.approx(5000, abs=5)


@bounded
@given(logits_of, st.floats(0.01, 100))
def test_at_temperature(case, temperature):
    "Protects the temperature: probabilities to the power of 1/T, renormalised; the order never changes."
    x = logits_with_ties(case)
    cooled = at_temperature(x, temperature)
    powers = (x - x.amax(-1, keepdim=True)).exp() ** (1 / temperature)
    torch.testing.assert_close(softmax(cooled), powers / powers.sum(-1, keepdim=True), rtol=1e-9, atol=1e-12)
    assert torch.equal(cooled.sort(dim=-1, stable=True).indices, x.sort(dim=-1, stable=True).indices)


@bounded
@given(logits_of, st.sampled_from([1e-3, 1e-5, 1e-30, 1e-40, 1e-300]), st.sampled_from([torch.float32, torch.float16, torch.bfloat16]), seeds)
def test_a_tiny_temperature_is_greedy(case, temperature, dtype, seed):
    "Protects the limit: however small the temperature, the most probable token is drawn, and nothing overflows into NaN."
    x = numbers(case[:2], case[2], size=2.0).mul(8).round().mul(4).to(dtype)  # no two nearly alike
    assume((x == x.amax(-1, keepdim=True)).sum(-1).eq(1).all())
    assert torch.equal(sample(x, temperature, generator=torch.Generator().manual_seed(seed)), x.argmax(-1))


@bounded
@given(logits_of, st.none() | st.integers(1, 40), st.none() | st.floats(0.01, 1))
def test_temperature_zero_is_greedy(case, top_k, top_p):
    "Protects greedy choice: the first of the most probable, whatever else is set, and no random number is used."
    x = logits_with_ties(case)
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    assert torch.equal(sample(x, 0, top_k, top_p, generator), x.argmax(-1)) and torch.equal(generator.get_state(), before)


@bounded
@given(logits_of, st.floats(0.1, 5), st.integers(1, 8), st.floats(0.05, 1), seeds)
def test_sample_takes_what_the_filters_left(case, temperature, top_k, top_p, seed):
    "Protects the order of the filters: no drawn token is one that top-k, then top-p, had thrown out."
    x = logits_with_ties(case).repeat(20, 1)
    left = keep_top_p(keep_top_k(at_temperature(x, temperature), top_k), top_p)
    token = sample(x, temperature, top_k, top_p, torch.Generator().manual_seed(seed))
    assert (left.gather(-1, token[:, None]) > -torch.inf).all()


@bounded
@given(st.integers(1, 30), st.integers(1, 30), seeds, st.floats(0, 0.9), st.integers(-20, 20), st.sampled_from([torch.float64, torch.float32]))
def test_draw(B, V, seed, empty, power, dtype):
    "Protects the drawing: an index of its row, never one of weight 0, the same for weights twice as large."
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(B, V, generator=generator).masked_fill(torch.rand(B, V, generator=generator) < empty, 0).to(dtype)
    assume((weights > 0).any(-1).all())
    index = draw(weights, torch.Generator().manual_seed(seed))
    assert index.shape == (B,) and (weights.gather(-1, index[:, None]) > 0).all()
    assert torch.equal(draw(weights * 2.0**power, torch.Generator().manual_seed(seed)), index)


@pytest.mark.parametrize("chance", [0.0, 1 - 2**-53])
@pytest.mark.parametrize("weights", [[0.0, 1.0, 0.0], [1.0, 2.0, 3.0], [0.0, 0.0, 1e-30], [1e-30, 0.0, 0.0], [0.1] * 10])
def test_draw_at_the_ends_of_chance(monkeypatch, chance, weights):
    "Protects the rarest draws: the smallest and the largest random number there are still give an index that has a weight."
    monkeypatch.setattr(torch, "rand", lambda *shape, dtype=None, **options: torch.full(shape, chance, dtype=dtype))
    index = draw(torch.tensor([weights]))
    assert 0 <= index.item() < len(weights) and weights[index.item()] > 0


@pytest.mark.parametrize("weights", [[1.0, 1.0], [0.0, 3.0, 1.0, 0.0, 6.0], [1e-3, 1.0]])
def test_draw_meets_the_probabilities(weights):
    "Protects the distribution: over 100,000 draws, each count within six standard deviations of its share."
    n, shares = 100_000, torch.tensor(weights) / sum(weights)
    counts = draw(torch.tensor(weights).expand(n, -1)).bincount(minlength=len(weights))
    assert ((counts - n * shares).abs() <= 6 * (n * shares * (1 - shares)).sqrt()).all()


# Training


@bounded
@given(st.integers(1, 300), st.integers(0, 300), st.floats(1e-5, 1), st.floats(0, 1))
def test_lr_at(steps, warmup, peak, share):
    "Protects the schedule: it starts above 0, rises to the peak and no further, and falls towards its floor without a jump."
    assume(warmup < steps)
    floor = peak * share
    rates = [lr_at(step, steps, peak, warmup, floor) for step in range(steps + 1)]
    rise, fall = rates[: warmup + 1], rates[warmup:]
    assert all(0 < r <= peak * (1 + 1e-12) for r in rise) and rates[warmup] == pytest.approx(peak)
    assert all(a < b for a, b in zip(rise, rise[1:])) and all(a >= b * (1 - 1e-12) for a, b in zip(fall, fall[1:]))
    assert rates[steps] == pytest.approx(floor, abs=1e-12 * peak) and lr_at(steps + 50, steps, peak, warmup, floor) == pytest.approx(floor, abs=1e-12 * peak)
    assert max(abs(a - b) for a, b in zip(rates, rates[1:])) <= peak * max(1 / (warmup + 1), math.pi / 2 / (steps - warmup)) * (1 + 1e-9)


@bounded
@given(st.lists(batches, min_size=1, max_size=4), seeds, st.sampled_from([torch.float64, torch.float32]), st.sampled_from([1e-6, 1.0, 1e3]), st.floats(0.01, 10))
def test_clip_gradients(shapes, seed, dtype, size, limit):
    "Protects clipping: the same norm and the same gradients as the library's, parameters without a gradient left alone."
    ours, theirs = ([nn.Parameter(torch.zeros(s, dtype=dtype)) for s in shapes] for _ in range(2))
    for i, (a, b) in enumerate(zip(ours, theirs)): a.grad, b.grad = (numbers(a.shape, seed + i, dtype, size) for _ in range(2))
    unused = nn.Parameter(torch.zeros(3))
    norm = clip_gradients([*ours, unused], limit)
    assert_near(norm, nn.utils.clip_grad_norm_(theirs, limit).double(), dtype, unit=size)
    for a, b in zip(ours, theirs): torch.testing.assert_close(a.grad, b.grad, rtol=10 * torch.finfo(dtype).eps, atol=0)
    assert unused.grad is None


@bounded
@given(st.lists(sizes, max_size=3).map(tuple), seeds, st.sampled_from([torch.float64, torch.float32]), st.floats(1e-4, 0.5), st.floats(0, 0.99), st.floats(0, 0.999), st.sampled_from([1e-8, 1e-3]), st.floats(0, 1))
def test_adamw_update(shape, seed, dtype, lr, beta_1, beta_2, eps, weight_decay):
    "Protects the update rule: five steps equal the library's, for any settings."
    theirs = nn.Parameter(numbers(shape, seed, dtype))
    optimizer = torch.optim.AdamW([theirs], lr, (beta_1, beta_2), eps, weight_decay)
    weight = theirs.detach().clone()
    m, v = torch.zeros_like(weight), torch.zeros_like(weight)
    for t in range(1, 6):
        theirs.grad = numbers(shape, seed + t, dtype)
        adamw_update(weight, theirs.grad.clone(), m, v, t, lr, (beta_1, beta_2), eps, weight_decay)
        optimizer.step()
    torch.testing.assert_close(weight, theirs.detach(), rtol=1e-11 if dtype == torch.float64 else 1e-4, atol=1e-11 if dtype == torch.float64 else 1e-4)


def test_adamw_leaves_parameters_without_a_gradient_alone():
    "Protects parts that are frozen or unused: no gradient, no step and no decay, while the others go on."
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = AdamW([{"params": [used, unused], "weight_decay": 0.1}], 0.1)
    for _ in range(3):
        used.grad = torch.ones(3)
        optimizer.step()
    assert torch.equal(unused, torch.ones(3)) and (used < 0.8).all()


# The split


def hash_of(row: list[int], key: int) -> int:
    "The same hash in Python's integers, which have no width to overflow."
    h = (key * 0x9E3779B1 + len(row)) % 2**32
    for digit in row:
        h = ((h ^ digit) * 0x85EBCA77) % 2**32
        h = ((h ^ h >> 15) * 0xC2B2AE3D) % 2**32
        h ^= h >> 13
    return h


rows = st.integers(1, 8).flatmap(lambda length: st.lists(st.lists(st.integers(0, 9), min_size=length, max_size=length), min_size=1, max_size=5))


@bounded
@given(rows, st.integers(0, 2**31), st.sampled_from([torch.int64, torch.int32]))
def test_stable_hash(rows, key, dtype):
    "Protects the hash: plain integer arithmetic, each row by itself, the same for every integer dtype."
    found = stable_hash(torch.tensor(rows, dtype=dtype), key)
    assert found.tolist() == [hash_of(row, key) for row in rows] and found.dtype == torch.int64
    assert torch.equal(found, torch.cat([stable_hash(torch.tensor([row]), key) for row in rows]))


@bounded
@given(rows, st.randoms(use_true_random=False))
def test_part_of(rows, random):
    "Protects the split: three parts by the hash modulo 16, and by multiset one part for all orders of the same digits."
    expected = [HELD_OUT if hash_of(row, 0) % 16 < 4 else VALIDATION if hash_of(row, 0) % 16 == 4 else TRAIN for row in rows]
    assert part_of(torch.tensor(rows)).tolist() == expected
    shuffled = [random.sample(row, len(row)) for row in rows]
    assert torch.equal(part_of(torch.tensor(rows), "multiset"), part_of(torch.tensor(shuffled), "multiset"))
    assert torch.equal(part_of(torch.tensor(rows), "multiset"), part_of(torch.tensor(rows).sort(-1).values))
