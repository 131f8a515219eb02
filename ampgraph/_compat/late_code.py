"""The Python code of graph modules, written when somebody asks for it. Tried on torch 2.13 and 2.14.

``GraphModule.recompile`` writes and compiles the code of the whole graph. ``torch.export`` and a conversion
do that 8 to 35 times, which took 7 to 30 % of their time. An `EagerProgram` never runs that code.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.graph import _PyTreeCodeGen

from .forked import new_lock
from .replaced_attribute import replaced
from .tracing import tracing_lock

_lock, _writing = new_lock(), threading.local()
_recompile = GraphModule.recompile
# The attribute of a ``forward`` that says in whose place it came.
_CAME_AFTER = "_ampgraph_came_after"
_IS_LATE = "_ampgraph_is_late"


class _LateText:
    """The attribute ``_code`` of graph modules without code; a text in their own dict goes before it."""

    def __get__(self, graph_module: GraphModule | None, cls: type) -> Any:
        return self if graph_module is None else vars(write_code(graph_module))["_code"]


@contextlib.contextmanager
def code_written_late() -> Iterator[None]:
    """While active, a graph module that this thread makes or recompiles has no code until it is asked for.

    A call of the graph module asks, and its attribute ``code``. Whoever reads ``forward`` from its class
    (Dynamo, ``symbolic_trace``, ``inspect.signature``) must call `write_code` before.
    """
    outer, thread = GraphModule.recompile, threading.get_ident()

    def recompile(self: GraphModule) -> Any:
        is_late = threading.get_ident() == thread and not _is_left_alone()
        return _leave_out(self) if is_late else outer(self)

    with tracing_lock(), replaced(GraphModule, "recompile", recompile):
        yield


def write_code(graph_module: GraphModule) -> GraphModule:
    """Writes the code of a graph module, if it has none; returns the graph module."""
    cls = type(graph_module)
    if not _is_late(cls.forward):
        return graph_module
    with _lock:
        late = cls.forward
        if _is_late(late):
            with replaced(_writing, "now", True):  # also the code of the bodies inside
                _recompile(graph_module)
            setattr(cls.forward, _CAME_AFTER, late)
    return graph_module


def has_code(cls: type[GraphModule], code: Callable) -> bool:
    """Whether nobody has recompiled the graph module of this class since its ``forward`` was ``code``."""
    if cls.forward is code:
        return True
    with _lock:  # another thread may write it now
        return getattr(cls.forward, _CAME_AFTER, None) is code


def _leave_out(graph_module: GraphModule) -> None:
    """Does what ``recompile`` does, without the code."""
    codegen, cls = graph_module.graph._codegen, type(graph_module)
    if isinstance(codegen, _PyTreeCodeGen):
        info = codegen.pytree_info
        graph_module._in_spec, graph_module._out_spec = info.in_spec, info.out_spec
    vars(graph_module).pop("_code", None)
    cls._code, cls.forward = _LateText(), _late_forward()
    for child in graph_module.children():
        if isinstance(child, GraphModule) and _was_left_out(child):  # parts of the user's model were not
            _leave_out(child)


def _was_left_out(graph_module: GraphModule) -> bool:
    return "_code" in vars(type(graph_module))


def _is_left_alone() -> bool:
    """Whether code is written at once: for `write_code`, and while a trace runs code of a model."""
    return getattr(_writing, "now", False) or get_proxy_mode() is not None


def _late_forward() -> Callable:
    """Returns a new function each time. It stands for the graph of this moment."""

    def forward(self: GraphModule, *args: Any, **kwargs: Any) -> Any:
        return write_code(self).forward(*args, **kwargs)

    setattr(forward, _IS_LATE, True)
    return forward


def _is_late(forward: Callable) -> bool:
    return getattr(forward, _IS_LATE, False)
