"""The machine of a reader: pins that every promised Python can install, and a browser wherever one is to be had."""

import importlib.metadata
import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tools import browser, environment

PYTHONS = ("3.11.0", "3.11.2", "3.12.0", "3.13.0")  # the first of each, and Debian 12's


def pins(root: Path) -> list[Requirement]:
    lines = [line.partition("#")[0].strip() for name in ("requirements-dev.txt", "requirements-texts.txt") for line in (root / name).read_text(encoding="utf-8").splitlines()]
    return [Requirement(line) for line in lines if line and not line.startswith("-")]


def test_the_pins_say_what_is_installed(root: Path):
    "Otherwise the next test would look at other releases than those that a reader gets."
    for pin in pins(root):
        if pin.marker is None or pin.marker.evaluate(): assert importlib.metadata.version(pin.name) in pin.specifier, pin


@pytest.mark.parametrize("python", PYTHONS)
def test_every_pin_can_be_installed_by(python: str, root: Path):
    "soupsieve 4.1.3 wants 3.11.5, and Debian 12 has 3.11.2."
    for pin in pins(root):
        if pin.marker is not None and not pin.marker.evaluate({"python_version": python.rpartition(".")[0], "python_full_version": python}): continue
        if pin.marker is not None and not pin.marker.evaluate(): continue  # for another Python than this one, so its metadata is not here
        wants = importlib.metadata.metadata(pin.name).get("Requires-Python") or ""
        assert python in SpecifierSet(wants), f"{pin} wants Python {wants}"


def test_the_oldest_python_is_the_one_that_the_readme_names(root: Path):
    text = (root / "README.md").read_text(encoding="utf-8")
    assert f"needs Python {'.'.join(map(str, environment.OLDEST))} or newer" in text and PYTHONS[0].startswith("3.11")
    assert re.search(r'requires-python = ">=3\.10"', (root / "pyproject.toml").read_text(encoding="utf-8")) and "runs on Python 3.10 and newer" in text


# A browser


def program(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("#!/bin/sh\n")
    (folder / name).chmod(0o755)
    return folder / name


@pytest.mark.parametrize("name", browser.NAMES)
def test_any_browser_of_the_family_is_found_on_the_path(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    there = program(tmp_path / "bin", name)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert browser.installed(places=()) == str(there)


def test_a_browser_outside_the_path_is_found_where_its_system_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    there = program(tmp_path / "Google Chrome.app", "Google Chrome")
    assert browser.installed(places=(str(tmp_path / "none"), str(there))) == str(there) and browser.installed(places=()) is None


@pytest.mark.parametrize("code, outcome", [("raise SystemExit(1)", "not fetched: it cannot be downloaded here"), ("import time; time.sleep(60)", "not fetched: it took more than 1 seconds"), ("", "fetched")])
def test_playwrights_own_is_fetched_once_and_said_in_one_line(code: str, outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.setattr(browser, "playwrights", lambda: None)
    for _ in range(2): assert browser.fetched(tmp_path / "note", (sys.executable, "-c", code), 1) is None
    assert capsys.readouterr().out == f"Playwright's browser was {outcome}\n" == (tmp_path / "note").read_text()


def test_without_any_the_reason_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("installed", "playwrights"): monkeypatch.setattr(browser, name, lambda *_: None)
    monkeypatch.setattr(browser, "fetched", lambda note: None)
    with pytest.raises(LookupError, match="no Chrome, Chromium or Edge, .* cannot be fetched"): browser.find(tmp_path / "note")


def test_a_browser_that_is_installed_is_taken_before_anything_is_fetched(monkeypatch: pytest.MonkeyPatch):
    def never(*_): raise AssertionError("nothing may be fetched")
    monkeypatch.setattr(browser, "installed", lambda: "/usr/bin/chromium")
    monkeypatch.setattr(browser, "fetched", never)
    assert browser.find() == "/usr/bin/chromium"
