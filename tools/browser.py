"""A browser for the tests of the pages: one that is installed, else Playwright's own, which is fetched once."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge", "microsoft-edge-stable", "msedge")
PLACES = (
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Microsoft Edge.app/Contents/MacOS/Microsoft Edge",
    *(f"{folder}/{name}" for folder in filter(None, map(os.environ.get, ("PROGRAMFILES", "PROGRAMFILES(X86)", "LOCALAPPDATA")))
      for name in ("Google/Chrome/Application/chrome.exe", "Chromium/Application/chrome.exe", "Microsoft/Edge/Application/msedge.exe")),
)
SECONDS = 180  # that fetching Playwright's browser may take
FETCH = (sys.executable, "-m", "playwright", "install", "--only-shell", "chromium")


def installed(names: Sequence[str] = NAMES, places: Sequence[str] = PLACES) -> str | None:
    "The program of any Chrome, Chromium or Edge: from the PATH, or where macOS and Windows have it."
    return next(filter(None, map(shutil.which, names)), None) or next((place for place in places if os.access(place, os.X_OK)), None)


def playwrights() -> str | None:
    "The program of the browser that Playwright has fetched, if it has."
    from playwright.sync_api import sync_playwright

    with sync_playwright() as p: path = p.chromium.executable_path
    folder = Path(path).parents[2] if path else Path()
    shells = sorted(folder.glob("chromium_headless_shell-*/*/*headless*shell*"))
    return next((str(found) for found in [Path(path), *shells] if found.is_file() and os.access(found, os.X_OK)), None) if path else None


def fetched(note: Path, command: Sequence[str] = FETCH, seconds: float = SECONDS) -> str | None:
    "Have Playwright fetch its browser, unless that was tried before. `note` remembers it."
    if not note.exists():
        try: outcome = "fetched" if subprocess.run(command, capture_output=True, timeout=seconds).returncode == 0 else "not fetched: it cannot be downloaded here"
        except subprocess.TimeoutExpired: outcome = f"not fetched: it took more than {seconds:g} seconds"
        note.write_text(f"Playwright's browser was {outcome}\n", encoding="utf-8")
        print(f"Playwright's browser was {outcome}", flush=True)
    return playwrights()


def find(note: Path = Path(sys.prefix) / "browser-tried.txt") -> str:
    "The program of a browser. Raises `LookupError`, saying what was looked for, if none can be had."
    found = installed() or playwrights() or fetched(note)
    if found: return found
    raise LookupError(f"there is no Chrome, Chromium or Edge, and Playwright's own cannot be fetched (remove {note} to try again)")
