"""Notebooks as plain JSON: reading, writing in one canonical form, and what a cell's `#|` lines say."""

import configparser
import json
import os
import re
import tempfile
from pathlib import Path

DIRECTIVE = re.compile(r"^\s*#\s*\|\s*(.*?)\s*$")
CELL_MAGIC = re.compile(r"^\s*%%\w+")
EXPORTS = ("export", "exports", "exporti")


def paths(root: Path) -> list[Path]:
    "The notebooks of the book, in reading order: the index first, as on the site."
    found = [p for p in (root / "nbs").glob("*.ipynb") if p.name[0] not in "._"]
    return sorted(found, key=lambda p: (p.name != "index.ipynb", p.name))


def settings(root: Path) -> dict[str, str]:
    "What `settings.ini` says."
    config = configparser.ConfigParser(interpolation=None)
    config.read(root / "settings.ini", encoding="utf-8")
    return {key: value.strip() for key, value in config["DEFAULT"].items()}


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def text(nb: dict) -> str:
    "A notebook as the text of its file, in the form that `nbdev_clean` leaves."
    return json.dumps(nb, sort_keys=True, indent=1, ensure_ascii=False) + "\n"


def write(path: Path, content: str) -> None:
    "Replace a file in one step, so that nobody ever reads half of it."
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file: file.write(content)
        os.chmod(temporary, path.stat().st_mode if path.exists() else 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def source(cell: dict) -> str:
    return "".join(cell["source"])


def split(cell: dict) -> tuple[list[str], str]:
    "The bodies of a code cell's leading `#|` lines, and the code below them."
    bodies, lines = [], source(cell).splitlines()
    for i, line in enumerate(lines):
        found = DIRECTIVE.match(line)
        if found: bodies.append(" ".join(found[1].split()))
        elif line.strip() and not CELL_MAGIC.match(line): break
    else: i = len(lines)
    magic = [line for line in lines[:i] if CELL_MAGIC.match(line)]
    return bodies, "\n".join(magic + lines[i:])


def directives(cell: dict) -> dict[str, str]:
    "The `#|` lines of a cell as name -> value: `{'exports': '', 'eval': 'false'}`."
    found = (re.match(r"([\w-]+)\s*:?\s*(.*)", body) for body in split(cell)[0])
    return {m[1]: m[2] for m in found if m}


def front_matter(nb: dict) -> str:
    "The text of the first cell if it is raw, else nothing."
    first = nb["cells"][0] if nb["cells"] else {"cell_type": ""}
    return source(first) if first["cell_type"] == "raw" else ""


def runs(cell: dict) -> bool:
    "Whether a cell is code that a run executes: not switched off by `eval: false`, and holding more than `#|` lines."
    return cell["cell_type"] == "code" and directives(cell).get("eval", "").lower() != "false" and bool(split(cell)[1].strip())


def shown(cell: dict) -> str:
    "What a code cell shows, as one text; nothing if it shows nothing."
    def joined(value: object) -> object: return "".join(value) if isinstance(value, list) else value

    parts = [{"type": o["output_type"], "text": joined(o.get("text")), "data": {k: joined(v) for k, v in o.get("data", {}).items()}} for o in cell.get("outputs", [])]
    return json.dumps(parts, sort_keys=True) if parts else ""


def exported(cell: dict) -> bool:
    return cell["cell_type"] == "code" and any(name in EXPORTS for name in directives(cell))


def slow(cell: dict) -> bool:
    return cell["cell_type"] == "code" and "slow" in directives(cell)


INSTALL = "install"  # the id of the cell that `with_installation` makes


def with_installation(nb: dict, address: str) -> dict:
    """The notebook with a first code cell that installs the package, for those who open it without a checkout, as on Colab. It never runs here.

    Without the repository's address there is nothing to install from, and no such cell."""
    cells = [cell for cell in nb["cells"] if cell.get("id") != INSTALL]
    first = next((i for i, cell in enumerate(cells) if cell["cell_type"] == "code"), None)
    if address and first is not None:
        source = ["#| hide\n", "#| eval: false\n", f"%pip install -q git+{address.rstrip('/')}"]
        cells.insert(first, {"cell_type": "code", "execution_count": None, "id": INSTALL, "metadata": {}, "outputs": [], "source": source})
    return nb | {"cells": cells}
