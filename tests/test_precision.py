"""Numbers of 16 bits: what is summed is summed in float32, so that results are as near to those in float64 as the numbers that went in allow."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from minigpt.attention import attention_weights, causal_mask, sdpa
from minigpt.generation import keep_top_p, sample
from minigpt.layers import layer_norm, softmax
from minigpt.model import GPT, GPTConfig, cross_entropy, next_token_loss, residual_norms

HALVES = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}  # dtype -> largest relative error of rounding a number to it
halves = pytest.mark.parametrize("dtype, unit", HALVES.items(), ids=["float16", "bfloat16"])


@halves
@pytest.mark.parametrize("size", [1.0, 300.0, 10_000.0])
def test_layer_norm_of_large_numbers(dtype, unit, size):
    "In float16 the squares of 300 are infinite, and every output was 0."
    x = (size * torch.randn(4, 64)).to(dtype)
    weight, bias = torch.randn(64).to(dtype), torch.randn(64).to(dtype)
    y = layer_norm(x, weight, bias)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), F.layer_norm(x.double(), (64,), weight.double(), bias.double()), rtol=2 * unit, atol=2 * unit)


@halves
@pytest.mark.parametrize("size", [1.0, 40.0, 200.0])
def test_attention_with_large_scores(dtype, unit, size):
    "In float16 these scores are infinite, and every output was NaN."
    q, k, v = (torch.randn(1, 2, 7, 64).to(dtype) for _ in range(3))
    q, k = size * q, size * k
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    ours = sdpa(q, k, v, causal_mask(7))
    assert ours.dtype == dtype and attention_weights(q, k).dtype == dtype
    torch.testing.assert_close(ours.double(), exact, rtol=4 * unit, atol=4 * unit)


@halves
def test_softmax_over_many(dtype, unit):
    "A sum of 100,000 small numbers ends early if it is taken in 16 bits."
    x = torch.randn(2, 100_000).to(dtype)
    y = softmax(x)
    assert y.dtype == dtype
    assert y.double().sum(-1).sub(1).abs().max() < 4 * unit
    torch.testing.assert_close(y.double(), torch.softmax(x.double(), -1), rtol=2 * unit, atol=1e-7)


@halves
def test_cross_entropy(dtype, unit):
    "The loss comes in float32, as it does under autocast: eight binary digits are too few to see it fall."
    x, y = (5 * torch.randn(200, 1000)).to(dtype), torch.randint(1000, (200,))
    loss = cross_entropy(x, y)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), F.cross_entropy(x.double(), y), rtol=1e-5, atol=1e-5)


@halves
@pytest.mark.parametrize("large", [0.0, 400.0])
def test_a_model_with_one_large_channel(dtype, unit, large):
    "Its logits were wrong by all of their size."
    config = GPTConfig(17, 12, 32, 4, 2, dropout=0.0)
    model = GPT(config)
    with torch.no_grad(): model.token_embedding.weight[:, 3] += large
    idx = torch.randint(17, (3, 12))
    model.to(dtype)
    exact = GPT(config)
    exact.load_state_dict(model.state_dict())
    logits, wanted = model(idx).double(), exact.double()(idx)
    assert (logits - wanted).norm() < 12 * unit * wanted.norm()
    for (place, norm), right in zip(residual_norms(model, idx).items(), residual_norms(exact, idx).values()): assert norm == pytest.approx(right, rel=12 * unit), place


def test_under_autocast_the_norms_and_the_loss_stay_in_float32():
    model = GPT(GPTConfig(17, 12, 32, 4, 2, dropout=0.0))
    idx = torch.randint(17, (3, 12))
    with torch.autocast("cpu", torch.bfloat16):
        assert model.ln_f(torch.randn(2, 32).bfloat16()).dtype == torch.float32
        loss = next_token_loss(model, idx, idx)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, next_token_loss(model, idx, idx), rtol=0.01, atol=0.01)


@halves
def test_sampling_in_16_bits_meets_the_probabilities(dtype, unit):
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).to(dtype).expand(50_000, -1)
    drawn = torch.bincount(sample(logits, generator=torch.Generator().manual_seed(0)), minlength=4) / 50_000
    assert (drawn - torch.softmax(logits[0].double(), -1)).abs().max() < 0.01


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("p", [1e-300, 1e-46, 1e-38, 1e-9])
def test_the_best_token_always_stays(dtype, p):
    "A top_p that float32 rounds to zero masked every token."
    kept = keep_top_p(torch.tensor([[0.0, 3.0, 1.0], [2.0, 2.0, -9.0]]).to(dtype), p) > -torch.inf
    assert kept.tolist() == [[False, True, False], [True, False, False]]
    assert sample(torch.tensor([[0.0, 3.0, 1.0]], dtype=dtype), top_p=p).tolist() == [1]


@pytest.mark.unenforced
@pytest.mark.parametrize("temperature", [0, 1e-3, 1.0])
@pytest.mark.parametrize("bad", [[torch.nan, 1.0, 0.0], [torch.inf, 1.0, 0.0], [-torch.inf] * 3])
def test_what_cannot_be_sampled_from_is_refused_at_every_temperature(temperature, bad):
    "A greedy choice from a row of NaN wrote zeros without a word."
    with pytest.raises(ValueError, match="logits must be finite at their largest, got "):
        sample(torch.tensor([[1.0, 2.0, 3.0], bad]), temperature)


@pytest.mark.unenforced
@pytest.mark.parametrize("name, call", [
    ("temperature", lambda: sample(torch.zeros(1, 3), "0.8")),
    ("top_p", lambda: sample(torch.zeros(1, 3), top_p="0.9")),
    ("temperature", lambda: sample(torch.zeros(1, 3), None)),
    ("dropout", lambda: GPTConfig(dropout=None)),
    ("dropout", lambda: GPTConfig(dropout="0.1")),
    ("dropout", lambda: GPTConfig(dropout=True)),
    ("dropout", lambda: dataclasses.replace(GPTConfig(), dropout=[0.1])),
])
def test_what_is_no_number_is_refused_by_name(name, call):
    with pytest.raises(TypeError, match=f"{name} must be a number, got "): call()


@pytest.mark.unenforced
def test_nested_and_sparse_tensors_are_refused_by_name():
    ragged = torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([3])])
    model = GPT(GPTConfig(9, 6, 8, 2, 1))
    with pytest.raises(TypeError, match="idx must be a plain tensor, got a nested or sparse one"): model(ragged)
    with pytest.raises(TypeError, match="idx must be a plain tensor"): model(torch.tensor([[1, 2]]).to_sparse())
    with pytest.raises(TypeError, match="ids must be a plain tensor"): model.token_embedding(ragged)
    q = torch.nested.nested_tensor([torch.randn(2, 3, 4), torch.randn(2, 2, 4)])
    with pytest.raises(TypeError, match="[qk] must be a plain tensor"): sdpa(q, q, q)
    with pytest.raises(TypeError, match="x must be a plain tensor"): model.ln_f(torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(1, 8)]))
