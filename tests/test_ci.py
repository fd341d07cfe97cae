"""What continuous integration looks at: devices, files of the user's outside their folder, files that anybody may write, processes that are left."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
SPEC = importlib.util.spec_from_file_location("ordinary", ROOT / ".ci" / "ordinary.py")
ordinary = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(ordinary)


def test_a_device_that_has_become_a_file_is_seen(tmp_path: Path):
    "As /dev/null once did, when a second process of a training opened its log there."
    os.mkfifo(tmp_path / "null")
    (tmp_path / "zero").touch()
    before = ordinary.devices(str(tmp_path))
    (tmp_path / "null").unlink()
    (tmp_path / "null").write_text("step,loss\n")
    (tmp_path / "zero").chmod(0o600)
    (tmp_path / "new").touch()
    found = ordinary.differences(before, ordinary.devices(str(tmp_path)))
    assert len(found) == 3 and any("null was" in line for line in found) and any("zero was" in line for line in found) and f"{tmp_path}/new is new" in found
    assert "/dev/null" in ordinary.devices() and ordinary.differences(before, before) == []
    assert ordinary.differences({"a": 1}, {}) == ["a is gone"]


def test_files_outside_the_home_are_seen_and_those_inside_are_not(tmp_path: Path):
    home, away = tmp_path / "home", tmp_path / "away"
    for folder in (home, away): folder.mkdir()
    since = tmp_path / "since"
    since.touch()
    os.utime(since, (0, 0))
    for folder in (home, away): (folder / "left").touch()
    assert set(ordinary.left_behind(os.geteuid(), since, home, (str(away), str(home)))) == {str(away), str(away / "left")}


def test_a_file_that_anybody_may_write_is_seen_if_it_is_newer(tmp_path: Path):
    since, open_to_all = tmp_path / "since", tmp_path / "log"
    since.touch()
    open_to_all.touch()
    open_to_all.chmod(0o666)
    for seconds, seen in ((10, {str(open_to_all): "was written"}), (-10, {})):
        os.utime(since, (open_to_all.stat().st_mtime - seconds,) * 2)
        assert ordinary.left_behind(os.geteuid() + 1, since, tmp_path / "home", (str(tmp_path),)) == seen


def test_a_process_that_is_left_is_seen():
    process = subprocess.Popen([sys.executable, "-c", "print(1, flush=True); import time; time.sleep(60)"], stdout=subprocess.PIPE)
    process.stdout.readline()  # it runs: before, it has no command line yet
    try: assert f"/proc/{process.pid}" in ordinary.processes(os.geteuid())
    finally: process.kill()
    process.communicate(timeout=30)
    assert f"/proc/{process.pid}" not in ordinary.processes(os.geteuid())


def test_pytest_stopped_before_it_begins_leaves_the_users_temporary_folder_alone(root: Path, tmp_path: Path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "kept").write_text("mine", encoding="utf-8")
    (tmp_path / "early.py").write_text("import pytest\n\n@pytest.hookimpl(tryfirst=True)\ndef pytest_configure(config): raise pytest.UsageError('stopped early')\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "early", "-p", "no:cacheprovider", str(root / "tests" / "test_ci.py")]
    done = subprocess.run(command, cwd=root, env=os.environ | {"TMPDIR": str(theirs), "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode != 0 and "stopped early" in done.stderr + done.stdout
    assert [p.name for p in theirs.iterdir()] == ["kept"] and (theirs / "kept").read_text(encoding="utf-8") == "mine"


# The Python that the user gets


def test_a_relocated_program_finds_its_library_beside_itself():
    program = b"\x7fELF..\0/closed/versions/3.13.0/lib\0/closed/versions/3.13.0/lib64\0.."
    moved = ordinary.relocated(program, "/closed/versions/3.13.0")
    assert len(moved) == len(program) and b"\0$ORIGIN/../lib\0" in moved and b"/closed/versions/3.13.0/lib\0" not in moved and b"/closed/versions/3.13.0/lib64\0" in moved
    assert ordinary.relocated(b"\0/usr/lib\0", "/usr") == b"\0/usr/lib\0"  # no room for the new path


def test_the_pythons_that_are_found_run_and_the_newest_comes_first():
    found = ordinary.pythons()
    if (3, 11) <= sys.version_info < (3, 14) and importlib.util.find_spec("ensurepip"): assert found[0][0] >= sys.version_info[:3]
    assert found == sorted(found, reverse=True)
    for number, name, _ in found:
        assert subprocess.run([name, "-c", "import sys; print(sys.version_info[:3])"], capture_output=True, text=True).stdout.strip() == str(number)


@pytest.mark.parametrize("copied", [(3, 13, 0), (3, 11, 2), (0,)])
def test_a_copy_that_turns_out_to_be_another_python_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied: tuple):
    "As when the loader took Debian's library, since the copy's own was in a folder that is closed to the user: without ssl, pip found nothing."
    prefix, home = tmp_path / "root's", tmp_path / "home"
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin/python3.13").write_bytes(f"..{prefix}/lib\0".encode())
    home.mkdir()
    monkeypatch.setattr(ordinary, "pythons", lambda: [((3, 13, 0), str(prefix / "bin/python3"), str(prefix)), ((3, 11, 2), "/usr/bin/python3", "/usr")])
    monkeypatch.setattr(ordinary, "version", lambda python, home: copied if "home/python" in python else (3, 11, 2) if python.startswith("/usr") else (0,))
    monkeypatch.setattr(ordinary.subprocess, "run", lambda command, **how: shutil.copytree(prefix, home / "python") if command[0] == "cp" else None)
    assert ordinary.newest_python(home) == (str(home / "python/bin/python3") if copied == (3, 13, 0) else "/usr/bin/python3")
    assert b"$ORIGIN/../lib" in (home / "python/bin/python3.13").read_bytes()


# The workflows

WORKFLOWS = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted((ROOT / ".github/workflows").glob("*.yml"))}


def steps() -> list[tuple[str, str, dict]]: return [(name, job, step) for name, flow in WORKFLOWS.items() for job, about in flow["jobs"].items() for step in about["steps"]]


def test_the_site_is_published_after_the_tests_of_the_same_commit_and_runs_nothing_anew():
    site = WORKFLOWS["test"]["jobs"]["site"]
    assert "test" in site["needs"] and "refs/heads/main" in site["if"]
    run = " ".join(step.get("run", "") for step in site["steps"])
    assert "tools render" in run and "make book" not in run and "refresh" not in run
    assert not any("deploy-pages" in step.get("uses", "") for name, job, step in steps() if (name, job) != ("test", "site"))


def test_every_action_is_pinned_and_every_setup_of_python_caches():
    uses = [step["uses"] for _, _, step in steps() if "uses" in step]
    assert uses and all(use.partition("@")[2].lstrip("v")[:1].isdigit() for use in uses)
    assert all(step["with"].get("cache") == "pip" for _, _, step in steps() if "setup-python" in step.get("uses", ""))
    assert all(step["with"]["version"].count(".") == 2 for _, _, step in steps() if "quarto-actions" in step.get("uses", ""))


def test_the_slow_tests_and_the_newest_of_everything_are_run_once_a_week():
    weekly = WORKFLOWS["weekly"]
    assert weekly[True]["schedule"] and any("make test-slow" in step.get("run", "") for step in weekly["jobs"]["slow"]["steps"])
    newest = weekly["jobs"]["newest"]["steps"]
    assert any("--upgrade" in step.get("run", "") and "minigpt verify" in step.get("run", "") for step in newest)


@pytest.mark.parametrize("system", ["windows-latest", "macos-latest", "ubuntu-latest"])
def test_the_package_is_tried_on_every_system(system: str):
    package = WORKFLOWS["test"]["jobs"]["package"]
    assert system in [row["os"] for row in package["strategy"]["matrix"]["include"]]
    run = " ".join(step.get("run", "") for step in package["steps"])
    assert all(part in run for part in ("pip install", "minigpt verify", "minigpt sort", "minigpt train", "--resume"))


def test_the_oldest_torch_and_python_are_those_that_the_project_promises():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest = next(row for row in WORKFLOWS["test"]["jobs"]["package"]["strategy"]["matrix"]["include"] if row["torch"] != "torch")
    torch = next(d for d in project["dependencies"] if d.startswith("torch"))
    assert oldest["torch"] == torch.replace(">=", "==") + ".0" and project["requires-python"] == ">=" + oldest["python"]
