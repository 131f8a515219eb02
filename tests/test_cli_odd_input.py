"""The command line on odd input: one line with the fault and the legal values, status 2."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import torch

import ampgraph
from ampgraph import AmpGraphError, Policy
from ampgraph.cli import commands
from ampgraph.cli.main import main
from ampgraph.cli.model_spec import SpecError, parse_input

from . import forks

MODELS = """
import sys
import torch
from torch import nn

def tiny():
    return nn.Sequential(nn.Linear(4, 4), nn.GELU()), (torch.ones(3, 4),)

class Masked(nn.Linear):
    def forward(self, x, mask):
        return super().forward(x) * mask

class Dict(nn.Linear):
    def forward(self, batch):
        return super().forward(batch["x"])

X = torch.ones(3, 4)

def by_name():
    return Masked(4, 4), {"x": X, "mask": X}

def one_dict():
    return Dict(4, 4), {"x": X}

def misspelt():
    return Masked(4, 4), {"x": X, "msk": X}

def in_a_list():
    return nn.Linear(4, 4), [X]

def wrong_kwargs():
    return nn.Linear(4, 4), (X,), [X]

def quits():
    sys.exit(0)

def waits():
    print("waiting", file=sys.stderr, flush=True)
    import time
    time.sleep(60)
"""
OURS = "odd_models_of_a_user:"
TINY = OURS + "tiny"
KEYWORDS = ["--input", "x=3x4", "--input", "mask=3x4"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "odd_models_of_a_user.py").write_text(MODELS)
    (tmp_path / "quits_at_import.py").write_text("import sys; sys.exit(3)")
    for name, text in FILES.items():
        (tmp_path / name).write_bytes(text)
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "secret.json").write_text("{}")
    (tmp_path / "secret.json").chmod(0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "odd_models_of_a_user", raising=False)
    return tmp_path


FILES = {
    "deep.json": b"[" * 200_000,
    "deep_report.json": b'{"nodes":' * 100_000,
    "digits.json": b'{"nodes": ' + b"9" * 5000 + b"}",
    "empty.json": b"",
    "null.json": b"null",
    "bytes.json": b"\xff\xfe\x00",
    "no_report.json": b'{"nodes": 3}',
    "nan.json": b'{"loss_scale": {"type": "static", "value": NaN}}',
    "preset.json": b'{"ops": {"preset": []}}',
}
BAD_FILES = [*FILES, "folder.json", "missing.json", "nul\0.json", "x" * 300 + ".json"]
if os.geteuid():
    BAD_FILES.append("secret.json")  # root reads everything


def said(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that was said on standard error beside the progress; there is no other output."""
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if not line.endswith((" ...", " s"))]
    assert out == ""
    assert len(lines) == 1, err
    assert lines[0].startswith("ampgraph: error: ")
    return lines[0]


@pytest.mark.parametrize("option", ["--diff", "--policy"])
@pytest.mark.parametrize("name", BAD_FILES, ids=lambda name: ascii(name[:20]))
def test_bad_files(option: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", TINY, option, name]) == 2
    assert name[:20].replace("\0", "\\x00") in said(capsys)


@pytest.mark.parametrize(
    "shape",
    [
        "9" * 5000,
        "4x" + "9" * 5000,
        "9" * 19,
        "9223372036854775808x4",
        "99999999999x99999999999",
        "x".join("1" * 65),
        "٣x٤",
        "3x4\n",
        "",
        "3x4:complex64",
        "a b=3x4",
        "nul\0=3",
    ],
    ids=lambda shape: ascii(shape[:24]),
)
def test_bad_inputs(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", TINY, "--input", shape]) == 2
    assert "--input" in said(capsys)


def test_good_inputs_at_the_edge() -> None:
    assert parse_input("größe=2x" + "x".join("1" * 63)).shape == (2, *[1] * 63)
    with pytest.raises(SpecError, match="expected"):
        parse_input("x".join("1" * 65))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["explain", TINY, "-o", "report.xyz"], "legal: .txt, .text, .log, .json, .md or none"),
        (["explain", TINY, "-o", "report.jsn"], "Did you mean '.json'"),
        (["explain", TINY, "--json", "-o", "report.md"], "contradicts --json"),
        (["explain", TINY, "--markdown", "-o", "report.json"], "contradicts --markdown"),
        (["compare-policies", TINY, "-o", "report.xyz"], "'.xyz'"),
        (["explain", TINY, "-o", "folder.json"], "Is a directory"),
        (["explain", TINY, "-o", "nul\0.txt"], "null byte"),
        (["explain", TINY, "-o", "/dev/full"], "No space left"),
        (["draw", TINY, "-o", "nul\0.dot"], "null byte"),
        (["draw", TINY, "-o", "model.xyz"], "'.xyz' is not a known format; common are .svg"),
        (["draw", TINY, "-o", "model.svgg"], "Did you mean '.svg"),
        (["draw", TINY, "-o", "folder.json"], "Is a directory"),
        (["draw", TINY, "-o", "x.dot", "--depth", "-1"], "depth=-1"),
        (["draw", TINY, "-o", "x.dot", "--depth", "9" * 5000], "invalid int value"),
        (["draw", TINY, "-o", "x.dot", "--focus", "lniear*"], "Did you mean 'linear'"),
        (["draw", TINY, "-o", "x.dot", "--highlight", "gleu"], "Did you mean 'gelu'"),
        (["draw", TINY, "-o", "x.dot", "--graph", "forwrad"], "Did you mean 'forward'"),
        (["explain", TINY, "--rules", "linaer.*=fp32"], "Did you mean 'linear'"),
        (["explain", TINY, "--rules", "nowhere.*=low"], "matches no module"),
        (["explain", TINY, "--why", "lniear"], "Did you mean 'linear'"),
        (["explain", TINY, "--level", "o1"], "Did you mean 'O1'"),
        (["explain", TINY, "--lists", "troch"], "Did you mean 'torch'"),
        (["explain", TINY, "--policy", "o2"], "Did you mean 'O2'"),
        (["explian", TINY], "Did you mean 'explain'"),
        (["explain", TINY, "--bogus"], "unrecognized arguments"),
        (["explain", TINY, "--black", "aten."], "no op 'aten.'"),
        (["explain", TINY, "--black", "nul\0"], "no op"),
        (["compare-policies", TINY, "--policies", "O1", "/"], "Is a directory"),
        (["explain", "sys:exit"], "sys:exit is a built-in function"),
        (["explain", "os:abort"], "os:abort is a built-in function"),
        (["explain", "odd_models_of_a_user:quits"], "ends the program"),
        (["explain", OURS + "in_a_list"], "returned (model, list)"),
        (["explain", OURS + "misspelt"], "Did you mean 'mask'"),
        (["explain", OURS + "wrong_kwargs"], "returned a list as kwargs"),
        (["explain", OURS + "by_name", "--input", "3x4"], "missing a required argument: 'mask'"),
        (["explain", OURS + "by_name", *KEYWORDS, "--input", "3x4"], "multiple values for argument 'x'"),
        (["explain", OURS + "by_name", "--input", "3x4", "--input", "msk=3x4"], "Did you mean 'mask'"),
        (["explain", "quits_at_import:model"], "ends the program"),
        (["explain", "sys:argv"], "returned a list"),
        (["explain", "nul\0:x"], "not the name of a Python module"),
        (["explain", "\udcff:x"], "not the name of a Python module"),
    ],
)
def test_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert message in said(capsys)


@pytest.mark.parametrize("name", ["by_name", "one_dict"])
def test_a_function_may_return_a_dict_of_inputs(name: str) -> None:
    assert main(["explain", OURS + name]) == 0


def test_a_library_that_cannot_be_imported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "timm.py").write_text('raise RuntimeError("operator torchvision::nms does not exist")')
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    assert main(["explain", "timm:vit"]) == 2
    assert f"Install what is built for torch {torch.__version__}: pip install" in said(capsys)


def test_the_suffix_tells_the_form(folder: Path) -> None:
    for name, start in (("a.json", "{"), ("a.MD", "#"), ("a.txt", "Seq"), ("a", "Seq")):
        assert main(["explain", TINY, "-q", "-o", name]) == 0
        assert (folder / name).read_text().startswith(start), name
    assert main(["explain", TINY, "-q", "--diff", "a.json"]) == 0


def test_a_fault_of_ampgraph_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (ValueError, TypeError, RecursionError):

        def fails(*args: object, fault: type = error, **kwargs: object) -> None:
            raise fault("a bug")

        monkeypatch.setattr(commands, "convert", fails)
        with pytest.raises(error, match="a bug"):
            main(["explain", TINY, "-q"])


def test_interrupted() -> None:
    read, write = os.pipe()
    running = forks.Fork(None, "-m", "ampgraph", "explain", "odd_models_of_a_user:waits", streams=(1, write))
    os.close(write)
    with open(read, "rb") as told:
        assert b"waiting\n" in iter(told.readline, b"")
        os.kill(running.pid, signal.SIGINT)
        assert told.read() == b"ampgraph: error: interrupted\n"
    assert running.wait(60) == 130


def test_a_reader_that_goes_away(folder: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    with (folder / "err.txt").open("wb") as err:
        running = forks.Fork(None, "-m", "ampgraph", "explain", TINY, "-q", streams=(write, err.fileno()))
    os.close(write)
    assert running.wait(60) == 0
    assert (folder / "err.txt").read_bytes() == b""


def test_a_terminal_that_cannot_say_everything() -> None:
    done = forks.run(
        *("-m", "ampgraph", "explain", TINY, "-q", "--json", "--rules", "*é=low", "0=low"),
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert "Traceback" not in done.stderr
    assert done.returncode == 2


# -- the same policies in Python ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["O2", "torch", "paddle:O1", "mine.json", "./mine.json", "sub/mine"])
def test_convert_takes_what_the_command_line_takes(name: str, folder: Path) -> None:
    (folder / "sub").mkdir()
    for path in ("mine.json", "sub/mine"):
        (folder / path).write_text(Policy(level="O2", rules={"0": "fp32"}).to_json())
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.ones(2, 4)
    policy = Policy.of(name)
    amp = ampgraph.convert(model, (x,), policy=name)
    assert amp.policy == policy.replace(dtype=torch.bfloat16)
    assert ("mine" in name) == bool(policy.rules)
    assert main(["explain", TINY, "-q", "--policy", name, "-o", "report.txt"]) == 0
    assert repr(policy.level) in (folder / "report.txt").read_text() or policy.level == "O1"


def test_path_objects_are_files_whatever_their_name(folder: Path) -> None:
    (folder / "O1").write_text('{"level": "O3"}')
    assert Policy.of(Path("O1")).level == "O3"
    assert Policy.of("O1").level == "O1"
    assert Policy.of(folder / "O1", "float16") == Policy("O3", torch.float16)
    (folder / "marked.json").write_bytes(b'\xef\xbb\xbf{"level": "O2"}')
    assert Policy.of("marked.json").level == "O2"


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("troch", r"legal: O0, O1, .*torch.* or a .json file; .* Did you mean 'torch'"),
        ("o1", "Did you mean 'O1'"),
        (Path("missing"), "missing: No such file"),
        ("digits.json", "digits.json: policy: not valid JSON"),
        (b"O1", "got bytes"),
        (1, "got int"),
    ],
)
def test_wrong_policies_in_python(policy: object, message: str) -> None:
    with pytest.raises(AmpGraphError, match=message):
        Policy.of(policy)  # type: ignore[arg-type]
