"""The kernels of a graph after fusion, before any dtype is known.

The grouping is an estimate of what a fusing compiler does: pointwise ops, softmax and layer norm run in one
kernel with their producers and readers, matrix products and convolutions in kernels of a library.
"""

from __future__ import annotations

import copy
import enum
import operator
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch.fx import Node

from ampgraph._compat import evaluate, fake_mode_of, storage_key
from ampgraph.marks import input_mark
from ampgraph.ops import fusion_tables as fusion

from ..analysis import graph_walk
from ..analysis.alias import SOURCES
from ..analysis.facts import Facts, element_count, tensors


class Kind(enum.Enum):
    """How an op runs after fusion."""

    INPUT = "input"
    OUTPUT = "output"
    ITEM = "item"
    VIEW = "view"
    EXTERN = "extern"
    READS_MEMORY = "reads memory"
    CONCATENATES = "concatenates"
    FUSED = "fused"


class Read(NamedTuple):
    """A node that reads a tensor, the view through which it reads, and the view's elements."""

    reader: Node
    through: Node
    elements: int


class FusedKernels:
    """The kernels of a graph.

    Attributes:
        names: The op of each node, as `graph_walk.kind` names it.
        sizes: The number of elements of each node's tensor; 0 if it has none or several.
        kinds: How each node runs.
        roots: The tensor that each node's memory belongs to.
        has_gradient: Whether a gradient reaches each node.
        needs_values: Whether the backward of a node, or of a later node of its kernel, needs values.
        kept: Sums whose value the backward needs: saved themselves, and not their operands.
        saved_low: The ops of norms, and softmax ops, whose backward reads low values and no operand.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.names = {node: graph_walk.kind(node) for node in facts}
        self.sizes = {node: _elements(node) for node in facts}
        self.kinds: dict[Node, Kind] = {}
        self.roots: dict[Node, Node] = {}
        self.has_gradient: dict[Node, bool] = {}
        self.needs_values: dict[Node, bool] = {}
        self.kept: set[Node] = set()
        self.saved_low: frozenset[Node] = frozenset()
        self._levels: dict[Node, int] = {}
        self._joined: dict[Node, Node] = {}
        self._reads: dict[Node, list[Read]] = {}
        for node in facts:
            self._add(node)
        self._find_all_saved()

    def saving_low(self, nodes: Iterable[Node]) -> FusedKernels:
        """Returns the same kernels with other `saved_low` nodes."""
        other = copy.copy(self)
        other.saved_low = frozenset(nodes)
        other._find_all_saved()
        return other

    def is_norm(self, node: Node) -> bool:
        """Whether the node is a norm whose backward reads its operand."""
        return self.names[node] in fusion.NORMS and node not in self.saved_low

    def _find_all_saved(self) -> None:
        self.needs_values, self.kept = {}, set()
        for node in reversed(list(self.facts)):
            self._find_saved(node)

    def kernel(self, node: Node) -> Node:
        """Returns the node that stands for the kernel of ``node``."""
        while (next_one := self._joined.get(node)) is not None:
            node = next_one
        return node

    def is_managed(self, node: Node) -> bool:
        """Whether the node is one tensor whose dtype the placement may decide."""
        return self.facts[node].dtype is not None and isinstance(node.meta.get("val"), torch.Tensor)

    def producer_kind(self, tensor: Node) -> Kind:
        """Returns the kind of the op that computes a tensor: for an item, of the op with several results."""
        kind = self.kinds[tensor]
        if kind is not Kind.ITEM:
            return kind
        of = self.kinds[tensor.args[0]]  # type: ignore[index]
        return of if of in (Kind.EXTERN, Kind.READS_MEMORY, Kind.FUSED) else Kind.FUSED

    def stays_in_registers(self, tensor: Node, reader: Node) -> bool:
        """Whether the kernel of ``reader`` may compute ``tensor``, so that it need not be in memory."""
        kind = self.kinds[reader]
        if self.producer_kind(tensor) not in (Kind.FUSED, Kind.READS_MEMORY):
            return False
        if kind not in (Kind.FUSED, Kind.CONCATENATES):
            return False
        given, made = self.sizes[tensor], self.sizes[reader]
        if kind is Kind.CONCATENATES or given >= made:
            return True
        return made % max(given, 1) == 0 and self.names[reader] not in fusion.REORDERS

    def reads(self, tensor: Node) -> list[Read]:
        """Returns who reads a tensor's memory, directly or through views; the same list at every call."""
        if (found := self._reads.get(tensor)) is None:
            found = self._reads[tensor] = self._find_reads(tensor)
        return found

    def _find_reads(self, tensor: Node) -> list[Read]:
        found: dict[tuple[Node, Node], Read] = {}
        stack = [tensor]
        while stack:
            through = stack.pop()
            for user in through.users:
                if self.kinds[user] is Kind.VIEW and self.roots[user] is tensor:
                    stack.append(user)
                else:
                    found[user, through] = Read(user, through, self.sizes[through])
        return list(found.values())

    def _add(self, node: Node) -> None:
        kind = self.kinds[node] = self._kind(node)
        inputs = [n for n in node.all_input_nodes if n in self.kinds]
        self.roots[node] = node
        if kind is Kind.INPUT:
            self.has_gradient[node], self._levels[node] = _is_trained(node), 0
            return
        self.has_gradient[node] = self._passes_gradients(node, inputs)
        if kind is Kind.VIEW and self._is_view_of_managed(node, inputs[0]):
            self.roots[node], self._levels[node] = self.roots[inputs[0]], self._levels[inputs[0]]
            return
        if kind is Kind.ITEM:
            self._levels[node] = self._levels[inputs[0]]
            if self.kinds[inputs[0]] is Kind.VIEW:  # a part of a split, or one of several views
                self.kinds[node], self.roots[node] = Kind.VIEW, self.roots[_viewed(node)]
            return
        self._join(node, [self.roots[n] for n in inputs])

    def _is_view_of_managed(self, node: Node, source: Node) -> bool:
        return self.facts[node].dtype is not None and self.is_managed(self.roots[source])

    def _join(self, node: Node, operands: list[Node]) -> None:
        """Puts a node into the kernel of the operands that are computed last."""
        level = 0
        for operand in operands:
            if self.facts[operand].dtype is None and self.kinds[operand] is not Kind.EXTERN:
                continue
            waits = self.kinds[operand] is not Kind.INPUT and not self.stays_in_registers(operand, node)
            level = max(level, self._levels[operand] + waits)
        self._levels[node] = level
        for operand in operands:
            if self._levels[operand] == level and self.stays_in_registers(operand, node):
                one, other = self.kernel(operand), self.kernel(node)
                if one is not other:
                    self._joined[other] = one

    def _kind(self, node: Node) -> Kind:
        if node.op in SOURCES:
            return Kind.INPUT
        if node.op == "output":
            return Kind.OUTPUT
        if node.target is operator.getitem:
            return Kind.ITEM
        name = self.names[node]
        if not name or name in fusion.EXTERN:
            return Kind.EXTERN
        if not self.facts[node].moves_data and node.all_input_nodes:
            is_view = name not in fusion.MAY_COPY or _shares_memory(node, node.all_input_nodes[0])
            return Kind.VIEW if is_view else Kind.FUSED
        if name in fusion.CONCATENATES:
            return Kind.FUSED if self._is_computed_by_readers(node) else Kind.CONCATENATES
        return Kind.READS_MEMORY if name in fusion.READS_MEMORY else Kind.FUSED

    def _is_computed_by_readers(self, concatenation: Node) -> bool:
        if len(concatenation.all_input_nodes) > fusion.CONCATENATED_IN_KERNEL:
            return False
        in_memory = fusion.EXTERN | fusion.READS_MEMORY | fusion.CONCATENATES | fusion.NORMS
        found: list[Node] = []
        stack = [concatenation]
        while stack:
            for user in stack.pop().users:
                is_view = user in self.facts and graph_walk.kind(user) and not self.facts[user].moves_data
                (stack if is_view else found).append(user)
        names = [graph_walk.kind(user) for user in found]
        return bool(names) and all(name and name not in in_memory for name in names)

    def _passes_gradients(self, node: Node, inputs: list[Node]) -> bool:
        is_float = self.facts[node].dtype is not None or self.kinds[node] in (Kind.ITEM, Kind.OUTPUT)
        if not (is_float or isinstance(node.meta.get("val"), (tuple, list))):
            return False
        return any(self.has_gradient[n] for n in inputs)

    def _find_saved(self, node: Node) -> None:
        if self.kinds[node] not in (Kind.FUSED, Kind.READS_MEMORY, Kind.CONCATENATES):
            return
        name = self.names[node]
        readers = [read.reader for read in self.reads(node)]
        beside = [r for r in readers if self.kinds[r] is Kind.FUSED and self.kernel(r) is self.kernel(node)]
        own = self._needs_operands(node, name)
        later = name not in fusion.NORMS and any(self.needs_values.get(r) for r in beside)
        self.needs_values[node] = (own or later) and self.has_gradient[node]
        if name not in fusion.SUMS or own or not (later or any(map(self.is_norm, beside))):
            return
        trained = (n for n in node.all_input_nodes if self.has_gradient[n])
        if sum(self.sizes[n] == self.sizes[node] for n in trained) > 1:
            self.needs_values[node] = False
            self.kept.add(node)

    def _needs_operands(self, node: Node, name: str) -> bool:
        if name in fusion.NORMS or node in self.saved_low:  # counted with the norm
            return False
        if name in fusion.PRODUCTS:
            inputs = node.all_input_nodes
            is_square = len(inputs) == 1 and sum(isinstance(a, Node) for a in node.args) > 1
            return is_square or sum(self.has_gradient[n] for n in inputs) > 1
        if name in fusion.QUOTIENTS:
            divisor = node.args[1]
            return isinstance(divisor, Node) and self.has_gradient[divisor]
        return name not in fusion.LINEAR


def _viewed(item: Node) -> Node:
    """Returns what an item of several views is a view of: ``broadcast_tensors`` takes a list."""
    whole, index = item.args
    given = whole.args[0]  # type: ignore[union-attr]
    return given[index] if isinstance(given, (list, tuple)) else whole  # type: ignore[index,return-value]


def _elements(node: Node) -> int:
    value = node.meta.get("val")
    return element_count(value) if isinstance(value, torch.Tensor) else 0


def _is_trained(node: Node) -> bool:
    """Whether an input of the graph has a gradient."""
    if node.op == "get_attr":
        try:
            value = operator.attrgetter(str(node.target))(node.graph.owning_module)
        except AttributeError:
            return False
        return isinstance(value, torch.Tensor) and value.requires_grad
    found, mark = tensors(node), input_mark(node)
    is_parameter = mark.is_parameter and not mark.is_table
    return bool(found) and found[0].is_floating_point() and (is_parameter or found[0].requires_grad)


def _shares_memory(node: Node, source: Node) -> bool:
    """Whether an op that may copy does not."""
    made, given = tensors(node), tensors(source)
    if len(made) != 1 or len(given) != 1:
        return True
    key = storage_key(made[0])
    if key is None or key == storage_key(given[0]) or given[0].is_contiguous():
        return True
    # Tensors whose metadata was computed again have other memory than their views.
    return storage_key(evaluate(node, fake_mode_of(node.graph))) == storage_key(given[0])
