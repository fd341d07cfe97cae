"""README.md is what the index page says, and says it in a way that a repository's page can show."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tools import notebooks, readme


def test_the_readme_is_current(root: Path):
    assert (root / "README.md").read_text(encoding="utf-8") == readme.text(root), "make book writes it"


def test_every_link_of_the_readme_leads_somewhere(root: Path):
    for target in re.findall(r"\]\(([^)\s]+)\)", (root / "README.md").read_text(encoding="utf-8")):
        if not re.match(r"[a-z]+:|#", target): assert (root / target.partition("#")[0]).exists(), target


def code(source: str, *outputs: dict) -> dict:
    return {"cell_type": "code", "metadata": {}, "source": source.splitlines(True), "outputs": list(outputs)}


def result(**data: str) -> dict:
    return {"output_type": "execute_result", "metadata": {}, "data": {f"text/{kind}": text.splitlines(True) for kind, text in data.items()}}


def made(tmp_path: Path, *cells: dict | str) -> str:
    (tmp_path / "nbs").mkdir()
    cells = [c if isinstance(c, dict) else {"cell_type": "markdown", "metadata": {}, "source": c.splitlines(True)} for c in cells]
    (tmp_path / "nbs" / "index.ipynb").write_text(json.dumps({"cells": cells, "metadata": {}}), encoding="utf-8")
    other = {"cells": [{"cell_type": "raw", "metadata": {}, "source": ["---\n", "output-file: attention.html\n", "---"]}], "metadata": {}}
    (tmp_path / "nbs" / "02_attention.ipynb").write_text(json.dumps(other), encoding="utf-8")
    return readme.text(tmp_path).removeprefix(readme.NOTE).strip()


def test_code_and_what_it_printed_are_kept(tmp_path: Path):
    cells = [{"cell_type": "raw", "metadata": {}, "source": ["---\n", "x: y\n", "---"]}, "# Title", code("#| hide\nimport secret"), code("1 + 1", result(plain="2")),
             code("#| echo: false\nshow()", result(html="<figure><svg></svg><figcaption>It &lt;sorts&gt;.</figcaption></figure>", plain="<Figure>")),
             code("print(3)", {"output_type": "stream", "name": "stdout", "text": ["3\n"]}), code("#| echo: false\nsay()", result(markdown="It took **3** s.", plain="x"))]
    assert made(tmp_path, *cells) == ("# Title\n\n```python\n1 + 1\n```\n\n```text\n2\n```\n\n*Figure, on the first page of the site: It <sorts>.*\n\n"
                                      "```python\nprint(3)\n```\n\n```text\n3\n```\n\nIt took **3** s.")


def test_quartos_markup_becomes_plain_markdown(tmp_path: Path):
    text = '::: {.callout-note title="Mind"}\nthe [gap](02_attention.ipynb#sdpa){.button}\n:::\n\n::: {.column-margin}\nSee [this](attention.html), [that](https://example.org/a.html) and [below](#here).\n:::\n\n```\n::: [x](02_attention.ipynb)\n```'
    assert made(tmp_path, text) == ("> **Mind**\n>\n> the [gap](nbs/02_attention.ipynb)\n\nSee [this](nbs/02_attention.ipynb), [that](https://example.org/a.html) and [below](#here).\n\n```\n::: [x](02_attention.ipynb)\n```")


def test_a_current_readme_is_not_written_again(tmp_path: Path):
    made(tmp_path, "# Title")
    readme.make(tmp_path)
    before = (tmp_path / "README.md").stat().st_mtime_ns
    readme.make(tmp_path)
    assert (tmp_path / "README.md").stat().st_mtime_ns == before and notebooks.paths(tmp_path)[0].name == "index.ipynb"


RUN = """
import ast, sys
names = {}
for block in sys.argv[1:]:
    *lines, last = ast.parse(block).body
    exec(compile(ast.Module(lines, []), "README", "exec"), names)
    value = eval(compile(ast.Expression(last.value), "README", "eval"), names) if isinstance(last, ast.Expr) else exec(compile(ast.Module([last], []), "README", "exec"), names)
    print("" if value is None else repr(value), end="\\0")
"""


def test_whoever_types_the_readme_sees_what_it_shows(root: Path):
    "In a new Python, the blocks one behind the other: each output is the one below its block."
    blocks = re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", (root / "README.md").read_text(encoding="utf-8"), re.S)
    done = subprocess.run([sys.executable, "-c", RUN, *(code for code, _ in blocks)], cwd=root, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\0")[:-1] == [shown.rstrip("\n") for _, shown in blocks] and sum(bool(shown) for _, shown in blocks) >= 4
