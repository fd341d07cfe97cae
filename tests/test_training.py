"""Training as a whole: repeatable, equal to the library's optimiser, able to learn, and stopped by a loss that is no number."""

import math
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minigpt.generation import generate
from minigpt.model import GPT, GPTConfig, attention_maps, next_token_loss
from minigpt.training import NonFiniteLoss, TrainConfig, decay_groups, evaluate, matrices_only, new_optimizer, train, train_step

SMALL = GPTConfig(vocab_size=9, context_length=6, d_model=16, n_heads=2, n_layers=2, dropout=0.2)
SETTINGS = TrainConfig(steps=12, lr=1e-2, warmup=3, floor=1e-4, betas=(0.8, 0.95), weight_decay=0.3, clip=0.5)


def batch_at(step: int, seed: int = 0, B: int = 4) -> tuple[Tensor, Tensor]:
    text = torch.randint(SMALL.vocab_size, (B, SMALL.context_length + 1), generator=torch.Generator().manual_seed(1000 * seed + step))
    return text[:, :-1].clone(), text[:, 1:].clone()


def model_of(seed: int = 0, config: GPTConfig = SMALL, dtype: torch.dtype = torch.float32) -> GPT:
    torch.manual_seed(seed)
    return GPT(config).to(dtype)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {n: w.clone() for n, w in model.state_dict().items()}


def trained(seed: int = 0, data_seed: int = 0, watch=None, config: TrainConfig = SETTINGS) -> tuple[list[float], dict[str, Tensor]]:
    model = model_of(seed)
    return train(model, lambda step: batch_at(step, data_seed), config, watch=watch), weights(model)


def differ(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool: return any(not torch.equal(a[n], b[n]) for n in a)


# Determinism


def test_the_same_seed_gives_the_same_weights():
    "Protects repeatability, dropout included: losses and weights agree bit for bit."
    (losses, first), (again, second) = trained(), trained()
    assert losses == again and not differ(first, second)


@pytest.mark.parametrize("other", [{"seed": 1}, {"data_seed": 1}])
def test_another_seed_gives_other_weights(other: dict):
    "Protects the seeds themselves: initial weights and data each follow theirs."
    assert trained()[0] != trained(**other)[0] and differ(trained()[1], trained(**other)[1])


def test_training_changes_every_parameter():
    "Protects the wiring: no parameter is left without a gradient or out of the optimiser."
    assert all(not torch.equal(before, after) for before, after in zip(weights(model_of()).values(), trained()[1].values()))


# Learning


def test_one_batch_is_learned_by_heart():
    "Protects the ability to learn at all: from ln(9) to next to nothing in 100 steps."
    model, batch = model_of(config=GPTConfig(vocab_size=9, context_length=6, d_model=32, n_heads=2, n_layers=2, dropout=0.0)), batch_at(0)
    batch[0][:, 0] = torch.arange(len(batch[0]))  # each text is told by its first token, so that it can be known how it goes on
    losses = train(model, lambda step: batch, TrainConfig(steps=100, lr=1e-2, warmup=10, betas=(0.9, 0.99), weight_decay=0.0))
    assert losses[0] == pytest.approx(math.log(9), abs=0.2) and losses[-1] < 0.01
    assert torch.equal(model.eval()(batch[0]).argmax(-1), batch[1])


# The optimiser


def library_run(model: GPT, config: TrainConfig) -> list[float]:
    "What `train` should do, by the library's cross entropy, clipping and AdamW, with the learning rate of each step written out."
    decaying = {n for n, p in model.named_parameters() if p.ndim == 2 and not n.endswith("embedding.weight")}
    groups = [{"params": [p for n, p in model.named_parameters() if (n in decaying) is chosen], "weight_decay": config.weight_decay * chosen} for chosen in (True, False)]
    optimizer, losses = torch.optim.AdamW(groups, lr=1.0, betas=config.betas), []
    for step in range(config.steps):
        falling = config.floor + (config.lr - config.floor) * (1 + math.cos(math.pi * (step - config.warmup) / (config.steps - config.warmup))) / 2
        for group in optimizer.param_groups: group["lr"] = config.lr * (step + 1) / (config.warmup + 1) if step < config.warmup else falling
        idx, targets = batch_at(step)
        loss = F.cross_entropy(model(idx).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("clip", [0.5, 1e6])
def test_a_whole_run_equals_one_with_the_library(clip: float):
    "Protects loss, groups, schedule, clipping and AdamW together: 40 steps of a whole model in float64, every weight alike."
    config = TrainConfig(steps=40, lr=3e-3, warmup=10, floor=1e-4, betas=(0.9, 0.99), weight_decay=0.5, clip=clip)
    plain = GPTConfig(**{**vars(SMALL), "dropout": 0.0})
    ours, theirs = (model_of(0, plain, torch.float64) for _ in range(2))
    losses = train(ours, batch_at, config)
    assert losses == pytest.approx(library_run(theirs, config), abs=1e-9)
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-8, atol=1e-8)


def test_the_groups_hold_every_parameter_once_and_decay_matrices_only():
    "Protects the split into what decays and what does not."
    model = model_of()
    decaying, others = decay_groups(model, 0.1)
    assert sorted(map(id, decaying["params"] + others["params"])) == sorted(map(id, model.parameters()))
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    names = {id(p): n for n, p in model.named_parameters()}
    assert {names[id(p)].rpartition(".")[0].rpartition(".")[2] for p in decaying["params"]} == {"qkv", "proj", "fc", "lm_head"}


def test_the_caller_chooses_what_decays():
    "Protects the choice: a rule of one's own is followed, `matrices_only` being no more than the default."
    model = model_of()
    chosen = decay_groups(model, 0.1, lambda name, p: name.endswith("bias"))[0]["params"]
    assert {id(p) for p in chosen} == {id(p) for n, p in model.named_parameters() if n.endswith("bias")}
    assert not matrices_only("token_embedding.weight", model.token_embedding.weight) and matrices_only("lm_head.weight", model.lm_head.weight)


def test_a_state_is_a_snapshot():
    "Protects saved states: later steps do not reach into them, nor do steps of the optimiser that loaded one."
    model = model_of()
    optimizer = new_optimizer(model, SETTINGS)
    train(model, batch_at, SETTINGS, optimizer, stop=3)
    saved = optimizer.state_dict()
    copy = deepcopy(saved)
    train(model, batch_at, SETTINGS, optimizer, start=3)
    other = new_optimizer(model, SETTINGS)
    other.load_state_dict(saved)
    train(model, batch_at, SETTINGS, other, start=3, stop=5)
    assert saved["t"] == 3
    torch.testing.assert_close(saved, copy, rtol=0, atol=0)


# Evaluation


def everything_that_looks(model: GPT) -> None:
    "All that one may do with a model while it is being trained."
    idx, targets = batch_at(99)
    evaluate(model, [(idx, targets)] * 2)
    generate(model, idx[:, :2], 5, seed=3)
    generate(model, idx[:, :2], 5, temperature=0)
    attention_maps(model, idx)


def test_looking_at_a_model_does_not_change_its_training():
    "Protects training from evaluation: with and without it, the same losses and weights, bit for bit, dropout included."
    model = model_of()
    losses = train(model, batch_at, SETTINGS, watch=lambda step, loss: everything_that_looks(model))
    expected, expected_weights = trained()
    assert losses == expected and not differ(weights(model), expected_weights)


def test_evaluation_leaves_modes_gradients_and_random_numbers_alone():
    "Protects what `evaluate` touches: a part that was frozen in evaluation mode stays so, gradients and the global generator stay, too."
    model = model_of().train()
    model.blocks[0].eval()
    next_token_loss(model, *batch_at(0)).backward()
    modes, gradients, state = [m.training for m in model.modules()], [p.grad.clone() for p in model.parameters()], torch.get_rng_state()
    everything_that_looks(model)
    assert [m.training for m in model.modules()] == modes and torch.equal(torch.get_rng_state(), state) and torch.is_grad_enabled()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients))


def test_evaluation_that_fails_restores_the_mode():
    "Protects a training loop that catches an error: the model is back in training mode, gradients are on."
    model = model_of().train()
    with pytest.raises(ValueError): evaluate(model, [(torch.full((1, 3), 99), torch.zeros(1, 3, dtype=torch.long))])
    assert all(m.training for m in model.modules()) and torch.is_grad_enabled()


def test_evaluation_weighs_tokens_not_batches():
    "Protects the mean: batches of unequal size and with ignored targets give what one big batch gives."
    model = model_of().eval()
    idx, targets = batch_at(0, B=10)
    targets[0, :4], targets[7:] = -100, -100
    whole = next_token_loss(model, idx, targets).item()
    parts = [(idx[a:b], targets[a:b]) for a, b in [(0, 1), (1, 7), (7, 10)]]
    assert evaluate(model, iter(parts)) == pytest.approx(whole, abs=1e-6)
    assert evaluate(model, parts[:1]) != pytest.approx(evaluate(model, parts[1:2]), abs=1e-3)


# What stops training


class Poisoned(nn.Module):
    "A model that at one step gives a bad logit to a token that occurs among the targets."

    def __init__(self, model: GPT, at: int, bad: float):
        super().__init__()
        self.model, self.at, self.bad, self.calls = model, at, bad, 0

    def forward(self, idx: Tensor) -> Tensor:
        self.calls += 1
        logits = self.model(idx)
        return logits.index_fill(-1, batch_at(self.at)[1][0, :1], self.bad) if self.calls == self.at + 1 else logits


@pytest.mark.parametrize("bad, loss", [(math.nan, "nan"), (math.inf, "nan"), (-math.inf, "inf")])
@pytest.mark.parametrize("at", [0, 5])
def test_a_loss_that_is_no_number_stops_training(bad: float, loss: str, at: int):
    "Protects a run from going on with spoilt weights: the error names loss and step; weights and optimiser are as they were before it."
    model, good = Poisoned(model_of(), at, bad), model_of()
    optimizer, reference = new_optimizer(model, SETTINGS), new_optimizer(good, SETTINGS)
    torch.manual_seed(1)
    with pytest.raises(NonFiniteLoss, match=rf"^loss is {loss} at step {at}\b"): train(model, batch_at, SETTINGS, optimizer)
    torch.manual_seed(1)
    if at: train(good, batch_at, SETTINGS, reference, stop=at)
    assert not differ(weights(model.model), weights(good)) and optimizer.t == reference.t == at
    torch.testing.assert_close(optimizer.state_dict(), reference.state_dict(), rtol=0, atol=0)


class Cliff(torch.autograd.Function):
    "Does nothing on the way forward, and gives gradients that are no numbers on the way back."

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor: return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor: return gradient * math.nan


def test_gradients_that_are_no_numbers_stop_training():
    "Protects the weights from a finite loss with NaN gradients (an overflow on the way back): the same error, before they are touched."
    model = model_of()
    before, optimizer = weights(model), new_optimizer(model, SETTINGS)
    hook = model.ln_f.register_forward_hook(lambda module, args, out: Cliff.apply(out))
    with pytest.raises(NonFiniteLoss, match=r"\bstep 7\b"): train_step(model, optimizer, batch_at(0), 7, SETTINGS)
    hook.remove()
    assert not differ(weights(model), before) and optimizer.t == 0


def test_the_error_is_of_both_kinds():
    "Protects callers: it is a ValueError, as all bad input here, and a FloatingPointError, as what it is."
    assert issubclass(NonFiniteLoss, ValueError) and issubclass(NonFiniteLoss, FloatingPointError)


def test_the_loop_tells_what_it_does():
    "Protects `watch` and the list of losses: called after each step with the number done and its loss, on any part of a run."
    seen, model = [], model_of()
    losses = train(model, batch_at, SETTINGS, start=4, stop=9, watch=lambda step, loss: seen.append((step, loss)))
    assert seen == list(zip(range(5, 10), losses)) and model.training


def test_a_bar_is_shown_only_where_it_is_asked_for(monkeypatch, capfd):
    "Protects notebooks and logs: no output where it is switched off; a bar where it is switched on."
    train(model_of(), batch_at, SETTINGS)
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    train(model_of(), batch_at, SETTINGS, progress=False)
    train(model_of(), batch_at, SETTINGS)  # standard error is no terminal here
    quiet = capfd.readouterr()
    train(model_of(), batch_at, SETTINGS, progress=True)
    assert (quiet.out, quiet.err) == ("", "") and "12/12" in capfd.readouterr().err


# Whoever watches changes nothing


@pytest.mark.parametrize("watch", [lambda model: torch.rand(5), lambda model: model.eval(), lambda model: model.blocks[0].eval(), lambda model: torch.manual_seed(7),
                                   lambda model: next_token_loss(model, *batch_at(99)).backward()], ids=["draws", "evaluates", "in part", "seeds", "leaves gradients"])
def test_a_careless_watcher_changes_neither_losses_nor_weights(watch):
    "With dropout: it would use other random numbers, or none, after such a watcher."
    losses, after = trained()
    model = model_of(0)
    assert train(model, batch_at, SETTINGS, watch=lambda step, loss: watch(model)) == losses
    assert not differ(weights(model), after)


def test_a_watcher_that_fails_leaves_modes_and_random_numbers_as_they_were():
    model = model_of(0)
    def watch(step, loss):
        model.eval(), torch.rand(3)
        raise KeyError("watch")
    torch.manual_seed(1)
    with pytest.raises(KeyError): train(model, batch_at, SETTINGS, watch=watch)
    state = torch.get_rng_state()
    torch.manual_seed(1)
    train(model_of(0), batch_at, SETTINGS, stop=0)
    assert model.training and state.shape == torch.get_rng_state().shape
