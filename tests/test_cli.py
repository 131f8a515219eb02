"""The command line: its output, where it goes, and the exit status."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import torch

import ampgraph
from ampgraph import OpLists, Policy
from ampgraph.cli.main import main
from ampgraph.cli.model_spec import SpecError, build_inputs, parse_input, resolve
from ampgraph.cli.terminal import wants_colour

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
        ([OURS + "number", "--input", "2"], "returned a int; expected a model"),
        ([OURS + "tiny", "--input", "3,4"], "expected [NAME=]SHAPE[:DTYPE]"),
        ([OURS + "tiny", "--input", "3x4:flaot32"], "Did you mean 'float32'"),
        ([OURS + "tiny", "--black", "aten.geluu"], "Did you mean 'aten.gelu'"),
        ([OURS + "tiny", "--rules", "0=fp16"], "expected GLOB=low or GLOB=fp32"),
        ([OURS + "tiny", "--rules", "0=low", "0=fp32"], "'0' is given both as low and as fp32"),
        ([OURS + "tiny", "--white", "aten.gelu", "--black", "aten.gelu"], "both as --white and as --black"),
        ([OURS + "tiny", "--input", "99999999999x99999999999"], "this tensor cannot be created"),
        ([OURS + "tiny", "--level", "O7"], "invalid choice"),
        ([OURS + "with_inputs", "-o", "no/such/folder/x"], "there is no directory 'no/such/folder'"),
        ([], "required"),
    ],
)
def test_usage_errors(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*argv) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert out == ""


def test_what_cannot_be_captured_whole_is_explained_in_parts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(UserWarning, match="could not be captured at .* just in time instead"):
        assert main(["explain", OURS + "branches", "--input", "3"]) == 0
    assert "Net" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([OURS + "branches", "--input", "3", "--capture", "ahead-of-time"], "could not be captured"),
        ([OURS + "broken", "--input", "3"], "RuntimeError: no such file"),
        ([OURS + "tiny", "--input", "3x5"], "could not be captured"),
    ],
)
def test_conversion_errors(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*argv) == 1
    assert message in capsys.readouterr().err


# -- reports -------------------------------------------------------------------------------------------


def test_markdown_and_peers(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(OURS + "with_inputs", "--markdown", "--peers") == 0
    out = capsys.readouterr().out
    assert out.startswith("# Sequential: 3 ops")
    assert "| paddle lists | " in out
    assert run(OURS + "with_inputs", "--json", "--peers") == 0
    assert set(json.loads(capsys.readouterr().out)["peers"]) == {"torch", "paddle", "mindspore", "oneflow"}


def test_why_with_what_flipping_costs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(OURS + "with_inputs", "--why", "gelu", "--why", "input") == 0
    out = capsys.readouterr().out
    assert "linear is bfloat16, decided by list: white" in out
    assert "  flipping: +2 casts, +144 B of casts, +192 B of modelled traffic; 1 nodes change dtype" in out
    assert "  flipping: no policy can flip 'input'" in out
    assert run(OURS + "with_inputs", "--why", "gelu", "--json") == 0
    assert json.loads(capsys.readouterr().out)["gelu"]["flip"]["dtypes"][0]["node"] == "gelu"
    assert run(OURS + "with_inputs", "--why", "gleu") == 2
    assert "Did you mean 'gelu'" in capsys.readouterr().err


def test_diff_with_a_policy_and_with_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(OURS + "with_inputs", "--diff", "O0") == 0
    assert "3 nodes in another dtype, 0 casts appeared, 6 casts vanished" in capsys.readouterr().out
    assert run(OURS + "with_inputs", "--json", "-o", "before.json") == 0
    assert run(OURS + "with_inputs", "--diff", "before.json") == 0
    assert "no difference" in capsys.readouterr().out
    assert run(OURS + "with_inputs", "--black", "aten.gelu", "--diff", "before.json", "--markdown") == 0
    assert "| gelu | aten.gelu | 1 | float32 | bfloat16 |" in capsys.readouterr().out


# -- policies ------------------------------------------------------------------------------------------


def test_a_policy_from_a_file_and_what_options_change_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = Policy("O2", ops=OpLists.torch(), rules={"2": "fp32"})
    (tmp_path / "mine.json").write_text(policy.to_json())
    assert run(OURS + "with_inputs", "--policy", "mine.json", "--json") == 0
    assert json.loads(capsys.readouterr().out)["policy"] == repr(policy.replace(dtype=torch.bfloat16))
    options = ["--level", "O1", "--rules", "0=fp32", "--gray", "aten.gelu", "--clear", "aten.tanh"]
    assert run(OURS + "with_inputs", "--policy", "mine.json", *options, "--dtype", "fp16", "--json") == 0
    expected = Policy(
        "O1",
        dtype=torch.float16,
        ops=OpLists.torch().with_gray("aten.gelu").with_clear("aten.tanh"),
        rules={"2": "fp32", "0": "fp32"},
    )
    assert json.loads(capsys.readouterr().out)["policy"] == repr(expected)


def test_a_peers_policy_is_its_lists_under_the_autocast_rule(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(OURS + "with_inputs", "--policy", "torch", "--json") == 0
    policy = json.loads(capsys.readouterr().out)["policy"]
    assert "OpLists.torch()" in policy
    assert "placement='autocast'" in policy


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--policy", "O5"], "there is no policy 'O5'; legal: O0, O1"),
        (["--policy", "troch"], "Did you mean 'torch'"),
        (["--policy", "none.json"], "none.json: No such file"),
        (["--policy", "bad.json"], "bad.json: policy: key 'levle' is not known"),
        (["--policy", "text.json"], "text.json: policy: not valid JSON"),
        (["--diff", "text.json"], "text.json: not valid JSON"),
        (["--diff", "old.json"], "old.json: not a report that this version"),
        (["--diff", "padle"], "Did you mean 'paddle'"),
        (["--json", "--markdown"], "not allowed with"),
        (["--gray", "aten.geluu"], "Did you mean 'aten.gelu'"),
        (["--policy", "Auto"], "Did you mean 'auto'"),
    ],
)
def test_wrong_policies(
    argv: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.json").write_text('{"levle": "O1"}')
    (tmp_path / "text.json").write_text("level: O1")
    (tmp_path / "old.json").write_text('{"nodes": [], "casts": []}')
    assert run(OURS + "with_inputs", *argv) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert out == ""


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["explain", "-o", "folder"], "-o folder: Is a directory"),
        (["explain", "-o", "text.md/x.md"], "no directory 'text.md'"),
        (["draw", "-o", "text.md/x.svg"], "no directory 'text.md'"),
        (["check", "--save-policy", "folder"], "--save-policy folder: Is a directory"),
        (["tune", "--budget", "0.1", "--save-policy", "text.md/x.json"], "no directory 'text.md'"),
        (["compare", "--histogram", "folder"], "--histogram folder: Is a directory"),
    ],
)
def test_files_are_checked_before_the_work(
    argv: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.md").write_text("kept")
    with mock.patch("ampgraph.cli.commands.resolve") as resolve:
        assert main([argv[0], OURS + "with_inputs", *argv[1:]]) == 2
    assert not resolve.called
    assert message in capsys.readouterr().err
    assert (tmp_path / "text.md").read_text() == "kept"


def test_compare_policies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.json").write_text('{"ops": {"black": ["aten.gelu"]}}')
    command = ["compare-policies", OURS + "with_inputs", "--policies", "O1", "torch", "mine.json"]
    with mock.patch("torch.export.export", wraps=torch.export.export) as export:
        assert main(command) == 0
    assert export.call_count == 1
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()[4:8]] == ["fp32", "O1", "torch", "mine.json"]
    assert "planning 3 policies" in err
    assert main([*command, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["totals"]["casts"] for row in rows] == [0, 6, 6, 8]
    assert main([*command, "--markdown", "-o", "table.md"]) == 0
    assert "| mine.json | 8 |" in (tmp_path / "table.md").read_text()
    assert main([*command, "--policies", "O1", "troch"]) == 2


# -- drawing -------------------------------------------------------------------------------------------


def test_draw_writes_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["draw", OURS + "with_inputs", "-o", "model.dot", "--policy", "O2"]) == 0
    assert "gelu" in (tmp_path / "model.dot").read_text()
    out, err = capsys.readouterr()
    assert out == ""
    assert "wrote model.dot" in err


@pytest.mark.parametrize(
    ("graph", "capture"), [("backward", "ahead of time"), ("both", "ahead of time"), ("both", "just in time")]
)
def test_draw_writes_the_graph_of_the_backward(graph: str, capture: str, tmp_path: Path) -> None:
    command = ["draw", OURS + "with_inputs", "-o", "model.dot", "--graph", graph, "--capture", capture]
    assert main(command) == 0
    text = (tmp_path / "model.dot").read_text()
    assert "tanh_backward" in text or "gelu_backward" in text
    assert ("forward/" in text) == (graph == "both")


def test_draw_hands_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(ampgraph, "draw", lambda amp, path, **keywords: calls.append((path, keywords)))
    command = ["draw", OURS + "with_inputs", "-o", "x.svg"]
    options = ["--depth", "2", "--focus", "0*", "--highlight", "casts", "--graph", "both", "--plumbing"]
    assert main([*command, *options]) == 0
    assert main([*command, "--highlight", "gelu", "linear*"]) == 0
    assert main(command) == 0
    assert calls == [
        ("x.svg", {"depth": 2, "focus": "0*", "highlight": "casts", "graph": "both", "plumbing": True}),
        ("x.svg", {"highlight": ["gelu", "linear*"]}),
        ("x.svg", {}),
    ]


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [([], 2, "-o/--output"), (["-o", "model"], 2, "no suffix"), (["-o", "x.svg", "--depth", "z"], 2, "int")],
)
def test_draw_errors(argv: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["draw", OURS + "with_inputs", *argv]) == status
    assert message in capsys.readouterr().err


def test_top_and_all_layers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", OURS + "with_inputs", "--casts-only", "--top", "1", "-q"]) == 0
    first = capsys.readouterr().out
    assert re.search(r"^\(the 1 of \d+ that move the most bytes\)$", first, re.MULTILINE)
    assert main(["explain", OURS + "with_inputs", "--casts-only", "--all-layers", "-q"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > len(first.splitlines())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--top", "0"], "'0': expected a number of rows, 1 or more"),
        (["--top", "many"], "'many': expected a number of rows"),
        (["--top", "3", "--json"], "--top selects rows of the text report; --json always writes all rows."),
        (["--all-layers", "--why", "gelu"], "--all-layers selects rows of the text report; --why"),
        (["--top", "3", "--diff", "O2"], "--diff always writes all rows"),
    ],
)
def test_wrong_rows(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", OURS + "tiny", *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err


# -- the terminal --------------------------------------------------------------------------------------


def test_quiet_says_nothing_but_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(OURS + "with_inputs", "-q") == 0
    assert capsys.readouterr().err == ""
    assert run(OURS + "branches", "--input", "3", "-q", "--capture", "ahead-of-time") == 1
    assert "could not be captured" in capsys.readouterr().err


def test_colours_keep_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(OURS + "with_inputs", "--color", "always") == 0
    coloured = capsys.readouterr().out
    assert run(OURS + "with_inputs") == 0
    plain = capsys.readouterr().out
    assert "\x1b[34mbfloat16\x1b[0m" in coloured
    assert "\x1b[33mfloat32\x1b[0m" in coloured
    assert re.sub("\x1b\\[[0-9]+m", "", coloured) == plain
    for form in ("--json", "--markdown"):
        assert run(OURS + "with_inputs", "--color", "always", form) == 0
        assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("choice", "is_terminal", "environment", "expected"),
    [
        ("auto", True, {"TERM": "xterm"}, True),
        ("auto", False, {"TERM": "xterm"}, False),
        ("auto", True, {"NO_COLOR": "1"}, False),
        ("auto", True, {"NO_COLOR": ""}, True),
        ("auto", True, {"TERM": "dumb"}, False),
        ("always", False, {"NO_COLOR": "1"}, True),
        ("never", True, {}, False),
    ],
)
def test_when_to_colour(choice: str, is_terminal: bool, environment: dict[str, str], expected: bool) -> None:
    stream = mock.Mock(isatty=lambda: is_terminal)
    assert bool(wants_colour(choice, stream, environment)) is expected


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"ampgraph {ampgraph.__version__} (torch {torch.__version__})\n"


@pytest.mark.parametrize("command", ["explain", "draw", "compare-policies"])
def test_every_command_has_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert f"  ampgraph {command} torchvision:resnet18" in capsys.readouterr().out


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


def test_compare_ranks_draws_and_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [OURS + "with_inputs", "--level", "O2", "--dtype", "float16", "--backward", "--top", "3"]
    assert main(["compare", *argv, "--by", "headroom", "--draw", "x.dot", "--histogram", "x.svg"]) == 0
    out, err = capsys.readouterr()
    title, _, heading, _, *rows = out.splitlines()
    assert "in float16 beside float32" in title
    assert "gradients times 65536" in title
    assert heading.split()[-2:] == ["accumulated", "headroom"]
    assert len(rows) == 3
    headrooms = [float(row.split()[-1]) for row in rows]
    assert headrooms == sorted(headrooms, reverse=True)
    assert "wrote x.dot" in err
    assert (tmp_path / "x.dot").read_text().startswith("digraph")
    assert "float32 gradients" in (tmp_path / "x.svg").read_text()


def test_compare_writes_json(tmp_path: Path) -> None:
    assert main(["compare", OURS + "with_inputs", "-o", "x.json"]) == 0
    found = ampgraph.NumericComparison.from_json((tmp_path / "x.json").read_text())
    assert {row.direction for row in found.rows} == {"forward"}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--by", "owm"], "Did you mean 'own'"),
        (["--draw", "x.xyz"], "'.xyz' is not a known format"),
        (["--histogram", "x.png"], "ends in .svg or .txt"),
        (["--json", "--top", "3"], "json always writes all rows"),
    ],
)
def test_compare_refuses_wrong_options(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", OURS + "with_inputs", *argv]) == 2
    assert message in capsys.readouterr().err
