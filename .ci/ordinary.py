"""Run the two commands of the README as an ordinary user who is made for it, and see that nothing outside that user's folder changed.

The user gets a clone in a folder with a space and a letter outside ASCII in its name, 1024 open files, umask 022, and no Python of
root's: first the newest that is here, then Debian's own, for set-up, export, lint and the quick tests. Only the standard library is used.
"""

import glob
import os
import pwd
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
USER, FOLDER = "minigpt-ci", "mini gpt ü"
PASSED_ON = re.compile(r"PIP_\w+|\w+_proxy|MINIGPT_NO_SKIPS", re.I)
SYSTEM = Path("/usr/bin/python3")
WATCHED = ("/", "/dev", "/dev/shm", "/tmp", "/var/tmp", "/run")


def devices(folder: str = "/dev") -> dict[str, tuple]:
    "Everything in a folder of devices that is no folder or link: its kind, numbers, mode and owner."
    found = {}
    for name in sorted(os.listdir(folder)):
        is_, path = os.lstat(f"{folder}/{name}"), f"{folder}/{name}"
        if not (stat.S_ISDIR(is_.st_mode) or stat.S_ISLNK(is_.st_mode)): found[path] = (is_.st_mode, is_.st_rdev, is_.st_uid)
    return found


def differences(before: dict, after: dict) -> list[str]:
    "What is new, gone or other, as sentences."
    return ([f"{name} is new" for name in sorted(after.keys() - before.keys())] + [f"{name} is gone" for name in sorted(before.keys() - after.keys())]
            + [f"{name} was {before[name]} and is {after[name]}" for name in sorted(before.keys() & after.keys()) if before[name] != after[name]])


def left_behind(uid: int, since: Path, home: Path, folders: tuple = WATCHED) -> dict[str, str]:
    "Files outside `home` that belong to the user, or that anybody may write and that are newer than `since`."
    theirs = ["-uid", str(uid), "-printf", "%p\\tbelongs to the user\\n"]
    anybodys = ["-type", "f", "-perm", "-o+w", "-newer", str(since), "-printf", "%p\\twas written\\n"]
    command = ["find", *filter(os.path.isdir, folders), "-xdev", "(", "-path", str(home), "-o", "-path", "/proc", ")", "-prune", "-o", "(", *theirs, ")", "-o", "(", *anybodys, ")"]
    found = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    return dict(line.split("\t") for line in found.splitlines() if "\t" in line)


def processes(uid: int) -> dict[str, str]:
    "The user's processes that are still there."
    found = {}
    for folder in glob.glob("/proc/[0-9]*"):
        try:
            if os.stat(folder).st_uid == uid: found[folder] = Path(folder, "cmdline").read_text().replace("\0", " ").strip()
        except OSError: pass  # it has just ended
    return {name: command for name, command in found.items() if command}


def as_user(command: str, home: Path, folder: Path, **how) -> subprocess.CompletedProcess:
    "Run a shell command as the user."
    passed = {name: value for name, value in os.environ.items() if PASSED_ON.fullmatch(name)}
    environment = {"HOME": str(home), "USER": USER, "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"} | passed
    group = pwd.getpwnam(USER).pw_gid
    return subprocess.run(["bash", "-c", f"ulimit -n 1024; umask 022; {command}"], cwd=folder, env=environment, user=USER, group=group, extra_groups=[], **how)


ASKED = "import ctypes, ensurepip, ssl, sys, venv; print(*sys.version_info[:3], sys.base_prefix)"


def version(python: str, home: Path) -> tuple[int, ...]:
    "The version of a Python that the user can run, with what set-up needs; (0,) if that fails."
    done = as_user(f'"{python}" -c "{ASKED}"', home, home, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return tuple(map(int, done.stdout.split()[:3])) if done.returncode == 0 else (0,)


def pythons() -> list[tuple[tuple[int, ...], str, str]]:
    "Version, path and prefix of every Python from 3.11 to 3.13 that root can run, the newest first: those on the path, and this one's siblings."
    names = [shutil.which(f"python3.{minor}") for minor in (11, 12, 13)] + [str(SYSTEM), sys.executable]
    names += map(str, Path(sys.base_prefix).parent.glob("*/bin/python3"))
    found = {}
    for name in filter(None, names):
        done = subprocess.run([name, "-c", ASKED], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) if os.path.exists(name) else None
        if done is None or done.returncode: continue
        *numbers, prefix = done.stdout.split(maxsplit=3)
        found.setdefault((tuple(map(int, numbers)), prefix.strip()), name)
    return [(number, name, prefix) for (number, prefix), name in sorted(found.items(), reverse=True) if (3, 11) <= number < (3, 14)]


def relocated(program: bytes, prefix: str) -> bytes:
    "An executable that looks for its library beside itself, not in `prefix`/lib, as long as before."
    old = f"{prefix}/lib".encode() + b"\0"
    return program.replace(old, b"$ORIGIN/../lib".ljust(len(old), b"\0")) if len(old) > len("$ORIGIN/../lib") else program


def newest_python(home: Path) -> str:
    "The newest Python here up to 3.13. One in a folder that is closed to the user is copied into the user's, and must be the same there."
    for number, name, prefix in pythons():
        if version(name, home) == number: return name
        copy = home / "python"
        shutil.rmtree(copy, ignore_errors=True)
        subprocess.run(["cp", "-a", prefix, copy], check=True)
        for program in (copy / "bin").glob("python3.*"):
            if not program.is_symlink(): program.write_bytes(relocated(program.read_bytes(), prefix))
        subprocess.run(["chown", "-R", USER, copy], check=True)
        if version(str(copy / "bin/python3"), home) == number: return str(copy / "bin/python3")
    raise SystemExit("no Python of 3.11 or newer can be run by an ordinary user here")


def clone(home: Path, name: str) -> Path:
    "A clone of the checkout that belongs to the user."
    folder = home / name / FOLDER
    folder.parent.mkdir()
    subprocess.run(["git", "-c", f"safe.directory={ROOT}", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(folder)], check=True)
    subprocess.run(["chown", "-R", f"{USER}:", home], check=True)
    return folder


def proven(home: Path, name: str, python: str, targets: str) -> list[str]:
    "Run make's targets in a clone of its own; return what went wrong."
    folder, start = clone(home, name), time.time()
    print(f"== {USER}, Python {'.'.join(map(str, version(python, home)))} ({python}): make {targets}", flush=True)
    done = as_user(f'make PYTHON="{python}" {targets}', home, folder)
    print(f"== {name}: exit code {done.returncode} after {(time.time() - start) / 60:.1f} minutes", flush=True)
    changed = as_user("git status --porcelain", home, folder, stdout=subprocess.PIPE, text=True).stdout
    return [f"{name}: make {targets} failed"] * bool(done.returncode) + [f"{name}: changed {line}" for line in changed.splitlines()]


def main() -> int:
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    home = Path("/home") / USER
    if subprocess.run(["id", USER], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0: remove(home)
    subprocess.run(["useradd", "--create-home", "--home-dir", str(home), "--shell", "/bin/bash", USER], check=True)
    try:
        uid, settings = pwd.getpwnam(USER).pw_uid, Path.home() / ".config/pip/pip.conf"
        if settings.exists():
            (home / ".config/pip").mkdir(parents=True)
            shutil.copy(settings, home / ".config/pip/pip.conf")
        since = home / "since"
        since.touch()
        before = devices(), left_behind(uid, since, home)
        python = newest_python(home)
        wrong = proven(home, "newest", python, "book test")
        if SYSTEM.exists() and python != str(SYSTEM) and version(str(SYSTEM), home) >= (3, 11): wrong += proven(home, "system", str(SYSTEM), "test-fast")
        wrong += [f"a process is left: {command}" for command in processes(uid).values()]
        wrong += differences(before[0], devices()) + differences(before[1], left_behind(uid, since, home))
    finally: remove(home)
    for line in wrong: print(f"== {line}")
    print("== nothing outside the user's folder changed, no process is left" if not wrong else f"== {len(wrong)} things are wrong")
    return bool(wrong)


def remove(home: Path) -> None:
    "The user, all processes and the folder."
    for process in processes(pwd.getpwnam(USER).pw_uid):
        with suppress(ProcessLookupError): os.kill(int(Path(process).name), signal.SIGKILL)
    subprocess.run(["userdel", USER], stderr=subprocess.DEVNULL)
    shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__": sys.exit(main())
