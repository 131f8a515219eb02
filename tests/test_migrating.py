"""Every line of docs/migrating.md runs, and does what the line beside it says."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch

from ampgraph import DynamicLossScale

from .test_readme import ROOT, code

pytestmark = pytest.mark.usefixtures("shared_captures")
PAGE = ROOT / "docs" / "migrating.md"
SECTIONS = ["torch.autocast and GradScaler", "Paddle", "OneFlow", "MindSpore"]
CELL = re.compile(r"^\|(.*)\|([^|]*)\|$", re.MULTILINE)
INLINE = re.compile(r"`([^`]+)`")
# Cells whose second piece of code is a value, not a line.
FRAGMENTS = {"False", "loss_scale=", "scaler = amp.scaler"}


def lines(section: str) -> list[str]:
    """The code in the right column of a section's table."""
    body = PAGE.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    cells = [cell for _, cell in CELL.findall(body)[2:]]
    return [line for cell in cells for line in INLINE.findall(cell) if line not in FRAGMENTS]


@functools.cache
def parts() -> tuple[dict[str, Any], CodeType]:
    """What the page's code imports and defines, and the code after it."""
    body = ast.parse(code(PAGE)).body
    defined = 1 + max(at for at, statement in enumerate(body) if isinstance(statement, ast.ClassDef))
    first, rest = (
        compile(ast.Module(part, []), str(PAGE), "exec") for part in (body[:defined], body[defined:])
    )
    namespace: dict[str, Any] = {"__name__": "page"}
    exec(first, namespace)
    return namespace, rest


def prepared() -> dict[str, Any]:
    """What the page's code makes; models of one class share captures."""
    namespace, rest = parts()
    namespace = dict(namespace)
    exec(rest, namespace)
    return namespace


@pytest.mark.parametrize(
    ("section", "line"), [(section, line) for section in SECTIONS for line in lines(section)]
)
def test_line_runs(section: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(line, section, "exec"), prepared())


def test_every_row_has_a_line() -> None:
    sections = re.findall(r"^## (.*)$", PAGE.read_text(), re.MULTILINE)
    assert sections == SECTIONS
    assert [len(lines(section)) for section in SECTIONS] == [14, 18, 11, 16]


def value_of(section: str, beginning: str) -> Any:
    (line,) = [line for line in lines(section) if line.startswith(beginning)]
    return eval(line, prepared())


def test_the_peers_default_scales_are_ours() -> None:
    for section in SECTIONS[:3]:
        assert value_of(section, "Policy(loss_scale=Dynamic").loss_scale == DynamicLossScale()
    mindspore = value_of("MindSpore", "Policy(loss_scale=Dynamic").loss_scale
    assert mindspore == DynamicLossScale(init_scale=2.0**24)


def test_only_matrix_products_run_low_at_od() -> None:
    from ampgraph import convert
    from ampgraph.testing import assert_dtype

    page = prepared()
    policy = value_of("Paddle", 'Policy(ops=OpLists.paddle("OD"))').replace(dtype=torch.float16)
    amp = convert(page["model"], (page["x"],), policy=policy)
    assert_dtype(amp, "body", torch.float16)
    assert_dtype(amp, "gelu", torch.float32)
    assert_dtype(amp, "batch_norm", torch.float32)
