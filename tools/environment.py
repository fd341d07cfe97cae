"""Make .venv what requirements-dev.txt and pyproject.toml say; quick if it already is.

Runs before anything is installed, under whatever `python3` is, so it uses the standard library only and no recent syntax.
"""

import hashlib
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
OLDEST = (3, 11)
QUARTO_SECONDS = 120


def run(*command, **kwargs):
    return subprocess.run([str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True, **kwargs)


def version_of(python):
    "The version of a Python as a tuple, or None if it does not run."
    try: found = run(python, "-c", "import sys, venv, ensurepip; print(*sys.version_info[:2])")
    except OSError: return None
    return tuple(map(int, found.stdout.split())) if found.returncode == 0 else None


def suitable_python():
    "This Python if it is recent enough, else a newer one from the PATH."
    candidates = [sys.executable] + [shutil.which("python3.%d" % minor) for minor in (11, 12, 13, 14)]
    for python in filter(None, candidates):
        if (version_of(python) or (0,)) >= OLDEST: return python
    sys.exit("The book needs Python %d.%d or newer with its venv module, and %s is %d.%d: make PYTHON=/path/to/python names another one."
             % (OLDEST + (sys.executable,) + tuple(sys.version_info[:2])))


def pip(*arguments):
    done = run(PYTHON, "-m", "pip", "--disable-pip-version-check", *arguments, cwd=str(ROOT))
    if done.returncode: sys.exit("pip %s failed:\n%s" % (" ".join(arguments), done.stdout))


def try_quarto():
    "Once per environment: try PyPI's installer of Quarto. It downloads the program, which works only on the open internet."
    note = VENV / "quarto-tried.txt"
    if shutil.which("quarto") or note.exists(): return
    try: done = run(PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", "quarto-cli", timeout=QUARTO_SECONDS)
    except subprocess.TimeoutExpired: outcome = "not installed: it took more than %d seconds" % QUARTO_SECONDS
    else: outcome = "installed" if done.returncode == 0 and (PYTHON.parent / "quarto").exists() else "not installed: it cannot be downloaded here"
    note.write_text("quarto %s\n" % outcome, encoding="utf-8")
    print("quarto %s%s" % (outcome, "" if outcome == "installed" else "; smalldocs will render the site"), flush=True)


def main():
    files = ["requirements-dev.txt", "requirements-texts.txt", "pyproject.toml"]
    key = hashlib.sha256(b"".join((ROOT / name).read_bytes() for name in files) + str(ROOT).encode()).hexdigest()
    ready = VENV / "ready.txt"
    if ready.exists() and ready.read_text(encoding="utf-8") == key and PYTHON.exists(): return
    start = time.time()
    if (version_of(PYTHON) or (0,)) < OLDEST:
        python = suitable_python()
        print("making .venv with %s" % python, flush=True)
        made = run(python, "-m", "venv", "--clear", VENV)
        if made.returncode: sys.exit("%s -m venv .venv failed:\n%s" % (python, made.stdout))
    print("installing requirements-dev.txt into .venv, a minute or two ...", flush=True)
    pip("install", "--quiet", "-r", "requirements-dev.txt")
    pip("install", "--quiet", "--no-deps", "-r", "requirements-texts.txt")
    pip("install", "--quiet", "--no-deps", "--no-build-isolation", "-e", ".")
    try_quarto()
    ready.write_text(key, encoding="utf-8")
    print(".venv is ready after %d s" % (time.time() - start), flush=True)


if __name__ == "__main__":
    main()
