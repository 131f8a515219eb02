"""One labelling of a graph, by a minimum cut or by the rule of ``torch.autocast``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from torch.fx import Node

from ampgraph.ops.lists import OpClass

from ..analysis.facts import DECIDED, OperandRule, followed
from ..analysis.precision import FP32, LOW, Precision
from ..analysis.problem import Problem
from .build_network import Price, Weigher, cut_network
from .choices import Search
from .cost_model import greedy_anchors, missing_anchors
from .fused_kernels import FusedKernels

# Steps that may be spent on proving one plan minimal: table entries of eliminations, and cuts by their size.
MAX_WORK = 200_000


@dataclass(frozen=True, eq=False)
class Placement:
    """A labelling and its anchors.

    Attributes:
        labels: A precision for every variable.
        anchors: The operand that each float32 promoting op over low operands widens.
        gap: Upper bound on the distance to the minimum: 0 for a proven minimum, None if unknown.
        motive: Why free nodes have their dtypes, for people.
        motives: The same for single nodes that have another reason.
    """

    labels: dict[Node, Precision]
    anchors: dict[Node, Node]
    gap: int | None = 0
    motive: str = "this moves the fewest bytes"
    motives: Mapping[Node, str] = field(default_factory=dict)

    @property
    def optimal(self) -> bool:
        """Whether the labelling is proven minimal."""
        return self.gap == 0


def autocast_rule(problem: Problem) -> Placement:
    """Labels the graph as ``torch.autocast`` does: lists decide, the rest runs low if all its inputs are."""
    labels: dict[Node, Precision] = {}
    for node, variable in problem.variables.items():
        if variable.pinned is not None:
            labels[node] = variable.pinned
        elif problem.facts[node].op_class is OpClass.BLACK:
            labels[node] = FP32
        else:
            labels[node] = _following(problem, node, labels)
    motive = "the rule of torch.autocast gives this"
    return Placement(labels, greedy_anchors(problem, labels), gap=None, motive=motive)


def place_low(problem: Problem) -> Placement:
    """Labels every free node low if its constraints allow."""
    labels: dict[Node, Precision] = {}
    for node, variable in problem.variables.items():
        label = LOW if variable.pinned is None else variable.pinned
        if variable.pinned is None and variable.follows:
            label = _following(problem, node, labels)
        labels[node] = label
    motive = "casts inside fused kernels are free"
    return Placement(labels, greedy_anchors(problem, labels), gap=None, motive=motive)


def without_idle_casts(
    problem: Problem, kernels: FusedKernels, decides_bytes: Callable[[Node], bool], placement: Placement
) -> Placement:
    """Returns the placement with float32 for low values inside kernels between float32 values.

    An op that promotes may read low values too, beside a float32 one. These labels save no bytes. The casts
    round, and are ops, of which a compiler puts a limited number in a kernel.

    Args:
        problem: The pinned graph.
        kernels: Its kernels.
        decides_bytes: Whether the label of a node decides any bytes.
        placement: A labelling for fused kernels.
    """
    labels = dict(placement.labels)
    idle = [
        n
        for n, v in problem.variables.items()
        if labels[n] is LOW and v.pinned is None and kernels.is_managed(n) and not decides_bytes(n)
    ]
    labels |= dict.fromkeys(idle, FP32)
    before = None
    while idle != before:
        before = idle
        for node in idle:
            labels[node] = FP32 if _has_wide_operands(problem, node, labels) else LOW
        idle = [node for node in idle if labels[node] is FP32]
        for node in reversed(idle):
            reads = kernels.reads(node)
            is_wanted = all(_widens(problem, r.reader, r.through, labels) for r in reads)
            labels[node] = FP32 if is_wanted else LOW
        idle = [node for node in idle if labels[node] is FP32]
    if not idle:
        return placement
    return _changed(problem, placement, labels, idle, "it stays inside a kernel that reads and wants float32")


def _changed(
    problem: Problem, placement: Placement, labels: dict[Node, Precision], nodes: list[Node], motive: str
) -> Placement:
    """Returns the placement with other labels, and the motive of the nodes that have them."""
    motives = {**placement.motives, **dict.fromkeys(nodes, motive)}
    return replace(placement, labels=labels, anchors=greedy_anchors(problem, labels), motives=motives)


def _has_wide_operands(problem: Problem, node: Node, labels: Mapping[Node, Precision]) -> bool:
    """Whether a float32 node reads float32 values; it may widen low ones beside them in its kernel."""
    facts = problem.facts
    low = [o for o in facts[node].operands if labels.get(facts[o.tensor].dtype_source) is not FP32]
    decides = [o for o in facts[node].operands if o not in low and o.rule in DECIDED]  # no number beside it
    return not low or (bool(decides) and all(o.rule is OperandRule.PROMOTED for o in low))


def _widens(problem: Problem, reader: Node, tensor: Node, labels: Mapping[Node, Precision]) -> bool:
    """Whether a float32 reader wants a tensor in float32."""
    rules = {o.rule for o in problem.facts[reader].operands if o.tensor is tensor}
    if rules == {OperandRule.SOURCE_DTYPE}:  # an output, or an op that no plan changes
        return problem.source_precision(tensor) is FP32
    return labels.get(reader) is FP32 and bool(rules) and rules <= DECIDED


def with_wide_norms(problem: Problem, kernels: FusedKernels, placement: Placement) -> Placement:
    """Returns the placement with norms in float32 where that only spares casts of their parameters.

    A fused norm computes in float32 and casts what it writes. Where all its readers want the low dtype, a
    float32 norm writes the same low values, and its parameters and their gradients are not rounded.

    Args:
        problem: The pinned graph.
        kernels: Its kernels.
        placement: A labelling for fused kernels.
    """
    labels = dict(placement.labels)
    norms = [
        node for node in labels if kernels.is_norm(node) and _gains_as_wide(problem, kernels, node, labels)
    ]
    if not norms:
        return placement
    labels |= dict.fromkeys(norms, FP32)
    for node, variable in problem.variables.items():
        if variable.pinned is None and variable.follows and labels[node] is LOW:
            labels[node] = _following(problem, node, labels)
    motive = "its kernel casts what it writes, and its parameters are not rounded"
    return _changed(problem, placement, labels, norms, motive)


def _gains_as_wide(
    problem: Problem, kernels: FusedKernels, norm: Node, labels: Mapping[Node, Precision]
) -> bool:
    if labels[norm] is FP32 or problem.variables[norm].pinned is not None:
        return False
    facts = problem.facts
    read = [o.tensor for o in facts[norm].operands if o.rule is OperandRule.NODE_DTYPE]
    is_cast = any(facts[t].is_parameter and labels.get(facts[t].dtype_source) is FP32 for t in read)
    return is_cast and all(_reads_low(problem, r.reader, r.through) for r in kernels.reads(norm))


def _reads_low(problem: Problem, reader: Node, tensor: Node) -> bool:
    """Whether a reader casts a tensor to the low dtype in any case."""
    variable = problem.variables.get(reader)
    if variable is None or variable.pinned is not LOW:
        return False
    rules = {o.rule for o in problem.facts[reader].operands if o.tensor is tensor}
    return rules == {OperandRule.NODE_DTYPE}


def _following(problem: Problem, node: Node, labels: Mapping[Node, Precision]) -> Precision:
    return Precision.following(labels[source] for source in followed(node, problem.facts))


def place_optimally(
    problem: Problem, weigh: Weigher, search: Search | None = None, prices: Iterable[Price] = ()
) -> Placement:
    """Returns a labelling of least weight.

    Args:
        problem: The pinned graph.
        weigh: The number to minimise, linear in the fields of `Cost`.
        search: The budget of work, shared by all cuts for one plan.
        prices: What rounding adds to the weight.
    """
    network, widened = cut_network(problem, weigh, prices)
    cost, lower, sides = (search or Search(MAX_WORK)).solve(network)
    labels = {
        n: (LOW if sides[n] else FP32) if v.pinned is None else v.pinned for n, v in problem.variables.items()
    }
    anchors = {}
    for node in missing_anchors(problem, labels):
        anchors[node] = min(
            problem.promoted[node],
            key=lambda t: (sides.get(widened[t, node], False), problem.facts[t].elements, t.name),
        )
    return Placement(labels, anchors, cost - lower)
