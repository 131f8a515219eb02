"""`Writes`: checks which arguments share memory, for a graph that writes to arguments or buffers."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from .._compat import storage_key
from ..passes.analysis.alias import SOURCES, written_memory

# For each tensor, the position of the first tensor that shares its memory; for a compiler also how.
Sharing = tuple[object, ...]


class Writes:
    """The requirements of a graph on shared memory among a call's arguments.

    A graph without writes is correct for any sharing. A graph with writes is correct only for the sharing at
    its capture: a value that it holds in another dtype would miss a write through another argument.

    Args:
        root: The graph, or what holds its attributes.
        targets: Paths of the attributes that it writes.
        args: The positional arguments that it was captured for.
        kwargs: The keyword arguments.
        is_compiled: Whether the graph is compiled. AOTAutograd computes one argument from the memory of
            another, and compiles in where it begins; it checks this in part (torch 2.13).
    """

    def __init__(
        self, root: nn.Module, targets: list[str], args: tuple, kwargs: dict[str, Any], is_compiled: bool
    ) -> None:
        self._root, self._targets, self._is_compiled = root, targets, is_compiled
        self._attributes = attrgetter(*targets) if targets else None
        self._is_single = len(targets) == 1
        self._captured = self._sharing(args, kwargs)

    def of(self, root: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Writes:
        """Returns the same for another block of the same graph, captured for its arguments."""
        return Writes(root, self._targets, args, kwargs, self._is_compiled)

    def allows(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether these arguments share no memory, or share memory as at the capture."""
        sharing = self._sharing(args, kwargs)
        return sharing == self._captured or (not self._is_compiled and len(set(sharing)) == len(sharing))

    def _sharing(self, args: tuple, kwargs: dict[str, Any]) -> Sharing:
        values = tree_leaves((args, kwargs))
        if self._attributes is not None:
            held = self._attributes(self._root)
            values = [*values, held] if self._is_single else [*values, *held]
        first: dict[object, int] = {}
        tensors = [(i, v) for i, v in enumerate(values) if isinstance(v, torch.Tensor)]
        sharing = [first.setdefault(_memory(v), i) for i, v in tensors]
        if not self._is_compiled or len(first) == len(sharing):
            return tuple(sharing)
        return tuple(
            [(j, _extent(v), _extent(values[j])) for j, (_, v) in zip(sharing, tensors, strict=True)]
        )


def _memory(tensor: torch.Tensor) -> object:
    key = storage_key(tensor)
    return ("no storage", id(tensor)) if key is None else key


def _extent(tensor: torch.Tensor) -> tuple[object, ...]:
    is_strided = tensor.layout is torch.strided
    return (tensor.storage_offset(), tuple(tensor.shape), tensor.stride()) if is_strided else ()


def lost_by_compilers(graph_module: fx.GraphModule) -> list[str]:
    """Returns the 0-dim float64 tensors of the caller on a CPU that a graph writes.

    Dynamo takes such a tensor for a number of Python, and loses the write (seen in torch 2.13).
    """
    written = [n for n in written_memory(graph_module.graph) if n.op in SOURCES]
    values = [(n, n.meta.get("val")) for n in written]
    return [str(n.target) for n, v in values if isinstance(v, torch.Tensor) and _is_like_a_number(v)]


def _is_like_a_number(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 0 and tensor.dtype is torch.float64 and tensor.device.type == "cpu"


def writes_of(
    graph_module: fx.GraphModule, args: tuple, kwargs: dict[str, Any], is_compiled: bool
) -> Writes | None:
    """Returns the caller's memory that a graph writes, captured for these arguments; None if it writes none.

    Integer counters are excluded: no plan casts an integer, so no cast holds an older value.
    """
    written = written_memory(graph_module.graph)
    seen = [n for n in written if n.op in SOURCES and _counts(n, is_compiled)]
    if not seen:
        return None
    targets = sorted({str(n.target) for n in seen if n.op == "get_attr"})
    return Writes(graph_module, targets, args, kwargs, is_compiled)


def _counts(node: fx.Node, is_compiled: bool) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    return value.is_floating_point() or (is_compiled and node.op == "placeholder")
