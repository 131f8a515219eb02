"""An independent reading of the cost model and its constraints, for graphs small enough to try everything.

Nothing here calls the placement code; only the pinned problem (variables, slots) is shared with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from torch.fx import Node

from ampgraph.passes.analysis.facts import OperandRule
from ampgraph.passes.analysis.precision import Precision
from ampgraph.passes.analysis.problem import Problem

Labels = dict[Node, Precision]
Anchors = dict[Node, Node]


class Moved(NamedTuple):
    """What a labelling moves: all bytes, the casts' bytes and number, and those of casts of activations."""

    traffic: int
    cast_bytes: int
    casts: int
    activation_cast_bytes: int
    activation_casts: int

    def key(self, objective: str) -> tuple[int, int]:
        """What to minimise, ties broken by traffic; "priced": bytes, with three more for each cast byte."""
        if objective == "priced":
            return self.traffic + 3 * self.activation_cast_bytes, 0
        return getattr(self, objective), self.traffic


def is_low(problem: Problem, labels: Labels, tensor: Node) -> bool:
    return labels[problem.facts[tensor].dtype_source] is Precision.LOW


def outputs_of(problem: Problem, node: Node) -> list[Node]:
    """The tensors that a node's label decides."""
    return [n for n, f in problem.facts.items() if f.dtype_source is node]


def allowed(problem: Problem, labels: Labels) -> bool:
    """Whether a labelling keeps to the pins and to "follows"."""
    for node, variable in problem.variables.items():
        if variable.pinned is not None:
            if labels[node] is not variable.pinned:
                return False
            continue
        if labels[node] is Precision.FP32:
            continue
        fact = problem.facts[node]
        if variable.follows and not all(is_low(problem, labels, s.tensor) for s in fact.operands if s.follow):
            return False
    return True


def labellings(problem: Problem) -> Iterator[Labels]:
    free = [n for n, v in problem.variables.items() if v.pinned is None]
    pinned = {n: v.pinned for n, v in problem.variables.items() if v.pinned is not None}
    for choice in itertools.product(Precision, repeat=len(free)):
        labels = {**pinned, **dict(zip(free, choice, strict=True))}
        if allowed(problem, labels):
            yield labels


def anchorless(problem: Problem, labels: Labels) -> dict[Node, list[Node]]:
    """The float32 promoting ops whose promoted operands are all low, with those operands."""
    found = {}
    for node in problem.variables:
        operands = [s.tensor for s in problem.facts[node].operands if s.rule is OperandRule.PROMOTED]
        if labels[node] is Precision.FP32 and operands and all(is_low(problem, labels, t) for t in operands):
            found[node] = list(dict.fromkeys(operands))
    return found


def anchor_choices(problem: Problem, labels: Labels) -> Iterator[Anchors]:
    missing = anchorless(problem, labels)
    for choice in itertools.product(*missing.values()):
        yield dict(zip(missing, choice, strict=True))


def moved(problem: Problem, labels: Labels, anchors: Anchors, shared: bool = True) -> Moved:
    """Counts casts and bytes, argument by argument."""
    casts: list[Node] = []
    seen: set[tuple[Node, bool]] = set()
    traffic = 0
    for node, fact in problem.facts.items():
        low = labels.get(node) is Precision.LOW
        if fact.moves_data and node in problem.variables:
            traffic += fact.elements * (2 if low else 4)
        for operand in fact.operands:
            source = problem.facts[operand.tensor]
            has = is_low(problem, labels, operand.tensor)
            original = source.dtype == problem.low_dtype
            if operand.rule is OperandRule.SOURCE_DTYPE:  # the same in every labelling
                wants, reads = original, original
            elif operand.rule is OperandRule.NODE_DTYPE:
                wants, reads = low, low
            elif operand.rule is OperandRule.EITHER:
                wants, reads = has, has
            else:
                anchored = operand.rule is OperandRule.PROMOTED and anchors.get(node) is operand.tensor
                wants, reads = (True if low else False if anchored else has), has
            if fact.moves_data:
                traffic += source.elements * (2 if reads else 4)
            if wants == has:
                continue
            if not shared or source.mutated or (operand.tensor, wants) not in seen:
                seen.add((operand.tensor, wants))
                casts.append(operand.tensor)
    activations = [t for t in casts if not problem.facts[t].is_parameter]
    cast_bytes, activation_bytes = (
        sum(6 * problem.facts[t].elements for t in ts) for ts in (casts, activations)
    )
    return Moved(traffic + cast_bytes, cast_bytes, len(casts), activation_bytes, len(activations))


def every_cost(problem: Problem) -> list[Moved]:
    """The costs of all labellings with all choices of anchors."""
    return [moved(problem, la, an) for la in labellings(problem) for an in anchor_choices(problem, la)]
