"""GPT-2's weights in our classes, and back: parity with `transformers` at many sizes, and one sentence for what does not fit."""

import json

import pytest
import torch
from safetensors.torch import save_file

from minigpt import generate
from minigpt.checkpoints import load_checkpoint, save_checkpoint
from minigpt.generation import recompute
from minigpt.gpt2 import GPT2, SMALLEST, costs, empty, from_gpt2, load_gpt2, to_gpt2
from minigpt.model import GPT, GPTConfig, next_token_loss
from minigpt.speed import fast_cached, fused



def theirs(dtype: torch.dtype = torch.float32, **sizes) -> torch.nn.Module:
    import transformers  # takes seconds, also where no test of this file is run
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    small = {"vocab_size": 31, "n_positions": 64, "n_embd": 48, "n_layer": 2, "n_head": 3, "bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**small | sizes)).to(dtype).eval()
    with torch.no_grad():
        for p in model.parameters(): p.add_(0.1 * torch.randn_like(p))  # biases start at zero, which would hide a lost one
    return model


SIZES = [{}, {"n_layer": 1, "n_head": 1}, {"n_embd": 40, "n_head": 5, "n_layer": 4}, {"n_head": 48}, {"vocab_size": 3, "n_positions": 9}]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype, near", [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("change", [lambda m: m, fused], ids=["by hand", "fused"])
def test_logits_and_gradients_agree(sizes: dict, dtype: torch.dtype, near: float, change):
    other = theirs(dtype, **sizes)
    ours = change(load_gpt2(other.state_dict(), n_heads=other.config.n_head))
    idx = torch.randint(other.config.vocab_size, (2, other.config.n_positions))
    assert ours.lm_head.weight.dtype == dtype and (ours(idx) - other(idx).logits).abs().max() < near
    next_token_loss(ours, idx[:, :-1], idx[:, 1:]).backward()
    torch.nn.functional.cross_entropy(other(idx).logits[:, :-1].flatten(0, 1), idx[:, 1:].flatten()).backward()  # its own loss is taken in float32
    scale = 1 if dtype == torch.float64 else 100
    assert (ours.token_embedding.weight.grad - other.transformer.wte.weight.grad).abs().max() < near * scale
    assert (ours.blocks[0].attn.qkv.weight.grad - other.transformer.h[0].attn.c_attn.weight.grad.T).abs().max() < near * scale


@pytest.mark.parametrize("engine", [None, recompute, fast_cached])
def test_a_hundred_greedy_tokens(engine):
    other = theirs(n_positions=120)
    prompt = torch.randint(31, (2, 7))
    text = other.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=100, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert torch.equal(generate(load_gpt2(other.state_dict(), n_heads=3), prompt, 100, temperature=0, **({"engine": engine} if engine else {})), text)


def test_there_and_back():
    other = theirs()
    ours = load_gpt2(other.state_dict(), n_heads=3)
    again = theirs()
    again.load_state_dict(to_gpt2(ours), strict=True)
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), other.state_dict().values()))
    idx = torch.randint(31, (1, 9))
    assert torch.equal(again(idx).logits, other(idx).logits)
    with pytest.raises(ValueError, match="tied_head=True and gelu='tanh'"): to_gpt2(GPT(GPTConfig()))


def test_from_a_folder(tmp_path):
    other = theirs()
    other.save_pretrained(tmp_path / "a")
    idx = torch.randint(31, (1, 20))
    assert torch.allclose(load_gpt2(tmp_path / "a")(idx), other(idx).logits, atol=1e-5)
    other.transformer.save_pretrained(tmp_path / "b")  # without the prefix, without the head
    assert torch.allclose(load_gpt2(str(tmp_path / "b"))(idx), other(idx).logits, atol=1e-5)
    loaded = load_checkpoint(save_checkpoint(tmp_path / "ours", load_gpt2(tmp_path / "a"))).model
    assert torch.allclose(loaded(idx), other(idx).logits, atol=1e-5) and loaded.lm_head.weight is loaded.token_embedding.weight


def test_old_files_hold_masks():
    weights = dict(theirs().state_dict()) | {"transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4), "transformer.h.1.attn.masked_bias": torch.tensor(-1e4)}
    assert load_gpt2(weights, n_heads=3).config.n_layers == 2


@pytest.mark.parametrize("change, parts", [
    (lambda w: w.pop("transformer.h.1.ln_2.bias"), ["lack", "h.1.ln_2.bias"]), (lambda w: w.update({"transformer.h.0.attn.extra": torch.ones(2)}), ["hold", "h.0.attn.extra"]),
    (lambda w: w.update({"transformer.h.0.mlp.c_fc.weight": torch.ones(192, 48)}), ["h.0.mlp.c_fc.weight", "(48, 192)", "(192, 48)"]),
    (lambda w: w.update({"transformer.h.0.ln_1.weight": torch.ones(49)}), ["h.0.ln_1.weight", "(48,)", "(49,)"]),
    (lambda w: w.pop("transformer.wte.weight"), ["wte.weight"]), (lambda w: w.update({"transformer.wpe.weight": torch.ones(4)}), ["wpe.weight"]),
    (lambda w: w.clear(), ["wte.weight"])])
def test_what_does_not_fit_is_named(change, parts: list[str]):
    weights = dict(theirs().state_dict())
    change(weights)
    with pytest.raises(ValueError) as caught: load_gpt2(weights, n_heads=3)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_folders_that_are_none(tmp_path):
    with pytest.raises(FileNotFoundError, match="model.safetensors"): load_gpt2(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="safetensors file"): load_gpt2(tmp_path)
    save_file(to_gpt2(load_gpt2(theirs().state_dict(), n_heads=3)), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"activation_function": "relu"}))
    with pytest.raises(ValueError, match="activation_function must be 'gelu_new', got 'relu'"): load_gpt2(tmp_path)


def test_without_a_network_it_is_one_sentence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConnectionError, match="nowhere/at-all is no folder"): load_gpt2("nowhere/at-all")


def test_the_published_sizes():
    counts = [sum(p.numel() for p in empty(config).parameters()) for config in GPT2.values()]
    assert counts == [124_439_808, 354_823_168, 774_030_080, 1_557_611_200]
    assert costs(SMALLEST)["parameters"] == counts[0]
    assert from_gpt2(theirs().state_dict(), GPTConfig(31, 64, 48, 3, 2, gelu="tanh", tied_head=True)).config.d_model == 48


def test_a_head_that_is_not_the_table_is_not_dropped_in_silence():
    weights = dict(theirs().state_dict())
    weights["lm_head.weight"] = weights["lm_head.weight"] + 1
    with pytest.raises(ValueError, match="lm_head.weight must be equal to wte.weight"): load_gpt2(weights, n_heads=3)


def test_a_model_that_gpt2_cannot_be_is_not_written():
    from minigpt.rotary import RotaryPositions

    config = GPTConfig(31, 16, 24, 3, 1, gelu="tanh", tied_head=True)
    with pytest.raises(ValueError, match="position_embedding"): to_gpt2(GPT(config, positions=RotaryPositions))
    with pytest.raises(ValueError, match="tied_head"): to_gpt2(GPT(GPTConfig()))


@pytest.mark.parametrize("said, fits", [({"n_inner": 192}, True), ({"n_inner": None}, True), ({"n_inner": 96}, False), ({"scale_attn_weights": False}, False)], ids=str)
def test_configs_that_our_classes_do_not_have_are_refused(said: dict, fits: bool, tmp_path):
    other = theirs()
    other.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | said))
    if fits: assert load_gpt2(tmp_path).config.n_heads == 3
    else:
        with pytest.raises(ValueError, match=next(iter(said))): load_gpt2(tmp_path)


def test_a_file_by_its_path_is_read_with_the_config_beside_it_or_without(tmp_path):
    other = theirs()
    other.save_pretrained(tmp_path)
    idx = torch.randint(31, (1, 7))
    for path in (tmp_path / "model.safetensors", str(tmp_path / "model.safetensors")):
        assert load_gpt2(path).config.n_heads == 3 and (load_gpt2(path)(idx) - other(idx).logits).abs().max() < 1e-5
    (tmp_path / "config.json").unlink()
    assert (load_gpt2(tmp_path / "model.safetensors", n_heads=3)(idx) - other(idx).logits).abs().max() < 1e-5
    (tmp_path / "notes.txt").write_text("no tensors")
    with pytest.raises(ValueError, match="notes.txt must be a safetensors file"): load_gpt2(tmp_path / "notes.txt")


@pytest.mark.parametrize("said, parts", [('{"n_head": 0}', ["n_heads must be at least 1, got 0"]), ('{"n_head": "12"}', ["n_heads", "'12'"]), ('{"n_head": 5}', ["n_heads=5 does not divide"]),
                                         ("[]", ["must hold an object", "[]"]), ("{", ["must hold JSON"]), ("", ["must hold JSON"])])
def test_a_config_file_that_says_nonsense_is_named(said: str, parts: list[str], tmp_path):
    theirs().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(said)
    with pytest.raises(ValueError) as caught: load_gpt2(tmp_path)
    assert all(part in str(caught.value) for part in [str(tmp_path / "config.json"), *parts]), caught.value


def test_no_heads_are_not_taken_for_the_default():
    with pytest.raises(ValueError, match="n_heads must be at least 1, got 0"): load_gpt2(theirs().state_dict(), n_heads=0)
