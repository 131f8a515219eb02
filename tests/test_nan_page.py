"""The page "My model is NaN in float16": every command and every line of it runs, in order."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from ampgraph import Policy
from ampgraph.cli.main import main

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "nan-in-float16.md").read_text()
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.S)
COMMANDS = [shlex.split(line) for line in re.findall(r"```bash\n(.*?)\n```", PAGE, re.S)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the page's model in it."""
    (tmp_path / "energy.py").write_text(CODE[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_five_commands(folder, capsys):
    outputs, statuses = [], []
    for program, *arguments in COMMANDS:
        assert program == "ampgraph"
        statuses.append(main(arguments))
        outputs.append(capsys.readouterr().out)
    assert statuses == [3, 3, 0, 0, 0]
    assert "mul_1" in outputs[0]
    assert "energy.py" in outputs[0]
    assert "'node:mul_1': 'fp32'" in outputs[1]
    assert Policy.from_json((folder / "fixed.json").read_text()).rules["node:mul_1"] == "fp32"
    assert "everything is finite" in outputs[2]
    assert "nothing to fix" in outputs[3] or "everything is finite" in outputs[3]
    assert "mul_1" in outputs[4]


def test_python_of_the_page():
    torch.manual_seed(0)
    space: dict[str, object] = {"__name__": "page"}
    for block in CODE:
        exec(compile(block, "page", "exec"), space)
    assert space["finding"].node == "mul_1"
    assert space["watched"].step == 5


def test_finding_as_json(folder, capsys):
    assert main(["check", "energy:build", "--level", "O2", "--dtype", "float16", "--json", "-q"]) == 3
    data = json.loads(capsys.readouterr().out)
    remedy = {"node:mul_1": "fp32", "node:abs_1": "fp32"}
    assert (data["node"], data["direction"], data["remedy"]) == ("mul_1", "forward", remedy)
    assert data["inputs"][0]["name"] == "mul"
