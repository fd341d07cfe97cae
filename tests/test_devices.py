"""Where models live and how they travel: the choice of a device, the meta device, dtypes, copies, pickles and spawned workers."""

import copy
import multiprocessing
import pickle
import resource
from collections.abc import Callable

import pytest
import torch
from messages import refuses

from minigpt import GPT, GPTConfig, KVCache, MultiHeadAttention, fused, generate, pick_device, sdpa
from minigpt.ablations import ABLATIONS, BUGS
from minigpt.addition import AddTask
from minigpt.checkpoints import newest, save_checkpoint
from minigpt.grokking import ModularTask
from minigpt.language import CharTokenizer, TextTask
from minigpt.layers import LayerNorm, Linear, embedding
from minigpt.model import attention_maps, next_token_loss, parameter_table, trace_shapes
from minigpt.rotary import POSITIONS, LengthTask
from minigpt.sorting import SortTask
from minigpt.training import AdamW, TrainConfig, decay_groups, new_optimizer, train

SMALL = GPTConfig(vocab_size=11, context_length=12, d_model=16, n_heads=2, n_layers=2, dropout=0.0)
MODELS: dict[str, Callable[[], GPT]] = {
    "plain": lambda: GPT(SMALL),
    "as GPT-2": lambda: GPT(GPTConfig(11, 12, 16, 2, 2, 0.0, gelu="tanh", tied_head=True)),
    "fused": lambda: fused(GPT(SMALL)),
    **{f"{name} positions": lambda kind=kind: GPT(SMALL, positions=kind) for name, kind in POSITIONS.items()},
    **{name: lambda kind=kind: kind.model(SMALL) for name, kind in {**ABLATIONS, **BUGS}.items()},
}
TASKS = [SortTask(3), LengthTask((2, 3)), AddTask(2), TextTask("to be or not to be, " * 40, context_length=16)]
IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    "Makes torch say that there are so many GPUs, and whether there is mps; nothing is moved there."
    def pretend(gpus: int = 0, mps: bool = False, rank: int | None = None) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
        if rank is None: monkeypatch.delenv("LOCAL_RANK", raising=False)
        else: monkeypatch.setenv("LOCAL_RANK", str(rank))
    return pretend


@pytest.mark.parametrize("there, auto", [({}, "cpu"), ({"mps": True}, "mps"), ({"gpus": 1}, "cuda:0"), ({"gpus": 2, "mps": True}, "cuda:0"), ({"gpus": 4, "rank": 3}, "cuda:3")])
def test_auto_is_the_best_there_is(machine: Callable, there: dict, auto: str):
    machine(**there)
    assert pick_device() == pick_device("auto") == auto and pick_device("cpu") == "cpu"
    if "gpus" in there: assert pick_device("cuda") == auto


def test_a_device_that_is_not_there_is_named(machine: Callable):
    machine(gpus=2)
    assert pick_device("cuda:1") == "cuda:1"
    for name in ("cuda:2", "mps", "tpu", ""): refuses(lambda name=name: pick_device(name), [repr(name), "cuda:0, cuda:1, cpu"])
    machine(gpus=2, rank=2)
    refuses(lambda: pick_device("cuda"), ["cuda:2", "cuda:0, cuda:1, cpu"])
    machine()
    refuses(lambda: pick_device("cuda"), ["'cuda'", "there is cpu"])


@pytest.mark.parametrize("name", MODELS)
def test_everything_follows_to_the_meta_device(name: str):
    "On a device without numbers a step of training works in shapes; a tensor that was made elsewhere on the way would be noticed."
    model, ids = MODELS[name]().to("meta"), IDS.to("meta")
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} <= {"meta"}
    if name == "learned, offset positions": model.eval()  # while training it asks for the number of the last position
    loss = next_token_loss(model, ids[:, :-1], ids[:, 1:])
    loss.backward()
    assert loss.device.type == "meta" and {p.grad.device.type for p in model.parameters() if p.grad is not None} == {"meta"}
    optimizer = AdamW(decay_groups(model, 0.1))
    optimizer.step()
    assert {m.device.type for m, _ in optimizer.state_dict()["averages"]} == {"meta"}


@pytest.mark.parametrize("name", MODELS)
def test_models_can_be_made_on_the_meta_device(name: str):
    with torch.device("meta"): model = MODELS[name]()
    assert {p.device.type for p in model.parameters()} == {"meta"} and parameter_table(model) == parameter_table(MODELS[name]())


def test_what_listens_and_what_remembers_follows_as_well():
    model, ids = GPT(SMALL).to("meta"), IDS.to("meta")
    assert attention_maps(model, ids).device.type == "meta" and trace_shapes(model, ids) == trace_shapes(GPT(SMALL), IDS)
    with torch.no_grad():
        cache = KVCache(model, batch_size=2)
        assert cache.memory.device.type == "meta" and model(ids, cache).shape == (2, 5, 11) and len(cache) == 5


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["plain", "as GPT-2", "fused", "rotary positions"])
def test_everything_follows_to_another_dtype(name: str, dtype: torch.dtype):
    model = MODELS[name]().to(dtype)
    assert model(IDS).dtype == dtype and generate(model, IDS, 3, temperature=0).shape == (2, 8)
    with torch.no_grad():
        cache = KVCache(model, batch_size=2)
        assert model(IDS, cache).dtype == cache.memory.dtype == dtype


X, W = torch.ones(2, 3, 4), torch.ones(4)
Q = torch.ones(1, 2, 3, 4)
MISTAKES = {
    "ids elsewhere": (lambda: GPT(SMALL)(IDS.to("meta")), ["ids", "meta", "cpu", "move"], ValueError),
    "model elsewhere": (lambda: GPT(SMALL).to("meta")(IDS), ["ids", "cpu", "meta", "move"], ValueError),
    "writing elsewhere": (lambda: generate(GPT(SMALL).to("meta"), IDS, 1), ["ids", "cpu", "meta"], ValueError),
    "writing without numbers": (lambda: generate(GPT(SMALL), IDS.to("meta"), 1), ["idx", "meta", "no numbers"], ValueError),
    "targets elsewhere": (lambda: next_token_loss(GPT(SMALL), IDS, IDS.to("meta")), ["idx", "cpu", "targets", "meta"], ValueError),
    "table elsewhere": (lambda: embedding(IDS, torch.ones(11, 2, device="meta")), ["ids", "cpu", "table", "meta"], ValueError),
    "input elsewhere": (lambda: Linear(4, 2)(X.to("meta")), ["x is on meta", "weight on cpu"], ValueError),
    "norm elsewhere": (lambda: LayerNorm(4)(X.to("meta")), ["x is on meta", "weight on cpu"], ValueError),
    "attention elsewhere": (lambda: MultiHeadAttention(4, 2, 8)(X.to("meta")), ["x is on meta", "weight on cpu"], ValueError),
    "mask elsewhere": (lambda: sdpa(Q, Q, Q, torch.ones(3, 3, dtype=torch.bool, device="meta")), ["q is on cpu", "mask on meta"], ValueError),
    "keys elsewhere": (lambda: sdpa(Q, Q.to("meta"), Q.to("meta")), ["q is on cpu", "k on meta"], ValueError),
    "cache elsewhere": (lambda: cached_pass(GPT(SMALL), KVCache(GPT(SMALL).to("meta"), batch_size=2)), ["cache", "meta", "keys", "cpu"], ValueError),
    "ids that are floats": (lambda: GPT(SMALL)(IDS.float()), ["ids", "integers", "torch.float32"], TypeError),
    "ids that are a list": (lambda: GPT(SMALL)([[1, 2]]), ["idx", "tensor", "list"], TypeError),
    "ids that are an array": (lambda: generate(GPT(SMALL), IDS.numpy(), 1), ["idx", "tensor", "ndarray"], TypeError),
    "targets that are floats": (lambda: next_token_loss(GPT(SMALL), IDS, IDS.float()), ["targets", "integers", "torch.float32"], TypeError),
    "input of another dtype": (lambda: Linear(4, 2)(X.double()), ["x is torch.float64", "weight torch.float32"], TypeError),
    "norm of another dtype": (lambda: LayerNorm(4)(X.half()), ["x is torch.float16", "weight torch.float32"], TypeError),
    "input that is integers": (lambda: Linear(4, 2)(X.long()), ["x is torch.int64", "weight torch.float32"], TypeError),
    "queries of another dtype": (lambda: sdpa(Q.double(), Q, Q), ["q is torch.float64", "k torch.float32"], TypeError),
    "values of another dtype": (lambda: sdpa(Q, Q, Q.double()), ["k is torch.float32", "v torch.float64"], TypeError),
    "mask of zeros and ones": (lambda: sdpa(Q, Q, Q, torch.ones(3, 3).long()), ["mask must be boolean", "torch.int64"], TypeError),
    "mask of another shape": (lambda: sdpa(Q, Q, Q, torch.ones(3, 2, dtype=torch.bool)), ["mask must be", "(3, 3)", "(3, 2)"], ValueError),
    "keys of another width": (lambda: sdpa(Q, Q[..., :3], Q), ["q and k", "wide", "(1, 2, 3, 4)", "(1, 2, 3, 3)"], ValueError),
    "values of another length": (lambda: sdpa(Q, Q, Q[:, :, :2]), ["k and v", "long", "(1, 2, 2, 4)"], ValueError),
    "input of another width": (lambda: Linear(3, 2)(X), ["x must end in 3 channels", "(2, 3, 4)"], ValueError),
    "a width that would be stretched": (lambda: LayerNorm(4)(X[..., :1]), ["x must end in 4 channels", "(2, 3, 1)"], ValueError),
}


def cached_pass(model: GPT, cache: KVCache) -> torch.Tensor:
    with torch.no_grad(): return model(IDS, cache)


@pytest.mark.unenforced
@pytest.mark.parametrize("call, parts, error", MISTAKES.values(), ids=MISTAKES)
def test_wrong_devices_dtypes_and_shapes_are_sentences(call: Callable, parts: list[str], error: type[Exception]): refuses(call, parts, error)


def test_under_autocast_dtypes_may_meet():
    layer = Linear(4, 2, bias=False)
    with torch.autocast("cpu", torch.bfloat16): assert torch.equal(layer(X), layer(X.bfloat16())) and layer(X).dtype == torch.bfloat16
    refuses(lambda: Linear(4, 2)(X.bfloat16()), ["x is torch.bfloat16", "weight torch.float32"], TypeError)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_copies_are_equal_and_independent(make: Callable[[], GPT], copied: Callable):
    model = make().eval()
    other = copied(model)
    assert type(other) is type(model) and other.config == model.config and list(other.state_dict()) == list(model.state_dict())
    assert torch.equal(other(IDS), model(IDS))
    assert (other.lm_head.weight is other.token_embedding.weight) == model.config.tied_head
    before = model(IDS).clone()
    with torch.no_grad():
        for parameter in other.parameters(): parameter.add_(1)
    assert torch.equal(model(IDS), before)


def test_a_copied_optimizer_goes_on_alike():
    model = GPT(SMALL)
    optimizer, batch = new_optimizer(model, TrainConfig()), (IDS[:, :-1], IDS[:, 1:])
    train(model, lambda step: batch, TrainConfig(steps=5, warmup=1), optimizer)
    both = copy.deepcopy((model, optimizer))  # one copy of both, so that they still belong together
    assert train(model, lambda step: batch, TrainConfig(steps=5, warmup=1), optimizer) == train(both[0], lambda step: batch, TrainConfig(steps=5, warmup=1), both[1])


def answer(sent: bytes, folder: str) -> list:
    "What a spawned worker finds: logits of each model, batches of each task, and a checkpoint that it writes."
    torch.set_num_threads(1)
    models, tasks = pickle.loads(sent)
    save_checkpoint(folder, models[0], step=1)
    return [[model(IDS).detach().numpy() for model in models], [[part.numpy() for part in task.batch_at(3, seed=1)] for task in tasks], CharTokenizer("abc").encode("cab").tolist()]


def test_models_and_tasks_travel_to_spawned_workers(tmp_path):
    "A new process, which has imported nothing and inherits nothing, gets them pickled, computes with them, and sends results back; with 256 open files allowed, a quarter of what is usual."
    models, limits = [make().eval() for make in MODELS.values()], resource.getrlimit(resource.RLIMIT_NOFILE)
    sent = pickle.dumps((models, TASKS))  # as bytes: a pool's own pickling holds an open file for each tensor
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, limits[1]), limits[1]))
        with multiprocessing.get_context("spawn").Pool(1) as pool: logits, batches, ids = pool.apply(answer, (sent, str(tmp_path)))
    finally: resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    for name, model, found in zip(MODELS, models, logits, strict=True): assert torch.equal(model(IDS), torch.from_numpy(found)), name
    for task, found in zip(TASKS, batches, strict=True): assert all(torch.equal(a, torch.from_numpy(b)) for a, b in zip(task.batch_at(3, seed=1), found, strict=True))
    assert ids == [2, 0, 1] and newest(tmp_path).name.endswith("1")


def test_a_task_of_pairs_travels_too():
    task = ModularTask(p=7)
    assert pickle.loads(pickle.dumps(task)) == task == copy.deepcopy(task)
