"""Gradients against formulas that do not come from this package: differentiated by hand, finite differences, and PyTorch's own functions.

It needs torch, pytest and the package, no more, so that it can be run with every torch that the package allows: `pytest --noconftest tests/test_gradients.py`.
The cases are the ones in which something is tied: one visible key, a saturated row, equal scores, constant vectors, a row with nothing to look at."""

import ast
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import gradcheck

import minigpt
from minigpt.attention import MultiHeadAttention, attention_weights, causal_mask, sdpa
from minigpt.layers import Linear, dropout, embedding, gelu, gelu_tanh, layer_norm, linear, softmax
from minigpt.model import GPT, GPTConfig, cross_entropy, next_token_loss
from minigpt.speed import by_hand, fused, verification
from minigpt.training import TrainConfig, train

INF = math.inf
ROWS = {
    "one score alone": [[3.0]],
    "one visible score": [[3.0, -INF], [-INF, -2.0]],
    "a saturated row": [[800.0, 1.0, -5.0], [0.0, 60.0, 0.0]],
    "equal scores": [[2.0, 2.0, 2.0], [7.0, 7.0, 1.0]],
    "nothing to look at": [[-INF, -INF, -INF], [0.5, -INF, 1.5]],
    "nothing special": [[0.3, -1.2, 2.2], [-0.1, 0.9, 0.4]],
}
rows = pytest.mark.parametrize("scores", ROWS.values(), ids=ROWS.keys())


def doubles(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradients(f, *inputs: Tensor, upstream: Tensor) -> tuple[Tensor, ...]:
    "What autograd gives for our function: the gradients of the inputs, given that of the output."
    inputs = tuple(x.clone().requires_grad_() for x in inputs)
    return torch.autograd.grad((f(*inputs) * upstream).sum(), inputs)


def near(ours, theirs, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


# Differentiated by hand. Sums run over plain Python numbers, so that not even torch's reductions are relied upon.


def shares_of(row: list[float]) -> list[float]:
    peak = max(row)
    if peak == -INF: return [0.0] * len(row)
    powers = [math.exp(x - peak) for x in row]
    return [power / math.fsum(powers) for power in powers]


def softmax_backward(row: list[float], upstream: list[float]) -> list[float]:
    "y_i (g_i - sum of g_j y_j)"
    y = shares_of(row)
    mean = math.fsum(g * share for g, share in zip(upstream, y))
    return [share * (g - mean) for g, share in zip(upstream, y)]


@rows
def test_softmax(scores):
    x = torch.tensor(scores, dtype=torch.float64)
    g = doubles(*x.shape) + torch.tensor(5.0)
    near(softmax(x), torch.tensor([shares_of(row) for row in scores], dtype=torch.float64))
    expected = [softmax_backward(row, upstream) for row, upstream in zip(scores, g.tolist())]
    near(gradients(softmax, x, upstream=g)[0], torch.tensor(expected, dtype=torch.float64))
    near(gradients(lambda x: softmax(x, 0), x.T, upstream=g.T)[0].T, torch.tensor(expected, dtype=torch.float64))


def test_the_smallest_case_that_was_wrong():
    "The gradient was 5: with one visible key the sum is exactly 1, the border of a clamp."
    s = torch.tensor([[3.0, -INF]], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad((softmax(s) * torch.tensor([5.0, 1.0])).sum(), s)
    assert gradient.tolist() == [[0.0, 0.0]]


@rows
def test_softmax_by_finite_differences(scores):
    "Hidden scores stay hidden; the others are moved a little to both sides."
    x = torch.tensor(scores, dtype=torch.float64)
    hidden = x == -INF
    assert gradcheck(lambda x: softmax(x.masked_fill(hidden, -INF)), x.masked_fill(hidden, 0.0).requires_grad_())


@rows
def test_cross_entropy(scores):
    "(softmax - one at the target) / number of targets that count"
    if any(max(row) == -INF for row in scores): return
    x = torch.tensor(scores, dtype=torch.float64)
    targets = [row.index(max(row)) for row in scores]
    loss = -math.fsum(math.log(shares_of(row)[y]) for row, y in zip(scores, targets)) / len(scores)
    expected = [[(share - (i == y)) / len(scores) for i, share in enumerate(shares_of(row))] for row, y in zip(scores, targets)]
    near(cross_entropy(x, torch.tensor(targets)).item(), loss)
    near(gradients(lambda x: cross_entropy(x, torch.tensor(targets)), x, upstream=torch.tensor(1.0))[0], torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("ignored", [0, 1, 2])
def test_cross_entropy_with_targets_left_out(ignored):
    x, targets = doubles(4, 5, seed=1) * 3, [4, 0, 2, 2]
    counted = [i for i in range(4) if i >= ignored]
    y = torch.tensor([t if i in counted else -100 for i, t in enumerate(targets)])
    expected = torch.zeros(4, 5, dtype=torch.float64)
    for i in counted:
        for j, share in enumerate(shares_of(x[i].tolist())): expected[i, j] = (share - (j == targets[i])) / len(counted)
    near(gradients(lambda x: cross_entropy(x, y), x, upstream=torch.tensor(1.0))[0], expected)


@pytest.mark.parametrize("row", [[1.0, 0.0, 0.0, 0.0], [7.0] * 5, [0.0] * 3, [-2.0], [1e4, 1e4 + 1, 1e4 - 2], [0.2, -0.7]])
def test_layer_norm(row):
    "With c the normalised vector and h = g * gamma: (h - mean(h) - c mean(h c)) / deviation."
    d, eps = len(row), 1e-5
    gamma, beta, g = (doubles(d, seed=s).tolist() for s in (1, 2, 3))
    mean = math.fsum(row) / d
    deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in row) / d + eps)
    c = [(x - mean) / deviation for x in row]
    h = [up * scale for up, scale in zip(g, gamma)]
    along, level = math.fsum(a * b for a, b in zip(h, c)) / d, math.fsum(h) / d
    expected = [(up - level - place * along) / deviation for up, place in zip(h, c)]
    inputs = [torch.tensor(numbers, dtype=torch.float64) for numbers in (row, gamma, beta)]
    ours = gradients(layer_norm, *inputs, upstream=torch.tensor(g, dtype=torch.float64))
    near(layer_norm(*inputs), torch.tensor([p * s + b for p, s, b in zip(c, gamma, beta)], dtype=torch.float64), 1e-9)
    for found, wanted in zip(ours, (expected, [up * p for up, p in zip(g, c)], g)):
        near(found, torch.tensor(wanted, dtype=torch.float64), 1e-9 * max(1, 1 / deviation))


MASKS = {
    "causal": causal_mask(3),
    "only oneself": torch.eye(3) > 0,
    "one row blind": torch.tensor([[True, False, True], [False, False, False], [False, True, False]]),
    "all": torch.ones(3, 3) > 0,
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("size", [1.0, 30.0])
def test_attention(mask, size):
    "dV = W'g; dW = gV'; dS = softmax backward; dQ = dS K scale; dK = dS'Q scale."
    q, k, v, g = (doubles(3, 4, seed=s) * size for s in range(4))
    scale = 0.5
    s = [[math.fsum(a * b for a, b in zip(q[i].tolist(), k[j].tolist())) * scale if mask[i, j] else -INF for j in range(3)] for i in range(3)]
    w = torch.tensor([shares_of(row) for row in s], dtype=torch.float64)
    ds = torch.tensor([softmax_backward(row, up) for row, up in zip(s, (g @ v.T).tolist())], dtype=torch.float64)
    ours = gradients(lambda q, k, v: sdpa(q[None, None], k[None, None], v[None, None], mask)[0, 0], q, k, v, upstream=g)
    for found, wanted in zip(ours, (ds @ k * scale, ds.T @ q * scale, w.T @ g)): near(found, wanted, 1e-12 * size**3)
    near(attention_weights(q[None, None], k[None, None], mask)[0, 0], w)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_attention_by_finite_differences(mask):
    q, k, v = (doubles(1, 2, 3, 4, seed=s).requires_grad_() for s in range(3))
    assert gradcheck(lambda q, k, v: sdpa(q, k, v, mask), (q, k, v))


def test_the_other_layers_by_finite_differences():
    "At places where something is tied or flat, too: zeros for the GELUs, an id that occurs twice."
    x = torch.cat([doubles(2, 5), torch.zeros(1, 5, dtype=torch.float64)])
    weight, bias = doubles(4, 5, seed=1), doubles(4, seed=2)
    assert gradcheck(linear, [t.clone().requires_grad_() for t in (x, weight, bias)])
    assert gradcheck(lambda w: embedding(torch.tensor([[1, 1], [3, 0]]), w), weight.clone().requires_grad_())
    for f in (gelu, gelu_tanh): assert gradcheck(f, x.clone().requires_grad_())

    def dropped(x):
        torch.manual_seed(3)
        return dropout(x, 0.4)

    assert gradcheck(dropped, x.clone().requires_grad_())


def test_multi_head_attention_by_finite_differences():
    torch.manual_seed(0)
    attention = MultiHeadAttention(6, 2, 4).double()
    assert gradcheck(attention, doubles(2, 4, 6).requires_grad_())


@pytest.mark.parametrize("size", [1.0, 25.0])
def test_a_whole_model_by_finite_differences(size):
    "The loss's slope along some random directions through all weights; large weights saturate the softmax."
    torch.manual_seed(0)
    model = GPT(GPTConfig(7, 5, 8, 2, 2, dropout=0.0)).double()
    for p in model.parameters(): p.data *= size
    idx = torch.tensor([[3, 1, 4, 1, 5], [2, 6, 5, 3, 5]])
    def loss(): return next_token_loss(model, idx, idx.roll(-1, 1))
    slopes = torch.autograd.grad(loss(), list(model.parameters()))
    for seed in range(5):
        way = [doubles(*p.shape, seed=seed) for p in model.parameters()]
        step = 1e-6 / math.sqrt(sum(w.square().sum().item() for w in way))
        ends = []
        for sign in (1, -2):
            with torch.no_grad():
                for p, w in zip(model.parameters(), way): p += sign * step * w
                ends.append(loss().item())
        with torch.no_grad():
            for p, w in zip(model.parameters(), way): p += step * w
        along = sum((s * w).sum().item() for s, w in zip(slopes, way))
        assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(along, rel=1e-4, abs=1e-5 * math.sqrt(sum(w.numel() for w in way)))


# A training, step by step, against a model written in torch's own functions


def theirs(p: dict[str, Tensor], config: GPTConfig, idx: Tensor) -> Tensor:
    "The logits of a GPT, by torch.nn.functional alone."
    C = config.d_model
    x = F.embedding(idx, p["token_embedding.weight"]) + p["position_embedding.weight"][: idx.shape[1]]
    for i in range(config.n_layers):
        b = f"blocks.{i}."
        y = F.layer_norm(x, (C,), p[b + "ln_1.weight"], p[b + "ln_1.bias"])
        qkv = F.linear(y, p[b + "attn.qkv.weight"], p[b + "attn.qkv.bias"])
        q, k, v = (t.unflatten(-1, (config.n_heads, -1)).transpose(1, 2) for t in qkv.split(C, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.linear(y, p[b + "attn.proj.weight"], p[b + "attn.proj.bias"])
        y = F.layer_norm(x, (C,), p[b + "ln_2.weight"], p[b + "ln_2.bias"])
        y = F.gelu(F.linear(y, p[b + "ff.fc.weight"], p[b + "ff.fc.bias"]))
        x = x + F.linear(y, p[b + "ff.proj.weight"], p[b + "ff.proj.bias"])
    return F.linear(F.layer_norm(x, (C,), p["ln_f.weight"], p["ln_f.bias"]), p["lm_head.weight"])


SMALL = GPTConfig(10, 11, 16, 2, 2, dropout=0.0)
SETTINGS = TrainConfig(steps=60, lr=1e-2, warmup=5, weight_decay=0.1, clip=1.0)


def digits(step: int) -> tuple[Tensor, Tensor]:
    "Six digits and their sorted order; only the sorted ones count."
    rows = torch.randint(10, (16, 6), generator=torch.Generator().manual_seed(step))
    text = torch.cat([rows, rows.sort(-1).values], 1)
    return text[:, :-1], text[:, 1:].masked_fill(torch.arange(11) < 5, -100)


def their_losses(model: GPT) -> list[float]:
    "The losses of the same training with torch's functions, optimizer and clipping."
    p = {name: w.detach().clone().requires_grad_() for name, w in model.named_parameters()}
    groups = [[w for n, w in p.items() if (w.ndim >= 2 and "embedding" not in n) is decays] for decays in (True, False)]
    adamw = torch.optim.AdamW([{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0.0}], betas=SETTINGS.betas, eps=1e-8)
    losses = []
    for step in range(SETTINGS.steps):
        idx, targets = digits(step)
        loss = F.cross_entropy(theirs(p, SMALL, idx).flatten(0, 1), targets.flatten())
        losses.append(loss.item())
        adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(p.values(), SETTINGS.clip)
        warm, progress = step < SETTINGS.warmup, (step - SETTINGS.warmup) / (SETTINGS.steps - SETTINGS.warmup)
        for group in adamw.param_groups: group["lr"] = SETTINGS.lr * ((step + 1) / (SETTINGS.warmup + 1) if warm else 0.5 * (1 + math.cos(math.pi * progress)))
        adamw.step()
    return losses


def test_a_training_by_hand_is_the_one_by_torch_in_float64():
    torch.manual_seed(0)
    model = GPT(SMALL).double()
    reference = their_losses(model)
    ours = train(model, digits, SETTINGS, progress=False)
    assert ours == pytest.approx(reference, rel=1e-8)
    assert ours[0] == pytest.approx(math.log(10), abs=0.1) and sum(ours[-5:]) / 5 < 1.75


@pytest.mark.parametrize("change", [by_hand, fused])
def test_a_training_in_float32_follows_the_one_in_float64(change):
    torch.manual_seed(0)
    model = GPT(SMALL)
    reference = their_losses(in_float64(model))
    ours = train(change(model), digits, SETTINGS, progress=False)
    assert ours == pytest.approx(reference, abs=2e-3)


def in_float64(model: GPT) -> GPT:
    "A copy with numbers of 64 bits."
    other = GPT(model.config)
    other.load_state_dict(model.state_dict())
    return other.double()


def test_verify_finds_every_part_equal():
    assert {row["verdict"] for row in verification()} == {"equal"}


def test_verify_has_the_case_of_one_visible_key(monkeypatch):
    "With the softmax that was wrong, `minigpt verify` says so, whatever this torch does at a clamp's border."

    class Passed(torch.autograd.Function):
        "A sum whose gradient is lost where it is exactly 1, as behind the clamp of torch 2.14."

        @staticmethod
        def forward(ctx, x):
            total = x.sum(-1, keepdim=True)
            ctx.save_for_backward(x, total)
            return total

        @staticmethod
        def backward(ctx, g):
            x, total = ctx.saved_tensors
            return torch.where(total > 1, g, 0.0).expand_as(x)

    def tied(x, dim=-1):
        weights = (x - x.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).min)).exp()
        return weights / Passed.apply(weights)

    import minigpt.attention
    import minigpt.speed

    for module in (minigpt.attention, minigpt.speed): monkeypatch.setattr(module, "softmax", tied)
    bad = {row["part"] for row in verification() if row["verdict"] != "equal"}
    assert {"softmax", "softmax, one visible", "attention", "multi-head attention"} <= bad


# Nothing else of the kind


TIES = {"clamp", "clamp_", "clamp_min", "clamp_max", "clip", "maximum", "minimum", "amax", "amin", "aminmax", "abs", "relu", "sign", "hardtanh", "where", "fmax", "fmin"}
LOOKED_AT = {  # module, definition, name -> why no gradient depends on how a tie is broken there
    ("layers", "softmax", "amax"): "of scores that are detached",
    ("layers", "check_ids", "aminmax"): "of ids",
    ("model", "cross_entropy", "amax"): "of scores that are detached",
    ("generation", "sample", "amax"): "sampling is not differentiated, and the same number is subtracted from all",
    ("generation", "most_probable", "where"): "of ids",
    ("training", "clip_gradients", "clamp"): "a factor for gradients that are there already",
    ("language", "orthogonalized", "clamp"): "part of an optimizer",
    ("speed", "optimizer_difference", "abs"): "a comparison",
    ("checks", "largest_difference", "abs"): "a comparison",
    ("sorting", "part_of", "where"): "of ids",
    ("sorting", "random_rows", "where"): "of ids",
    ("addition", "*", "where"): "of ids",
    ("addition", "*", "maximum"): "of ids",
    ("grokking", "*", "minimum"): "decides which pairs are shown",
}


def test_every_operation_that_can_tie_was_looked_at():
    "A new clamp, maximum or where in the package has to be entered in the list above, with the reason why its border does not matter."
    unknown = []
    for path in sorted(Path(minigpt.__file__).parent.glob("*.py")):
        for definition in ast.parse(path.read_text(encoding="utf-8")).body:
            name = getattr(definition, "name", "")
            for node in ast.walk(definition):
                called = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
                known = {(path.stem, name, called), (path.stem, "*", called)} & LOOKED_AT.keys()
                if called in TIES and not known: unknown.append(f"{path.stem}.{name}: {called}")
    assert unknown == []
