"""What a capture tells the model's code. Tried on torch 2.11, 2.13 and 2.14."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.fx.experimental import proxy_tensor

from .replaced_attribute import replaced

# The method of ``nn.Module`` that every call of a module runs.
MODULE_CALL = "_call_impl"

_ANSWER = "_answer_of_ampgraph"
_TRACED_NODES = "_FAKE_TENSOR_ID_TO_PROXY_MAP_FOR_EXPORT"
_HOOK = "register_buffer_assignment_hook"
# They print the names of symbols.
_PRINTS_NAMES = ("torch", "sympy", "logging")


def _is_exporting() -> bool:
    return _answer_of_ampgraph()  # type: ignore[name-defined] # noqa: F821


@contextlib.contextmanager
def telling_no_export(is_here: Callable[[], bool], note: Callable[[str], None]) -> Iterator[None]:
    """Tells a model that is being captured that no export is under way; torch's own code still sees one.

    Models take other branches for an export: they build masks that a call skips, or resize what has its
    size already, so that the program serves other shapes too. Dynamo knows the function by its identity, so
    the function stays and gets other code. One thread at a time may enter.

    Args:
        is_here: Whether this thread captures; other threads get the true answer.
        note: Called with the names of the modules whose code asks.
    """
    function = torch.compiler.is_exporting

    def answer() -> bool:
        caller = _module(sys._getframe(2))
        if not is_here() or caller.partition(".")[0] == "torch":
            return torch.compiler._is_exporting_flag
        note(caller)
        return False

    code = function.__code__
    with replaced(torch.compiler, _ANSWER, answer):
        function.__code__ = _is_exporting.__code__
        try:
            yield
        finally:
            function.__code__ = code


@contextlib.contextmanager
def sizes_written_as_numbers(is_here: Callable[[], bool]) -> Iterator[None]:
    """Gives the model's code the number if it makes text of a dynamic size, such as the key of a table.

    Without this the text is the name of a symbol, and no guard tells the sizes apart. The number fixes the
    size. torch's own code still gets the name. One thread at a time may enter.

    Args:
        is_here: Whether this thread captures.
    """

    name_of = torch.SymInt.__repr__

    def text(size: torch.SymInt) -> str:
        if not is_here() or _module(sys._getframe(1)).partition(".")[0] in _PRINTS_NAMES:
            return name_of(size)
        return str(int(size))

    # A list or tuple has the `repr` of what it holds.
    with replaced(torch.SymInt, "__str__", text), replaced(torch.SymInt, "__repr__", text):
        yield


def no_copies_into_buffers(is_here: Callable[[], bool]) -> contextlib.AbstractContextManager[None]:
    """Keeps torch.export from copying what forward assigns to a buffer of the root into the buffer.

    It copies once more after ``self.mean += x``, takes a wrong index if another buffer is None, and leaves
    out the modules inside. One thread at a time may enter. Tried on torch 2.13 and 2.15.

    Args:
        is_here: Whether this thread captures.
    """
    from torch.export import _trace  # imports Dynamo

    register = getattr(_trace, _HOOK, None)
    if register is None:
        return contextlib.nullcontext()

    def register_unless_here(root: nn.Module, assigned: dict[str, str]) -> Any:
        return register(root, {} if is_here() else assigned)

    return replaced(_trace, _HOOK, register_unless_here)


@contextlib.contextmanager
def traced_nodes_forgotten() -> Iterator[None]:
    """Drops the table of nodes that torch.export keeps until the next export.

    A node leads to its graph, and so to the graph module and the parameters of a model. Tried on torch 2.13
    and 2.14.
    """
    try:
        yield
    finally:
        getattr(proxy_tensor, _TRACED_NODES, {}).clear()


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


class _Validation:
    """A class attribute that is False where ``is_here``, and else what it was."""

    def __init__(self, before: bool, is_here: Callable[[], bool]) -> None:
        self._before, self._is_here = before, is_here

    def __get__(self, instance: object, owner: type) -> bool:
        return self._before and not self._is_here()


def distributions_unchecked(is_here: Callable[[], bool]) -> contextlib.AbstractContextManager[None]:
    """Leaves out the checks that ``torch.distributions`` makes of arguments, which branch on values."""
    before = torch.distributions.Distribution._validate_args
    return replaced(torch.distributions.Distribution, "_validate_args", _Validation(before, is_here))
