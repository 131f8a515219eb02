"""Some rows of the generated tables come out the same today.

Compared are counts and modelled bytes. Times and errors differ between machines.
"""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"

pytestmark = pytest.mark.exhaustive


@pytest.fixture(autouse=True)
def _tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tools import each other as they do when they run as scripts."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))


def rows(page: Path, name: str) -> list[list[str]]:
    """Returns the cells of each row of a page that starts with a name."""
    lines = page.read_text().splitlines()
    return [line.strip("| ").split(" | ") for line in lines if line.startswith(f"| {name} |")]


def fresh(tool: str, tmp_path: Path, *options: str) -> Path:
    """Returns a page that a tool writes for a few names."""
    page = tmp_path / "page.md"
    module: ModuleType = importlib.import_module(tool)
    module.main([*options, "--records", str(tmp_path / "records.jsonl"), "--output", str(page)])
    return page


@pytest.mark.parametrize("model", ["transformers/opt"])
def test_zoo(model: str, tmp_path: Path) -> None:
    page = fresh("zoo_check", tmp_path, "--names", model, "--modes", "eval")
    (today,), (then,) = rows(page, model), rows(RESULTS / "zoo.md", model)
    assert today[:10] == then[:10], "run python tools/zoo_check.py"  # then errors and times


@pytest.mark.parametrize("model", ["torchvision/swin_v2", "transformers/opt"])
def test_hazards(model: str, tmp_path: Path) -> None:
    """Both pages name the same nodes for the same reasons."""
    page = fresh("hazard_cost", tmp_path, "--names", model)
    today = [part for part in sections(page) if part.startswith(f"{model}, ")]
    assert today
    assert today == [part for part in sections(RESULTS / "hazards.md") if part.startswith(f"{model}, ")], (
        "run python tools/hazard_cost.py"
    )


def sections(page: Path) -> list[str]:
    """Returns the models of a page with their lists."""
    parts = page.read_text().rstrip().split("\n\n")
    return [f"{title}\n{nodes}" for title, nodes in itertools.pairwise(parts)]


@pytest.mark.parametrize("op", ["native_layer_norm"])
def test_op_sweep(op: str, tmp_path: Path) -> None:
    page = fresh("op_sweep", tmp_path, "--names", op, "--samples", "2", "--processes", "1")
    today, then = rows(page, op), rows(RESULTS / "op-sweep.md", op)
    assert today
    assert [row[:3] for row in today] == [row[:3] for row in then], "run python tools/op_sweep.py"


def test_bytes() -> None:
    """The eager step of a mixer, in bytes of O1 and O2 over those of the autocast rule."""
    bench, report = map(importlib.import_module, ("bench_bytes", "bytes_report"))
    model, args = bench.made("mixer")
    variants = {label: bench.VARIANTS[label] for label in ("autocast", "O1", "O2")}
    record = {
        label: bench.counted(label, (model, args), variant.policy, ("eager",), {}, variant.shares)
        for label, variant in variants.items()
    }
    today = [
        f"{report.moved(record, label, 'eager') / report.moved(record, 'autocast', 'eager'):.3f}"
        for label in ("O1", "O2")
    ]
    eager = (RESULTS / "bytes.md").read_text().partition("## Eager")[2]
    then = next(line for line in eager.splitlines() if line.startswith("| mixer |"))
    assert then.strip("| ").split(" | ")[1:3] == today, "run python tools/bench_bytes.py"


def test_step() -> None:
    """Kernels of a step of three layers: the plain loop, and one graph."""
    bench = importlib.import_module("bench_step_bytes")
    today = [str(count.kernels) for count in bench.eager("3 linears")]
    eager = (RESULTS / "step.md").read_text().partition("## Eager")[2]
    then = next(line for line in eager.splitlines() if line.startswith("| 3 linears |"))
    assert then.strip("| ").split(" | ")[1:3] == today, "run python tools/bench_step_bytes.py"


def test_op_accuracy(tmp_path: Path) -> None:
    """Ops and their classes."""
    accuracy = importlib.import_module("op_accuracy")
    page = tmp_path / "page.md"
    accuracy.main(["--ops", "addmm", "mul", "layer_norm", "--output", str(page)])
    for op in ("`aten.addmm`", "`aten.mul`", "`aten.layer_norm`"):
        today, then = rows(page, op), rows(RESULTS / "op-accuracy.md", op)
        assert today
        assert [row[1] for row in today] == [row[1] for row in then], "run python tools/op_accuracy.py"
