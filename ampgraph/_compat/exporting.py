"""What ``torch.compiler.is_exporting`` tells a model. Tried on torch 2.13 and 2.14."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

import torch


@contextlib.contextmanager
def telling_no_export(is_here: Callable[[], bool]) -> Iterator[list[str]]:
    """Tells a model that is being captured that no export is under way; torch's own code still sees one.

    Models take other branches for an export: they build masks that a call skips, or resize what has its
    size already, so that the program serves other shapes too.

    Args:
        is_here: Whether this thread captures; other threads get the true answer.

    Yields:
        The modules whose code asked.
    """
    asked: list[str] = []
    original = torch.compiler.is_exporting

    def is_exporting() -> bool:
        caller = str(sys._getframe(1).f_globals.get("__name__", ""))
        if not is_here() or caller.partition(".")[0] == "torch":
            return original()
        asked.append(caller)
        return False

    torch.compiler.is_exporting = is_exporting
    try:
        yield asked
    finally:
        torch.compiler.is_exporting = original
