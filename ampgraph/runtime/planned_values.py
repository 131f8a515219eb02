"""`PlannedValues`: whether a plan still holds for the values of a model, which a checkpoint may change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from operator import attrgetter

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
        getters = [(node, attrgetter(str(node.target))) for node in self._nodes]
        self._tables = [(node, get) for node, get in getters if _is_table(get(root))]
        self._seen = self._states()
        self._looks: Counter[fx.Node] = Counter()
        self._beyond: set[fx.Node] = set()
        self._is_loaded = False

    def hold(self) -> bool:
        """Whether the values are within the room that the plan leaves them. Runs at every call."""
        now = self._states()
        if self._is_loaded:
            self._is_loaded, self._seen = False, now
            self._look(self._nodes)
        elif now != self._seen:
            states = zip(self._tables, now, self._seen, strict=True)
            changed = [node for (node, _), new, old in states if new != old]
            self._seen = now
            self._looks.update(changed)
            self._look(node for node in changed if self._looks[node] <= _MOST_LOOKS)
        return not self._beyond

    def look_again(self) -> None:
        """Makes the next `hold` look at all values."""
        self._is_loaded = True

    def _look(self, nodes: Iterable[fx.Node]) -> None:
        for node, peak in self._peaks(nodes).items():
            (self._beyond.discard if self._is_within(peak, self._planned[node]) else self._beyond.add)(node)

    def _is_within(self, peak: float, planned: float) -> bool:
        """Whether a plan for the second is right for the first; results count where the range is small."""
        if planned <= self._limit < peak:
            return False
        return self._limit > _WIDE or peak <= of_trained(-planned, planned).high

    def _peaks(self, nodes: Iterable[fx.Node]) -> dict[fx.Node, float]:
        extents = Extents(self._root)
        return {node: extents.peak(node) for node in nodes}

    def _states(self) -> list[object]:
        return [_state_of(get(self._root)) for _, get in self._tables]


def _is_table(value: object) -> bool:
    is_tensor = isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
    return is_tensor and value.is_floating_point()  # type: ignore[attr-defined]


def _state_of(table: torch.Tensor) -> object:
    """Returns what changes with a write; for a table whose writes nothing counts, the table's identity."""
    if not has_content(table) or is_of_transform(table):
        return id(table)
    return table._version, table.data_ptr()


def _is_read_wide(node: fx.Node) -> bool:
    """Whether only kernels read a node that take it in float32: running statistics."""
    return all(
        isinstance(user.target, OpOverload) and argument_name(user, path) in fp32_slots(user.target)
        for user in node.users
        for path, tensor in tensor_arguments(user)
        if tensor is node
    )
