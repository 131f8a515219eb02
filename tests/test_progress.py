"""Progress of long work on standard error."""

from __future__ import annotations

import io
import sys
import time

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph.runtime import progress


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class _Slow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.2)
        return x * 2


def _terminal(monkeypatch: pytest.MonkeyPatch) -> _Terminal:
    """Replaces standard error; not in a fixture, because pytest replaces it after those."""
    made = _Terminal()
    monkeypatch.setattr(sys, "stderr", made)
    return made


def _raise() -> None:
    time.sleep(0.2)
    raise ZeroDivisionError


def test_a_long_capture_says_so_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _terminal(monkeypatch)
    monkeypatch.setattr(progress, "_PATIENCE", 0.02)
    ampgraph.convert(_Slow(), (torch.ones(2),))
    assert "\rampgraph captures _Slow, 0 s" in terminal.getvalue()
    assert terminal.getvalue().endswith("\n")


def test_a_short_capture_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _terminal(monkeypatch)
    ampgraph.convert(_Slow(), (torch.ones(2),))
    assert not terminal.getvalue()


def test_a_capture_is_silent_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    monkeypatch.setattr(progress, "_PATIENCE", 0.02)
    ampgraph.convert(_Slow(), (torch.ones(2),))
    assert not written.getvalue()


def test_a_line_ends_where_the_work_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _terminal(monkeypatch)
    monkeypatch.setattr(progress, "_PATIENCE", 0.02)
    with pytest.raises(ZeroDivisionError), progress.told_if_long("dividing"):
        _raise()
    assert terminal.getvalue().startswith("\rdividing, ")
    assert terminal.getvalue().endswith("\n")


def test_a_bar_counts_the_items(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _terminal(monkeypatch)
    assert list(progress.with_progress([1, 2], "adding", shown=None)) == [1, 2]
    assert "adding [###############...............] 1/2, 0 s" in terminal.getvalue()
