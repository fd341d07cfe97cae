"""The cache changes no result: not the logits, not the tokens, wherever a text is cut, for every kind of positions; and it refuses what it cannot hold."""

from functools import partial

import pytest
import torch
from torch import Tensor

from messages import refuses
import minigpt
from minigpt import cache as cache_module
from minigpt import generation
from minigpt.cache import KVCache, cached, generate, in_common, run_seconds, step_seconds
from minigpt.generation import recompute
from minigpt.model import GPT, GPTConfig, LearnedPositions, evaluating
from minigpt.rotary import MovedPositions, NoPositions, RotaryPositions, random_choice
from minigpt.sorting import VALIDATION, SortTask, load_sorter, spread
from minigpt.speed import fast_cached
from minigpt.training import AdamW

CONFIG = GPTConfig(vocab_size=11, context_length=14, d_model=24, n_heads=3, n_layers=2, dropout=0.2)
POSITIONS = {
    "learned": LearnedPositions,
    "rotary": RotaryPositions,
    "rotary, half": partial(RotaryPositions, rotated=4, base=100.0),
    "randomised": partial(MovedPositions, positions=RotaryPositions, move=random_choice),
    "none": NoPositions,
}
LIMITS = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 0.05}


def model_of(kind: str, dtype: torch.dtype = torch.float64) -> GPT:
    "A model with weights large enough for its logits to say something."
    torch.manual_seed(3)
    model = GPT(CONFIG, positions=POSITIONS[kind])
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1: p.mul_(6)
    return model.to(dtype).eval()


def texts(B: int, T: int, seed: int = 0) -> Tensor:
    return torch.randint(CONFIG.vocab_size, (B, T), generator=torch.Generator().manual_seed(seed))


def in_parts(model: GPT, idx: Tensor, cuts: list[int], cache: KVCache | None = None) -> Tensor:
    if cache is None: cache = KVCache(model, batch_size=len(idx))
    with evaluating(model): return torch.cat([model(part, cache) for part in idx.tensor_split(cuts, dim=1)], dim=1)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("kind", POSITIONS)
def test_logits_are_the_same_wherever_the_text_is_cut(kind: str, dtype: torch.dtype):
    "Protects every call pattern: whole prompt, single steps, a cut at every place, a batch, the full context."
    model, T = model_of(kind, dtype), CONFIG.context_length
    for B in (1, 3):
        idx = texts(B, T)
        with torch.no_grad(): whole = model(idx)
        assert whole.abs().max() > 0.5  # in bfloat16, too, a wrong position would show
        cuts = [[], *([k] for k in range(1, T)), list(range(1, T)), [1, 2, 7], [5, 13]]
        for cut in cuts:
            parts = in_parts(model, idx, cut)
            assert parts.dtype == dtype
            assert (parts - whole).abs().max() <= LIMITS[dtype] * whole.abs().max(), (B, cut)


@pytest.mark.parametrize("kind", POSITIONS)
@pytest.mark.parametrize("prompt", [1, 5, 13, 14, 17])
@pytest.mark.unenforced
def test_generation_is_the_same_at_and_across_the_border(kind: str, prompt: int):
    "Protects greedy and seeded generation, up to the end of the context, over it and far beyond; and two calls in a row."
    model, idx = model_of(kind), texts(2, prompt)
    for n in (0, 1, CONFIG.context_length - prompt, CONFIG.context_length + 6):
        if n < 0: continue
        for knobs in ({"temperature": 0}, {"seed": 4, "top_k": 7, "top_p": 0.9, "temperature": 2.0}):
            expected = generation.generate(model, idx, n, **knobs)
            for _ in range(2 if n == CONFIG.context_length - prompt else 1): assert torch.equal(generate(model, idx, n, **knobs), expected)


@pytest.mark.parametrize("kind", POSITIONS)
def test_every_step_has_the_logits_of_the_uncached_one(kind: str):
    "Protects the engine step by step, past the border of the context."
    model, idx = model_of(kind), texts(2, CONFIG.context_length + 5)
    engine = cached(model)
    with torch.no_grad():
        for T in range(1, idx.shape[1] + 1):
            assert (engine(idx[:, :T]) - recompute(model)(idx[:, :T])).abs().max() < 1e-12, T


def test_the_engine_follows_any_sequence_of_texts():
    "Protects a caller who does not only append: other texts, shorter ones, other batches, the same again, beyond the border and back."
    model = model_of("learned")
    engine, a, b = cached(model), texts(3, 20), texts(3, 20, seed=1)
    mixed = torch.cat([a[:, :6], b[:, 6:]], dim=1)
    calls = a[:, :5], a[:, :5], a[:, :9], a[:, :3], mixed[:, :9], b[:, :9], a[:1, :4], a[:1, :5], a, a[:, :14], b[:, 3:17], b, b[:, :2]
    with torch.no_grad():
        for idx in calls: assert (engine(idx) - recompute(model)(idx)).abs().max() < 1e-12, idx.shape


def test_the_engine_survives_a_text_changed_in_place_and_a_refused_one():
    "Protects two callers: one who writes into the tensor that was passed, and one who goes on after an error."
    model, idx = model_of("learned"), texts(2, 9)
    engine, text = cached(model), idx.clone()
    with torch.no_grad():
        engine(text)
        text[:, 3] = (text[:, 3] + 1) % CONFIG.vocab_size
        assert (engine(text) - recompute(model)(text)).abs().max() < 1e-12
        bad = idx[:, :5].clone()
        bad[:, 2] = 99
        with pytest.raises(ValueError, match="99"): engine(bad)
        assert (engine(idx) - recompute(model)(idx)).abs().max() < 1e-12


def test_the_engine_computes_each_position_once():
    "Protects the point of it: n tokens after a prompt of t take t + n - 1 positions in all, and one per step."
    model, counts = model_of("rotary"), []
    model.ln_f.register_forward_hook(lambda module, args, out: counts.append(out.shape[1]))
    generate(model, texts(1, 4), 9)
    assert counts == [4, *[1] * 8]
    counts.clear()
    generate(model, texts(1, 12), 5)
    assert counts == [12, 1, 1, 14, 14]  # the last two are past the border


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_a_trained_model_writes_the_same_tokens_in_every_precision(dtype: torch.dtype):
    "Protects bfloat16, where rounding is coarse: with a trained model's margins the tokens are the same."
    sorter = load_sorter().to(dtype)
    rows = spread(SortTask().rows(VALIDATION), 200)
    with_cache, without = (f(sorter, rows, 5, temperature=0) for f in (generate, generation.generate))
    assert torch.equal(with_cache, without)


def test_the_package_generates_with_the_cache():
    "Protects what users get from `minigpt.generate`."
    assert minigpt.generate is cache_module.generate and minigpt.KVCache is KVCache
    assert generation.generate.__annotations__.keys() == generate.__annotations__.keys()


# What it is made of


@pytest.mark.parametrize("dtype", [*LIMITS, torch.float16], ids=str)
def test_the_cache_is_of_the_models_kind_and_size(dtype: torch.dtype):
    "Protects dtype, size and that memory is allocated once."
    model = model_of("learned", dtype)
    cache = KVCache(model, batch_size=3, capacity=9)
    memory = cache.memory
    assert memory.dtype == dtype and memory.device == model.token_embedding.weight.device
    assert memory.untyped_storage().nbytes() == 2 * CONFIG.n_layers * 3 * 9 * CONFIG.d_model * dtype.itemsize
    if dtype == torch.float16: return
    in_parts(model, texts(3, 9), [4, 5], cache)
    cache.reset()
    in_parts(model, texts(3, 8), [3], cache)
    assert cache.memory is memory and len(cache) == 8


def test_the_cache_works_where_there_are_no_numbers():
    "Protects models on the meta device, which stands for every device that is not the CPU."
    model = model_of("rotary").to("meta")
    cache = KVCache(model)
    with torch.no_grad(): logits = model(torch.zeros(1, 5, dtype=torch.long, device="meta"), cache)
    assert logits.shape == (1, 5, 11) and len(cache) == 5 and cache.memory.device.type == "meta"


def test_inference_mode_and_training_mode():
    "Protects two ways in which generation is called in practice; the mode of the model is left as it was."
    model, idx = model_of("learned"), texts(2, 4)
    expected = generation.generate(model, idx, 12, temperature=0)
    with torch.inference_mode(): assert torch.equal(generate(model, idx, 12, temperature=0), expected)
    assert torch.equal(generate(model.train(), idx, 12, temperature=0), expected) and model.training


def test_forgotten_positions_are_gone():
    "Protects `crop`: what was behind it has no influence."
    model, idx, other = model_of("rotary"), texts(1, 12), texts(1, 12, seed=2)
    cache = KVCache(model)
    in_parts(model, torch.cat([idx[:, :5], other[:, 5:]], dim=1), [], cache)
    cache.crop(5)
    assert len(cache) == 5
    with torch.no_grad(): assert (model(idx[:, 5:], cache) - model(idx)[:, 5:]).abs().max() < 1e-12


# What it refuses


@pytest.mark.parametrize("T", [1, 3, 5, 8])
def test_beyond_the_capacity_is_an_error_that_loses_nothing(T: int):
    "Protects against a silent wrap: the error names capacity and request, and the cache can be used on."
    model, idx = model_of("learned"), texts(1, 14)
    cache = KVCache(model, capacity=6)
    with torch.no_grad():
        stored = max(1, 6 - T)  # T more are too many, by as few as there can be
        model(idx[:, :stored], cache)
        with pytest.raises(ValueError, match=rf"capacity of 6 .*got {stored + T + 1}"): model(idx[:, stored : stored + T + 1], cache)
        assert len(cache) == stored and cache.lengths == [stored, stored]
        after = model(idx[:, stored:6], cache)
        assert (after - model(idx[:, :6])[:, stored:]).abs().max() < 1e-12


def test_past_the_context_a_cached_call_is_refused():
    "Protects the border: the model itself says that there are no more positions."
    model, cache = model_of("rotary"), None
    cache = KVCache(model)
    with torch.no_grad():
        model(texts(1, 14), cache)
        with pytest.raises(ValueError, match="context_length=14, got 15"): model(texts(1, 1), cache)


class Break(Exception): pass


def test_a_pass_that_breaks_off_is_noticed():
    "Protects against a cache whose layers hold different texts: refused until it is reset, and right afterwards."
    model, idx = model_of("learned"), texts(1, 9)
    cache = KVCache(model)
    def breaks(*_): raise Break
    with torch.no_grad():
        hook = model.blocks[1].register_forward_pre_hook(breaks)
        with pytest.raises(Break): model(idx[:, :4], cache)
        hook.remove()
        with pytest.raises(ValueError, match=r"\[4, 0\].*reset"): model(idx[:, :4], cache)
        cache.reset()
        assert (in_parts(model, idx, [4], cache) - model(idx)).abs().max() < 1e-12
        engine = cached(model)
        engine(idx[:, :3])
        hook = model.blocks[1].register_forward_pre_hook(breaks)
        with pytest.raises(Break): engine(idx[:, :5])
        hook.remove()
        assert (engine(idx[:, :6]) - model(idx[:, :6])[:, -1]).abs().max() < 1e-12


def deeper(n_layers: int) -> GPT: return GPT(GPTConfig(11, 14, 24, 3, n_layers)).eval()


@pytest.mark.unenforced
@pytest.mark.parametrize("call, holds", [
    (lambda: KVCache(model_of("learned"), batch_size=0), ["batch_size", "at least 1", "0"]),
    (lambda: KVCache(model_of("learned"), capacity=0), ["capacity", "at least 1", "0"]),
    (lambda: KVCache(model_of("learned"), capacity=15), ["capacity=15", "context_length=14"]),
    (lambda: KVCache(model_of("learned")).crop(1), ["n", "0", "1"]),
    (lambda: KVCache(model_of("learned")).crop(-1), ["n", "0", "-1"]),
    (lambda: model_of("learned")(texts(2, 3), KVCache(model_of("learned"))), ["(1, 3, T, 8)", "(2, 3, 3, 8)"]),
    (lambda: model_of("learned")(texts(1, 3), KVCache(GPT(GPTConfig(11, 14, 12, 3, 2)).double())), ["(1, 3, T, 4)", "(1, 3, 3, 8)"]),
    (lambda: model_of("learned", torch.float32)(texts(1, 3), KVCache(model_of("learned"))), ["float64", "float32"]),
    (lambda: deeper(3)(texts(1, 3), KVCache(deeper(2))), ["2 layers", "layer 2"]),
    (lambda: [deeper(1)(texts(1, 3), cache) for cache in [KVCache(deeper(2))] for _ in range(2)], ["[3, 0]", "fewer layers"]),
    (lambda: step_seconds(model_of("learned"), 15), ["length", "context_length=14", "15"]),
    (lambda: step_seconds(model_of("learned"), 0), ["length", "1", "0"]),
], ids=range(12))
def test_what_does_not_fit_is_refused_by_name(call, holds: list[str]):
    "Protects the messages: each names the thing, the value, and what would be right."
    with torch.no_grad(): refuses(call, holds)


def test_gradients_are_refused():
    "Protects a training loop from a cache that would silently cut its gradients."
    model = model_of("learned")
    with pytest.raises(ValueError, match="no gradients.*no_grad"): model(texts(1, 3), KVCache(model))


# The measuring functions


def test_prefixes():
    "Protects what the engine keeps: positions from the first on, in all rows."
    a, b = torch.tensor([[1, 2, 3], [1, 2, 3]]), torch.tensor([[1, 2, 3, 4], [1, 0, 3, 4]])
    assert [in_common(a, a), in_common(a, b), in_common(b, a), in_common(a[:, :0], b), in_common(a[:, 1:], a)] == [3, 1, 1, 0, 0]


def test_a_run_is_the_sum_of_its_steps():
    "Protects the integration: exact where the times of steps lie on a straight line."
    def step(t: int) -> float: return 3.0 + 0.5 * t
    lengths = [1, 4, 9, 30]
    totals = run_seconds(lengths, [step(t) for t in lengths])
    exact = [sum(step(t) for t in range(1, n + 1)) for n in lengths]
    for total, sum_of_steps in zip(totals, exact): assert abs(total - sum_of_steps) < 1e-9


# What changes between two calls


@pytest.mark.parametrize("engine", [cached, fast_cached])
@pytest.mark.parametrize("change", ["a step of training", "a state dict", "another dtype", "an assignment"])
def test_nothing_stored_is_used_after_the_weights_have_changed(engine, change: str):
    "The same engine, a text that grows by a token, and weights that change in between: logits as computed anew."
    model = model_of("learned")
    other, text, next_logits = GPT(CONFIG).double().eval(), texts(2, 9), engine(model)
    with torch.no_grad():
        next_logits(text[:, :8])
        if change == "a state dict": model.load_state_dict(other.state_dict())
        elif change == "another dtype": model.float()
        elif change == "an assignment": model.blocks[0].ln_1.weight.data = torch.full_like(model.blocks[0].ln_1.weight, 3)
    if change == "a step of training":
        optimizer = AdamW([{"params": list(model.parameters()), "weight_decay": 0.1}], lr=0.1)
        model(text).square().sum().backward()
        optimizer.step()
    with torch.no_grad():
        limit = 1e-4 if change == "another dtype" else 1e-10
        assert (next_logits(text) - recompute(model)(text)).abs().max() < limit


def test_the_memory_is_kept_while_the_weights_are(monkeypatch: pytest.MonkeyPatch):
    "Protects the speed: after the first step, one position is computed at a time."
    model, text, widths = model_of("learned"), texts(2, 9), []
    model.blocks[0].register_forward_hook(lambda module, args, out: widths.append(args[0].shape[1]))
    next_logits = cached(model)
    with torch.no_grad():
        for n in (6, 7, 8, 9): next_logits(text[:, :n])
    assert widths == [6, 1, 1, 1]


@pytest.mark.parametrize("engine", [recompute, cached, fast_cached])
@pytest.mark.parametrize("T", [3, 20])
def test_a_batch_of_no_rows_stays_one_with_every_engine(engine, T: int):
    assert generate(model_of("learned"), torch.zeros(0, T, dtype=torch.long), 4, engine=engine).shape == (0, T + 4)
