"""Threads that share a model: each gets what it would have got alone."""

import threading

import pytest
import torch

from minigpt.cache import cached, generate
from minigpt.generation import recompute
from minigpt.language import train_for
from minigpt.model import GPT, GPTConfig, attention_maps, evaluating, exclusive, residual_norms, trace_shapes
from minigpt.speed import fast_cached
from minigpt.training import TrainConfig, train

pytestmark = pytest.mark.unenforced
CONFIG = GPTConfig(11, 16, 16, 2, 2, dropout=0.5)


def a_model() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG)


def batch(step: int):
    text = torch.randint(11, (8, 17), generator=torch.Generator().manual_seed(step))
    return text[:, :-1], text[:, 1:]


def together(*jobs) -> None:
    "Run some functions, each in a thread; what one of them raises is raised here."
    failed: list[BaseException] = []

    def guarded(job):
        try: job()
        except BaseException as error: failed.append(error)

    threads = [threading.Thread(target=guarded, args=(job,), daemon=True) for job in jobs]
    for thread in threads: thread.start()
    for thread in threads: thread.join(120)
    assert not any(thread.is_alive() for thread in threads), "a thread waits for ever"
    if failed: raise failed[0]


def for_steps(model): train(model, batch, TrainConfig(steps=60, lr=1e-3, warmup=5), progress=False)


def for_a_time(model): train_for(1.0, model, batch, TrainConfig(steps=60, lr=1e-3, warmup=5), progress=False)


@pytest.mark.parametrize("loop", [for_steps, for_a_time])
def test_sampling_beside_a_training_leaves_it_in_training_mode(loop):
    "Fifty of sixty steps used to run without dropout, since a sampling thread had switched it off."
    model, modes, over = a_model(), [], threading.Event()
    model.blocks[0].register_forward_hook(lambda module, args, out: modes.append((threading.current_thread().name, module.training)))

    def training():
        threading.current_thread().name = "training"
        try: loop(model)
        finally: over.set()

    def sampling():
        threading.current_thread().name = "sampling"
        while not over.is_set(): generate(model, torch.tensor([[1, 2, 3]]), 6, seed=0)

    together(training, sampling)
    assert modes.count(("training", True)) == 60 or loop is for_a_time and ("training", True) in modes
    assert ("training", False) not in modes
    assert ("sampling", False) in modes and ("sampling", True) not in modes


@pytest.mark.parametrize("engine", [recompute, cached, fast_cached])
def test_samples_taken_beside_a_training_come_from_one_state_of_the_weights(engine):
    "A sample is finished before the weights move on, so each is one that the model gives when it is left alone."
    model, samples, over = a_model(), [], threading.Event()
    alone = a_model()
    possible = {tuple(generate(alone, torch.tensor([[1, 2, 3]]), 10, seed=0, engine=engine)[0].tolist())}

    def note(step, loss): possible.add(tuple(generate(alone, torch.tensor([[1, 2, 3]]), 10, seed=0, engine=engine)[0].tolist()))

    settings = TrainConfig(steps=25, lr=3e-2, warmup=2)
    torch.manual_seed(1)
    train(alone, batch, settings, watch=note, progress=False)

    def training():
        try:
            torch.manual_seed(1)
            train(model, batch, settings, progress=False)
        finally: over.set()

    def sampling():
        while not over.is_set(): samples.append(tuple(generate(model, torch.tensor([[1, 2, 3]]), 10, seed=0, engine=engine)[0].tolist()))

    together(training, sampling)
    assert len(possible) > 5 and samples and set(samples) <= possible


def test_two_threads_sample_and_look_at_the_same_model():
    model = a_model()
    idx = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[5, 6, 7, 8]])
    wanted = [(generate(model, x, 12, seed=i), attention_maps(model, x)) for i, x in enumerate(idx)]

    def look(i):
        for _ in range(20):
            assert torch.equal(generate(model, idx[i], 12, seed=i), wanted[i][0])
            assert torch.equal(attention_maps(model, idx[i]), wanted[i][1])

    together(lambda: look(0), lambda: look(1))
    assert model.training


def test_a_thread_that_has_the_model_may_ask_again_and_another_waits():
    model, order = a_model(), []
    inside = threading.Event()

    def first():
        with exclusive(model), evaluating(model), evaluating(model):
            inside.set()
            other.join(0.2)
            order.append("first")

    def second():
        inside.wait()
        with exclusive(torch.compile(model)): order.append("second")

    other = threading.Thread(target=second, daemon=True)
    other.start()
    first()
    other.join(60)
    assert order == ["first", "second"]


def test_two_models_do_not_wait_for_each_other():
    a, b, done = a_model(), a_model(), threading.Event()
    with exclusive(a): together(lambda: (exclusive(b).__enter__(), done.set()))
    assert done.is_set()


def test_what_listens_to_a_compiled_model_hears_it():
    "Hooks of a model that `torch.compile` has wrapped are not called; `KeyError: Dropout()` was all that one saw."
    model = a_model().eval()
    compiled = torch.compile(model, backend="eager")
    idx = torch.tensor([[1, 2, 3]])
    compiled(idx)
    assert torch.equal(attention_maps(compiled, idx), attention_maps(model, idx))
    assert trace_shapes(compiled, idx) == trace_shapes(model, idx) and residual_norms(compiled, idx) == residual_norms(model, idx)
