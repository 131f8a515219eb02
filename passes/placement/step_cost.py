"""Bytes of a training step of a labelling: eager op by op, and after fusion by a compiler.

Both are estimates that compare labellings of one graph. A gradient has the dtype of its tensor. Casts inside
a fused kernel are free. Bytes count for tensors in memory: operands and results of library kernels, values
that another kernel reads, and values that the backward reads.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from torch.fx import Node

from ampgraph.ops import fusion_tables as fusion
from ampgraph.plan import Cost

from ..analysis.facts import OperandRule
from ..analysis.norms import Norm
from ..analysis.precision import FP32, LOW, Precision
from ..analysis.problem import Problem
from .cost_model import CAST_BYTES, WIDTHS, Anchors, Labels, cost_of, demands
from .fused_kernels import FusedKernels, Kind, Read
from .labelling import Placement

# At most this many kernels of a backward read one saved tensor.
MAX_BACKWARD_READS = 3
# A sum of two gradients reads both and writes one.
ACCUMULATES = 3


class Step(NamedTuple):
    """Bytes of a forward, of its backward, and of what is saved between them."""

    forward: int
    backward: int
    saved: int

    @property
    def moved(self) -> int:
        """Bytes of forward and backward."""
        return self.forward + self.backward


@dataclass
class _Ledger:
    forward: int = 0
    backward: int = 0
    saved: dict[tuple[Node, Precision], int] = field(default_factory=lambda: defaultdict(int))
    saved_low: int = 0

    def save(self, tensor: Node, label: Precision, count: int) -> None:
        self.saved[tensor, label] = max(self.saved[tensor, label], count * WIDTHS[label])

    def step(self) -> Step:
        return Step(self.forward, self.backward, sum(self.saved.values()) + self.saved_low)


class StepCost:
    """Counts the bytes of the labellings of one problem.

    Args:
        problem: The graph.
        kernels: Its kernels, where they are known.
        saved_low: Norms whose backward reads low values in fused kernels.
    """

    def __init__(
        self, problem: Problem, kernels: FusedKernels | None = None, saved_low: Sequence[Norm] = ()
    ) -> None:
        self.problem = problem
        self.kernels = kernels or FusedKernels(problem.facts)
        self.saved_low = saved_low
        # What no label changes, by tensor.
        self._readers_of: dict[Node, tuple[list[Read], dict[Node, list[Read]]]] = {}
        self._eager_of: dict[tuple[Placement, bool], Cost] = {}

    def saving_low(self, norms: Sequence[Norm]) -> StepCost:
        """Returns the costs where the backward of these norms reads low values."""
        nodes = (node for norm in norms for node in (norm.output, *norm.inside))
        return StepCost(self.problem, self.kernels.saving_low(nodes), norms)

    def complete(self, placement: Placement, shared: bool = True) -> Cost:
        """Returns the cost of a placement with all fields; ``shared`` as for `cost_of`."""
        cost, fused = self.eager(placement, shared), self.fused(placement.labels)
        return replace(
            cost, fused_forward=fused.forward, fused_backward=fused.backward, fused_saved=fused.saved
        )

    def eager(self, placement: Placement, shared: bool = True) -> Cost:
        """Returns the cost of a placement whose ops run one by one; the same object at every call."""
        if (placement, shared) not in self._eager_of:
            labels, anchors = placement.labels, placement.anchors
            cost = cost_of(self.problem, labels, anchors, shared)
            backward, saved = self._eager_backward(labels, anchors, shared)
            self._eager_of[placement, shared] = replace(cost, backward=backward, saved=saved)
        return self._eager_of[placement, shared]

    def _eager_backward(self, labels: Labels, anchors: Anchors, shared: bool) -> tuple[int, int]:
        """Returns the bytes of the backward, and those saved for it."""
        ledger, problem = _Ledger(), self.problem
        for node, fact in problem.facts.items():
            if not fact.moves_data or not self.kernels.has_gradient[node]:
                continue
            name = self.kernels.names[node]
            if name in fusion.SUMS:
                self._count_sum(node, labels, ledger)
                continue
            trained = [o for o in fact.operands if self.kernels.has_gradient[o.tensor]]
            if fact.dtype is not None:
                one_each = self.kernels.kinds[node] is Kind.EXTERN or name in fusion.PRODUCTS
                reads = len(trained) if one_each and name not in fusion.ATTENTION else 1
                ledger.backward += WIDTHS[labels[fact.dtype_source]] * fact.elements * reads
            needs_values = name not in fusion.LINEAR
            for operand in fact.operands:
                label = self._label_read(labels, node, operand.tensor, operand.rule)
                source = problem.facts[operand.tensor]
                moved = WIDTHS[label] * source.elements
                ledger.backward += moved * (needs_values + self.kernels.has_gradient[operand.tensor])
                if needs_values and not (source.is_parameter and label is self._own(labels, operand.tensor)):
                    ledger.save(self.kernels.roots[operand.tensor], label, source.elements)
        self._count_accumulation(labels, anchors, shared, ledger)
        return ledger.backward, ledger.step().saved

    def _count_sum(self, node: Node, labels: Labels, ledger: _Ledger) -> None:
        """Adds the backward of a sum: nothing; reduces for broadcast operands, casts for widened ones."""
        fact = self.problem.facts[node]
        own = labels[fact.dtype_source]
        for operand in fact.operands:
            source = self.problem.facts[operand.tensor]
            if not self.kernels.has_gradient[operand.tensor]:
                continue
            if source.elements < fact.elements:
                ledger.backward += WIDTHS[own] * (fact.elements + source.elements)
            is_widened = operand.rule is OperandRule.PROMOTED and own is not self._own(labels, operand.tensor)
            if is_widened and own is FP32:
                ledger.backward += CAST_BYTES * source.elements

    def _count_accumulation(self, labels: Labels, anchors: Anchors, shared: bool, ledger: _Ledger) -> None:
        """Adds the backward of casts, and the sums of the gradients of tensors with several uses."""
        problem, trained = self.problem, self.kernels.has_gradient
        edges = dict(self._uses_trained)
        for (tensor, need), uses in demands(problem, labels, anchors).items():
            fact = problem.facts[tensor]
            count = sum(trained[node] for node, _ in uses)
            if not trained[tensor] or not count:
                continue
            is_shared = (shared or fact.is_parameter) and not fact.mutated
            casts = 1 if is_shared else count
            edges[tensor] += casts - count
            ledger.backward += casts * CAST_BYTES * fact.elements
            ledger.backward += ACCUMULATES * WIDTHS[need] * fact.elements * (count - casts)
        for tensor, count in edges.items():
            moved = ACCUMULATES * WIDTHS[self._own(labels, tensor)] * problem.facts[tensor].elements
            ledger.backward += moved * max(count - 1, 0)

    def fused(self, labels: Labels) -> Step:
        """Returns the bytes of a step that a compiler fuses."""
        ledger = _Ledger()
        for tensor in self._in_memory:
            self._count(tensor, labels, ledger)
        for tensor, times in self._normalized.items():
            self._count_norms(tensor, times, labels, ledger)
        for norm in self.saved_low:
            self._count_low_norm(norm, ledger)
        return ledger.step()

    @cached_property
    def _uses_trained(self) -> dict[Node, int]:
        """How many gradients each tensor gets from the ops that read it."""
        trained = self.kernels.has_gradient
        reads = ((n, o.tensor) for n, fact in self.problem.facts.items() for o in fact.operands)
        return Counter(tensor for node, tensor in reads if trained[node] and trained[tensor])

    @cached_property
    def _in_memory(self) -> list[Node]:
        """The tensors that may be in memory after fusion: those with more than a number."""
        kernels = self.kernels
        found = (t for t in self.problem.facts if kernels.roots[t] is t and kernels.is_managed(t))
        return [t for t in found if kernels.sizes[t] > 1 and kernels.producer_kind(t) is not Kind.OUTPUT]

    def _count_low_norm(self, norm: Norm, ledger: _Ledger) -> None:
        """Adds the normalized values. Their write is added where float32 values would not be written."""
        x, size = self.kernels.roots[norm.x], WIDTHS[LOW] * self.kernels.sizes[norm.output]
        is_in_kernel = self._is_in_kernel(x, (*norm.inside, norm.output)[0])
        ledger.saved_low += size
        ledger.forward += 0 if is_in_kernel else size
        ledger.backward += size * (1 if is_in_kernel else fusion.READS_BACKWARD["layer_norm"])

    def _own(self, labels: Labels, tensor: Node) -> Precision:
        return labels[self.problem.facts[tensor].dtype_source]

    def _label_read(self, labels: Labels, reader: Node, tensor: Node, rule: OperandRule) -> Precision:
        """Returns the dtype that an unfused kernel reads."""
        if rule is OperandRule.NODE_DTYPE:
            return labels[reader]
        if rule is OperandRule.SOURCE_DTYPE:
            return self.problem.source_precision(tensor)
        return self._own(labels, tensor)

    def _count(self, tensor: Node, labels: Labels, ledger: _Ledger) -> None:
        """Adds what is written and read of one tensor and of its gradient."""
        size, kind = self.kernels.sizes[tensor], self.kernels.producer_kind(tensor)
        own, trained = self._own(labels, tensor), self.kernels.has_gradient[tensor]
        if tensor not in self._readers_of:
            self._readers_of[tensor] = self._readers(tensor)
        alone, kernels = self._readers_of[tensor]
        for read in alone:
            self._count_library_read(tensor, read, labels, ledger)
        if kind is not Kind.INPUT:
            for reads in kernels.values():
                self._count_fused_read(tensor, reads, labels, ledger)
        wanted = {self._library_label(labels, tensor, read) for read in alone}
        if kind in (Kind.INPUT, Kind.EXTERN, Kind.CONCATENATES):
            if wanted - {own}:
                ledger.forward += CAST_BYTES * size
                ledger.backward += CAST_BYTES * size * trained
        else:
            for label in wanted | ({own} if kernels else set()):
                ledger.forward += WIDTHS[label] * size
        if kind is Kind.EXTERN:
            is_attention = self.kernels.names[tensor] in fusion.ATTENTION
            ledger.forward += WIDTHS[own] * size
            # The gradient is read for the gradients of input, weight and bias.
            ledger.backward += WIDTHS[own] * size * (3 if is_attention else 4) * trained
        if kind is Kind.CONCATENATES:
            ledger.forward += WIDTHS[own] * size
            ledger.backward += WIDTHS[own] * size * trained

    def _readers(self, tensor: Node) -> tuple[list[Read], dict[Node, list[Read]]]:
        """Returns the reads by library kernels, and those by fused kernels in memory, by kernel."""
        alone: list[Read] = []
        kernels: dict[Node, list[Read]] = defaultdict(list)
        for read in self.kernels.reads(tensor):
            kind = self.kernels.kinds[read.reader]
            if kind is Kind.EXTERN:
                alone.append(read)
            elif kind is not Kind.OUTPUT and not self._is_in_kernel(tensor, read.reader):
                kernels[self.kernels.kernel(read.reader)].append(read)
        return alone, kernels

    def _is_in_kernel(self, tensor: Node, reader: Node) -> bool:
        if not self.kernels.stays_in_registers(tensor, reader):
            return False
        return self.kernels.kernel(tensor) is self.kernels.kernel(reader)

    def _library_label(self, labels: Labels, tensor: Node, read: Read) -> Precision:
        operands = self.problem.facts[read.reader].operands
        rule = next((o.rule for o in operands if o.tensor is read.through), OperandRule.EITHER)
        if rule is OperandRule.NODE_DTYPE and read.reader in labels:
            return labels[read.reader]
        return self._own(labels, tensor)

    def _count_library_read(self, tensor: Node, read: Read, labels: Labels, ledger: _Ledger) -> None:
        label, is_input = self._library_label(labels, tensor, read), tensor.op != "call_function"
        moved = WIDTHS[label] * read.elements
        ledger.forward += moved
        if not self.kernels.has_gradient[read.reader]:
            return
        ledger.backward += moved
        if not is_input or label is not self._own(labels, tensor):
            ledger.save(tensor, label, read.elements)
        if self.kernels.has_gradient[tensor]:
            ledger.backward += moved if is_input else 2 * moved

    def _count_fused_read(self, tensor: Node, reads: list[Read], labels: Labels, ledger: _Ledger) -> None:
        own, size = self._own(labels, tensor), max(read.elements for read in reads)
        moved, readers = WIDTHS[own] * size, [read.reader for read in reads]
        ledger.forward += moved * max(fusion.READS.get(self.kernels.names[r], 1) for r in readers)
        if not any(self.kernels.has_gradient[r] for r in readers):
            return
        again = sum(self._backward_reads(r) for r in readers)
        if again:
            ledger.backward += moved * min(again, MAX_BACKWARD_READS)
            ledger.save(tensor, own, size)
        if self.kernels.has_gradient[tensor] and self.kernels.producer_kind(tensor) is not Kind.EXTERN:
            ledger.backward += 2 * moved

    def _backward_reads(self, reader: Node) -> int:
        if self.kernels.needs_values.get(reader) or self.kernels.is_norm(reader):
            return fusion.READS_BACKWARD.get(self.kernels.names[reader], 1)
        return 0

    @cached_property
    def _normalized(self) -> dict[Node, int]:
        """The values that a kernel passes on in registers and the backward reads, and how often."""
        return {tensor: times for tensor in self._in_memory if (times := self._norm_reads(tensor))}

    def _count_norms(self, tensor: Node, times: int, labels: Labels, ledger: _Ledger) -> None:
        """Adds what the backward reads of one of these values."""
        own, size = self._own(labels, tensor), self.kernels.sizes[tensor]
        ledger.backward += WIDTHS[own] * size * times
        ledger.save(tensor, own, size)

    def _norm_reads(self, tensor: Node) -> int:
        if tensor in self.kernels.kept:
            return 1
        return sum(self._is_normalized_inside(tensor, read.reader) for read in self.kernels.reads(tensor))

    def _is_normalized_inside(self, tensor: Node, reader: Node) -> bool:
        if not self.kernels.is_norm(reader) or not self.kernels.has_gradient[reader]:
            return False
        return reader.all_input_nodes[0] is tensor and self._is_in_kernel(tensor, reader)
