"""The command line, as a user meets it: each command in a process of its own, its exit code, what it says and what it leaves on the disk."""

import csv
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forked import Forks

import minigpt.__main__ as program
from minigpt import __version__ as minigpt_version
from minigpt.checkpoints import checkpoints, load_checkpoint, newest
from minigpt.model import GPT
from minigpt.speed import fused
from minigpt.training import train_step

pytestmark = pytest.mark.unenforced  # what is checked here is the program, whose messages are our own
TEXT = "The quick brown fox jumps over the lazy dog.\n" * 60
SMALL = '{"model": {"d_model": 16, "n_heads": 2, "n_layers": 1}}'


@pytest.fixture
def minigpt(forks: Forks, root: Path):
    "Runs the command in a process of its own, which is forked; see that it ends with the expected code, and a failure with one sentence."
    def run(*words: object, code: int = 0, program: Sequence[object] = ("-m", "minigpt"), cwd: Path = root) -> subprocess.CompletedProcess:
        done = forks.run([*program, *words], cwd, os.environ | {"TQDM_DISABLE": "1", "PYTHONPATH": str(root)})
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        if code == 1: assert done.stderr.startswith("minigpt: ") and done.stderr.count("\n") == 1, done.stderr
        return done
    return run


def bits(folder: Path) -> list[bytes]:
    found = load_checkpoint(newest(folder))
    return [p.detach().numpy().tobytes() for p in found.model.parameters()] + [t.numpy().tobytes() for _, t in sorted(found.training.items())]


def log(folder: Path) -> list[list[str]]:
    "The log without its last column, the speed."
    with open(folder / "log.csv", newline="") as file: return [row[:-1] for row in csv.reader(file)]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "fox.txt").write_text(TEXT)
    (tmp_path / "small.json").write_text(SMALL)
    return tmp_path / "fox.txt"


# Commands that only say something


@pytest.mark.parametrize("digits, want", [("3 1 4 1 5 9", "1 1 3 4 5 9"), ("999998", "8 9 9 9 9 9"), ("00 00 00", "0 0 0 0 0 0")])
def test_sort(minigpt, digits: str, want: str): assert minigpt("sort", *digits.split()).stdout.splitlines()[-1] == want


def test_sort_loads_nothing_that_it_does_not_need():
    "Plotting or another framework would make the shortest command slow."
    code = "import sys, minigpt.__main__; minigpt.__main__.main(['sort', '314159']); print(*sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert said.startswith("1 1 3 4 5 9\n") and not {"matplotlib", "transformers", "pandas"} & {name.split(".")[0] for name in said.split()}


@pytest.mark.parametrize("words, parts", [(["verify"], ["layer norm", "AdamW", torch.__version__]), (["shapes"], ["(1, 4, 8, 8)", "(1, 8, 384)"]), (["params"], ["470,528"]), (["params", "--config", "sorter"], ["152,064"])])
def test_tables(words: list[str], parts: list[str], capsys: pytest.CaptureFixture):
    assert program.main(words) == 0
    said = capsys.readouterr().out
    assert all(part in said for part in parts) and (words != ["verify"] or said.count("equal") == 12)


@pytest.mark.parametrize("command", [[], ["verify"], ["shapes"], ["params"], ["sort"], ["train"], ["sample"]])
def test_help(command: list[str], capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit) as caught: program.main([*command, "--help"])
    said = capsys.readouterr().out
    assert caught.value.code == 0 and "usage: minigpt" in said and (not command or "--seed" in said and "--device" in said)


# A run, stopped and resumed


@contextmanager
def stopping_at(step: int, monkeypatch: pytest.MonkeyPatch):
    "In this process: as if Ctrl-C came in the middle of a step."
    asked = iter(range(1, 10**6))
    @contextmanager
    def interruptible(): yield lambda: next(asked) == step
    with monkeypatch.context() as patched:
        patched.setattr(program, "interruptible", interruptible)
        yield


@pytest.mark.parametrize("job", ["sort", "add", "grok", "text"])
def test_every_job_trains_resumes_and_samples(tmp_path: Path, text: Path, job: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    "2N steps are N steps, a stop and N more: same weights, averages, random numbers and log."
    more = ["--text", str(text), "--config", str(text.with_name("small.json"))] if job == "text" else []
    def train(name, *words): return program.main(["train", job, *more, *"--steps 8 --every 2 --save-every 3 --seed 4 --out".split(), str(tmp_path / name), *words])
    assert train("whole") == 0
    with stopping_at(5, monkeypatch): assert train("halves") == 130
    said = capsys.readouterr().err
    assert "stopped after 5 steps" in said and "--resume" in said and newest(tmp_path / "halves").name == "step-00000005"
    assert train("halves", "--resume") == 0
    assert bits(tmp_path / "halves") == bits(tmp_path / "whole") and log(tmp_path / "halves") == log(tmp_path / "whole")
    assert [row[0] for row in log(tmp_path / "whole")] == ["step", "2", "4", "6", "8"] and len(checkpoints(tmp_path / "whole")) == 2
    assert (tmp_path / "whole" / "loss.svg").read_text().startswith("<?xml")
    capsys.readouterr()
    prompt = {"sort": "314159", "add": "457+589=", "grok": "5 3", "text": "The"}[job]
    few = ["--tokens", "20"] if job == "text" else []
    texts = [(program.main(["sample", str(tmp_path / "whole"), "--prompt", prompt, *few, "--seed", seed]), capsys.readouterr().out)[1] for seed in "112"]
    assert texts[0].startswith(prompt) and texts[0] == texts[1] and len(texts[0].strip()) > len(prompt)


def test_fused_training_agrees_and_is_not_mixed_up(tmp_path: Path, capsys: pytest.CaptureFixture):
    def train(name, *words): return program.main(["train", "sort", *"--steps 6 --every 3 --out".split(), str(tmp_path / name), *words])
    assert train("ours") == train("theirs", "--fused") == 0
    a, b = (load_checkpoint(newest(tmp_path / name)).model for name in ("ours", "theirs"))
    assert max((p - q).abs().max().item() for p, q in zip(a.parameters(), b.parameters())) < 1e-3
    assert train("theirs", "--resume") == 1 and "how fused was True and is False now" in capsys.readouterr().err
    assert train("half", "--bf16") == 0 and all(p.dtype == torch.float32 for p in load_checkpoint(newest(tmp_path / "half")).model.parameters())


def test_weights_in_bfloat16_are_never_those_of_an_earlier_step(tmp_path: Path):
    "Autocast keeps weights that it has converted; over a whole run that would freeze those which torch's kernels take as they are."
    job = program.configured(program.make_job("sort"), steps=3)
    job = replace(job, settings=replace(job.settings, lr=0.1, warmup=0))
    finished = {}
    for name in ("whole", "steps"):
        torch.manual_seed(0)
        model = fused(GPT(job.model))
        optimizer, batches = job.optimizer(model, job.settings), [job.batch_at(step, 0) for step in range(3)]
        options = program.Options(fused=True, bf16=True)
        def steps(which): return [train_step(model, optimizer, batches[i], i, job.settings) for i in which]
        if name == "whole":
            with program.precision(options): finished[name] = steps(range(3))
        else:
            finished[name] = []
            for i in range(3):
                with torch.autocast("cpu", torch.bfloat16): finished[name] += steps([i])
    assert finished["whole"] == finished["steps"] and len(set(finished["whole"])) == 3
    assert not torch.is_autocast_enabled("cpu")


def test_a_compiled_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    "Compiled by the backend that needs no compiler: the same training, and a checkpoint of the plain model."
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: compile(model, backend="eager"))
    for name, words in (("plain", []), ("compiled", ["--compile"])):
        assert program.main(["train", "sort", *"--steps 6 --every 3 --out".split(), str(tmp_path / name), *words]) == 0
    a, b = (load_checkpoint(newest(tmp_path / name)).model for name in ("plain", "compiled"))
    assert max((p - q).abs().max().item() for p, q in zip(a.parameters(), b.parameters())) < 1e-4


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path: Path):
    "A real signal to a real process."
    out = tmp_path / "run"
    command = [sys.executable, "-m", "minigpt", "train", "sort", "--steps", "5000", "--every", "2", "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 120
    while not (out / "log.csv").exists() or len(log(out)) < 3:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    step = int(newest(out).name.removeprefix("step-"))
    assert process.returncode == 130 and f"stopped after {step} steps, saved" in said and "--resume" in said and "Traceback" not in said
    assert 4 <= step < 5000


# What goes wrong is one sentence


@pytest.mark.parametrize("words, parts", [
    (["sort", "3", "1"], ["6 digits", "3 1"]), (["sort", "a", "b", "c", "d", "e", "f"], ["6 digits"]), (["sort", "314159", "--device", "cuda"], ["device", "'cuda'", "cpu"]),
    (["sample", "DIR/none"], ["DIR/none", "no checkpoint"]), (["train", "text", "--text", "DIR/none.txt"], ["none.txt", "No such file"]),
    (["train", "text", "--text", "DIR/empty.txt"], ["empty.txt", "empty"]), (["train", "text", "--text", "DIR/binary"], ["binary", "UTF-8"]),
    (["train", "text", "--text", "DIR/short.txt"], ["text", "context_length"]), (["train", "sort", "--text", "DIR/short.txt"], ["--text", "train text"]),
    (["train", "sort", "--steps", "0", "--out", "DIR/x"], ["steps", "at least 1", "0"]), (["train", "sort", "--every", "0", "--out", "DIR/x"], ["every", "at least 1"]),
    (["train", "sort", "--config", "nonsense"], ["--config", "nonsense", "reading"]), (["train", "sort", "--config", "DIR/short.txt"], ["--config", "JSON"]),
    (["train", "sort", "--config", "DIR/list.json"], ["--config", "object"]), (["train", "sort", "--config", "DIR/odd.json"], ["--config", "width"]),
    (["train", "sort", "--config", "DIR/bad.json", "--out", "DIR/x"], ["n_heads=5", "d_model=64"]), (["train", "sort", "--resume", "--out", "DIR/none"], ["DIR/none", "no checkpoint"]),
    (["train", "sort", "--config", "DIR/words.json", "--out", "DIR/x"], ["--config", "vocab_size", "10"]), (["verify", "--device", "tpu"], ["device", "'tpu'", "cpu"]),
    (["shapes", "--device", "tpu"], ["device", "'tpu'"]), (["sample", "DIR/done", "--prompt", "3\\n1"], ["--prompt", "'\\n'", "vocabulary"]),
    (["train", "sort", "--out", "DIR/short.txt"], ["short.txt", "exists"]), (["sample", "DIR/done", "--prompt", "31x"], ["--prompt", "'x'", "vocabulary"]),
    (["sample", "DIR/done", "--prompt", "31", "--temperature", "-1"], ["temperature", "-1"]), (["train", "sort", "--out", "DIR/done"], ["DIR/done", "--resume"]),
    (["train", "sort", "--steps", "9", "--resume", "--out", "DIR/done"], ["settings steps was 2 and is 9 now", "resume"]), (["train", "add", "--steps", "2", "--resume", "--out", "DIR/done"], ["job"]),
    (["train", "sort", "--steps", "2", "--seed", "1", "--resume", "--out", "DIR/done"], ["seed"]), (["sample", "DIR/done", "--tokens", "-1", "--prompt", "3"], ["n_tokens", "-1"]),
])
def test_one_sentence(done: Path, words: list[str], parts: list[str], capsys: pytest.CaptureFixture):
    (done / "short.txt").write_text("too short")
    (done / "empty.txt").write_text("")
    (done / "binary").write_bytes(bytes(range(256)))
    (done / "list.json").write_text("[]")
    (done / "odd.json").write_text('{"model": {"width": 3}}')
    (done / "words.json").write_text('{"model": {"vocab_size": 50}}')
    (done / "bad.json").write_text('{"model": {"n_heads": 5}}')
    assert program.main([word.replace("DIR", str(done)) for word in words]) == 1
    said = capsys.readouterr().err.replace(str(done), "DIR")
    assert said.startswith("minigpt: ") and said.count("\n") == 1 and all(part in said for part in parts), said


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    "A folder with a finished run in it."
    folder = tmp_path_factory.mktemp("runs")
    assert program.main(["train", "sort", "--steps", "2", "--out", str(folder / "done")]) == 0
    return folder


def test_unknown_words_are_explained(capsys: pytest.CaptureFixture):
    for words in (["trian"], ["train", "chess"], ["sort", "1", "--colour"], []):
        with pytest.raises(SystemExit) as caught: program.main(words)
        assert caught.value.code == 2 and "usage: minigpt" in capsys.readouterr().err


LIMITED = """
import resource, runpy, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
runpy.run_module("minigpt", run_name="__main__", alter_sys=True)
"""


@pytest.mark.skipif(os.name != "posix", reason="limits of a process")
def test_a_full_disk_is_one_sentence_and_loses_nothing(minigpt, tmp_path: Path):
    "A process that may write no file of more than 100 kB, as on a disk that is nearly full."
    out, limited = tmp_path / "run", [tmp_path / "limited.py"]
    limited[0].write_text(LIMITED)
    said = minigpt("train", "sort", "--steps", 4, "--save-every", 2, "--out", out, code=1, program=limited).stderr
    assert "cannot be written" in said or "File too large" in said
    assert [p.name for p in out.iterdir()] == ["log.csv"]
    minigpt("train", "sort", "--steps", 4, "--save-every", 2, "--out", out)
    before = bits(out)
    minigpt("train", "sort", "--steps", 4, "--save-every", 2, "--out", out, "--resume", program=limited)
    assert bits(out) == before


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(minigpt, tmp_path: Path):
    tmp_path.chmod(0o500)
    assert "Permission denied" in minigpt("train", "sort", "--steps", 2, "--out", tmp_path / "run", code=1).stderr


def test_another_text_is_not_gone_on_with(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture):
    def train(*words): return program.main(["train", "text", "--text", str(text), *"--steps 4 --every 2 --out".split(), str(tmp_path / "run"), *words])
    assert train() == 0
    text.write_text(TEXT.replace("quick", "kciuq"))  # the same alphabet, the same length
    assert train("--resume") == 1 and "source was" in capsys.readouterr().err


def test_a_lost_connection_is_not_blamed_on_the_disk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    def offline(*_, **__): raise ConnectionError("tinyshakespeare could not be downloaded")
    monkeypatch.setattr(program, "load_text", offline)
    assert program.main(["train", "text"]) == 1 and capsys.readouterr().err == "minigpt: tinyshakespeare could not be downloaded\n"


def test_an_error_without_words_and_one_of_another_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture):
    "In a team only an error of the network means that somebody has gone; others keep their own words."
    def train(error):
        def fail(*_): raise error
        monkeypatch.setattr(program, "run", fail)
        return program.main(["train", "sort", "--out", str(tmp_path)]), capsys.readouterr().err
    assert train(RuntimeError("")) == (1, "minigpt: RuntimeError\n")
    lost = RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer")
    assert "Connection closed" in train(lost)[1]
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert "another process of this run has ended; nothing was saved" in train(lost)[1]
    assert train(RuntimeError("CUDA out of memory"))[1] == "minigpt: CUDA out of memory\n"


def test_prompts_keep_their_accents_and_may_break_lines():
    words = ["\n", "a", "é"]
    assert program.prompt_ids("é\\naé", words).tolist() == [[2, 0, 1, 2]] and program.prompt_ids("", words).tolist() == [[0]]
    assert program.prompt_ids("12 3", ["3", "12"]).tolist() == [[1, 0]]


def test_a_log_is_replaced_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    "Killed while the shorter log is written, a run still has the old one."
    path = tmp_path / "log.csv"
    old = "step,loss,validation,lr,tokens_per_second\n1,2,3,4,5\n5,1,3,4,5\n"
    path.write_text(old)
    def killed(*_): raise KeyboardInterrupt
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt): program.open_log(path, 3)
    assert path.read_text() == old and len(list(tmp_path.iterdir())) == 1
    rows, file = program.open_log(path, 3)
    with file: rows.writerow([4, 1])
    assert path.read_text().splitlines() == [",".join(program.COLUMNS), "1,2,3,4,5", "4,1"]


# Two in one folder


def everything(folder: Path) -> dict[str, bytes]: return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_second_run_is_refused_before_the_first_has_saved_and_touches_nothing(minigpt, tmp_path: Path):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "minigpt", "train", "sort", "--steps", "100000", "--every", "2", "--save-every", "100000", "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"}) as first:
        try:
            waiting(lambda: (out / "log.csv").exists() and len(log(out)) > 2, first)
            first.send_signal(signal.SIGSTOP)
            before = everything(out)
            for how in ((), ("--resume",)):
                said = minigpt("train", "sort", "--steps", 100000, "--out", out, *how, code=1).stderr
                assert f"{out}: another run is writing into this folder" in said
            assert everything(out) == before and set(before) == {"log.csv"}
        finally: first.kill()
    minigpt("train", "sort", "--steps", 2, "--out", out)


def waiting(ready, process: subprocess.Popen, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


def test_of_two_identical_starts_one_trains_and_the_other_says_why_not(tmp_path: Path):
    command = [sys.executable, "-m", "minigpt", "train", "sort", "--steps", "100", "--save-every", "5", "--out", str(tmp_path / "run")]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}) for _ in range(2)]
    said = [process.communicate(timeout=300)[1] for process in both]
    codes = [process.returncode for process in both]
    assert sorted(codes) == [0, 1]
    loser = said[codes.index(1)]
    assert ("another run is writing" in loser or "holds a run" in loser) and loser.count("\n") == 1
    assert newest(tmp_path / "run").name == "step-00000100" and len(log(tmp_path / "run")) == 3


# Logs, outputs and terminals as they are


def logged(out: Path, *words: str) -> int:
    return program.main(["train", "sort", *"--steps 6 --every 1 --save-every 4 --out".split(), str(out), *words])


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    "A run that was killed after its last line and before its last checkpoint."
    out = tmp_path_factory.mktemp("stopped") / "run"
    assert logged(out) == 0
    shutil.rmtree(out / "step-00000006")
    return out


@pytest.mark.parametrize("spoil", [lambda t: t[:-9], lambda t: t + "9,1\0\0,\0", lambda t: t.replace(",", ";"), lambda t: t + "\0" * 50, lambda t: t + "six,1,1,1,1\n", lambda t: "", lambda t: "\n" * 3],
                         ids=["cut", "cut with NUL", "semicolons", "NUL", "words", "empty", "blank"])
def test_a_spoilt_log_costs_its_unreadable_lines_and_no_training(spoil, stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    shutil.copytree(stopped, tmp_path / "run")
    path = tmp_path / "run" / "log.csv"
    path.write_bytes(spoil(path.read_text()).encode())
    assert logged(tmp_path / "run", "--resume") == 0
    said, steps = capsys.readouterr().err, [int(row[0]) for row in log(tmp_path / "run")[1:]]
    assert steps[-2:] == [5, 6] and steps == sorted(set(steps)) and (not said or "unreadable lines are left out" in said)
    assert "<svg" in (tmp_path / "run" / "loss.svg").read_text()


def test_a_run_whose_picture_cannot_be_drawn_is_finished_all_the_same(tmp_path: Path, capsys: pytest.CaptureFixture):
    (tmp_path / "run" / "loss.svg").mkdir(parents=True)
    assert program.main(["train", "sort", "--steps", "2", "--out", str(tmp_path / "run")]) == 0
    assert newest(tmp_path / "run").name == "step-00000002" and "loss.svg could not be drawn" in capsys.readouterr().err


def test_a_log_that_is_a_pipe_or_a_device_is_refused_and_left_alone(minigpt, tmp_path: Path):
    out = tmp_path / "run"
    out.mkdir()
    os.mkfifo(out / "log.csv")
    assert "log.csv is no regular file" in minigpt("train", "sort", "--steps", 2, "--out", out, code=1).stderr
    (out / "log.csv").unlink()
    (out / "log.csv").symlink_to("/dev/null")
    assert "/dev/null is no regular file" in minigpt("train", "sort", "--steps", 2, "--out", out, code=1).stderr
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("reader", ["head -1", "true"])
def test_a_training_whose_reader_has_gone_goes_on_to_its_end(reader: str, tmp_path: Path):
    command = f'"{sys.executable}" -m minigpt train sort --steps 40 --every 5 --out run | {reader}; echo "${{PIPESTATUS[0]}}"'
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=300, env=os.environ | {"TQDM_DISABLE": "1"})
    assert done.stdout.splitlines()[-1] == "0" and not done.stderr, done
    assert newest(tmp_path / "run").name == "step-00000040" and len(log(tmp_path / "run")) == 9


def test_a_closed_output_is_none_of_a_runs_business(tmp_path: Path):
    command = f'"{sys.executable}" -m minigpt train sort --steps 4 --out run >&- 2>&-; echo $?'
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.stdout == "0\n" and newest(tmp_path / "run").name == "step-00000004"


def test_a_terminal_of_another_alphabet_shows_codes_and_fails_nothing(tmp_path: Path):
    def program_of(encoding, *words):
        environment = os.environ | {"PYTHONIOENCODING": encoding, "TQDM_DISABLE": "1"}
        return subprocess.run([sys.executable, "-m", "minigpt", *words], cwd=tmp_path, capture_output=True, env=environment, timeout=300)
    (tmp_path / "text").write_text("\u0416\u00fc\u20ac\n" * 400, encoding="utf-8")
    (tmp_path / "small").write_text(SMALL)
    trained = program_of("ascii", "train", "text", "--text", "text", "--config", "small", "--steps", "2", "--out", "r\u00fcn \u0416")
    assert trained.returncode == 0 and b"done: " in trained.stdout and b"\\u0416" in trained.stdout, trained
    sampled = program_of("cp1252", "sample", "r\u00fcn \u0416", "--prompt", "\u0416", "--tokens", "20")
    assert sampled.returncode == 0 and b"\\u0416" in sampled.stdout and sampled.stdout.decode("cp1252"), sampled


def test_the_tip_at_the_end_can_be_typed(minigpt, tmp_path: Path):
    done = minigpt("train", "sort", "--steps", 2, "--out", "it's a/b c", cwd=tmp_path)
    words = shlex.split(done.stdout.splitlines()[-1].partition("; ")[2])[:3]
    assert words == ["minigpt", "sample", "it's a/b c"] and len(minigpt(*words[1:], "--prompt", "123456", cwd=tmp_path).stdout.strip()) > 6


def test_ctrl_c_while_it_loads_is_one_line(tmp_path: Path):
    "A signal that comes while torch is being imported, by a module of that name that sends it."
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "torch.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(30)")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(slow), str(Path(program.__file__).parent.parent)])}
    done = subprocess.run([sys.executable, "-m", "minigpt", "sort", "123456"], capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "minigpt: interrupted\n")


def test_an_import_by_somebody_else_leaves_ctrl_c_alone():
    code = "import signal, sys; before = signal.getsignal(signal.SIGINT); import minigpt.__main__; sys.exit(signal.getsignal(signal.SIGINT) is not before)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
    assert not program.PROGRAM


def test_the_version_of_both(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit) as caught: program.main(["--version"])
    assert caught.value.code == 0 and capsys.readouterr().out == f"minigpt {minigpt_version}, torch {torch.__version__}\n"


@pytest.mark.parametrize("said, parts", [
    ({"settings": {"betas": [0.9]}}, ["settings", "betas must be two numbers"]), ({"settings": {"lr": "1e-3"}}, ["settings", "lr must be a number", "'1e-3'"]),
    ({"model": {"dropout": None}}, ["model", "dropout must be a number", "None"]), ({"model": 3}, ["'model' must be an object", "3"]), ({"settings": []}, ["'settings' must be an object", "[]"]),
    ({"model": {"width": 3}}, ["model", "width"]), ([], ["must be an object"]), ({"model": {"n_heads": 0}}, ["model", "n_heads", "at least 1"]),
], ids=str)
def test_a_config_is_refused_with_the_file_or_the_field(said, parts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture):
    (tmp_path / "config.json").write_text(json.dumps(said))
    assert program.main(["train", "sort", "--config", str(tmp_path / "config.json"), "--out", str(tmp_path / "run")]) == 1
    found = capsys.readouterr().err
    assert found.startswith("minigpt: --config: ") and found.count("\n") == 1 and all(part in found for part in parts), found
    assert not (tmp_path / "run").exists()
