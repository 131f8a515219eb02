"""Bytes of the backward of a labelling whose ops run one by one."""

from __future__ import annotations

from collections import Counter, defaultdict

from torch.fx import Node

from ampgraph.ops import fusion_tables as fusion

from ..analysis.facts import NodeFacts, Operand, OperandRule
from ..analysis.precision import FP32, LOW, Precision
from ..analysis.problem import Problem
from .cost_model import CAST_BYTES, WIDTHS, Demands, Labels, bytes_of
from .fused_kernels import FusedKernels, Kind

# A sum of two gradients reads both and writes one.
ACCUMULATES = 3


class EagerBackward:
    """Counts the backwards of the labellings of one problem.

    Args:
        problem: The graph.
        kernels: What each op is, and where gradients go.

    Attributes:
        moved: Elements that the backward moves, by the node whose label is their dtype, or by the dtype.
        widened: The owner of a sum, the owner of an operand that it may widen, and the operand's elements.
        uses: How many gradients each tensor gets from the ops that read it.
    """

    def __init__(self, problem: Problem, kernels: FusedKernels) -> None:
        self.problem, self.kernels = problem, kernels
        self.moved: dict[Node | Precision, int] = defaultdict(int)
        self.widened: list[tuple[Node, Node, int]] = []
        self.uses: Counter[Node] = Counter()
        for node, fact in problem.facts.items():
            if not kernels.has_gradient[node]:
                continue
            trained = [o for o in fact.operands if kernels.has_gradient[o.tensor]]
            self.uses.update(o.tensor for o in trained)
            if not fact.moves_data:
                continue
            if kernels.names[node] in fusion.SUMS:
                self._add_sum(fact, trained)
            else:
                self._add_op(node, fact, len(trained))
        for tensor, count in self.uses.items():
            fact = problem.facts[tensor]
            self.moved[fact.dtype_source] += ACCUMULATES * fact.elements * (count - 1)

    def of(self, labels: Labels, demands: Demands, shared: bool) -> int:
        """Returns the bytes of the backward.

        Args:
            labels: The labelling.
            demands: Its casts.
            shared: As for `cost_of`.
        """
        moved = bytes_of(self.moved, labels) + self._of_casts(labels, demands, shared)
        for owner, source, count in self.widened:
            if labels[owner] is FP32 and labels[source] is LOW:
                moved += CAST_BYTES * count
        return moved

    def _add_sum(self, fact: NodeFacts, trained: list[Operand]) -> None:
        """Adds the backward of a sum: nothing; reduces for broadcast operands, casts for widened ones."""
        for operand in trained:
            source = self.problem.facts[operand.tensor]
            if source.elements < fact.elements:
                self.moved[fact.dtype_source] += fact.elements + source.elements
            if operand.rule is OperandRule.PROMOTED:
                self.widened.append((fact.dtype_source, source.dtype_source, source.elements))

    def _add_op(self, node: Node, fact: NodeFacts, trained: int) -> None:
        """Adds the reads of the result's gradient, the reads of values and the writes of gradients."""
        name, kernels = self.kernels.names[node], self.kernels
        if fact.dtype is not None:
            one_each = kernels.kinds[node] is Kind.EXTERN or name in fusion.PRODUCTS
            reads = trained if one_each and name not in fusion.ATTENTION else 1
            self.moved[fact.dtype_source] += fact.elements * reads
        needs_values = name not in fusion.LINEAR
        for operand in fact.operands:
            source, read = self.problem.facts[operand.tensor], self.problem.width_read(node, operand)
            self.moved[read] += source.elements * (needs_values + kernels.has_gradient[operand.tensor])

    def _of_casts(self, labels: Labels, demands: Demands, shared: bool) -> int:
        """Returns the bytes of the backward of casts, which also changes how many gradients are summed."""
        trained, moved = self.kernels.has_gradient, 0
        fewer: Counter[Node] = Counter()
        for (tensor, need), uses in demands.items():
            fact = self.problem.facts[tensor]
            count = sum(trained[node] for node, _ in uses) if trained[tensor] else 0
            if not count:
                continue
            is_shared = (shared or fact.is_parameter) and not fact.mutated
            casts = 1 if is_shared else count
            moved += casts * CAST_BYTES * fact.elements
            moved += ACCUMULATES * WIDTHS[need] * fact.elements * (count - casts)
            fewer[tensor] += count - casts
        for tensor, count in fewer.items():
            fact = self.problem.facts[tensor]
            moved -= ACCUMULATES * WIDTHS[labels[fact.dtype_source]] * fact.elements * count
        return moved
