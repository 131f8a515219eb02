"""`PlannedValues`: whether a plan still holds for the values of a model, which a checkpoint may change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from operator import attrgetter, is_
from typing import Any

import torch
from torch import fx, nn

from .._compat import OpOverload, has_content, is_of_transform
from ..ops.kernels import fp32_slots
from ..passes.analysis.alias import written_memory
from ..passes.analysis.arguments import argument_name, tensor_arguments
from ..passes.analysis.magnitudes import of_trained
from ..passes.analysis.ranges import Extents

# A buffer that was written more often is one that the loop writes. Each look waits for the device.
_MOST_LOOKS = 8
# A low dtype with a larger maximum has the range of float32.
_WIDE = 1e38
_version = attrgetter("_version")


class PlannedValues:
    """What a plan of a graph depends on of the values of parameters, buffers and constants.

    A plan knows which of them the low dtype can hold: a mask of zeros, into which a checkpoint writes -1e9,
    needs another plan. It leaves them the room that training takes. Buffers and constants are looked at
    again after a write. Parameters are written at each step: call `look_again` after they were loaded.

    Args:
        graph: The graph.
        root: The module that holds its attributes.
        low_dtype: The low dtype.
    """

    def __init__(self, graph: fx.Graph, root: nn.Module, low_dtype: torch.dtype) -> None:
        self._root, self._limit = root, torch.finfo(low_dtype).max
        written = written_memory(graph)
        nodes = graph.find_nodes(op="get_attr")
        self._nodes = [n for n in nodes if n not in written and not _is_read_wide(n)]
        self._planned = self._peaks(self._nodes)
        self._tables = [node for node in self._nodes if _is_table(attrgetter(str(node.target))(root))]
        self._places = [_place(root, str(node.target)) for node in self._tables]
        self._looks: Counter[fx.Node] = Counter()
        self._beyond: set[fx.Node] = set()
        self._is_loaded = False
        self._objects = self._now()
        self._counted = list(filter(_is_counted, self._objects))
        self._seen = self._states()

    def hold(self) -> bool:
        """Whether the values are within the room that the plan leaves them. Runs at every call."""
        if self._places:
            now = self._now()
            if not all(map(is_, now, self._objects)) or self._states() != self._seen:
                self._look(self._written(now))
        if self._is_loaded:
            self._is_loaded = False
            self._look(self._nodes)
        return not self._beyond

    def _written(self, now: list[Any]) -> list[fx.Node]:
        """Returns the tables that were exchanged or written, unless too often, and remembers all of now."""
        before = dict(zip(map(id, self._counted), zip(*self._seen, strict=True), strict=True))
        self._objects, self._counted = now, list(filter(_is_counted, now))
        self._seen = self._states()
        after = dict(zip(map(id, self._counted), zip(*self._seen, strict=True), strict=True))
        pairs = zip(self._tables, map(id, now), strict=True)
        changed = [node for node, key in pairs if key not in after or before.get(key) != after[key]]
        self._looks.update(changed)
        return [node for node in changed if self._looks[node] <= _MOST_LOOKS]

    def _now(self) -> list[Any]:
        return [held.get(name) for held, name in self._places]

    def _states(self) -> tuple[list[int], list[int]]:
        return [*map(_version, self._counted)], [*map(torch.Tensor.data_ptr, self._counted)]

    def look_again(self) -> None:
        """Makes the next `hold` look at all values."""
        self._is_loaded = True

    def _look(self, nodes: Iterable[fx.Node]) -> None:
        for node, peak in self._peaks(nodes).items():
            (self._beyond.discard if self._is_within(peak, self._planned[node]) else self._beyond.add)(node)

    def _is_within(self, peak: float, planned: float) -> bool:
        """Whether a plan for the planned peak is right for another one.

        In a small range a few times the planned peak may take the results of ops out of it.
        """
        if planned <= self._limit < peak:
            return False
        return self._limit > _WIDE or peak <= of_trained(-planned, planned).high

    def _peaks(self, nodes: Iterable[fx.Node]) -> dict[fx.Node, float]:
        extents = Extents(self._root)
        return {node: extents.peak(node) for node in nodes}


def _is_table(value: object) -> bool:
    is_tensor = isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
    return is_tensor and value.is_floating_point()  # type: ignore[attr-defined]


def _is_counted(table: object) -> bool:
    """Whether torch counts the writes to a table."""
    return isinstance(table, torch.Tensor) and has_content(table) and not is_of_transform(table)


def _place(root: nn.Module, path: str) -> tuple[dict[str, Any], str]:
    """Returns the dict that holds a table, and its name there."""
    prefix, _, name = path.rpartition(".")
    owner = attrgetter(prefix)(root) if prefix else root
    return (owner._buffers if name in owner._buffers else vars(owner)), name


def _is_read_wide(node: fx.Node) -> bool:
    """Whether only kernels read a node that take it in float32: running statistics."""
    return all(
        isinstance(user.target, OpOverload) and argument_name(user, path) in fp32_slots(user.target)
        for user in node.users
        for path, tensor in tensor_arguments(user)
        if tensor is node
    )
