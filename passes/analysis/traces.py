"""Follows values from their origins through a graph that the autocast rule would rewrite.

Analysis only. `Tracer` labels every node by the rule, on the same lists, and notes of what it is made.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from functools import reduce
from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node

from ampgraph._compat import OpOverload, size_hint
from ampgraph.ops import kernels
from ampgraph.ops.lists import OpClass

from .alias import DETACH, SOURCES, AliasSets, written_args
from .facts import Facts, NodeFacts, followed, is_cast, tensors
from .graph_walk import values_read
from .precision import FP32, LOW, Precision
from .products import terms
from .ranges import is_table

# Longer products are not coordinates: the weights of a frozen model may be buffers.
MOST_TERMS = 8

_FILLS = frozenset(("zeros", "ones", "full", "scalar_tensor", "empty", "empty_strided"))


class Trace(NamedTuple):
    """The origin of the value of one node.

    Attributes:
        measured: It depends on a floating input of the graph, a parameter or random numbers.
        given: It depends on a float32 input of the graph.
        counted: It depends on integers.
        few: It has few distinct values, and rounding moves each as a whole: masks, single numbers.
        moved: The autocast rule moves it, or a node that it depends on, to another dtype.
    """

    measured: bool = False
    given: bool = False
    counted: bool = False
    few: bool = True
    moved: bool = False

    @property
    def origin(self) -> str:
        """Why rounding would spoil it, as the end of a sentence."""
        return "torch.autocast computes it in float32" if self.moved else "no low op feeds it"

    def __or__(self, other: Trace) -> Trace:
        return Trace(
            self.measured or other.measured,
            self.given or other.given,
            self.counted or other.counted,
            self.few and other.few,
            self.moved or other.moved,
        )


class Tracer:
    """Visits the graph in order and labels nodes by the autocast rule on the same lists."""

    def __init__(
        self,
        graph_module: GraphModule,
        facts: Facts,
        fixed: Mapping[Node, Precision],
        low_dtype: torch.dtype,
        lowers_black: bool,
    ) -> None:
        self.graph_module, self.facts, self.fixed, self.low_dtype = graph_module, facts, fixed, low_dtype
        self.lowers_black = lowers_black
        self.labels: dict[Node, Precision] = {}
        self.traces: dict[Node, Trace] = {}
        writes = [
            n
            for node, fact in facts.items()
            if fact.op is not None and fact.op.written and node.target is not DETACH
            for n in written_args(node)
        ]
        self.memory = AliasSets(graph_module.graph) if writes else None
        self.changed = {self.memory.root(n) for n in writes} if self.memory else set()
        self.written: dict[Node, Trace] = {}
        self._run()

    def keeps(self, node: Node) -> bool:
        """Whether the autocast rule leaves a node in the source's dtype."""
        dtype = self.facts[node].dtype
        return dtype is not None and self.labels[node] is Precision.of(dtype, self.low_dtype)

    def _run(self) -> None:
        for node, fact in self.facts.items():
            self.traces[node] = self._source(node, fact) if node.op in SOURCES else self._op(node, fact)
            if self.memory and (written := written_args(node)):
                for root in map(self.memory.root, written):
                    self.written[root] = self.written.get(root, Trace()) | self.traces[node]

    def _source(self, node: Node, fact: NodeFacts) -> Trace:
        if fact.dtype and fact.dtype_source is node:
            self.labels[node] = Precision.of(fact.dtype, self.low_dtype)
        values = tensors(node)
        counted = any(not v.dtype.is_floating_point and v.dtype is not torch.bool for v in values)
        boolean = bool(values) and all(v.dtype is torch.bool for v in values)
        changed = self.memory is not None and self.memory.root(node) in self.changed
        if changed or not is_table(self.graph_module, node):
            given = fact.dtype is torch.float32 and not fact.is_parameter
            return Trace(not (counted or boolean), given, counted, few=boolean)
        number = all(is_number(v) for v in values)
        return Trace(counted=counted and not number, few=boolean or number)

    def _op(self, node: Node, fact: NodeFacts) -> Trace:
        values, read = tensors(node), values_read(node)
        trace = reduce(Trace.__or__, map(self._read, read)) if read else Trace()
        random = fact.op is not None and fact.op.is_random
        trace = Trace(
            trace.measured or random,
            trace.given,
            trace.counted or (not read and _holds_integers(values)),
            self._takes_few_values(node, fact, trace, read, values),
            trace.moved,
        )
        if fact.dtype is None:
            return trace
        self.labels[node] = self._label(node, fact, trace)
        return trace if self.keeps(node) else trace._replace(moved=True)

    def _read(self, node: Node) -> Trace:
        trace = self.traces[node]
        if self.memory and (more := self.written.get(self.memory.root(node))):
            return trace | more
        return trace

    def _label(self, node: Node, fact: NodeFacts, trace: Trace) -> Precision:
        if fact.dtype_source is not node:
            return self.labels[fact.dtype_source]
        if node in self.fixed:
            return self.fixed[node]
        if fact.op_class is OpClass.WHITE:
            exact = is_position_product(node, trace)
            return Precision.of(fact.dtype, self.low_dtype) if exact else LOW
        follows = fact.op_class is OpClass.BLACK and self.lowers_black
        if fact.op_class in (None, OpClass.BLACK) and not follows:
            return FP32
        return Precision.following(self.labels[source] for source in followed(node, self.facts))

    def _takes_few_values(
        self, node: Node, fact: NodeFacts, trace: Trace, read: list[Node], values: list[torch.Tensor]
    ) -> bool:
        if all(v.dtype is torch.bool for v in values):
            return True  # numbers are not tensors
        if not trace.counted and all(map(is_number, values)):
            return True
        if node.target is operator.getitem:
            return trace.few
        if not isinstance(node.target, OpOverload) or fact.op is None:
            return False
        if not read:
            name = kernels.packet_name(node.target).removeprefix("aten.")
            return name in _FILLS or (fact.op.reads_no_values and not name.startswith("rand"))
        if not trace.few:
            return False
        return fact.op_class is OpClass.CLEAR or fact.op.promotes or is_cast(node)


def _holds_integers(values: list[torch.Tensor]) -> bool:
    """Whether one of the values is a tensor of integers: ``arange`` makes them."""
    return any(not v.dtype.is_floating_point and not is_number(v) for v in values)


def is_number(value: torch.Tensor) -> bool:
    """Whether a tensor has a single element; a tensor of data-dependent size counts as larger."""
    return size_hint(value.numel(), fallback=2) == 1


def is_position_product(node: Node, trace: Trace) -> bool:
    """Whether a matrix product computes positions from positions, with too few terms to gain from low."""
    if trace.measured or trace.moved:
        return False
    added = terms(node)
    return added is not None and added <= MOST_TERMS
