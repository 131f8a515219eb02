"""Each row of the table in docs/distributed.md names a test that `make test-distributed` runs."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parent.parent / "docs" / "distributed.md"
ROW = re.compile(r"^\| (?!engine)[^|]+ \|.*\|$", re.MULTILINE)
TEST = re.compile(r"`(\w+)\.py::(\w+)(?:\[([^\]]+)\])?` \|$")
ROWS = ROW.findall(PAGE.read_text().partition("## What is tested")[2])


def test_the_table_is_read() -> None:
    assert len(ROWS) >= 10


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_a_row_names_a_test(row) -> None:
    named = TEST.search(row)
    assert named, row
    module = importlib.import_module(f"tests.{named[1]}")
    test = getattr(module, named[2])
    marks = [*test.__dict__.get("pytestmark", ()), module.pytestmark]
    names = {mark.name for mark in marks}
    assert "distributed" in names
    assert not names & {"skip", "skipif", "xfail"}
    if named[3]:
        values = [value for mark in marks if mark.name == "parametrize" for value in mark.args[1]]
        assert any(named[3] in value for value in values if isinstance(value, tuple)), values


def test_no_engine_is_left_out() -> None:
    from . import test_four_ranks

    text = "\n".join(ROWS)
    for engine, _ in test_four_ranks.ROWS:
        assert f"test_gradients_and_skipping[{engine}]" in text
