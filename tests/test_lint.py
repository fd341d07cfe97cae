"""The lint finds what it should, leaves alone what it should, and finds nothing in the checkout."""

import ast
import json
from pathlib import Path

import pytest

from tools import lint


def test_the_checkout_is_clean(root: Path):
    found = lint.problems(root)
    assert not found, "\n".join(found[:30])


@pytest.mark.parametrize("code", [
    "import torch.nn.functional as F",
    "import torch.nn.functional",
    "from torch.nn import functional as f",
    "from torch.nn import Linear",
    "from torch.nn import *",
    "from torch.nn.functional import gelu as activation",
    "from torch import softmax",
    "from torch.optim import AdamW",
    "import torch.optim as o",
    "import torch\nx = torch.nn.Linear(3, 4)",
    "from torch import nn\nclass A(nn.Module):\n    def __init__(self): self.norm = nn.LayerNorm(3)",
    "import torch.nn as layers\nlayers.Sequential()",
    "from torch import nn\nnn.functional.relu(x)",
    "from torch import nn\nnn.init.normal_(w)",
    "from torch import nn\nnn.utils.clip_grad_norm_(w, 1.0)",
    "import torch\nF = torch.nn.functional\nF.gelu(x)",
    "import torch as t\nn = t.nn\nk = n\nk.Dropout()",
    "import torch\nsm = torch.softmax\nsm(x, -1)",
    "import torch\ntorch.softmax(x, -1)",
    "import torch\ntorch.special.log_softmax(x, -1)",
    "import torch\ntorch.layer_norm(x, (3,))",
    "import torch\ntorch.dropout(x, 0.1, True)",
    "import torch\ntorch._C._nn.gelu(x)",
    "import torch\ntorch.ops.aten.gelu(x)",
    "import torch\ngetattr(torch.nn, 'Linear')(3, 4)",
    "import torch\ngetattr(torch, 'softmax')(x, -1)",
    "import torch\ntorch.optim.AdamW(p)",
    "import importlib\nimportlib.import_module('torch.nn.functional')",
    "from torch import nn\nuse(nn)",
    "x.softmax(-1)",
    "(q @ k.mT).log_softmax(dim=-1)",
    "def f(self, x): return self.scores(x).softmax(-1)",
    "def late():\n    from torch.nn import functional\n    return functional",
])
def test_library_layers_are_found(code: str):
    assert lint.library_uses(ast.parse(code))


@pytest.mark.parametrize("code", [
    "import torch\nfrom torch.nn import Module, ModuleList, Parameter",
    "from torch import nn\nclass A(nn.Module): pass\np = nn.Parameter(w)\nb = nn.ModuleList([])",
    "from .layers import softmax, gelu, layer_norm\nsoftmax(gelu(layer_norm(x)), -1)",
    "from minigpt import layers\nlayers.softmax(x)",
    "def dropout(x, p): return x\ndropout(x, 0.1)",
    "import torch\nx = torch.exp(x) / torch.erf(x).sum()",
    "class A:\n    def forward(self, x): return self.dropout(self.softmax(x))",
    'def f():\n    "As `torch.nn.Linear` does it."\n    raise ValueError("see torch.nn.Linear for the shape")',
])
def test_by_hand_code_is_left_alone(code: str):
    assert lint.library_uses(ast.parse(code)) == []


def notebook(tmp_path: Path, *cells: str) -> Path:
    path = tmp_path / "00_sample.ipynb"
    made = [{"cell_type": "code", "id": str(i), "metadata": {}, "outputs": [], "execution_count": None, "source": c.splitlines(True)} for i, c in enumerate(cells)]
    path.write_text(json.dumps({"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    return path


@pytest.mark.parametrize("cells, what", [
    (["import torch\nx = 1"], "imports and work"),
    (["#| exports\ndef f():\n" + "    x = 1\n" * 30], "at most 30"),
    (["#| exports\n#| slow\nx = 1"], "exported and slow"),
    (['print(f"loss {x}")'], "f-string"),
    (["# ----------\nx = 1"], "divider"),
    (["x = 1  # ==== part two ===="], "divider"),
    (["#| slow\ntable = run()", "table"], "only slow cells define"),
    (["import torch.nn.functional as F", "#| exports\ndef f(x): return F.gelu(x)"], "torch.nn.functional.gelu"),
    (["#| exporti\ndef f(x): return x.softmax(-1)"], "tensor method"),
])
def test_breaches_of_the_house_style_are_found(tmp_path: Path, cells: list[str], what: str):
    assert any(what in problem for problem in lint.notebook_problems(notebook(tmp_path, *cells)))


@pytest.mark.parametrize("cells", [
    ["#| hide\nimport torch\nfrom math import pi", "import torch.nn.functional as F", "F.gelu(x)", "x.softmax(-1)", "print(x)"],
    ["#| exports\ndef f():\n" + "    x = 1\n" * 29],
    ["#| slow\ntable = run()", "#| slow\ntable", "table = 3", "table"],
    ["#| hide\n%load_ext jaxtyping", "x = '# ----- no comment'", "x = 1  # B T -> B H T d"],
])
def test_good_style_is_left_alone(tmp_path: Path, cells: list[str]):
    assert lint.notebook_problems(notebook(tmp_path, *cells)) == []


def test_a_source_that_is_one_string_is_found(tmp_path: Path):
    path = notebook(tmp_path, "x = 1\ny = 2")
    nb = json.loads(path.read_text())
    nb["cells"][0]["source"] = "x = 1\ny = 2"
    path.write_text(json.dumps(nb))
    assert lint.notebook_problems(path) == ["cell 0: source is not a list of lines"]


@pytest.mark.parametrize("text, found", [
    ("see /ho" + "me/somebody/minigpt", 1), ('"/ro' + 'ot/.cache"', 1), ("/tmp/ipy" + "kernel_12/3.py", 1), ("https://py" + "pi.org/simple", 1),
    ("pip install --index" + "-url x", 1), ("https://example.org/home/page", 0), ("../home/x and ./work/y", 0), ("a/b and 1/2", 0),
])
def test_traces_of_a_machine_are_found(tmp_path: Path, text: str, found: int):
    path = tmp_path / "file.md"
    path.write_text(text, encoding="utf-8")
    assert len(list(lint.traces(path))) == found
