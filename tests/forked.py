"""Programs that begin with torch already imported. One process imports it and is forked for each, which takes a tenth of a second, not two.

Where a signal, a closed output, or the start itself is what a test is about, it starts a real process instead."""

import atexit
import gc
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path


class Forks:
    "Runs programs one after the other, each in a fork of a process that has imported `modules`. At the end it has to be closed."

    def __init__(self, modules: Sequence[str], environment: dict[str, str]):
        asked, answered = os.pipe(), os.pipe()
        command = [sys.executable, __file__, str(asked[0]), str(answered[1]), *modules]
        self.folder = tempfile.TemporaryDirectory()
        self.process = subprocess.Popen(command, cwd=self.folder.name, env=environment, stdin=subprocess.DEVNULL, pass_fds=(asked[0], answered[1]))
        self.ask, self.answers = os.fdopen(asked[1], "w"), os.fdopen(answered[0])
        for end in asked[0], answered[1]: os.close(end)

    def run(self, words: Sequence[object], cwd: Path, environment: dict[str, str]) -> subprocess.CompletedProcess:
        "What `python` followed by these words does: a script and its arguments, or `-m` and a module. PYTHONPATH counts; Python's other settings are those of the first process."
        return self.together([words], cwd, [environment])[0]

    def together(self, programs: Sequence[Sequence[object]], cwd: Path, environments: Sequence[dict[str, str]]) -> list[subprocess.CompletedProcess]:
        "The same for several programs that run at the same time; all have ended afterwards."
        said = [[str(Path(self.folder.name) / f"{name}{i}") for name in ("out", "err")] for i in range(len(programs))]
        print(json.dumps([[[*map(str, words)], str(cwd), *files, environment] for words, files, environment in zip(programs, said, environments, strict=True)]), file=self.ask, flush=True)
        answer = self.answers.readline()
        assert answer, "the process that is forked has ended"
        texts = [[Path(path).read_text(encoding="utf-8", errors="backslashreplace") for path in files] for files in said]
        return [subprocess.CompletedProcess(words, code, *both) for words, code, both in zip(programs, json.loads(answer), texts)]

    def close(self) -> None:
        self.ask.close()
        self.process.wait(60)
        self.answers.close()
        self.folder.cleanup()


def serve(asked: int, answered: int) -> list[str]:
    "Fork for every program of every line; return in the fork, ready to be the program, with its words."
    with os.fdopen(asked) as lines:
        for line in iter(lines.readline, ""):
            started = []
            for words, cwd, out, err, environment in json.loads(line):
                if pid := os.fork():
                    started.append(pid)
                    continue
                os.close(answered)
                for path, stream in (out, 1), (err, 2): os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
                os.chdir(cwd)
                os.environ.clear()
                os.environ.update(environment)
                return words
            os.write(answered, f"{[os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in started]}\n".encode())
    os._exit(0)


def be(words: list[str]) -> None:
    "Be `python` with these words."
    sys.argv = words
    sys.path[:1] = filter(None, [*os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    if words[0] != "-m":
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")
    else:
        del words[0]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def end(code: object) -> None:
    "End as a program does that was left by `sys.exit(code)`, but without taking apart what was imported, which takes the better part of a second."
    threading._shutdown()
    atexit._run_exitfuncs()
    if not isinstance(code, int | None): print(code, file=sys.stderr)
    for stream in sys.stdout, sys.stderr: stream.flush()
    os._exit(int(code is not None) if not isinstance(code, int) else code)


if __name__ == "__main__":
    for module in sys.argv[3:]: importlib.import_module(module)
    gc.freeze()
    words = serve(*map(int, sys.argv[1:3]))
    try: be(words)
    except SystemExit as left: end(left.code)
    except BaseException:
        traceback.print_exc()
        end(1)
    end(None)
