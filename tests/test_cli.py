"""The command line: what it prints, where, and with which exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import ampgraph
from ampgraph.cli import main
from ampgraph.model_spec import SpecError, build_inputs, parse_input, resolve

OWN = """
import torch
from torch import nn

def tiny():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2))

def with_inputs():
    return tiny(), (torch.randn(3, 4),), {}

def branches():
    class Net(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x
    return Net()

def broken():
    raise RuntimeError("no such file")

instance = tiny()
number = 3
"""


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_models_of_a_user.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "own_models_of_a_user", raising=False)


def run(*argv: str) -> int:
    return main(["explain", *argv])


def needs(library: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(library) is None, reason=f"{library} is not installed")


OURS = "own_models_of_a_user:"


@pytest.mark.parametrize("name", ["tiny", "instance"])
def test_explains_a_model_of_the_user(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(OURS + name, "--input", "3x4", "--dtype", "float16") == 0
    out, err = capsys.readouterr()
    assert "aten.gelu" in out
    assert "autocast rule" in out
    assert "converting" in err
    assert "converting" not in out
    assert "\x1b" not in out + err


def test_json_is_the_explanation(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(OURS + "with_inputs", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    model = resolve(OURS + "tiny").model
    expected = ampgraph.explain(ampgraph.convert(model, (torch.randn(3, 4),))).to_dict()
    assert found["casts"] == expected["casts"]
    assert found["totals"] == expected["totals"]


def test_lists_rules_and_level_arrive(capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "--lists",
        "torch",
        "--black",
        "aten.gelu",
        "--white",
        "aten.tanh",
        "--rules",
        "0=fp32",
        "2=low",
    ]
    assert run(OURS + "with_inputs", *options, "--level", "O2", "--objective", "casts", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    by_name = {n["name"]: n for n in found["nodes"]}
    assert (by_name["linear"]["by"], by_name["linear"]["dtype"]) == ("rule", "float32")
    assert by_name["linear_1"]["dtype"] == "bfloat16"
    for part in ("level='O2'", "objective='casts'", "OpLists.torch()", "aten.gelu", "aten.tanh"):
        assert part in found["policy"]


def test_output_file_and_casts_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(OURS + "with_inputs", "--casts-only", "-o", "report.txt") == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "wrote report.txt" in err
    text = (tmp_path / "report.txt").read_text()
    assert "0.weight" in text
    assert "aten.gelu" not in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nonsense"], "expected LIBRARY:MODEL"),
        (["no_such_package:x"], "no module 'no_such_package'"),
        ([OURS + "tinny"], "Did you mean 'tiny'"),
        ([OURS + "tiny"], "needs an example input"),
        ([OURS + "number", "--input", "2"], "gave a int; expected a model"),
        ([OURS + "tiny", "--input", "3,4"], "expected [NAME=]SHAPE[:DTYPE]"),
        ([OURS + "tiny", "--input", "3x4:flaot32"], "Did you mean 'float32'"),
        ([OURS + "tiny", "--black", "aten.geluu"], "Did you mean 'aten.gelu'"),
        ([OURS + "tiny", "--rules", "0=fp16"], "expected GLOB=low or GLOB=fp32"),
        ([OURS + "tiny", "--level", "O7"], "invalid choice"),
        ([OURS + "with_inputs", "-o", "no/such/folder/x"], "No such file"),
        ([], "required"),
    ],
)
def test_usage_errors(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*argv) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert out == ""


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([OURS + "branches", "--input", "3"], "could not be captured"),
        ([OURS + "broken", "--input", "3"], "RuntimeError: no such file"),
        ([OURS + "tiny", "--input", "3x5"], "could not be captured"),
        ([OURS + "tiny", "--input", "3x4", "--rules", "nowhere.*=low"], "matches no module"),
    ],
)
def test_conversion_errors(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*argv) == 1
    assert message in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    assert "torchvision:resnet18" in capsys.readouterr().out


def test_inputs() -> None:
    args, kwargs = build_inputs(
        [parse_input("2x3"), parse_input("ids=4:int64"), parse_input("mask=1x2:bool")]
    )
    assert [a.shape for a in args] == [(2, 3)]
    assert kwargs["ids"].tolist() == [0, 0, 0, 0]
    assert kwargs["mask"].all()


@needs("torchvision")
def test_torchvision() -> None:
    spec = resolve("torchvision:squeezenet1_1")
    assert type(spec.model).__name__ == "SqueezeNet"
    with pytest.raises(SpecError, match="Did you mean 'squeezenet1_1'"):
        resolve("torchvision:squeezenet11")


@needs("timm")
def test_timm() -> None:
    assert resolve("timm:test_vit").example_input == "8x3x160x160"
    with pytest.raises(SpecError, match="Did you mean"):
        resolve("timm:test_vitt")


@needs("transformers")
def test_transformers() -> None:
    for name in ("transformers:distilbert", "transformers:DistilBertForMaskedLM"):
        model = resolve(name).model
        assert sum(p.numel() for p in model.parameters()) < 1_000_000
    with pytest.raises(SpecError, match="Did you mean"):
        resolve("transformers:DistilBertForMaskedLMM")


def test_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "ampgraph", "explain", OURS + "with_inputs", "--casts-only"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "proven optimal" in done.stdout
