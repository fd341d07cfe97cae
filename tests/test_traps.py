"""The traps that similar projects fell into (public reports), each one a test of ours. The docstrings name the report."""

import ast
import dataclasses
import importlib
import inspect
import json
import math
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import jaxtyping
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

import minigpt
from minigpt.attention import MultiHeadAttention, attention_weights, causal_mask, join_heads, sdpa, split_heads
from minigpt.checks import match
from minigpt.generation import generate
from minigpt.layers import GELU, LayerNorm, dropout, embedding, gelu, gelu_tanh, layer_norm, softmax
from minigpt.model import GPT, PRESETS, FeedForward, GPTConfig, next_token_loss
from minigpt.sorting import HELD_OUT, SORT_CONFIG, TRAIN, VALIDATION, Run, SortTask, all_rows, load_sorter, part_of, save_sorter, sorter_origin
from minigpt.training import TrainConfig, lr_at, new_optimizer, train

SMALL = GPTConfig(vocab_size=9, context_length=6, d_model=16, n_heads=2, n_layers=2, dropout=0.2)


def python(code: str, *options: str, program: str = sys.executable, **variables: str) -> str:
    "What a program prints that runs in a process of its own."
    env = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG", "PYTHON"))} | {"PYTHONPATH": str(Path(minigpt.__file__).parent.parent)} | variables
    run = subprocess.run([program, *options, "-c", code], env=env, capture_output=True, timeout=120)
    assert run.returncode == 0, run.stderr.decode("utf-8", "replace")
    return run.stdout.decode("utf-8")


def numbers_of(rows: Tensor) -> Tensor:
    "The rows read as decimal numbers, so that a set of rows is a set of places in a table."
    return (rows * 10 ** torch.arange(rows.shape[1] - 1, -1, -1)).sum(-1)


# Data and splits


SPLIT = """
import hashlib
from minigpt.sorting import SortTask, all_rows, part_of
parts = [part_of(all_rows(), by).numpy().tobytes() for by in ("sequence", "multiset")]
batches = [SortTask().batch_at(step, seed=3)[0].numpy().tobytes() for step in (0, 1, 1999)]
print([hashlib.sha256(b).hexdigest() for b in parts + batches])
"""


@pytest.mark.parametrize("hash_seed", ["1", "random"])
def test_the_split_is_the_same_in_every_process(hash_seed: str, capsys):
    "karpathy/minGPT demo.ipynb: Python's salted hash gave every process another split. Ours, and the batches, are the same under any PYTHONHASHSEED."
    exec(SPLIT, {})
    assert python(SPLIT, PYTHONHASHSEED=hash_seed) == capsys.readouterr().out


@pytest.mark.parametrize("by", ["sequence", "multiset"])
def test_the_parts_cover_all_inputs_and_share_none(by: str):
    "karpathy/minGPT demo.ipynb: each of the 10^6 inputs lies in exactly one part; the shares are near 1/4 and 1/16."
    count = torch.zeros(3, 10**6, dtype=torch.long)
    for part in (TRAIN, VALIDATION, HELD_OUT): count[part, numbers_of(SortTask(by=by).rows(part))] += 1
    assert (count.sum(0) == 1).all()
    near = 5e-3 if by == "sequence" else 3e-2  # multisets: 5,005 of them, the large ones of 720 orders each
    assert (count.sum(1) / 1e6).tolist() == pytest.approx([11 / 16, 1 / 16, 1 / 4], abs=near)


def test_training_never_draws_a_held_out_row():
    "karpathy/nanochat PR 306: test data repeated train data. Asserted on the examples of a whole run and of odd seeds, not argued from seeds."
    task, trains = SortTask(), torch.zeros(10**6, dtype=torch.bool)
    trains[numbers_of(task.rows(TRAIN))] = True
    seeds = [(0, range(SORT_CONFIG.steps)), *((seed, range(20)) for seed in (1, 5, -5, -6, 2**31))]
    drawn = torch.cat([numbers_of(task.batch_at(step, seed)[0][:, :6]) for seed, steps in seeds for step in steps])
    assert len(drawn) > 64 * SORT_CONFIG.steps and trains[drawn].all()


def test_all_orders_of_the_same_digits_stay_together():
    "karpathy/nanochat PR 306, the stricter kind: by multiset, no held-out answer is the answer of any training row, over all 10^6 inputs."
    rows, parts = all_rows(), part_of(all_rows(), "multiset")
    answers = numbers_of(rows.sort(-1).values)
    first = torch.full((10**6,), -1).scatter(0, answers, parts)
    assert torch.equal(first[answers], parts) and len(answers.unique()) == math.comb(15, 6)


def test_an_unknown_id_is_named():
    "karpathy/nanoGPT 273, 434, 169: an unknown id gave a bare KeyError. Ours names the id and says which there are; the empty prompt has its own sentence."
    model = GPT(SMALL)
    for bad in (9, -1):
        with pytest.raises(ValueError, match=rf"0\.\.8.*{bad}"): model(torch.tensor([[1, bad, 2]]))
    with pytest.raises(ValueError, match="at least one"): generate(model, torch.zeros(1, 0, dtype=torch.long), 1)


def batch_at(step: int) -> tuple[Tensor, Tensor]:
    text = torch.randint(9, (4, 7), generator=torch.Generator().manual_seed(step))
    return text[:, :-1], text[:, 1:]


@pytest.mark.parametrize("cut", [1, 5, 9])
def test_a_resumed_run_is_the_run_itself(cut: int, tmp_path: Path):
    "karpathy/nanoGPT 467: resuming replayed batches. N steps, save, load into new objects, the rest: weights, averages and losses as in one go, bit for bit."
    config = TrainConfig(steps=10, lr=1e-2, warmup=3, weight_decay=0.3)

    def fresh(seed: int) -> tuple:
        torch.manual_seed(seed)
        model = GPT(dataclasses.replace(SMALL, dropout=0.0))
        return model, new_optimizer(model, config)

    (whole, one), (part, two), (rest, three) = fresh(0), fresh(0), fresh(1)
    losses = train(whole, batch_at, config, one)
    before = train(part, batch_at, config, two, stop=cut)
    torch.save({"model": part.state_dict(), "optimizer": two.state_dict()}, tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    rest.load_state_dict(saved["model"]), three.load_state_dict(saved["optimizer"])
    assert before + train(rest, batch_at, config, three, start=cut) == losses
    assert all(torch.equal(a, b) for a, b in zip(whole.state_dict().values(), rest.state_dict().values()))
    torch.testing.assert_close(one.state_dict(), three.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_k": 4}, {"top_p": 0.8}])
def test_a_seeded_sample_stands_alone(options: dict):
    "karpathy/nanoGPT 426: a sample depended on how many came before. With a seed it depends on nothing else, and the global generator stays as it was."
    model, prompt = GPT(SMALL), torch.tensor([[1, 2], [3, 4]])
    first = generate(model, prompt, 20, seed=7, **options)
    generate(model, prompt, 13)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    assert torch.equal(generate(model, prompt, 20, seed=7, **options), first) and torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(generate(model, prompt, 20, seed=8, **options), first)
    assert torch.equal(torch.get_rng_state(), state) and not torch.equal(generate(model, prompt, 20), generate(model, prompt, 20))


def test_files_are_read_and_written_as_utf8(plain: tuple[str, str]):
    "karpathy/nanoGPT PR 429: files opened without an encoding. Every module imports and the sorter's file is read under LC_ALL=C, and no call leaves the encoding open."
    names = [m.name for m in pkgutil.iter_modules(minigpt.__path__)]
    code = f"import importlib, locale, minigpt\nfor n in {names}: importlib.import_module('minigpt.' + n)\nminigpt.sorting.load_sorter()\nprint(locale.getencoding())"
    said = python(code, "-X", "utf8=0", program=plain[0], PYTHONPATH=plain[1], LC_ALL="C", PYTHONCOERCECLOCALE="0", PYTHONIOENCODING="utf-8")
    assert "UTF-8" not in said.upper(), "the process was to run without UTF-8"
    texts = {"read_text", "write_text"}
    for path in Path(minigpt.__file__).parent.glob("*.py"):
        for call in (n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.Call)):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            assert (name not in texts and getattr(call.func, "id", "") != "open") or any(getattr(a, "value", "") == "utf-8" for a in (*call.args, *(k.value for k in call.keywords))), f"{path.name}:{call.lineno}"


# Layers and masks


def test_layer_norm_divides_by_the_biased_deviation():
    "harvardnlp/annotated-transformer 122, codertimo/BERT-pytorch 30: the unbiased deviation, eps outside the root. [1,0,0,0] gives 1.732, not 1.5."
    x = torch.tensor([1.0, 0, 0, 0], dtype=torch.float64)
    y = LayerNorm(4).double()(x)
    assert y[0].item() == pytest.approx((1 - 1 / 4) / math.sqrt((1 / 4) * (3 / 4) + 1e-5), abs=1e-12) == pytest.approx(1.732, abs=1e-3)
    tiny = 1e-3 * x  # variance 1.9e-7, far below eps: where eps stands decides
    assert LayerNorm(4).double()(tiny)[0].item() == pytest.approx(0.75e-3 / math.sqrt(1e-6 * 3 / 16 + 1e-5), abs=1e-12)


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("kind", ["random", "constant", "mean 1e4", "constant at 1e4"])
def test_layer_norm_at_small_widths_and_large_means(width: int, kind: str):
    "harvardnlp/annotated-transformer 122: equal to the library's, with gradients, at widths 2, 3, 4, on constant rows, at mean 1e4, and in float32, too."
    x = {"random": torch.randn(5, width), "constant": torch.full((5, width), 3.0), "mean 1e4": torch.randn(5, width) + 1e4, "constant at 1e4": torch.full((5, width), 1e4)}[kind]
    weight, bias = torch.randn(width), torch.randn(width)
    match(layer_norm, lambda x, w, b: F.layer_norm(x, (width,), w, b), x, weight, bias, tolerance=1e-8)
    torch.testing.assert_close(layer_norm(x, weight, bias), F.layer_norm(x, (width,), weight, bias), rtol=1e-5, atol=1e-5 if "1e4" not in kind else 1e-2)
    if "constant" in kind: assert torch.equal(layer_norm(x, weight, bias), bias.expand(5, width))


def test_the_two_gelus_are_told_apart():
    "karpathy/nanoGPT 2, litgpt PR 1004: tanh and exact GELU swapped. They differ by up to 5e-4; each equals its own reference and not the other's."
    x = torch.linspace(-4, 4, 801, dtype=torch.float64)
    exact, tanh = F.gelu(x), F.gelu(x, approximate="tanh")
    assert 4e-4 < (exact - tanh).abs().max() < 5e-4
    for ours, right, wrong in [(gelu, exact, tanh), (gelu_tanh, tanh, exact), (GELU(), exact, tanh), (GELU("tanh"), tanh, exact)]:
        assert (ours(x) - right).abs().max() < 1e-14 and (ours(x) - wrong).abs().max() > 4e-4
    feed_forward = FeedForward(16, 64)  # the model's own is the exact one
    assert feed_forward.act.approximate == "none" == GPT(GPTConfig()).blocks[0].ff.act.approximate


@pytest.mark.parametrize("which", ["weight_dropout", "out_dropout"])
def test_attention_dropout_is_off_in_evaluation_and_on_again_after(which: str):
    "karpathy/nanoGPT PR 240: attention dropout stayed active in evaluation. Ours is off there, whichever of the two it is, and on again in training."
    attn, x = MultiHeadAttention(16, 2, 8, dropout=0.5), torch.randn(2, 8, 16)
    other = {"weight_dropout": "out_dropout", "out_dropout": "weight_dropout"}[which]
    getattr(attn, other).p = 0.0
    attn.eval()
    still = attn(x)
    assert torch.equal(attn(x), still)
    getattr(attn, which).p = 0.0
    assert torch.equal(attn.train()(x), still), "without dropout, training and evaluation agree"
    getattr(attn, which).p = 0.5
    assert not torch.equal(attn(x), attn(x)) and torch.equal(attn.eval()(x), still)
    attn.train()
    assert not torch.equal(attn(x), attn(x))


def test_dropout_acts_in_the_stream_on_the_weights_and_after_each_sublayer():
    "karpathy/nanoGPT PR 240, the whole kind: each dropout of the model by itself makes training random, and none of them evaluation."
    model, idx = GPT(SMALL), torch.randint(9, (2, 6))
    places = {n: m for n, m in model.named_modules() if type(m).__name__ == "Dropout"}
    assert len(places) == 1 + 3 * SMALL.n_layers
    for chosen in places:
        for name, module in places.items(): module.p = 0.5 if name == chosen else 0.0
        assert not torch.equal(model.train()(idx), model(idx)), f"{chosen} does nothing"
        assert torch.equal(model.eval()(idx), model(idx)), f"{chosen} acts in evaluation"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_row_that_may_look_at_nothing_gives_zeros(dtype: torch.dtype):
    "pytorch 103963, 103749: a row with everything masked gave NaN. Ours gives zeros, as torch's attention does, and its gradients are numbers."
    q, k, v = (torch.randn(1, 2, 3, 4, dtype=dtype, requires_grad=True) for _ in range(3))
    mask = torch.tensor([[True, False, True], [False, False, False], [False, True, False]])
    out = sdpa(q, k, v, mask)
    assert (out[:, :, 1] == 0).all() and (attention_weights(q, k, mask)[:, :, 1] == 0).all()
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, attn_mask=mask), rtol=2e-2, atol=2e-2)
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)): assert gradient.isfinite().all()
    with torch.autograd.set_detect_anomaly(True): sdpa(q, k, v, mask).sum().backward()


def test_a_softmax_over_nothing_but_minus_infinity_is_zero():
    "pytorch 103963, where it starts: the softmax of a row of only -inf."
    row = torch.full((2, 3), -torch.inf, requires_grad=True)
    assert torch.equal(softmax(row), torch.zeros(2, 3)) and torch.equal(torch.autograd.grad(softmax(row).sum(), row)[0], torch.zeros(2, 3))


def test_no_loss_is_absurdly_good():
    "jadore801120/attention-is-all-you-need-pytorch 19: a leaking mask shows as absurd accuracy. On random text, which nothing can predict, training stays at ln(9)."
    model = GPT(dataclasses.replace(SMALL, dropout=0.0))
    fresh = lambda step: batch_at(step + 10)  # noqa: E731
    train(model, fresh, TrainConfig(steps=120, lr=1e-2, warmup=10))
    text = torch.randint(9, (500, 7))
    assert next_token_loss(model, text[:, :-1], text[:, 1:]).item() > math.log(9) - 0.02


def test_shapes_in_signatures_are_enforced():
    "jaymody/picoGPT commit 5c13762: shape comments with dimensions swapped. Ours are checked while testing: what does not fit is refused by the signature itself."
    q, k, v = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 6, 4), torch.randn(2, 3, 6, 7)
    assert sdpa(q, k, v).shape == (2, 3, 5, 7)
    wrong = [lambda: sdpa(q, k, v.transpose(2, 3)), lambda: sdpa(q[0], k, v), lambda: sdpa(q, k, v, torch.ones(6, 5, dtype=torch.bool)), lambda: layer_norm(q, torch.ones(5)),
             lambda: join_heads(q[0]), lambda: split_heads(q, 2), lambda: embedding(q, torch.ones(3, 4)), lambda: next_token_loss(GPT(SMALL), torch.zeros(2, 3).long(), torch.zeros(3, 2).long())]
    for call in wrong:
        with pytest.raises(jaxtyping.TypeCheckError): call()



def test_every_signature_says_what_it_takes():
    "jaymody/picoGPT commit 5c13762: a shape can be enforced only where it is written, so no parameter of a public function or forward goes without its type."
    untyped = []
    for module in (importlib.import_module(f"minigpt.{m.name}") for m in pkgutil.iter_modules(minigpt.__path__)):
        for name, found in ((n, getattr(module, n)) for n in getattr(module, "__all__", [])):
            function = found.forward if inspect.isclass(found) and issubclass(found, nn.Module) else found
            if not inspect.isfunction(function): continue
            parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self" and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
            untyped += [f"{module.__name__}.{name}({p.name})" for p in parameters if p.annotation is p.empty]
    assert untyped == []


# Past the context


@pytest.mark.parametrize("length", [1, 5, 6, 7, 20])
def test_generation_crosses_the_border_of_the_context(length: int):
    "gpt-fast 53, transformers 1749, gpt-2-simple 72: past the context it crashed. At, over and across the border it works, by cropping; forward says one clear sentence."
    model, prompt = GPT(SMALL).eval(), torch.randint(9, (2, length))
    text = generate(model, prompt, 9, temperature=0)
    assert text.shape == (2, length + 9) and torch.equal(text[:, :length], prompt)
    for t in range(length, length + 9): assert torch.equal(text[:, t], model(text[:, max(0, t - 6) : t])[:, -1].argmax(-1))
    if length > 6:
        with pytest.raises(ValueError, match=rf"context_length=6.*{length}"): model(prompt)


def test_two_generations_in_a_row_agree():
    "rasbt/LLMs-from-scratch PR 925: a position pointer was not reset between two generations. Nothing is kept from one to the next."
    model, prompt = GPT(SMALL), torch.randint(9, (1, 3))
    assert torch.equal(generate(model, prompt, 9, temperature=0), generate(model, prompt, 9, temperature=0))


# Training, checkpoints, devices


@pytest.mark.parametrize("config", [TrainConfig(), SORT_CONFIG, TrainConfig(steps=1, warmup=0), TrainConfig(steps=3, warmup=1)])
def test_the_first_step_learns_and_the_rate_is_a_function_of_the_step(config: TrainConfig):
    "karpathy/nanoGPT 443, litgpt PR 1435: lr(0) was 0, or decayed from the already decayed value. Ours is above 0 and the same however often and in whatever order it is asked."
    steps = list(range(config.steps))
    rates = [config.lr_at(s) for s in steps]
    assert rates[0] > 0 and max(rates) == pytest.approx(config.lr)
    assert [config.lr_at(s) for s in reversed(steps)] == rates[::-1] and [lr_at(s, config.steps, config.lr, config.warmup, config.floor) for s in steps] == rates


def test_parts_of_a_batch_give_the_gradients_of_the_whole():
    "karpathy/nanoGPT commit 553f949f: gradient accumulation was mis-scaled. The mean loss of 1 x 16 and of 4 x 4, each by a quarter, have the same gradients."
    model = GPT(dataclasses.replace(SMALL, dropout=0.0)).double()
    text = torch.randint(9, (16, 7))
    whole = torch.autograd.grad(next_token_loss(model, text[:, :-1], text[:, 1:]), list(model.parameters()))
    for part in text.split(4): (next_token_loss(model, part[:, :-1], part[:, 1:]) / 4).backward()
    for p, g in zip(model.parameters(), whole): torch.testing.assert_close(p.grad, g, rtol=1e-10, atol=1e-12)


@pytest.mark.unenforced
def test_a_checkpoint_with_other_names_is_refused_by_name(tmp_path: Path):
    "rasbt 580, litgpt 795, nanoGPT 121: checkpoints of compiled models had `_orig_mod.` keys. Ours have none, and a file that has them is refused, with the keys named, and never half loaded."
    run, path = Run(torch.compile(GPT(PRESETS["sorter"])), losses=[], accuracy={}, seed=0, seconds=0.0), tmp_path / "sorter.safetensors"
    save_sorter(run, path)
    weights, origin = load_file(path), sorter_origin(path)
    assert not any("_orig_mod" in name for name in weights)
    save_file({f"_orig_mod.{name}": w for name, w in weights.items()}, path, metadata={"origin": json.dumps(origin)})
    with pytest.raises((RuntimeError, ValueError), match=r"_orig_mod\.token_embedding\.weight"): load_sorter(path)


def test_a_checkpoint_of_another_model_is_refused_by_name():
    "nanoGPT 121: a vocabulary that does not match. The error names the table and both sizes."
    with pytest.raises(RuntimeError, match=r"token_embedding\.weight(.|\n)*\[10, 16\](.|\n)*\[9, 16\]"):
        GPT(SMALL).load_state_dict(GPT(dataclasses.replace(SMALL, vocab_size=10)).state_dict())


def test_weights_move_between_models_of_the_same_sizes():
    "karpathy/nanoGPT PR 698, rasbt 436, 604: buffers in the state dict. Attention's holds its four tensors, and fits one of another context length."
    short, long = MultiHeadAttention(16, 2, 4), MultiHeadAttention(16, 2, 9)
    assert set(short.state_dict()) == {"qkv.weight", "qkv.bias", "proj.weight", "proj.bias"}
    long.load_state_dict(short.state_dict())
    x = torch.randn(2, 4, 16)
    assert torch.equal(short(x), long(x))


@pytest.mark.parametrize("device", ["meta", *(["cuda"] if torch.cuda.is_available() else [])])
def test_everything_happens_on_the_device_of_the_model(device: str):
    "karpathy/nanoGPT PR 698, rasbt 436, 604: a mask left on another device. Forward, loss, masks and dropout stay where the model is."
    model, idx = GPT(SMALL).to(device).train(), torch.zeros(2, 5, dtype=torch.long, device=device)
    loss = next_token_loss(model, idx, idx)
    loss.backward()
    assert {t.device.type for t in (loss, *(p.grad for p in model.parameters()), *model.buffers(), causal_mask(3, device=device), dropout(torch.ones(3, device=device), 0.5))} == {device}


# The book


def test_names_promised_by_a_module_exist():
    "d2l-ai/d2l-en 806, 1910, 2557, 2648: pages used names that the package does not have. Every name in `__all__` exists and is the module's own."
    for info in pkgutil.iter_modules(minigpt.__path__):
        module = importlib.import_module(f"minigpt.{info.name}")
        for name in getattr(module, "__all__", []): assert hasattr(module, name), f"minigpt.{info.name}.{name}"
