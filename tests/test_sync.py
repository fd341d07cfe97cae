"""Notebooks, modules and settings say the same thing."""

import ast
import configparser
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tools import chapters, notebooks


def settings(root: Path) -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(root / "settings.ini", encoding="utf-8")
    return parser["DEFAULT"]


def toml(root: Path) -> dict:
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))


def modules(folder: Path) -> dict[str, str]:
    return {p.name: p.read_text(encoding="utf-8") for p in folder.glob("*.py")}


def test_an_export_from_empty_makes_exactly_the_modules(root: Path, tmp_path: Path):
    made = modules(chapters.exported(root, tmp_path))
    assert sorted(made) == sorted(modules(root / "minigpt"))
    assert [name for name, text in modules(root / "minigpt").items() if text != made[name]] == [], "make book exports"


def test_the_sync_test_notices_a_changed_module(project: Path, tmp_path: Path):
    chapters.export(project)
    with (project / "minigpt" / "layers.py").open("a", encoding="utf-8") as file: file.write("\nx = 1\n")
    (project / "minigpt" / "extra.py").write_text("", encoding="utf-8")
    (tmp_path / "into").mkdir()
    made = modules(chapters.exported(project, tmp_path / "into"))
    there = modules(project / "minigpt")
    assert {name for name in there if there[name] != made.get(name)} == {"layers.py", "extra.py"}


def test_cleaning_changes_no_notebook(project: Path):
    before = {p.name: p.read_bytes() for p in notebooks.paths(project)}
    run = subprocess.run([Path(sys.executable).with_name("nbdev_clean")], cwd=project, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert [p.name for p in notebooks.paths(project) if p.read_bytes() != before[p.name]] == []
    assert before and all(notebooks.text(notebooks.read(p)).encode() == before[p.name] for p in notebooks.paths(project))


def test_cell_ids_are_there_and_unique(root: Path):
    for path in notebooks.paths(root):
        ids = [cell.get("id") for cell in notebooks.read(path)["cells"]]
        assert all(ids) and len(set(ids)) == len(ids), path.name


def test_quartos_settings_are_linked(root: Path):
    link = root / "nbs" / "_quarto.yml"
    assert link.is_symlink(), "nbs/_quarto.yml should be a symbolic link to ../_quarto.yml; this checkout was made without links (git config core.symlinks true, then check out again)"
    assert link.resolve() == (root / "_quarto.yml").resolve() and not Path(link.readlink()).is_absolute()


def versions(code: str) -> list[str]:
    "What a piece of code sets `__version__` to."
    return [node.value.value for node in ast.parse(code).body if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__version__"]


def test_one_version(root: Path):
    version = settings(root)["version"]
    assert versions((root / "minigpt" / "__init__.py").read_text(encoding="utf-8")) == [version]
    cells = [notebooks.split(c)[1] for path in notebooks.paths(root) for c in notebooks.read(path)["cells"] if notebooks.exported(c)]
    assert [v for code in cells for v in versions(code)] == [version], "nbdev 3 takes the version from an exported cell, nbdev 2 writes that of settings.ini over it: they must agree"
    assert toml(root)["project"]["dynamic"] == ["version"]
    if (changes := root / "CHANGELOG.md").exists(): assert version in changes.read_text(encoding="utf-8")


def test_both_generations_of_nbdev_read_the_same_settings(root: Path):
    ini, mirror = settings(root), toml(root)["tool"]["nbdev"]
    flat = {key: " ".join(value) if isinstance(value, list) else str(value) for key, value in mirror.items()}
    assert flat == {key: ini[key] for key in flat}
    project = toml(root)["project"]
    assert project["description"] == ini["description"] and project["requires-python"] == f">={ini['min_python']}"
    assert project["keywords"] == ini["keywords"].split() and project["license"].lower() == ini["license"]


def test_an_unset_address_shows_nowhere(root: Path):
    if settings(root)["git_url"]: pytest.skip("the repository has an address")
    assert "urls" not in toml(root)["project"]


def name_of(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")


def test_every_requirement_is_pinned(root: Path):
    lines = [line.split("#")[0].strip() for line in (root / "requirements-dev.txt").read_text(encoding="utf-8").splitlines()]
    pinned = {name_of(line) for line in lines if line}
    assert all("==" in line for line in lines if line)
    project = toml(root)["project"]
    assert {name_of(r) for r in project["dependencies"] + project["optional-dependencies"]["dev"]} <= pinned
    assert {name_of(r) for r in project["dependencies"]} == {"torch", "jaxtyping", "safetensors", "matplotlib", "tqdm"}
