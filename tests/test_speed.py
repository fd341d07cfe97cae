"""The switch to torch's kernels: the same results in values and gradients, in place and back, whatever the shapes, dtypes and devices; and the fast engine of generation."""

import copy
import pickle

import pytest
import torch
from messages import refuses
from hypothesis import given, settings
from hypothesis import strategies as st

from minigpt import GPT, GPTConfig, generate
from minigpt.ablations import ABLATIONS
from minigpt.cache import KVCache, cached
from minigpt.generation import recompute
from minigpt.model import attention_maps, next_token_loss
from minigpt.rotary import RotaryPositions
from minigpt.speed import TWINS, FusedAdamW, by_hand, contestants, fast_cached, fused, matmul_limit, race, ratios, step_operations, verification
from minigpt.training import AdamW, TrainConfig, evaluate, new_optimizer, train


def pair(dtype=torch.float64, positions=None, **how) -> tuple[GPT, GPT]:
    torch.manual_seed(0)
    how = {"vocab_size": 13, "context_length": 12, "d_model": 24, "n_heads": 3, "n_layers": 2, "dropout": 0.0} | how
    ours = GPT(GPTConfig(**how), **({"positions": positions} if positions else {})).to(dtype)
    return ours, fused(copy.deepcopy(ours))


@pytest.mark.parametrize("dtype, near", [(torch.float64, 1e-12), (torch.float32, 1e-4)])
@pytest.mark.parametrize("T", [1, 2, 11, 12])
@pytest.mark.parametrize("how", [{}, {"gelu": "tanh", "tied_head": True}, {"n_heads": 1}, {"n_heads": 24}, {"positions": RotaryPositions}], ids=str)
def test_outputs_and_gradients_are_equal(how: dict, T: int, dtype: torch.dtype, near: float):
    ours, theirs = pair(dtype, **how)
    idx, targets = torch.randint(13, (2, 3, T))
    targets[0, 0] = -100 if T > 1 else targets[0, 0]
    losses = [next_token_loss(model, idx, targets) for model in (ours, theirs)]
    for loss in losses: loss.backward()
    assert (ours(idx) - theirs(idx)).abs().max() < near and (losses[0] - losses[1]).abs() < near
    assert all((p.grad - q.grad).abs().max() < near for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_the_switch_goes_both_ways_and_touches_no_weight():
    model, _ = pair()
    before, names = [p.data_ptr() for p in model.parameters()], list(model.state_dict())
    kinds = [type(part) for part in model.modules()]
    assert fused(model) is model and fused(fused(model)) is model and not set(TWINS) & {type(part) for part in model.modules()}
    assert [p.data_ptr() for p in model.parameters()] == before and list(model.state_dict()) == names
    assert [type(part) for part in by_hand(model).modules()] == kinds
    model, theirs = pair()
    model.load_state_dict(theirs.state_dict())
    for again in (copy.deepcopy(theirs), pickle.loads(pickle.dumps(theirs))):
        assert type(again) is type(theirs) and torch.equal(again(torch.ones(1, 3).long()), theirs(torch.ones(1, 3).long()))


def test_models_with_other_parts_keep_them():
    "An ablated model has parts that the library does not have; they stay as they are."
    model = fused(ABLATIONS["no mask"].model(GPTConfig(d_model=16, dropout=0.0)))
    assert type(model.blocks[0].attn).__name__ == "KernelAttention" and model(torch.ones(1, 4).long()).shape == (1, 4, 256)


def test_training_agrees_and_so_do_the_optimizers():
    runs = []
    for model in pair():
        batch = torch.randint(13, (4, 13), generator=torch.Generator().manual_seed(0))
        runs.append(train(model, lambda step: (batch[:, :-1], batch[:, 1:]), TrainConfig(steps=30, lr=1e-2, warmup=3)))
        kind = type(new_optimizer(model, TrainConfig()))
        assert kind is (AdamW if len(runs) == 1 else FusedAdamW)
    assert max(abs(a - b) for a, b in zip(*runs)) < 1e-10 and runs[0][-1] < runs[0][0]
    assert evaluate(pair()[1], [(batch[:, :-1], batch[:, 1:])]) == pytest.approx(evaluate(pair()[0], [(batch[:, :-1], batch[:, 1:])]), abs=1e-12)


def test_fused_dropout_drops_as_often():
    _, theirs = pair(torch.float32, dropout=0.5)
    theirs.train()
    a, b = (theirs(torch.ones(1, 12).long()) for _ in range(2))
    assert not torch.equal(a, b) and torch.equal(theirs.eval()(torch.ones(1, 12).long()), theirs(torch.ones(1, 12).long()))


def test_caches_and_maps_work_with_both():
    ours, theirs = pair()
    idx = torch.randint(13, (2, 12))
    with torch.no_grad():
        for model in (ours, theirs):
            cache = KVCache(model, batch_size=2)
            parts = torch.cat([model(piece, cache) for piece in idx.split([5, 1, 4, 2], dim=1)], dim=1)
            assert (parts - model(idx)).abs().max() < 1e-12
    assert (attention_maps(ours, idx) - attention_maps(theirs, idx)).abs().max() < 1e-12


@pytest.mark.unenforced
def test_one_graph_and_no_numbers_on_the_meta_device():
    "Checks of ids neither break a compiled graph nor ask the meta device for numbers it does not have."
    for model in pair(torch.float32):
        idx = torch.randint(13, (2, 12))
        torch._dynamo.reset()
        whole = torch.compile(model, fullgraph=True, backend="eager")
        assert (whole(idx) - model(idx)).abs().max() < 1e-6
        loss = torch.compile(lambda idx, targets, model=model: next_token_loss(model, idx, targets), fullgraph=True, backend="eager")
        loss(idx, idx).backward()
        meta = copy.deepcopy(model).to("meta")
        assert meta(idx.to("meta")).shape == (2, 12, 13) and next_token_loss(meta, idx.to("meta"), idx.to("meta")).device.type == "meta"
        with pytest.raises(ValueError, match="ids are on cpu, the table on meta"): meta(idx)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_by_autocast(half: torch.dtype):
    "Near the loss in float32, with gradients in float32; float16 where this device multiplies in it."
    for model in pair(torch.float32):
        exact = next_token_loss(model, torch.ones(2, 12).long(), torch.ones(2, 12).long()).item()
        with torch.autocast("cpu", half): loss = next_token_loss(model, torch.ones(2, 12).long(), torch.ones(2, 12).long())
        loss.backward()
        assert abs(loss.item() - exact) < 0.02 and all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


# The fast engine


@pytest.mark.unenforced
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 15), st.integers(0, 3)), min_size=1, max_size=12))
@settings(max_examples=30, deadline=None)
def test_the_fast_engine_is_right_whatever_it_is_asked(asked: list[tuple[int, int, int]]):
    "Other batches, shorter and longer texts, past the context, and one token more: always the logits of the plain way."
    model = pair()[0].eval()
    plain, quick = recompute(model), fast_cached(model)
    with torch.no_grad():
        for B, T, more in asked:
            text = torch.randint(13, (B, T), generator=torch.Generator().manual_seed(T))
            for _ in range(more + 1):
                assert (plain(text) - quick(text)).abs().max() < 1e-12
                text = torch.cat([text, torch.randint(13, (B, 1))], 1)


@pytest.mark.parametrize("how", [{}, {"gelu": "tanh", "tied_head": True}, {"n_layers": 1, "n_heads": 1}], ids=str)
def test_the_fast_engine_writes_the_same(how: dict):
    for model in pair(**how):
        prompt = torch.randint(13, (2, 3))
        texts = [generate(model, prompt, 20, temperature=t, seed=3, engine=e) for t in (0, 1.0) for e in (cached, fast_cached)]
        assert torch.equal(texts[0], texts[1]) and torch.equal(texts[2], texts[3])


def test_models_that_it_does_not_know_are_left_to_the_cache():
    model = pair(positions=RotaryPositions)[0].eval()
    with torch.no_grad(): assert (fast_cached(model)(torch.ones(1, 5).long()) - recompute(model)(torch.ones(1, 5).long())).abs().max() < 1e-12


@pytest.mark.parametrize("name", ["no norms", "no residuals", "no mask", "no scale"])
def test_changed_models_are_left_to_the_cache_as_well(name: str):
    "Their blocks look like ours from outside; a part within them is another."
    model = ABLATIONS[name].model(GPTConfig(13, 12, 24, 3, 2, dropout=0.0)).double().eval()
    quick, slow, text = fast_cached(model), cached(model), torch.randint(13, (2, 5))
    assert quick.__qualname__ == slow.__qualname__ != fast_cached(pair()[0]).__qualname__
    with torch.no_grad():
        if name in ("no mask", "no scale"): refuses(lambda: quick(text), ["cache must be None", "this attention keeps none"])
        else: assert torch.equal(quick(text), slow(text))


def test_a_step_that_fails_is_forgotten(monkeypatch: pytest.MonkeyPatch):
    model = pair()[0].eval()
    quick, text = fast_cached(model), torch.randint(13, (1, 6))
    def fails(*args): raise KeyboardInterrupt
    with torch.no_grad():
        quick(text[:, :3])
        with monkeypatch.context() as patch:
            patch.setattr("minigpt.speed.fast_step", fails)
            with pytest.raises(KeyboardInterrupt): quick(torch.cat([text[:, :3], torch.tensor([[9]])], 1))
        assert (quick(text[:, :4]) - recompute(model)(text[:, :4])).abs().max() < 1e-12


@pytest.mark.unenforced
def test_ids_and_targets_outside_the_vocabulary_are_told_as_by_the_parts_by_hand():
    "Torch's kernels say `index out of range in self`, and on a GPU end the process."
    model = pair()[0].eval()
    for bad in (13, -1):
        refuses(lambda: fast_cached(model)(torch.tensor([[1, bad]])), ["ids", "0..12", str(bad)])
        refuses(lambda: next_token_loss(fused(model), torch.tensor([[1, 2]]), torch.tensor([[1, bad]])), ["targets", "0..12", str(bad)])
    ignored = next_token_loss(fused(model), torch.tensor([[1, 2]]), torch.tensor([[1, -100]]))
    assert torch.equal(ignored, next_token_loss(by_hand(model), torch.tensor([[1, 2]]), torch.tensor([[1, -100]]))) or ignored.isfinite()


def test_a_step_of_the_fused_optimizer_is_noticed_by_a_cache():
    "Torch's fused kernel writes without counting, so stored keys would look as good as new."
    p = torch.nn.Parameter(torch.ones(3))
    optimizer, before = FusedAdamW([{"params": [p], "weight_decay": 0.0}]), p._version
    p.grad = torch.ones(3)
    optimizer.step()
    assert p._version > before


# Measuring


def test_everybody_in_the_race_has_the_same_size():
    config = GPTConfig(vocab_size=17, context_length=8, d_model=16, n_heads=2, n_layers=1, dropout=0.0)
    steps = contestants(config, 4, ["by hand", "fused", "torch.nn", "transformers", "x-transformers"])
    assert all(isinstance(step(), float) for step in steps.values())
    with pytest.raises(KeyError): contestants(config, 4, ["nobody"])


def test_ratios_and_turns():
    seen = []
    times = race({"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}, rounds=4, warmup=1)
    assert "".join(seen) == "abbaabbaab" and [len(t) for t in times.values()] == [4, 4]
    rows = ratios({"slow": [2.0, 2.0, 4.0], "quick": [1.0, 1.0, 1.0]}, "slow")
    assert [row["times as fast"] for row in rows] == [1.0, 2.0] and rows[1]["quartiles"] == "2.00 to 2.00"


def test_operations_are_counted_as_torch_counts_them():
    from torch.utils.flop_counter import FlopCounterMode
    config = GPTConfig(dropout=0.0)
    model = GPT(config)
    with FlopCounterMode(display=False) as counter: next_token_loss(model, *torch.zeros(2, 3, 64).long()).backward()
    assert counter.get_total_flops() == pytest.approx(step_operations(config, 3), rel=0.05)
    assert matmul_limit(64, 3) > 1e7


def test_the_table_of_proofs_would_show_a_difference(monkeypatch: pytest.MonkeyPatch):
    from minigpt import speed
    assert {row["verdict"] for row in verification()} == {"equal"}
    monkeypatch.setattr(speed, "gelu", speed.gelu_tanh)
    wrong = [row for row in verification() if row["verdict"] != "equal"]
    assert [row["part"] for row in wrong] == ["GELU"] and "no match" in wrong[0]["verdict"]
