"""Bytes of a training step of a labelling: eager op by op, and after fusion by a compiler.

Both are estimates that compare labellings of one graph. A gradient has the dtype of its tensor. Casts inside
a fused kernel are free. Bytes count for tensors in memory: operands and results of library kernels, values
that another kernel reads, and values that the backward reads.

Most bytes are a width times elements that no label changes. `EagerBackward`, `EagerSaved` and `FusedStep`
find these once, by the node whose label sets the width, so that each labelling only adds them up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from torch.fx import Node

from ampgraph.plan import Cost

from ..analysis.norms import Norm
from ..analysis.problem import Problem
from ..analysis.softmax import Softmax
from .cost_model import Demands, Labels, cost_of_casts, demands
from .eager_backward import EagerBackward
from .eager_saved import EagerSaved
from .fused_kernels import FusedKernels
from .fused_step import FusedStep, Step
from .labelling import Placement


class StepCost:
    """Counts the bytes of the labellings of one problem.

    Args:
        problem: The graph.
        kernels: Its kernels, where they are known.
        norms: Those whose backward reads low values in fused kernels.
        softmaxes: The same.
    """

    def __init__(
        self,
        problem: Problem,
        kernels: FusedKernels | None = None,
        norms: Sequence[Norm] = (),
        softmaxes: Sequence[Softmax] = (),
    ) -> None:
        self.problem = problem
        self.kernels = kernels or FusedKernels(problem.facts)
        self._saved_low = norms, softmaxes
        self._demands_of: dict[Placement, Demands] = {}
        self._eager_of: dict[tuple[Placement, bool], Cost] = {}

    def saving_low(self, norms: Sequence[Norm], softmaxes: Sequence[Softmax]) -> StepCost:
        """Returns the costs where the backward of these ops reads low values."""
        nodes = [node for norm in norms for node in (norm.output, *norm.inside)]
        nodes += [softmax.output for softmax in softmaxes]
        return StepCost(self.problem, self.kernels.saving_low(nodes), norms, softmaxes)

    def complete(self, placement: Placement, shared: bool = True) -> Cost:
        """Returns the cost of a placement with all fields; ``shared`` as for `cost_of`."""
        cost, fused = self.eager(placement, shared), self.fused(placement.labels)
        return replace(
            cost, fused_forward=fused.forward, fused_backward=fused.backward, fused_saved=fused.saved
        )

    def demands(self, placement: Placement) -> Demands:
        """Returns the casts of a placement; see `cost_model.demands`."""
        if placement not in self._demands_of:
            self._demands_of[placement] = demands(self.problem, placement.labels, placement.anchors)
        return self._demands_of[placement]

    def eager(self, placement: Placement, shared: bool = True) -> Cost:
        """Returns the cost of a placement whose ops run one by one; the same object at every call."""
        if (placement, shared) not in self._eager_of:
            labels, casts = placement.labels, self.demands(placement)
            cost = cost_of_casts(self.problem, labels, casts, shared)
            backward, saved = self._eager_backward.of(labels, casts, shared), self._eager_saved.of(labels)
            self._eager_of[placement, shared] = replace(cost, backward=backward, saved=saved)
        return self._eager_of[placement, shared]

    def fused(self, labels: Labels) -> Step:
        """Returns the bytes of a step that a compiler fuses."""
        return self._fused_step.of(labels)

    def decides_bytes(self, node: Node) -> bool:
        """Whether the label of a node decides any bytes of a step that a compiler fuses."""
        return self._fused_step.decides_bytes(node)

    @cached_property
    def _eager_backward(self) -> EagerBackward:
        return EagerBackward(self.problem, self.kernels)

    @cached_property
    def _eager_saved(self) -> EagerSaved:
        return EagerSaved(self.problem, self.kernels)

    @cached_property
    def _fused_step(self) -> FusedStep:
        return FusedStep(self.problem, self.kernels, *self._saved_low)
