"""Every private torch API that ampgraph uses, in one place. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_map_only

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "accept_real_constants",
    "evaluate",
    "fake_mode_of",
    "no_ambient_autocast",
    "size_hint",
    "storage_key",
    "unlift",
]


def fake_mode_of(graph: Graph) -> FakeTensorMode | None:
    """Returns the fake mode that the graph was captured under, or None for a graph without tensors."""
    for node in graph.nodes:
        values = node.meta.get("val")
        for value in values if isinstance(values, (list, tuple)) else (values,):
            if isinstance(value, FakeTensor):
                return value.fake_mode
    return None


def evaluate(node: Node, mode: FakeTensorMode | None) -> Any:
    """Runs one call_function node on its arguments' fake values; the authority on dtypes and shapes."""
    args, kwargs = tree_map_only(Node, lambda n: n.meta["val"], (node.args, dict(node.kwargs)))
    shape_env = mode.shape_env if mode else None
    fresh = shape_env.ignore_fresh_unbacked_symbols() if shape_env else contextlib.nullcontext()
    with mode or contextlib.nullcontext(), fresh, no_ambient_autocast():
        return node.target(*args, **kwargs)  # type: ignore[operator]


@contextlib.contextmanager
def accept_real_constants(mode: FakeTensorMode | None) -> Iterator[None]:
    """Lets real tensors (constants in model code) mix with the fake ones of ``mode``."""
    if mode is None:
        yield
        return
    before = mode.allow_non_fake_inputs
    mode.allow_non_fake_inputs = True
    try:
        yield
    finally:
        mode.allow_non_fake_inputs = before


@contextlib.contextmanager
def no_ambient_autocast() -> Iterator[None]:
    """Hides every enabled ``torch.autocast`` from the code inside."""
    with torch._C._DisableAutocast():
        yield


def size_hint(size: int | torch.SymInt, fallback: int = 1) -> int:
    """Returns a number for a possibly symbolic size; ``fallback`` where nothing is known about it."""
    if isinstance(size, int):
        return size
    node = size.node
    hint = node.hint if node.has_hint() else None
    return int(hint) if hint is not None else fallback


def storage_key(value: torch.Tensor) -> int | None:
    """Returns a number that two (fake) tensors share if and only if they share memory."""
    if value.layout != torch.strided:
        return None
    return value.untyped_storage()._cdata


def unlift(program: ExportedProgram) -> GraphModule:
    """Returns the program's module without the run-time guards on shapes and dtypes."""
    if "check_guards" in inspect.signature(program.module).parameters:
        return program.module(check_guards=False)  # type: ignore[return-value]
    return program.module()  # type: ignore[return-value]
