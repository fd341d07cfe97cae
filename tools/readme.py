"""README.md from nbs/index.ipynb, without Quarto: the prose, the shown code, the text that it printed."""

import html
import re
from pathlib import Path

from . import notebooks

NOTE = "<!-- Made from nbs/index.ipynb by `make book`: edit that. -->\n"
FENCE = re.compile(r"^ {0,3}(```|~~~)")


def make(root: Path) -> None:
    "Write README.md, if what it should say is not what it says."
    path, content = root / "README.md", text(root)
    if not path.exists() or path.read_text(encoding="utf-8") != content: notebooks.write(path, content)


def text(root: Path) -> str:
    nb = notebooks.read(root / "nbs" / "index.ipynb")
    pages = {page(path): f"nbs/{path.name}" for path in notebooks.paths(root)}
    blocks = [block for cell in nb["cells"] for block in of_cell(cell, pages)]
    return NOTE + "\n" + "\n\n".join(block.strip("\n") for block in blocks if block.strip()) + "\n"


def page(path: Path) -> str:
    "The name of a notebook's page, from its front matter."
    named = re.search(r"^output-file:\s*(\S+)", notebooks.front_matter(notebooks.read(path)), re.M)
    return named[1] if named else f"{path.stem}.html"


def of_cell(cell: dict, pages: dict[str, str]) -> list[str]:
    if cell["cell_type"] == "markdown": return [markdown(notebooks.source(cell), pages)]
    if cell["cell_type"] != "code": return []
    says = notebooks.directives(cell)
    if "hide" in says or says.get("include") == "false": return []
    code = notebooks.split(cell)[1].strip("\n")
    shown = code and says.get("echo") != "false" and not says.keys() & {"export", "exporti", "hide_input", "default_exp"}
    blocks = [f"```python\n{code}\n```"] if shown else []
    return blocks if says.get("output") == "false" else blocks + [block for output in cell.get("outputs", []) for block in of_output(output)]


def of_output(output: dict) -> list[str]:
    "What a README can show of an output; of a figure, its caption."
    data = {kind: "".join(lines) for kind, lines in output.get("data", {}).items() if isinstance(lines, (str, list))}
    if "text/markdown" in data: return [data["text/markdown"]]
    if "text/html" in data:
        caption = re.search(r"<figcaption>(.*?)</figcaption>", data["text/html"], re.S)
        return [f"*Figure, on the first page of the site: {html.unescape(caption[1])}*"] if caption else []
    printed = "".join(output["text"]) if output.get("name") == "stdout" else data.get("text/plain", "")
    return [f"```text\n{printed.rstrip()}\n```"] if printed.strip() else []


def markdown(source: str, pages: dict[str, str]) -> str:
    "Quarto's markdown as a repository's page shows it: callouts as quotations, links to notebooks instead of pages."
    out, fenced, callout = [], False, False
    for line in source.splitlines():
        if FENCE.match(line): fenced = not fenced
        elif not fenced and line.startswith(":::"):
            opening = "{" in line
            title = re.search(r'title="([^"]*)"', line)
            callout = opening and ".callout" in line
            if title: out.append(f"> **{title[1]}**\n>")
            continue
        elif not fenced: line = plain(line, pages)
        out.append(f"> {line}".rstrip() if callout else line)
    return "\n".join(out)


def plain(line: str, pages: dict[str, str]) -> str:
    def link(found: re.Match) -> str:
        name, _, fragment = found[2].partition("#")
        if re.match(r"[a-z]+:", name) or not name: return found[0]
        return f"{found[1]}({pages.get(name) or f'nbs/{name}'})" if name.endswith((".ipynb", ".html")) or name.split("/")[0] == "images" else found[0]

    line = re.sub(r"(\]|\))\{[.#][^}]*\}", r"\1", line)
    return re.sub(r"(!?\[[^\]]*\])\(([^)\s]+)\)", link, line)
