"""The site of the checkout, built once per test run, and small projects to build others from."""

import fcntl
import functools
import json
import os
import shutil
from pathlib import Path

from bs4 import BeautifulSoup

from tools import site

ROOT = Path(__file__).resolve().parent.parent


@functools.cache
def built() -> Path:
    "The folder of the whole site, built by the embedded renderer from what is in the checkout now; by one worker, while others wait."
    folder = Path(os.environ["MINIGPT_TEST_SITE"])
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not (folder / "_docs").exists(): site.build(ROOT, folder / "new", renderer="smalldocs").rename(folder / "_docs")
    return folder / "_docs"


@functools.cache
def pages() -> dict[str, str]:
    "Every page of the book: its name and its HTML."
    return {p.name: p.read_text(encoding="utf-8") for p in sorted(built().glob("*.html")) if p.name != "404.html"}


@functools.cache
def soup(name: str) -> BeautifulSoup:
    return BeautifulSoup(pages()[name], "html.parser")


def notebook(*cells) -> str:
    "A notebook from strings: Markdown, or code if it is a tuple of source and outputs."
    out = []
    for n, cell in enumerate(cells):
        if isinstance(cell, str): out.append(dict(cell_type="markdown", id=f"c{n}", metadata={}, source=cell.splitlines(True)))
        else:
            code, *outputs = cell
            data = [dict(output_type="execute_result", execution_count=None, metadata={}, data=o) if isinstance(o, dict)
                    else dict(output_type="stream", name="stdout", text=o.splitlines(True)) for o in outputs]
            out.append(dict(cell_type="code", id=f"c{n}", metadata={}, execution_count=None, source=code.splitlines(True), outputs=data))
    return json.dumps(dict(cells=out, metadata={}, nbformat=4, nbformat_minor=5))


def project(folder: Path, notebooks: dict[str, str]) -> Path:
    "A small book in `folder`, with the settings and the looks of this one."
    (folder / "nbs").mkdir(parents=True)
    (folder / "minigpt").mkdir()
    shutil.copy(ROOT / "settings.ini", folder)
    listed = "".join(f"          - {name}\n" for name in notebooks)
    text = (ROOT / "_quarto.yml").read_text(encoding="utf-8")
    head, tail = text.split("    contents:\n", 1)
    tail = tail[tail.index("\nformat:"):]
    (folder / "_quarto.yml").write_text(head + '    contents:\n      - section: "The book"\n        contents:\n' + listed + tail, encoding="utf-8")
    (folder / "nbs" / "_quarto.yml").symlink_to("../_quarto.yml")
    shutil.copy(ROOT / "nbs" / "styles.css", folder / "nbs")
    (folder / "minigpt" / "_modidx.py").write_text(
        "d = {'settings': {}, 'syms': {'minigpt.layers': {'minigpt.layers.softmax': ('layers.html#softmax', 'minigpt/layers.py')}}}\n")
    for name, text in notebooks.items(): (folder / "nbs" / name).write_text(text, encoding="utf-8")
    return folder
