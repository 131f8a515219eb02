"""Finds values that rounding would spoil.

Analysis only. A node is *exact* if it does not depend on any op that the autocast rule moves to another
dtype, through floats, integers or memory. A node is *kept* if the rule does not move it itself. These nodes
must stay in the source's dtype:

- *positions*: exact arithmetic on values computed only from integers, buffers and constants. The position
  2,047 is 2,048 in bfloat16, and its angles are wrong. Short matrix products of positions count (angles by
  ``einsum``, rotated grids), although the lists name them white. Values from a small set (masks) do not
  count, because rounding moves each value as a whole.
- *differences*: exact values from which exact values are subtracted. Rounded times of day differ by nothing.
- *decisions*: kept values that lead to integers, booleans, other dtypes, indices, and steps such as
  ``round``. So none is taken on less than the autocast rule computes it from.
- *angles*: kept values that lead into a periodic function, likewise.

The autocast rule keeps all of them in float32 except the products.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from functools import reduce
from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node

from ampgraph._compat import OpOverload, size_hint
from ampgraph.ops import kernels
from ampgraph.ops.lists import OpClass

from .alias import SOURCES, AliasSets, written_args
from .arguments import argument
from .facts import Facts, NodeFacts, is_cast, tensors
from .graph_walk import kind, operands, values_read
from .precision import FP32, LOW, Precision
from .problem import Hazard
from .products import terms
from .ranges import is_table

# Longer products are not coordinates: the weights of a frozen model may be buffers.
MOST_TERMS = 8

_DETACH = torch.ops.aten.detach_.default  # it does not write a value
_DIFFERENCES = frozenset(("sub", "rsub"))
_FILLS = frozenset(("zeros", "ones", "full", "scalar_tensor", "empty", "empty_strided"))


class Trace(NamedTuple):
    """The origin of the value of one node.

    Attributes:
        measured: It depends on a floating input of the graph, a parameter or random numbers.
        counted: It depends on integers.
        few: It has few distinct values, and rounding moves each as a whole: masks, single numbers.
        moved: The autocast rule moves it, or a node that it depends on, to another dtype.
    """

    measured: bool = False
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
            self.counted or other.counted,
            self.few and other.few,
            self.moved or other.moved,
        )


Traces = Mapping[Node, Trace]


def find_hazards(
    graph_module: GraphModule,
    facts: Facts,
    fixed: Mapping[Node, Precision],
    low_dtype: torch.dtype,
    lowers_black: bool = False,
) -> dict[Node, Hazard]:
    """Returns the nodes that must stay in the source's dtype.

    Args:
        graph_module: The graph.
        facts: The facts about its nodes.
        fixed: The labels that something above the op lists decides.
        low_dtype: The policy's low dtype.
        lowers_black: Whether black ops follow their operands, as at O3.
    """
    tracer = _Tracer(graph_module, facts, fixed, low_dtype, lowers_black)
    needed: dict[Node, Hazard] = {}
    waiting = list(_starts(tracer))
    while waiting:
        node, hazard = waiting.pop()
        node = facts[node].dtype_source
        if node in needed or node.op in SOURCES or not tracer.keeps(node):
            continue
        needed[node] = hazard
        waiting += [(n, Hazard(hazard.reason, hazard.because or node)) for n in _floats_read(node, facts)]
    return needed | _differences_of(needed, tracer)


def _differences_of(needed: Mapping[Node, Hazard], tracer: _Tracer) -> dict[Node, Hazard]:
    """Returns the differences of such nodes, ``x - floor(x)``, which a rounding of both would spoil."""
    found: dict[Node, Hazard] = {}
    for node in tracer.facts:
        if node in needed or kind(node) not in _DIFFERENCES or not tracer.keeps(node):
            continue
        read = [tracer.facts[n].dtype_source for n in _floats_read(node, tracer.facts)]
        if len(read) == len(operands(node)) and all(n in needed for n in read):
            found[node] = Hazard(f"a difference of {read[0].name!r} and {read[1].name!r}", read[1])
    return found


def _floats_read(node: Node, facts: Facts) -> list[Node]:
    return [n for n in values_read(node) if facts[n].dtype]


class _Tracer:
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
            if fact.op is not None and fact.op.written and node.target is not _DETACH
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
            return Trace(measured=not (counted or boolean), counted=counted, few=boolean)
        number = all(is_number(v) for v in values)
        return Trace(counted=counted and not number, few=boolean or number)

    def _op(self, node: Node, fact: NodeFacts) -> Trace:
        values, read = tensors(node), values_read(node)
        trace = reduce(Trace.__or__, map(self._read, read)) if read else Trace()
        random = fact.op is not None and fact.op.is_random
        trace = Trace(
            trace.measured or random,
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
        followed = (self.facts[s.tensor].dtype_source for s in fact.operands if s.follow)
        return Precision.following(self.labels[source] for source in followed)

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


# -- what must stay exact --------------------------------------------------------------------------------


def _starts(tracer: _Tracer) -> Iterator[tuple[Node, Hazard]]:
    """Yields computed positions, differences, and the inputs of decisions and periodic functions."""
    facts, traces = tracer.facts, tracer.traces
    for node, fact in facts.items():
        if node.op in (*SOURCES, "output"):
            continue
        if fact.dtype is None:
            yield from _decided_by(node, facts, traces)
            continue
        if not isinstance(node.target, OpOverload):
            continue
        trace = traces[node]
        if why := _own_hazard(node):
            if any(map(tracer.keeps, _floats_read(node, facts))):
                yield node, Hazard(f"{why}, and {trace.origin}")
        elif not trace.moved and _is_difference(node, traces):
            yield node, Hazard("a difference of values that no low op feeds")
        elif not trace.moved and _computes_positions(node, fact, trace):
            yield node, Hazard("computed from positions and tables alone: exact until a low op reads it")


def _is_difference(node: Node, traces: Traces) -> bool:
    """Whether two values are subtracted, or a number above 1, which tells of what size the value is."""
    if kind(node) not in _DIFFERENCES:
        return False
    given = operands(node)
    values = [n for n in given if isinstance(n, Node) and not traces[n].few]
    numbers = [n for n in given if isinstance(n, (int, float)) and abs(n) > 1]
    return len(values) + len(numbers) == len(given) and bool(values)


def _computes_positions(node: Node, fact: NodeFacts, trace: Trace) -> bool:
    if trace.measured or fact.dtype_source is not node or not fact.operands:
        return False
    return fact.op_class is OpClass.WHITE or (fact.op_class is not OpClass.CLEAR and not trace.few)


def _own_hazard(node: Node) -> str:
    """Returns the reason why the node's inputs must be exact; empty if they need not."""
    assert isinstance(node.target, OpOverload)
    if kernels.is_step(node.target) or argument(node, "rounding_mode"):
        return "its result jumps"
    return "a function of angles" if kernels.is_periodic(node.target) else ""


def _decided_by(node: Node, facts: Facts, traces: Traces) -> Iterator[tuple[Node, Hazard]]:
    """Yields the floats from which a node computes integers, booleans or unmanaged floats."""
    picked = node.target is operator.getitem and node.users
    if not (picked or isinstance(node.target, OpOverload)):
        return
    kinds = ", ".join(dict.fromkeys(str(v.dtype).removeprefix("torch.") for v in tensors(node)))
    made = f"{node.name!r} makes {kinds or 'a number'} of it"
    for read in _floats_read(node, facts):
        yield read, Hazard(f"{made}, and {traces[read].origin}", node)
