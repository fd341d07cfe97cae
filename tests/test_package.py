"""The wheel: what is in it, and that it works where nothing else is installed."""

import ast
import importlib.metadata as metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from conftest import copy

from tools import chapters, notebooks

RUNTIME = ("torch", "jaxtyping", "safetensors", "matplotlib", "tqdm")

IMPORTS = """
import sys
import minigpt
eager = {"torch", "matplotlib", "numpy"} & set(sys.modules)
assert not eager, f"import minigpt imports {eager}"
import importlib, pkgutil
names = [m.name for m in pkgutil.iter_modules(minigpt.__path__, "minigpt.")]
for name in names: importlib.import_module(name)
for name in dir(minigpt): getattr(minigpt, name)
print(minigpt.__version__, len(names), minigpt.__file__)
"""


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    "The wheel, built from a copy of the checkout with the tools that are installed."
    folder = tmp_path_factory.mktemp("wheel")
    run = subprocess.run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, copy(folder / "project")], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    (built,) = folder.glob("*.whl")
    return built


def in_wheel(wheel: Path, suffix: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(next(n for n in archive.namelist() if n.endswith(suffix))).decode()


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path, root: Path):
    with zipfile.ZipFile(wheel) as archive: names = set(archive.namelist())
    expected = {f"minigpt/{p.name}" for p in (root / "minigpt").iterdir() if p.is_file() and not p.name.startswith(".")}
    assert {n for n in names if ".dist-info/" not in n} == expected
    assert {"minigpt/__init__.py", "minigpt/py.typed", "minigpt/attention.py"} <= expected


def test_the_trained_sorter_is_in_the_wheel(wheel: Path):
    with zipfile.ZipFile(wheel) as archive: assert archive.getinfo("minigpt/sorter.safetensors").file_size > 100_000


def test_the_wheels_metadata(wheel: Path, root: Path):
    about = in_wheel(wheel, ".dist-info/METADATA")
    version = re.search(r"^version = (.*)$", (root / "settings.ini").read_text(encoding="utf-8"), re.M)[1]
    assert wheel.name == f"minigpt_book-{version}-py3-none-any.whl" and f"\nVersion: {version}\n" in about
    required = [line for line in re.findall(r"^Requires-Dist: (.*)$", about, re.M) if "extra ==" not in line]
    assert sorted(re.match(r"[\w-]+", r)[0] for r in required) == sorted(RUNTIME)
    assert "\nLicense-Expression: MIT\n" in about and "\nRequires-Python: >=3.10\n" in about
    assert "[nbdev]\nminigpt = minigpt._modidx:d" in in_wheel(wheel, "entry_points.txt")


def test_the_modules_are_written_for_python_3_10(root: Path):
    for path in (root / "minigpt").glob("*.py"): ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=(3, 10))


# An environment of its own, without the network: a new Python that sees the wheel, what it requires, and what that requires in turn.


def closure(names: tuple[str, ...]) -> dict[str, metadata.Distribution]:
    "The installed distributions that these names require, transitively, without extras."
    from packaging.requirements import Requirement

    found: dict[str, metadata.Distribution] = {}
    todo = list(names)
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in found: continue
        found[name] = metadata.distribution(name)
        todo += [r.name for r in map(Requirement, found[name].requires or []) if not r.marker or r.marker.evaluate({"extra": ""})]
    return found


def new_python(folder: Path) -> tuple[Path, Path]:
    "A virtual environment without pip: its Python and its folder of packages."
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return folder / "bin" / "python", next((folder / "lib").glob("python*/site-packages"))


@pytest.fixture(scope="session")
def alone(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    "The Python of an environment that holds the wheel and links to its requirements, and nothing else."
    python, packages = new_python(tmp_path_factory.mktemp("alone") / "venv")
    for distribution in closure(RUNTIME).values():
        for top in {file.parts[0] for file in distribution.files if file.parts[0] not in ("..", "__pycache__")}:
            source = Path(distribution.locate_file(top))
            if source.exists() and not (packages / top).exists(): (packages / top).symlink_to(source)
    run = subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--disable-pip-version-check", wheel], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return python


def run_in(python: Path, code: str, folder: Path, **env: str) -> str:
    "Run code where neither the checkout nor the environment of the tests can be seen."
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "LC_", "LANG", "MPL"))}
    run = subprocess.run([python, "-W", "error::ResourceWarning", "-c", code], cwd=folder, env=inherited | {"MPLBACKEND": "Agg"} | env, capture_output=True, text=True, encoding="utf-8", errors="replace")
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


PLAIN_ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}  # what Python otherwise repairs by itself


def quick_start(root: Path) -> str:
    "The code that the index page shows, as one program."
    says = [(c, notebooks.directives(c)) for c in notebooks.read(root / "nbs" / "index.ipynb")["cells"] if notebooks.runs(c)]
    return "\n".join(notebooks.split(c)[1] for c, said in says if not said.keys() & {"hide", "slow"} and said.get("echo") != "false")


@pytest.mark.parametrize("module", ["pytest", "IPython", "nbdev", "beartype", "execnb"])
def test_the_empty_environment_is_empty(alone: Path, tmp_path: Path, module: str):
    assert "absent" in run_in(alone, f"import importlib.util as u; print('present' if u.find_spec({module!r}) else 'absent')", tmp_path)


@pytest.mark.parametrize("locale", [{}, PLAIN_ASCII], ids=["as it is", "LC_ALL=C"])
def test_every_module_imports_there(alone: Path, root: Path, tmp_path: Path, locale: dict[str, str]):
    version, count, file = run_in(alone, IMPORTS, tmp_path, **locale).split()
    assert int(count) == len(list((root / "minigpt").glob("*.py"))) - 1 and "site-packages" in file and str(root) not in file
    assert f"version = {version}\n" in (root / "settings.ini").read_text(encoding="utf-8")


def test_the_quick_start_runs_there(alone: Path, root: Path, tmp_path: Path):
    code = quick_start(root)
    assert "minigpt" in code
    run_in(alone, code, tmp_path, **PLAIN_ASCII)


def used_on_pages(root: Path) -> set[tuple[str, str]]:
    "Every name of the package that some page uses: imported in a cell, reached through an imported module, or written out in the text."
    used: set[tuple[str, str]] = set()
    for path in notebooks.paths(root):
        cells = notebooks.read(path)["cells"]
        text = "\n".join(notebooks.source(c) for c in cells if c["cell_type"] == "markdown")
        code = ["".join(line for line in notebooks.split(c)[1].splitlines(True) if line[0] not in "%!") for c in cells if c["cell_type"] == "code"]
        aliases: dict[str, str] = {}
        for tree in map(ast.parse, code + re.findall(r"```python\n(.*?)```", text, re.S)):
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "minigpt":
                    used |= {(node.module, alias.name) for alias in node.names}
                    aliases |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names if (root / "minigpt" / f"{alias.name}.py").exists() and node.module == "minigpt"}
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases: used.add((aliases[node.value.id], node.attr))
        for module, name in re.findall(r"`minigpt\.(\w+)(?:\.(\w+))?(?:\(\))?`", text): used.add((f"minigpt.{module}", name) if name else ("minigpt", module))
    return used


def test_every_name_that_a_page_uses_exists_there(alone: Path, root: Path, tmp_path: Path):
    used = sorted(used_on_pages(root))
    assert len(used) > 120 and {("minigpt", "GPT"), ("minigpt.speed", "race"), ("minigpt.checks", "match")} <= set(used)
    program = f"import importlib\nfor module, name in {used!r}:\n    try: getattr(importlib.import_module(module), name)\n    except AttributeError: importlib.import_module(f'{{module}}.{{name}}')"
    run_in(alone, program, tmp_path)


def test_every_command_that_a_page_shows_exists_there(alone: Path, root: Path, tmp_path: Path):
    "`minigpt train sort --steps 60` and its like: each line is parsed by the installed program, options and all."
    shown = set()
    for path in notebooks.paths(root):
        for cell in notebooks.read(path)["cells"]:
            source = notebooks.source(cell)
            if cell["cell_type"] == "code": found = re.findall(r"(?<!f)\"(minigpt (?:sort|train|sample|verify|shapes|params)\b[^\"\n]*)\"", source)
            else: found = re.findall(r"(?:`|^|-m )(minigpt (?:sort|train|sample|verify|shapes|params)\b[^`\n|]*)", source, re.M)
            shown |= {line.strip() for line in found}
    assert len(shown) > 8
    complete = sorted(line for line in shown if line not in ("minigpt train", "minigpt sample", "minigpt sort"))
    program = f"from minigpt.__main__ import parser\nfor line in {complete!r}: parser().parse_args(line.split()[1:])"
    run_in(alone, program, tmp_path)


def test_the_import_is_quick_since_it_is_lazy(alone: Path, tmp_path: Path):
    "Nothing heavy is loaded by the import, and everything by the first name that needs it."
    code = "import sys, minigpt; before = 'torch' in sys.modules; minigpt.GPT; print(before, 'torch' in sys.modules)"
    assert run_in(alone, code, tmp_path).split() == ["False", "True"]


def test_a_forgotten_requirement_would_be_noticed(alone: Path, tmp_path: Path):
    with pytest.raises(AssertionError, match="ModuleNotFoundError"): run_in(alone, "import beartype", tmp_path)


@pytest.mark.slow
def test_the_wheel_in_a_really_empty_environment(wheel: Path, root: Path, tmp_path: Path):
    "With pip's own resolution of the requirements; of torch, the release that is pinned here."
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    pinned = re.search(r"^torch==\S+", (root / "requirements-dev.txt").read_text(encoding="utf-8"), re.M)[0]
    run = subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", pinned, wheel], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    run_in(python, IMPORTS, tmp_path, **PLAIN_ASCII)
    run_in(python, quick_start(root), tmp_path, **PLAIN_ASCII)


@pytest.mark.slow
def test_nbdev_3_exports_the_same_modules(root: Path, tmp_path: Path):
    """In an environment of its own. nbdev 3 does not read settings.ini, so the version has to stand in an exported cell, or it becomes 0.0.1.
    Its `_modidx.py` differs in one value, the base address of a site that has none: "/" instead of "". And nbdev 2 leaves lines that are meant for
    Quarto, `#| eval: false` below the line that exports, in the module."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    programs = tmp_path / "venv" / "bin"
    run = subprocess.run([programs / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "nbdev>=3,<4"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    project = copy(tmp_path / "project")
    chapters.export(project)
    (project / "settings.ini").unlink()
    there = {p.name: p.read_text(encoding="utf-8") for p in (project / "minigpt").glob("*.py")}
    shutil.rmtree(project / "minigpt")
    run = subprocess.run([programs / "nbdev-export"], cwd=project, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    made = {p.name: p.read_text(encoding="utf-8") for p in (project / "minigpt").glob("*.py")}
    made["_modidx.py"] = made["_modidx.py"].replace("'doc_baseurl': '/'", "'doc_baseurl': ''")
    assert sorted(made) == sorted(there)
    for name in sorted(there): assert made[name] == there[name].replace("#| eval: false\n", ""), name
