"""Several processes train one model: the same gradients and weights as one process with the whole batch, one writer, resumed by any number, and a killed worker ends the run with a sentence."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from forked import Forks

from minigpt.checkpoints import checkpoints, load_checkpoint, newest
from minigpt.distributed import Team, process_group, share, team_model, team_step
from minigpt.model import GPT, GPTConfig
from minigpt.training import NonFiniteLoss, TrainConfig, train, train_step

TEXT = "The quick brown fox jumps over the lazy dog.\n" * 60
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}


def command(processes: int, *words: object) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes > 1 else []
    return [sys.executable, *launcher, "-m", "minigpt", "train", "text", "--device", "cpu", *map(str, words)]


@pytest.fixture
def team(forks: Forks, root: Path):
    "Runs the command in one process, or in several that find each other without a launcher."
    def run(processes: int, *words: object) -> str:
        with socket.create_server(("127.0.0.1", 0)) as free: port = free.getsockname()[1]
        shared = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} if processes > 1 else {}
        environments = [ENVIRONMENT | {"PYTHONPATH": str(root), "RANK": str(rank), "LOCAL_RANK": str(rank)} | shared for rank in range(processes)]
        done = forks.together([command(1, *words)[1:]] * processes, root, environments)
        assert [one.returncode for one in done] == [0] * processes, done
        return "".join(one.stdout for one in done)
    return run


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    "A text, and a model that learns it fast."
    folder = tmp_path_factory.mktemp("job")
    (folder / "fox.txt").write_text(TEXT)
    (folder / "small.json").write_text('{"model": {"d_model": 32, "n_heads": 2, "n_layers": 1}}')
    return ["--text", folder / "fox.txt", "--config", folder / "small.json", "--seed", 1]


def apart(a: Path, b: Path) -> float:
    pairs = zip(*(load_checkpoint(newest(folder)).model.parameters() for folder in (a, b)), strict=True)
    return max((p - q).abs().max().item() for p, q in pairs)


def test_two_processes_are_one_with_the_whole_batch(job: list[object], team, tmp_path: Path):
    "The weights after some steps agree; there is one log and one line for each measurement."
    how = [*job, "--steps", 6, "--every", 3]
    team(1, *how, "--out", tmp_path / "one")
    said = subprocess.run(command(2, *how, "--out", tmp_path / "two"), check=True, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT, timeout=300).stdout
    team(2, *how, "--accumulate", 3, "--out", tmp_path / "parts")
    assert apart(tmp_path / "one", tmp_path / "two") < 1e-6 and apart(tmp_path / "one", tmp_path / "parts") < 1e-6
    assert said.count("step 3:") == 1 and said.count("done:") == 1 and len((tmp_path / "two" / "log.csv").read_text().splitlines()) == 3


def test_a_killed_worker_ends_the_run_and_any_number_goes_on(job: list[object], team, tmp_path: Path):
    how, out = [*job, "--steps", 600, "--every", 200, "--save-every", 5], tmp_path / "run"
    process = subprocess.Popen(command(2, *how, "--out", out), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    deadline = time.monotonic() + 120
    while not (out.exists() and checkpoints(out)):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    workers = subprocess.run(["pgrep", "-P", str(process.pid), "-f", "minigpt train"], capture_output=True, text=True).stdout.split()
    assert len(workers) == 2
    os.kill(int(workers[1]), signal.SIGKILL)
    _, said = process.communicate(timeout=120)
    assert process.returncode not in (0, None) and ("another process of this run has ended" in said or "SIGKILL" in said or "Signal 9" in said)
    at = load_checkpoint(newest(out)).step
    assert 5 <= at < 600
    team(1, *how, "--out", out, "--resume")  # by another number of processes
    assert load_checkpoint(newest(out)).step == 600
    steps, losses = zip(*(map(float, line.split(",")[:2]) for line in (out / "log.csv").read_text().splitlines()[1:]))
    assert steps == (200, 400, 600) and losses[-1] < losses[0]


def test_a_batch_that_cannot_be_shared():
    batch = torch.zeros(12, 3), torch.zeros(12, 3)
    assert [len(share(batch, Team(0, 2), n)[0][0]) for n in (1, 2, 3, 6)] == [6, 3, 2, 1]
    with pytest.raises(ValueError, match="batch of 12 sequences cannot be divided among 5 processes"): share(batch, Team(0, 5))
    assert torch.equal(torch.cat([part[0] for rank in range(3) for part in share((torch.arange(12), torch.arange(12)), Team(rank, 3), 2)]), torch.arange(12))


def test_alone_nothing_is_wrapped():
    model = GPT(GPTConfig(d_model=16, n_layers=1))
    with process_group("cpu") as alone: assert alone == Team() and team_model(model, alone) is model and alone.any(True) and alone.mean(3.0) == 3.0


def test_parts_add_up_and_bad_numbers_stop_the_run():
    def trained(step):
        torch.manual_seed(0)
        model = GPT(GPTConfig(vocab_size=9, context_length=8, d_model=16, n_heads=2, dropout=0.0)).double()
        batch = tuple(torch.randint(9, (2, 12, 8)))
        return train(model, lambda s: batch, TrainConfig(steps=6), take_step=step)
    whole = trained(train_step)
    assert all(abs(a - b) < 1e-12 for n in (1, 4, 12) for a, b in zip(whole, trained(team_step(Team(), n)), strict=True))
    broken = GPT(GPTConfig(vocab_size=9, d_model=16, n_layers=1))
    broken.lm_head.weight.data[0, 0] = torch.nan
    with pytest.raises(NonFiniteLoss, match="step 0"): train(broken, lambda s: (torch.zeros(2, 4).long(),) * 2, TrainConfig(steps=2), take_step=team_step(Team(), 2))


def test_parts_that_count_differently_are_refused():
    "The mean of their losses would not be the loss of the batch."
    idx = torch.zeros(4, 3, dtype=torch.long)
    targets = idx.clone()
    targets[0, 0] = -100
    with pytest.raises(ValueError, match=r"equally many targets.*\[5, 6\]"): share((idx, targets), Team(0, 2))
    targets[2, 1] = -100
    assert len(share((idx, targets), Team(0, 2))) == 1


@pytest.mark.unenforced
def test_a_model_that_nobody_averages_is_refused():
    step = team_step(Team(0, 2))
    with pytest.raises(ValueError, match="team_model"): step(torch.nn.Linear(1, 1), None, (torch.zeros(2, 1), torch.zeros(2, 1)), 0, TrainConfig())


def test_a_device_that_no_backend_serves_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="device cpu or cuda, got 'mps'"), process_group("mps"): pass
