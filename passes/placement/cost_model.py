"""The cost model that placement minimises and reports: the casts of a labelling and their bytes.

A labelling gives every variable a `Precision`. `demands` returns the tensors that must be cast and their
uses; `cost_of` counts bytes:

- a cast reads and writes its tensor once (2 + 4 bytes an element), for any number of uses;
- an op that moves data writes its outputs and reads its inputs at the width supplied; an operand that
  the kernel may widen (`OperandRule.PROMOTED`, ``DTYPE_ARG``, ``EITHER``) counts at its producer's
  width;
- views, inputs and parameters move nothing; symbolic sizes count with their hints.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Node

from ampgraph.plan import Cost

from ..analysis.facts import Operand, OperandRule
from ..analysis.precision import FP32, LOW, Precision
from ..analysis.problem import Problem

LOW_BYTES, FP32_BYTES = 2, 4
CAST_BYTES = LOW_BYTES + FP32_BYTES
WIDTHS = {LOW: LOW_BYTES, FP32: FP32_BYTES}

Labels = Mapping[Node, Precision]
Anchors = Mapping[Node, Node]
Demand = tuple[Node, Precision]
Demands = dict[Demand, list[tuple[Node, Operand]]]


def label_of(problem: Problem, labels: Labels, tensor: Node) -> Precision:
    """Returns the label of the node that produces ``tensor``."""
    return labels[problem.facts[tensor].dtype_source]


def required(problem: Problem, operand: Operand, label: Precision, anchor: Node | None) -> Precision | None:
    """Returns the label that a node with the label ``label`` needs of an operand; None: either is fine."""
    if operand.rule is OperandRule.SOURCE_DTYPE:
        return problem.source_precision(operand.tensor)
    if label is LOW or operand.rule is OperandRule.NODE_DTYPE:
        return label
    return FP32 if operand.rule is OperandRule.PROMOTED and operand.tensor is anchor else None


def demands(problem: Problem, labels: Labels, anchors: Anchors) -> Demands:
    """Returns, for each (tensor, needed label) that differs from the tensor's own, the uses that need it."""
    found: Demands = {}
    for node, operand, owner in problem.reads:
        label, own = labels.get(node, FP32), labels[owner]
        if label is own and operand.rule is not OperandRule.SOURCE_DTYPE:
            continue  # the common case: the node reads its own dtype
        need = required(problem, operand, label, anchors.get(node))
        if need is not None and need is not own:
            found.setdefault((operand.tensor, need), []).append((node, operand))
    return found


def missing_anchors(problem: Problem, labels: Labels) -> list[Node]:
    """Returns the float32 ops that promote and would read only low operands, and so return low."""
    return [
        node
        for node, tensors in problem.promoted.items()
        if labels.get(node) is FP32 and all(label_of(problem, labels, t) is LOW for t in tensors)
    ]


def greedy_anchors(problem: Problem, labels: Labels) -> dict[Node, Node]:
    """Chooses an anchor for every op that needs one: an operand that is widened anyway, else the smallest."""
    missing = sorted(missing_anchors(problem, labels), key=lambda n: n.name)
    if not missing:
        return {}
    chosen: dict[Node, Node] = {}
    widened = {tensor for tensor, need in demands(problem, labels, chosen) if need is FP32}
    for node in missing:
        chosen[node] = min(
            problem.promoted[node],
            key=lambda t: (t not in widened and problem.facts[t].elements, t.name),
        )
        widened.add(chosen[node])
    return chosen


def cost_of(problem: Problem, labels: Labels, anchors: Anchors) -> Cost:
    """Counts the bytes of a labelling.

    Args:
        problem: The pinned graph.
        labels: A precision for every variable.
        anchors: The operand that each float32 promoting op over low operands widens.
    """
    return cost_of_casts(problem, labels, demands(problem, labels, anchors), shared=True)


def cost_of_casts(problem: Problem, labels: Labels, casts_of: Demands, shared: bool) -> Cost:
    """Counts the bytes of a labelling whose `demands` are known; see `cost_of`.

    With ``shared`` one cast serves all uses of a tensor; ``torch.autocast`` shares only those of weights.
    """
    traffic = bytes_of(problem.moved, labels)
    casts = cast_bytes = activation_casts = activation_bytes = 0
    for (tensor, _), uses in casts_of.items():
        fact = problem.facts[tensor]
        count = 1 if (shared or fact.is_parameter) and not fact.mutated else len(uses)
        casts += count
        cast_bytes += count * CAST_BYTES * fact.elements
        if not fact.is_parameter:
            activation_casts += count
            activation_bytes += count * CAST_BYTES * fact.elements
    return Cost(traffic + cast_bytes, cast_bytes, casts, activation_bytes, activation_casts)


def bytes_of(moved: Mapping[Node | Precision, int], labels: Labels) -> int:
    """Returns the bytes of elements whose width is a node's label, or is fixed."""
    low: set[Node | Precision] = {LOW}
    low.update([node for node, label in labels.items() if label is LOW])
    low_elements = sum([elements for owner, elements in moved.items() if owner in low])
    return LOW_BYTES * low_elements + FP32_BYTES * (sum(moved.values()) - low_elements)


def scale_above_traffic(problem: Problem) -> int:
    """Returns a factor larger than any traffic, so that traffic decides only ties."""
    elements = sum(problem.moved.values())
    casts = sum(problem.facts[t].elements * len(u) for t, u in problem.uses.items())
    return 1 + FP32_BYTES * elements + 2 * CAST_BYTES * casts
