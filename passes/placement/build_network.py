"""Placement as a minimum cut: builds the vertices, arcs and choices.

Every free node is a vertex that ends low (source side) or float32 (sink side); a pinned node is a
terminal. Arcs:

- the traffic of an op in either dtype: an arc from the source or to the sink;
- a tensor with producer p and cast cost w gets one auxiliary vertex per direction, so that a cast
  is paid once however many consumers share it: ``p -w-> a -inf-> c`` for every consumer c that,
  being float32, needs a float32 operand (p low and some c float32 costs w), and
  ``c -inf-> b -w-> p`` for every c that, being low, needs a low one;
- "gray follows its inputs" is an infinite arc from the node to each floating producer;
- a price of rounding gets one vertex e: ``n -inf-> e -price-> sink`` for every node n that pays it by
  running low, so that it is paid once.

A float32 op that promotes (``add``, ``where``, ``cat``) needs more than arcs. It widens its low operands
inside the kernel if one operand, its *anchor*, is float32. If ``a`` ends on the sink side, the tensor is
read in float32: its producer is float32 (without cost) or it is cast. So the op is the head of a choice
among the auxiliary vertices ``a`` of its operands.

Source of the shared-cost construction: the "cover" gadgets of energy minimisation by graph cuts
(Kolmogorov and Zabih, 2004; robust P^n potentials, Kohli et al., 2008).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple

from torch.fx import Node

from ampgraph.plan import Cost

from ..analysis.facts import OperandRule, followed
from ..analysis.precision import FP32, LOW, Precision
from ..analysis.problem import Problem
from .cost_model import CAST_BYTES, FP32_BYTES, LOW_BYTES
from .min_cut import INFINITE, SINK, SOURCE, CutNetwork, Vertex

Weigher = Callable[[Cost], int]
_TERMINALS = {LOW: SOURCE, FP32: SINK}
Widened = dict[tuple[Node, Node], Vertex]


class Price(NamedTuple):
    """A price that is paid once if any of these nodes runs low.

    Attributes:
        name: What it is paid for.
        nodes: The nodes.
        amount: How much.
    """

    name: Hashable
    nodes: frozenset[Node]
    amount: int


def cut_network(problem: Problem, weigh: Weigher, prices: Iterable[Price] = ()) -> tuple[CutNetwork, Widened]:
    """Builds the network.

    Args:
        problem: The pinned graph.
        weigh: The number to minimise, linear in the fields of `Cost`.
        prices: Prices that the weight includes.

    Returns:
        The network, and for every (tensor, promoting op that reads it) the vertex that ends on the sink
        side if the op finds the tensor in float32.
    """
    builder = _Builder(problem, weigh)
    builder.build()
    for price in prices:
        builder.add_price(price)
    return builder.network, builder.widened


class _Builder:
    def __init__(self, problem: Problem, weigh: Weigher) -> None:
        self.problem = problem
        self.weigh = weigh
        self.network = CutNetwork()
        self.widened: Widened = {}
        self.cast_weights = _cast_weights(weigh, 1), _cast_weights(weigh, 0)
        self.vertices: dict[Node, Vertex] = {
            n: n if v.pinned is None else _TERMINALS[v.pinned] for n, v in problem.variables.items()
        }
        self.undecided = {n: tensors for n, tensors in problem.promoted.items() if self._is_undecided(n)}
        self.open = {n for n, v in problem.variables.items() if v.pinned is None} | self.undecided.keys()

    def build(self) -> None:
        problem, network = self.problem, self.network
        low_byte, fp32_byte = (self.weigh(Cost(traffic=width)) for width in (LOW_BYTES, FP32_BYTES))
        for node, variable in problem.variables.items():
            if variable.pinned is None:
                network.add_vertex(node)
                self._add_constraints(node)
        for owner, elements in problem.moved.items():
            if not isinstance(owner, Precision) and problem.variables[owner].pinned is None:
                network.add_arc(owner, SINK, low_byte * elements)
                network.add_arc(SOURCE, owner, fp32_byte * elements)
        for tensor in problem.uses:
            self._add_casts(tensor)
        for node, operands in self.undecided.items():
            network.add_choice(node, self._vertex(node), [self.widened[t, node] for t in operands])

    def add_price(self, price: Price) -> None:
        """Adds a price, unless it is paid in any case."""
        payers = {self._vertex(node) for node in price.nodes} - {SINK}
        if SOURCE in payers or not payers:
            return
        paid = next(iter(payers)) if len(payers) == 1 else ("price", price.name)
        for payer in payers - {paid}:
            self.network.add_arc(payer, paid, INFINITE)
        self.network.add_arc(paid, SINK, price.amount)

    def _vertex(self, node: Node) -> Vertex:
        return self.vertices.get(node, SINK)

    def _is_undecided(self, node: Node) -> bool:
        """Whether it is open which operand of a promoting op is float32, if the op is."""
        if self.problem.variables[node].pinned is LOW:
            return False
        return all(self.problem.pin(t) is not FP32 for t in self.problem.promoted[node])

    def _add_constraints(self, node: Node) -> None:
        problem, variable = self.problem, self.problem.variables[node]
        if variable.follows:
            for source in followed(node, problem.facts):
                self.network.add_arc(node, self._vertex(source), INFINITE)

    def _add_casts(self, tensor: Node) -> None:
        """Adds the cost of casting one tensor, once per direction (once per use if its memory is written)."""
        problem, fact = self.problem, self.problem.facts[tensor]
        producer, uses = self._vertex(fact.dtype_source), problem.uses[tensor]
        if producer in (SOURCE, SINK) and self.open.isdisjoint([user for user, _ in uses]):
            return  # whatever the cut, these casts are the same
        widening: dict[Hashable, _Readers] = defaultdict(_Readers)
        narrowing: dict[Hashable, _Readers] = defaultdict(_Readers)
        for user, index in uses:
            operand, at = problem.facts[user].operands[index], self._vertex(user)
            promoted = operand.rule is OperandRule.PROMOTED
            key = (user, promoted or index) if fact.mutated else None
            if promoted and user in self.undecided:
                widening[key].may_choose(user)
            elif operand.rule is OperandRule.SOURCE_DTYPE:
                at = _TERMINALS[problem.source_precision(tensor)]
                (narrowing if at == SOURCE else widening)[key].need(at)
                continue
            elif at != SOURCE and operand.rule is OperandRule.NODE_DTYPE:
                widening[key].need(at)
            if at != SINK and operand.rule is not OperandRule.EITHER:
                narrowing[key].need(at)
        each, per_element = self.cast_weights[fact.is_parameter]
        weight = each + per_element * fact.elements
        for group, readers in widening.items():
            cast = readers.shared(SINK, (tensor, "widen", group))
            self.network.add_arc(producer, cast, weight * (readers.uses if fact.mutated else 1))
            for reader in readers.needing - {cast, SINK}:
                self.network.add_arc(cast, reader, INFINITE)
            for user in readers.choosing:
                self.widened[tensor, user] = cast
        for group, readers in narrowing.items():
            cast = readers.shared(SOURCE, (tensor, "narrow", group))
            self.network.add_arc(cast, producer, weight * (readers.uses if fact.mutated else 1))
            for reader in readers.needing - {cast, SOURCE}:
                self.network.add_arc(reader, cast, INFINITE)


def _cast_weights(weigh: Weigher, activations: int) -> tuple[int, int]:
    """Returns the weight of one cast, and of each element of its tensor."""
    moved = CAST_BYTES * activations
    return weigh(Cost(0, 0, 1, 0, activations)), weigh(Cost(CAST_BYTES, CAST_BYTES, 0, moved))


class _Readers:
    """The readers that share one cast of a tensor: vertices that need it, and ops that may choose it."""

    __slots__ = ("choosing", "needing", "uses")

    def __init__(self) -> None:
        self.needing: set[Vertex] = set()
        self.choosing: set[Node] = set()
        self.uses = 0

    def need(self, vertex: Vertex) -> None:
        self.needing.add(vertex)
        self.uses += 1

    def may_choose(self, node: Node) -> None:
        self.choosing.add(node)
        self.uses += 1

    def shared(self, terminal: Vertex, auxiliary: Vertex) -> Vertex:
        """Returns the vertex that decides on the cast: a terminal, the only reader or an auxiliary one."""
        if terminal in self.needing:
            return terminal
        if len(self.needing) == 1 and not self.choosing:
            return next(iter(self.needing))
        return auxiliary
