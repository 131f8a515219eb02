"""Bytes that the eager forward of a labelling saves for its backward."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch.fx import Node

from ampgraph.ops import fusion_tables
from ampgraph.ops import saved_tables as tables

from ..analysis.arguments import argument, argument_name
from ..analysis.facts import NodeFacts, Operand, element_count, tensors
from ..analysis.precision import Precision
from ..analysis.problem import Problem
from .cost_model import WIDTHS, Labels
from .fused_kernels import FusedKernels

BYTES_OF_INDEX = 8


class _Saved(NamedTuple):
    """A tensor that an op saves.

    Attributes:
        node: The node that makes the tensor.
        dtype: Whose label is the dtype, or the dtype.
        elements: Its elements.
        is_inner: Whether the op makes it for the backward alone, as a dropout makes its mask.
    """

    node: Node
    dtype: Node | Precision
    elements: int
    is_inner: bool = False


class EagerSaved:
    """Counts what the labellings of one problem save. Memory that several ops save counts once.

    Args:
        problem: The graph.
        kernels: Its ops, and where gradients go.
    """

    def __init__(self, problem: Problem, kernels: FusedKernels) -> None:
        self.problem, self.kernels = problem, kernels
        self._saved: dict[_Saved, None] = {}
        self._other_bytes: dict[Node, int] = {}  # of integers and masks, by the root of their memory
        for node, fact in problem.facts.items():
            if kernels.has_gradient[node] and fact.moves_data:
                self._add(node, fact, kernels.names[node])

    def of(self, labels: Labels) -> int:
        """Returns the bytes that a labelling saves."""
        found: dict[tuple[Hashable, Precision], int] = {}
        for saved in self._saved:
            label = saved.dtype if isinstance(saved.dtype, Precision) else labels[saved.dtype]
            key, elements = self._memory(saved, label, labels)
            found[key, label] = max(found.get((key, label), 0), elements)
        floats = sum(WIDTHS[label] * count for (_, label), count in found.items())
        return floats + sum(self._other_bytes.values())

    def _memory(self, saved: _Saved, label: Precision, labels: Labels) -> tuple[Hashable, int]:
        """Returns what names the memory of a saved tensor, and its elements; a view keeps all of it."""
        if saved.is_inner:
            return ("inner", saved.node), saved.elements
        root = self.kernels.roots[saved.node]
        fact = self.problem.facts[root]
        if labels.get(fact.dtype_source) not in (label, None):
            return saved.node, saved.elements  # a cast of the view
        if fact.is_parameter:
            return root, 0  # it is there anyway
        return root, self.kernels.sizes[root] or saved.elements

    def _add(self, node: Node, fact: NodeFacts, name: str) -> None:
        returns_indices = name in tables.INDICES_ALONE and isinstance(node.meta["val"], (tuple, list))
        if name in tables.INNER:
            self._add_inner(node, fact, name)
        elif not returns_indices and name not in tables.NOTHING and name not in tables.RESULT:
            for operand in fact.operands:
                if self._is_saved(node, fact, operand, name):
                    self._add_operand(node, operand)
        if name in tables.RESULT or name in tables.BOTH:
            self._saved[_Saved(node, fact.dtype_source, fact.elements)] = None
        if name in tables.INDEXED:
            self._add_indices(node)
        if returns_indices or name in tables.WITH_INDICES:
            self._other_bytes[node] = BYTES_OF_INDEX * fact.elements

    def _add_inner(self, node: Node, fact: NodeFacts, name: str) -> None:
        first = next(iter(fact.operands), None)
        if first is None or (name in tables.DROPOUTS and not _drops(node)):
            return
        elements = self.problem.facts[first.tensor].elements
        self._saved[_Saved(node, self.problem.width_read(node, first), elements, is_inner=True)] = None

    def _is_saved(self, node: Node, fact: NodeFacts, operand: Operand, name: str) -> bool:
        if name in fusion_tables.QUOTIENTS:
            divisor = argument(node, "other")
            has_gradient = isinstance(divisor, Node) and self.kernels.has_gradient[divisor]
            return operand.tensor is divisor or has_gradient
        if argument_name(node, operand.path) == "bias" or _is_summand(node, operand, name):
            return False
        if name not in tables.MULTILINEAR:
            return True
        others = (o for o in fact.operands if o is not operand and not _is_summand(node, o, name))
        others = (o for o in others if argument_name(node, o.path) != "bias")
        return any(self.kernels.has_gradient[other.tensor] for other in others)

    def _add_operand(self, node: Node, operand: Operand) -> None:
        read = self.problem.width_read(node, operand)
        elements = self.problem.facts[operand.tensor].elements
        self._saved[_Saved(operand.tensor, read, elements)] = None

    def _add_indices(self, node: Node) -> None:
        for source in node.all_input_nodes:
            found = [t for t in tensors(source) if not (t.is_floating_point() or t.is_complex())]
            if found and source.op != "get_attr":
                root = self.kernels.roots[source]
                stored = sum(_bytes(tensor) for tensor in found)
                self._other_bytes[root] = max(self._other_bytes.get(root, 0), stored)


def _drops(node: Node) -> bool:
    """Whether a dropout drops anything."""
    return bool(argument(node, "train")) and argument(node, "p") != 0


def _is_summand(node: Node, operand: Operand, name: str) -> bool:
    return name in tables.WITH_SUMMAND and operand.path[:1] in ((0,), ("self",))


def _bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes of a tensor's memory, which an expanded tensor has less of."""
    stored = tensor.untyped_storage().nbytes() if tensor.layout == torch.strided else None
    return stored if isinstance(stored, int) else element_count(tensor) * tensor.element_size()
