"""`GradientTape`: the backward of one run of a graph, one node at a time.

Every value is detached from its producer, so autograd knows each node alone. The tape keeps edges of
autograd's graph but no values. Values that no backward needs are freed as usual.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils import _pytree as pytree

OUTPUT = "output"


class Key(NamedTuple):
    """One of the tensors that a node returns.

    Attributes:
        node: The node's name.
        place: The tensor's place among the leaves of what the node returns.
    """

    node: str
    place: int


Edges = dict[Key, GradientEdge]


class _Cut(Function):
    """Passes a value on, and stands in autograd's graph for what made it."""

    @staticmethod
    def forward(_: Any, __: Tensor, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(_: Any, *__: Tensor) -> None:
        raise AssertionError("a tape stops at each node's inputs")


class _Segment(NamedTuple):
    """The backward of one node.

    Attributes:
        results: Where the gradients of its results enter.
        read: The gradients of the node's inputs.
    """

    results: Edges
    read: Edges


class GradientTape:
    """What it takes to run a graph's backward node by node; see the module docstring.

    Nodes in memory that is written in place cannot be cut off: autograd has to see the writes. They belong to
    the segments of all that read them, and have no gradient here.
    """

    def __init__(self) -> None:
        self._token = torch.zeros((), requires_grad=True)
        self._keys: dict[tuple[Node, int], Key] = {}
        self._segments: dict[str, _Segment] = {}
        self._loose: Edges = {}
        self._gradients: dict[str, dict[int, Tensor]] = defaultdict(dict)

    # -- forward ---------------------------------------------------------------------------------

    def cut(self, key: Key, tensor: Tensor) -> Tensor:
        """Returns the tensor, cut off from what made it, as the one that the key names."""
        if tensor.device != self._token.device:
            self._token = torch.zeros((), requires_grad=True, device=tensor.device)
        with torch.enable_grad():
            result: Tensor = _Cut.apply(self._token, tensor.detach())
        self._keys[_place(get_gradient_edge(result))] = key
        return result

    def cut_source(self, name: str, value: Any) -> Any:
        """Returns an input or a parameter to run the graph with: its gradient ends here."""
        if not isinstance(value, Tensor) or not value.requires_grad:
            return value
        return self.cut(Key(name, 0), value)

    def key_of(self, value: Any) -> Key | None:
        """Returns the key of this tensor in the graph; None if the tape keeps no gradient for it."""
        if not isinstance(value, Tensor) or not value.requires_grad:
            return None
        return self._keys.get(_place(get_gradient_edge(value)))

    def edges(self, *values: Any) -> tuple[Edges, bool]:
        """Returns where gradients go from a node that reads the values, and whether that is all of it."""
        tensors = list(_differentiable(values))
        edges = [get_gradient_edge(tensor) for tensor in tensors]
        found = {self._keys[_place(e)]: e for e in edges if _place(e) in self._keys}
        is_whole = all(_place(e) in self._keys for e in edges)
        return (found if is_whole else {**found, **self._loose}), is_whole

    def record(self, name: str, read: Edges, value: Any, is_written: bool = False) -> Any:
        """Notes what a node returned; returns it, cut off.

        Args:
            name: The node's name.
            read: What `edges` returned for its arguments, before it ran.
            value: What it returned.
            is_written: Whether that is in memory which the graph writes.
        """
        if is_written:
            self._loose |= read
            return value
        results: Edges = {}
        leaves, spec = pytree.tree_flatten(value)
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor) or not leaf.requires_grad or self.key_of(leaf) is not None:
                continue  # a node may return what it reads
            key = Key(name, index)
            results[key] = get_gradient_edge(leaf)
            leaves[index] = self.cut(key, leaf)
        if results:
            self._segments[name] = _Segment(results, read)
        return pytree.tree_unflatten(leaves, spec)

    # -- backward --------------------------------------------------------------------------------

    def __contains__(self, name: str) -> bool:
        return name in self._segments

    def add(self, gradients: Mapping[Key, Tensor]) -> None:
        """Adds to the gradients of tensors."""
        for key, gradient in gradients.items():
            known = self._gradients[key.node]
            known[key.place] = known[key.place] + gradient if key.place in known else gradient

    def take(self, name: str) -> dict[Key, Tensor]:
        """Returns the gradients of what a node returned, and forgets them."""
        found = self._gradients.pop(name, {})
        return {Key(name, index): gradient for index, gradient in found.items()}

    def backward(self, name: str, gradients: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        """Runs one node's backward; returns what it adds to the gradients of what the node read."""
        segment = self._segments.pop(name, None)
        if segment is None or not segment.read:
            return {}
        given = {key: gradient for key, gradient in gradients.items() if key in segment.results}
        if not given:
            return {}
        found = torch.autograd.grad(
            [segment.results[key] for key in given],
            list(segment.read.values()),
            list(given.values()),
            retain_graph=bool(self._loose),
            allow_unused=True,
        )
        return {key: g for key, g in zip(segment.read, found, strict=True) if g is not None}


def _differentiable(values: Any) -> Iterator[Tensor]:
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            yield leaf


def _place(edge: GradientEdge) -> tuple[Node, int]:
    return edge.node, edge.output_nr
