"""`PlannedValues`: whether a plan still holds for the values of a model, which a checkpoint may change."""

from __future__ import annotations

from operator import attrgetter
from typing import NamedTuple

import torch
from torch import fx, nn

from .._compat import OpOverload
from ..ops.kernels import fp32_slots
from ..passes.analysis.alias import written_memory
from ..passes.analysis.arguments import argument_name, tensor_arguments
from ..passes.analysis.magnitudes import COARSE, of_trained
from ..passes.analysis.ranges import Extents


class PlannedValues:
    """What a plan of a graph depends on of the values of parameters, buffers and constants.

    A plan knows which of them the low dtype can hold: a mask of zeros, into which a checkpoint writes -1e9,
    needs another plan. Buffers are looked at again at each call after a write. Parameters change at each
    step, and a plan leaves them room for it; call `look_again` after they were loaded.

    Args:
        graph: The graph.
        root: What holds its attributes.
        low_dtype: The low dtype.
    """

    def __init__(self, graph: fx.Graph, root: nn.Module, low_dtype: torch.dtype) -> None:
        self._root, self._limit = root, torch.finfo(low_dtype).max
        written = written_memory(graph)
        nodes = graph.find_nodes(op="get_attr")
        self._nodes = [n for n in nodes if n not in written and not _is_read_wide(n)]
        tables = [attrgetter(str(n.target)) for n in self._nodes]
        self._tables = [get for get in tables if _is_table(get(root))]
        self._planned = self._values()
        self._seen, self._holds = self._state(), True

    def hold(self) -> bool:
        """Whether the values are like those that the plan was made for. Runs at every call."""
        now = self._state()
        if now != self._seen:
            pairs = zip(self._planned, self._values(), strict=True)
            self._seen, self._holds = now, all(self._is_like(*pair) for pair in pairs)
        return self._holds

    def look_again(self) -> None:
        """Makes the next `hold` look at all values."""
        self._seen = []

    def _state(self) -> list[object]:
        return [None, *map(_state_of, (get(self._root) for get in self._tables))]

    def _values(self) -> list[_Value]:
        extents = Extents(self._root)
        return [
            _Value(
                extents[node],
                extents.tops(node) if extents.peak(node) > COARSE else None,
                extents.is_constant(node),
            )
            for node in self._nodes
        ]

    def _is_like(self, planned: _Value, now: _Value) -> bool:
        """Whether a parameter is within the room that the plan leaves it, or a table is as it was."""
        if now.is_table or planned.extent is None or now.extent is None:
            return now == planned
        peak, before = (max(map(abs, extent)) for extent in (now.extent, planned.extent))
        return peak <= of_trained(*planned.extent).high and (peak > self._limit) <= (before > self._limit)


class _Value(NamedTuple):
    """What counts of one tensor; see `Extents`."""

    extent: tuple[float, float] | None
    tops: tuple[float, float] | None
    is_table: bool


def _is_table(value: object) -> bool:
    is_tensor = isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
    return is_tensor and value.is_floating_point()  # type: ignore[attr-defined]


def _state_of(table: torch.Tensor) -> object:
    """Returns what changes with a write; for a table whose writes nothing counts, the table."""
    if table.is_inference():
        return id(table)
    return table._version, table.data_ptr() if table.layout is torch.strided else id(table)


def _is_read_wide(node: fx.Node) -> bool:
    """Whether only kernels read a node that take it in float32: running statistics."""
    return all(
        isinstance(user.target, OpOverload) and argument_name(user, path) in fp32_slots(user.target)
        for user in node.users
        for path, tensor in tensor_arguments(user)
        if tensor is node
    )
