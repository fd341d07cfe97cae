"""No position can see a later one: shown by changing the future and by gradients, with leaks put in to show that they are found."""

import pytest
import torch
from torch import Tensor

from minigpt.attention import MultiHeadAttention, causal_mask, join_heads, sdpa, split_heads
from minigpt.layers import softmax
from minigpt.model import GPT, Block, GPTConfig

CONFIG = GPTConfig(vocab_size=11, context_length=9, d_model=12, n_heads=3, n_layers=3, dropout=0.3)


def model_of(block: type = Block) -> GPT:
    "A model in float64 with large weights, so that whatever can be seen has an effect."
    model = GPT(CONFIG, block=block).double().eval()
    with torch.no_grad():
        for p in model.parameters(): p.add_(torch.randn_like(p), alpha=0.3)
    return model


def seen_by_change(model: GPT, idx: Tensor) -> Tensor:
    "Entry (t, u): whether the logits at position t change, by any bit, when the token at u does."
    before, places = model(idx), torch.arange(idx.shape[1])
    changed = [(idx + (places == u)) % CONFIG.vocab_size for u in places]
    return torch.stack([(model(other) != before).any(-1).any(0) for other in changed], dim=1)


def seen_by_gradient(model: GPT, idx: Tensor) -> Tensor:
    "Entry (t, u): whether the logits at position t have a gradient with respect to the stream at u."
    stream = []
    hook = model.dropout.register_forward_hook(lambda module, args, out: stream.append(out))
    logits = model(idx)
    hook.remove()
    rows = [torch.autograd.grad(logits[:, t].square().sum(), stream[0], retain_graph=True)[0] for t in range(idx.shape[1])]
    return torch.stack([(row != 0).any(-1).any(0) for row in rows])


WAYS = pytest.mark.parametrize("seen", [seen_by_change, seen_by_gradient])


@WAYS
@pytest.mark.parametrize("T", range(1, CONFIG.context_length + 1))
def test_each_position_sees_itself_and_the_past_and_nothing_else(seen, T: int):
    "Protects the mask at every length and position, and that it hides no more than the future."
    idx = torch.randint(CONFIG.vocab_size, (2, T))
    assert torch.equal(seen(model_of(), idx), torch.ones(T, T).tril().bool())


class AfterSoftmax(MultiHeadAttention):
    "Masks after the softmax, where the future has already entered the sum."

    def forward(self, x: Tensor, rotate=None, cache=None) -> Tensor:
        q, k, v = (split_heads(part, self.n_heads) for part in self.qkv(x).chunk(3, dim=-1))
        weights = softmax(q @ k.mT * q.shape[-1] ** -0.5) * self.visible(x.shape[1], x.shape[1])
        return self.proj(join_heads(weights @ v))


def sabotaged(change, layer: int = 2) -> type:
    "A block class whose block number `layer` is changed; the others are ours."
    made = []

    class Sabotaged(Block):
        def __init__(self, config: GPTConfig):
            super().__init__(config)
            if len(made) == layer: change(self)
            made.append(self)

    return Sabotaged


def no_mask(block: Block) -> None: block.attn.mask.fill_(True)
def one_step_ahead(block: Block) -> None: block.attn.mask |= torch.ones_like(block.attn.mask).tril(1)
def one_cell(block: Block) -> None: block.attn.mask[3, 7] = True
def not_itself(block: Block) -> None: block.attn.mask &= torch.ones_like(block.attn.mask).tril(-1)
def transposed(block: Block) -> None: block.attn.mask = block.attn.mask.T.contiguous()
def after_softmax(block: Block) -> None: block.attn = AfterSoftmax(CONFIG.d_model, CONFIG.n_heads, CONFIG.context_length)
def no_past(block: Block) -> None: block.attn.mask &= torch.eye(CONFIG.context_length, dtype=torch.bool)


@WAYS
@pytest.mark.parametrize("change", [no_mask, one_step_ahead, one_cell, transposed, after_softmax])
def test_a_leak_in_a_single_block_is_found(seen, change):
    "Protects the check above: each leak that people really made is seen by it."
    idx = torch.randint(CONFIG.vocab_size, (2, CONFIG.context_length))
    assert seen(model_of(sabotaged(change)), idx).triu(1).any()


@WAYS
def test_a_mask_that_hides_too_much_is_found(seen):
    "Protects the other half of the check: with every block blind to the past, past positions have no effect."
    class Blind(Block):
        def __init__(self, config: GPTConfig):
            super().__init__(config)
            no_past(self)

    idx = torch.randint(CONFIG.vocab_size, (2, CONFIG.context_length))
    assert not seen(model_of(Blind), idx).tril(-1).any()


def test_a_block_that_does_not_see_its_own_position_loses_the_first_one():
    "Protects the diagonal: without it the first position attends to nothing, and its attention is its output bias alone."
    attn = MultiHeadAttention(12, 3, 9).double()
    with torch.no_grad(): attn.proj.bias.normal_()
    attn.mask &= torch.ones_like(attn.mask).tril(-1)
    out = attn(torch.randn(2, 5, 12, dtype=torch.float64))
    assert torch.equal(out[:, 0], attn.proj.bias.expand(2, 12)) and not torch.equal(out[:, 1], out[:, 0])


def test_sequences_of_a_batch_do_not_see_each_other():
    "Protects the batch axis: a sequence's logits are the same alone and among others."
    idx = torch.randint(CONFIG.vocab_size, (4, 9))
    model = model_of()
    torch.testing.assert_close(model(idx), torch.cat([model(row[None]) for row in idx]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("n_keys", range(1, 10))
def test_the_last_queries_see_what_they_saw_among_all(n_keys: int):
    "Protects queries fewer than keys, which a cache brings: the mask of the last rows is the last rows of the mask."
    attn = MultiHeadAttention(12, 3, 9)
    assert causal_mask(n_keys).tolist() == [[key <= query for key in range(n_keys)] for query in range(n_keys)]
    q, k, v = (torch.randn(2, 3, n_keys, 4, dtype=torch.float64) for _ in range(3))
    whole = sdpa(q, k, v, causal_mask(n_keys))
    for n in range(1, n_keys + 1):
        assert torch.equal(attn.visible(n, n_keys), causal_mask(n, n_keys)) and torch.equal(causal_mask(n, n_keys), causal_mask(n_keys)[-n:])
        torch.testing.assert_close(sdpa(q[:, :, -n:], k, v, attn.visible(n, n_keys)), whole[:, :, -n:], rtol=1e-12, atol=1e-12)
