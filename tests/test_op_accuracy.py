"""The table of ops' accuracy: what it measures, and that every exception from a class has a reason."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("op_accuracy", ROOT / "tools" / "op_accuracy.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_ops_are_measured(tool: ModuleType) -> None:
    rows = {row.op: row for row in tool.measured(["gelu", "transpose", "cross", "bmm"])}
    assert {op: row.cls.value for op, row in rows.items()} == {
        "aten.bmm": "white",
        "aten.cross": "gray",
        "aten.gelu": "gray",
        "aten.transpose": "clear",
    }
    assert all(m.worst == 0 and m.lost == 0 for m in rows["aten.transpose"].found.values())
    assert 0 < rows["aten.gelu"].found["float16"].worst <= tool.ROUNDINGS
    assert rows["aten.cross"].found["float16"].lost > 0  # products of 800 squared
    assert rows["aten.cross"].found["bfloat16"].lost == 0


def test_an_exception_without_a_reason_is_told(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert tool.main(["--ops", "cross"]) == 0
    monkeypatch.setattr(tool, "REASONS", {})
    assert tool.main(["--ops", "cross"]) == 1
    assert "aten.cross" in capsys.readouterr().err
