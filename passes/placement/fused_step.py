"""Bytes of a step of a labelling after fusion by a compiler."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from torch.fx import Node

from ampgraph.ops import fusion_tables as fusion

from ..analysis.facts import OperandRule
from ..analysis.norms import Norm
from ..analysis.precision import LOW, Precision
from ..analysis.problem import Problem
from ..analysis.softmax import Softmax
from .cost_model import CAST_BYTES, WIDTHS, Labels, bytes_of
from .fused_kernels import FusedKernels, Kind, Read

# At most this many kernels of a backward read one saved tensor.
MAX_BACKWARD_READS = 3
# In memory in any case, so that another dtype for a library kernel is a cast.
_IN_MEMORY = (Kind.INPUT, Kind.EXTERN, Kind.CONCATENATES)


class Step(NamedTuple):
    """Bytes of a forward, of its backward, and of what is saved between them."""

    forward: int
    backward: int
    saved: int

    @property
    def moved(self) -> int:
        """Bytes of forward and backward."""
        return self.forward + self.backward


class _Mixed(NamedTuple):
    """A tensor that a library kernel may read in another dtype than its own.

    Attributes:
        owner: The node whose label is its dtype.
        size: Its elements.
        kind: How it is computed.
        is_written: Whether it is in memory in its own dtype.
        is_input: Whether the graph does not compute it.
        is_trained: Whether it has a gradient.
        saved: Elements saved in its own dtype.
        reads: For each read of a library kernel: the node whose label is the dtype, the elements, and
            whether a backward reads them.
    """

    owner: Node
    size: int
    kind: Kind
    is_written: bool
    is_input: bool
    is_trained: bool
    saved: int
    reads: list[tuple[Node, int, bool]]


class FusedStep:
    """Counts the fused steps of the labellings of one problem.

    Args:
        problem: The graph.
        kernels: Its kernels.
        norms: Those whose backward reads low values.
        softmaxes: The same.

    Attributes:
        forward: Elements that the forward moves, by the node whose label is their dtype.
        backward: The same for the backward.
        saved: The same for what is saved, without that of `mixed`.
        mixed: The tensors for which the labels decide more than widths.
        low: The bytes of the low values that norms save and softmax ops read.
    """

    def __init__(
        self,
        problem: Problem,
        kernels: FusedKernels,
        norms: Sequence[Norm] = (),
        softmaxes: Sequence[Softmax] = (),
    ) -> None:
        self.problem, self.kernels = problem, kernels
        self.forward: dict[Node | Precision, int] = defaultdict(int)
        self.backward: dict[Node | Precision, int] = defaultdict(int)
        self.saved: dict[Node | Precision, int] = defaultdict(int)
        self.mixed: list[_Mixed] = []
        self.low = Step(0, 0, 0)
        for tensor in problem.facts:
            if self._may_be_in_memory(tensor):
                self._add(tensor)
        for norm in norms:
            self._add_low_norm(norm)
        # A product saves the probabilities in any case.
        read = sum(WIDTHS[LOW] * kernels.sizes[softmax.output] for softmax in softmaxes)
        self.low = self.low._replace(backward=self.low.backward + read)

    def of(self, labels: Labels) -> Step:
        """Returns the bytes of a step."""
        forward, backward, saved = self.low
        forward += bytes_of(self.forward, labels)
        backward += bytes_of(self.backward, labels)
        saved += bytes_of(self.saved, labels)
        for tensor in self.mixed:
            own, wanted = labels[tensor.owner], {labels[reader] for reader, _, _ in tensor.reads}
            if tensor.kind not in _IN_MEMORY:
                written = wanted | {own} if tensor.is_written else wanted
                forward += sum(WIDTHS[label] for label in written) * tensor.size
            elif wanted - {own}:
                forward += CAST_BYTES * tensor.size
                backward += CAST_BYTES * tensor.size * tensor.is_trained
            saved += _saved_of(tensor, own, labels)
        return Step(forward, backward, saved)

    def decides_bytes(self, node: Node) -> bool:
        """Whether the label of a node decides any bytes."""
        return node in self._owners

    @cached_property
    def _owners(self) -> set[Node | Precision]:
        sums = (self.forward, self.backward, self.saved)
        found = {owner for moved in sums for owner, elements in moved.items() if elements}
        found.update(tensor.owner for tensor in self.mixed)
        found.update(reader for tensor in self.mixed for reader, _, _ in tensor.reads)
        return found

    def _may_be_in_memory(self, tensor: Node) -> bool:
        """Whether a tensor may be in memory after fusion: it has more than a number."""
        kernels = self.kernels
        if kernels.roots[tensor] is not tensor or not kernels.is_managed(tensor):
            return False
        return kernels.sizes[tensor] > 1 and kernels.producer_kind(tensor) is not Kind.OUTPUT

    def _add(self, tensor: Node) -> None:
        """Adds what is written and read of one tensor and of its gradient."""
        owner, kind = self.problem.facts[tensor].dtype_source, self.kernels.producer_kind(tensor)
        size, is_trained = self.kernels.sizes[tensor], self.kernels.has_gradient[tensor]
        alone, kernels = self._readers(tensor)
        saved = self._add_norms(tensor, owner, size)
        if kind is not Kind.INPUT:
            for reads in kernels.values():
                saved = max(saved, self._add_fused_read(tensor, owner, kind, reads))
        library = [self._add_library_read(tensor, owner, read) for read in alone]
        if kind is Kind.EXTERN:
            is_attention = self.kernels.names[tensor] in fusion.ATTENTION
            self.forward[owner] += size
            # The gradient is read for the gradients of input, weight and bias.
            self.backward[owner] += size * (3 if is_attention else 4) * is_trained
        if kind is Kind.CONCATENATES:
            self.forward[owner] += size
            self.backward[owner] += size * is_trained
        if library:
            is_input = tensor.op != "call_function"
            self.mixed.append(_Mixed(owner, size, kind, bool(kernels), is_input, is_trained, saved, library))
            return
        self.saved[owner] += saved
        if kernels and kind not in _IN_MEMORY:
            self.forward[owner] += size

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

    def _add_library_read(self, tensor: Node, owner: Node, read: Read) -> tuple[Node, int, bool]:
        """Adds one read of a library kernel, and returns it as for `_Mixed`."""
        operands = self.problem.facts[read.reader].operands
        rule = next((o.rule for o in operands if o.tensor is read.through), OperandRule.EITHER)
        decides = rule is OperandRule.NODE_DTYPE and read.reader in self.problem.variables
        label = read.reader if decides else owner
        self.forward[label] += read.elements
        has_backward = self.kernels.has_gradient[read.reader]
        if has_backward:
            writes = (1 if tensor.op != "call_function" else 2) * self.kernels.has_gradient[tensor]
            self.backward[label] += read.elements * (1 + writes)
        return label, read.elements, has_backward

    def _add_fused_read(self, tensor: Node, owner: Node, kind: Kind, reads: list[Read]) -> int:
        """Adds the reads of one fused kernel, and returns the elements saved for its backward."""
        size, readers = max(read.elements for read in reads), [read.reader for read in reads]
        self.forward[owner] += size * max(fusion.READS.get(self.kernels.names[r], 1) for r in readers)
        if not any(self.kernels.has_gradient[r] for r in readers):
            return 0
        again = sum(self._backward_reads(r) for r in readers)
        self.backward[owner] += size * min(again, MAX_BACKWARD_READS)
        if self.kernels.has_gradient[tensor] and kind is not Kind.EXTERN:
            self.backward[owner] += 2 * size
        return size if again else 0

    def _backward_reads(self, reader: Node) -> int:
        if self.kernels.needs_values.get(reader) or self.kernels.is_norm(reader):
            return fusion.READS_BACKWARD.get(self.kernels.names[reader], 1)
        return 0

    def _add_norms(self, tensor: Node, owner: Node, size: int) -> int:
        """Adds the reads of the backward of values that a kernel passes on in registers, and saves them."""
        if tensor in self.kernels.kept:
            times = 1
        else:
            times = sum(
                self._is_normalized_inside(tensor, read.reader) for read in self.kernels.reads(tensor)
            )
        self.backward[owner] += size * times
        return size if times else 0

    def _is_normalized_inside(self, tensor: Node, reader: Node) -> bool:
        if not self.kernels.is_norm(reader) or not self.kernels.has_gradient[reader]:
            return False
        return reader.all_input_nodes[0] is tensor and self._is_in_kernel(tensor, reader)

    def _add_low_norm(self, norm: Norm) -> None:
        """Adds the normalized values. Their write is added where float32 values would not be written."""
        x, size = self.kernels.roots[norm.x], WIDTHS[LOW] * self.kernels.sizes[norm.output]
        is_in_kernel = self._is_in_kernel(x, (*norm.inside, norm.output)[0])
        forward, backward, saved = self.low
        forward += 0 if is_in_kernel else size
        backward += size * (1 if is_in_kernel else fusion.READS_BACKWARD["layer_norm"])
        self.low = Step(forward, backward, saved + size)


def _saved_of(tensor: _Mixed, own: Precision, labels: Labels) -> int:
    """Returns the bytes saved of a tensor; an input is saved only in another dtype than its own."""
    most = {own: tensor.saved}
    for reader, elements, has_backward in tensor.reads:
        label = labels[reader]
        if has_backward and not (tensor.is_input and label is own):
            most[label] = max(most.get(label, 0), elements)
    return sum(WIDTHS[label] * elements for label, elements in most.items())
