"""The whole model is the GPT that one would build from `torch.nn` parts: logits, loss and every gradient, in float64."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minigpt.model import GPT, PRESETS, GPTConfig, next_token_loss, parameter_table

CONFIGS = PRESETS | {
    "tiny": GPTConfig(vocab_size=5, context_length=4, d_model=2, n_heads=1, n_layers=1),
    "odd sizes": GPTConfig(vocab_size=13, context_length=9, d_model=15, n_heads=3, n_layers=3, dropout=0.5),
    "heads one wide": GPTConfig(vocab_size=7, context_length=6, d_model=8, n_heads=8, n_layers=2),
    "one of everything": GPTConfig(vocab_size=1, context_length=1, d_model=1, n_heads=1, n_layers=1),
}
CASES = [(name, T) for name, c in CONFIGS.items() for T in sorted({1, (c.context_length + 1) // 2, c.context_length})]


class ReferenceBlock(nn.Module):
    "A pre-norm block from the library's layers; attention by `nn.MultiheadAttention`, or by `F.scaled_dot_product_attention` with its weights."

    def __init__(self, config: GPTConfig, attention: str):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(config.d_model), nn.LayerNorm(config.d_model)
        self.attn = nn.MultiheadAttention(config.d_model, config.n_heads, batch_first=True)
        self.fc, self.proj = nn.Linear(config.d_model, config.d_ff), nn.Linear(config.d_ff, config.d_model)
        self.attend = self.by_module if attention == "MultiheadAttention" else self.by_function

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.ln_1(x))
        return x + self.proj(F.gelu(self.fc(self.ln_2(x))))

    def by_module(self, x: Tensor) -> Tensor:
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.attn(x, x, x, attn_mask=hidden, need_weights=False)[0]

    def by_function(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = F.linear(x, self.attn.in_proj_weight, self.attn.in_proj_bias).view(B, T, 3, self.attn.num_heads, -1).permute(2, 0, 3, 1, 4)
        return self.attn.out_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C))


class Reference(nn.Module):
    "A GPT from the library's layers, with the weights of one of ours."

    RENAMED = {"attn.qkv.": "attn.in_proj_", "attn.proj.": "attn.out_proj.", "ff.": ""}

    def __init__(self, model: GPT, attention: str = "MultiheadAttention"):
        super().__init__()
        config = model.config
        self.token_embedding, self.position_embedding = nn.Embedding(config.vocab_size, config.d_model), nn.Embedding(config.context_length, config.d_model)
        self.blocks = nn.ModuleList(ReferenceBlock(config, attention) for _ in range(config.n_layers))
        self.ln_f, self.lm_head = nn.LayerNorm(config.d_model), nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.to(model.lm_head.weight.dtype).load_state_dict({self.name(n): w for n, w in model.state_dict().items()})

    def name(self, ours: str) -> str:
        for old, new in self.RENAMED.items(): ours = ours.replace(old, new)
        return ours

    def forward(self, idx: Tensor) -> Tensor:
        x = self.token_embedding(idx) + self.position_embedding(torch.arange(idx.shape[1]))
        for block in self.blocks: x = block(x)
        return self.lm_head(self.ln_f(x))


def model_of(config: GPTConfig, dtype: torch.dtype = torch.float64) -> GPT:
    "A model whose weights are all far from where they start: no bias is 0 and no norm is 1, so that a lost one shows."
    model = GPT(config).to(dtype).eval()
    with torch.no_grad():
        for p in model.parameters(): p.add_(torch.randn_like(p), alpha=0.2)
    return model


def texts(config: GPTConfig, T: int, B: int = 2) -> tuple[Tensor, Tensor]:
    return tuple(torch.randint(config.vocab_size, (B, T)) for _ in range(2))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters()}


def assert_same(ours: GPT, theirs: Reference, idx: Tensor, targets: Tensor, atol: float = 1e-12) -> None:
    "Logits, loss and the gradients of the loss agree up to rounding, for every parameter there is on either side."
    torch.testing.assert_close(ours(idx), theirs(idx), rtol=atol, atol=atol)
    loss, reference = next_token_loss(ours, idx, targets), F.cross_entropy(theirs(idx).flatten(0, 1), targets.flatten(), ignore_index=-100)
    torch.testing.assert_close(loss, reference, rtol=atol, atol=atol)
    loss.backward(), reference.backward()
    torch.testing.assert_close({theirs.name(n): g for n, g in gradients(ours).items()}, gradients(theirs), rtol=atol, atol=atol)


@pytest.mark.parametrize("attention", ["MultiheadAttention", "scaled_dot_product_attention"])
@pytest.mark.parametrize("name, T", CASES)
def test_logits_loss_and_gradients_equal_the_reference(name: str, T: int, attention: str):
    "Protects the mechanism as a whole: any part, scale, order or wiring that differs from the library's shows here."
    ours = model_of(CONFIGS[name])
    assert_same(ours, Reference(ours, attention), *texts(ours.config, T))


@pytest.mark.parametrize("share", [0.3, 0.9])
def test_ignored_targets_are_left_out_as_in_the_library(share: float):
    "Protects the loss on a part of the positions, which the sort run rests on: values and gradients with -100 among the targets."
    ours = model_of(CONFIGS["odd sizes"])
    idx, targets = texts(ours.config, 9)
    targets = targets.masked_fill(torch.rand(targets.shape) < share, -100)
    assert 0 < (targets == -100).sum() < targets.numel()
    assert_same(ours, Reference(ours), idx, targets)


def test_single_precision_differs_by_rounding_only():
    "Protects float32, in which everybody trains: the parity holds there, too, at its own rounding level."
    ours = model_of(PRESETS["sorter"], torch.float32)
    assert_same(ours, Reference(ours), *texts(ours.config, 11), atol=2e-5)


def test_training_mode_without_dropout_changes_nothing():
    "Protects the training mode: only dropout may tell it from evaluation."
    ours = model_of(PRESETS["sorter"]).train()
    assert_same(ours, Reference(ours), *texts(ours.config, 11))


def test_a_swapped_weight_is_noticed():
    "Protects this file: with one weight of the reference changed by 1e-6, the comparison fails."
    ours = model_of(CONFIGS["odd sizes"])
    theirs = Reference(ours)
    with torch.no_grad(): theirs.blocks[2].attn.in_proj_bias[40] += 1e-6
    with pytest.raises(AssertionError): assert_same(ours, theirs, *texts(ours.config, 9))


def test_the_default_model_has_470528_parameters():
    "Protects the size that the book promises, and the two choices behind it: a head of its own, without a bias."
    model = GPT(GPTConfig())
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in Reference(model).parameters()) == 470_528
    assert parameter_table(model)[-1]["parameters"] == sum(row["parameters"] for row in parameter_table(model)[:-1]) == 470_528
    assert model.lm_head.bias is None and model.lm_head.weight.data_ptr() != model.token_embedding.weight.data_ptr()


@pytest.mark.parametrize("seed", range(3))
def test_the_first_loss_is_that_of_a_guess(seed: int):
    "Protects the initial weights: a new model knows nothing and is sure of nothing, so its loss is ln(256)."
    torch.manual_seed(seed)
    model = GPT(GPTConfig())
    assert next_token_loss(model, *texts(model.config, 64, B=8)).item() == pytest.approx(math.log(256), abs=0.06)


def test_the_state_dict_holds_parameters_and_nothing_else():
    "Protects checkpoints: no mask is stored, so that they fit models of the same weights whatever their buffers."
    model = GPT(GPTConfig())
    assert set(model.state_dict()) == {n for n, _ in model.named_parameters()}
    assert len(list(model.buffers())) == model.config.n_layers


@pytest.mark.parametrize("device", ["meta", *(["cuda"] if torch.cuda.is_available() else [])])
def test_the_mask_goes_where_the_model_goes(device: str):
    "Protects moving a model: every buffer follows `.to()`, and the model runs there."
    model = GPT(GPTConfig()).to(device)
    assert {t.device.type for t in (*model.buffers(), *model.parameters())} == {device}
    assert model(torch.zeros(2, 8, dtype=torch.long, device=device)).shape == (2, 8, 256)


def test_a_change_of_dtype_leaves_the_mask_a_mask():
    "Protects `.double()` and `.bfloat16()`: the mask stays boolean, the logits follow the model."
    for dtype in (torch.float64, torch.bfloat16):
        model = GPT(GPTConfig()).to(dtype)
        assert {b.dtype for b in model.buffers()} == {torch.bool}
        assert model(torch.zeros(1, 8, dtype=torch.long)).dtype == dtype
