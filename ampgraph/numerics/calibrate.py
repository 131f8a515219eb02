"""`calibrate`: the ranges of a model's float32 values and gradients, over batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..errors import AmpGraphError
from ..module import AmpModule
from ..passes.analysis.fingerprint import fingerprint
from ..report import graph_view as view
from ..runtime.run_graph import GraphRun, floats
from .batches import Batch, arguments_of
from .calibration import Calibration, GraphStatistics
from .progress import with_progress
from .run_model import ModelRunner, Part
from .side_run import Loss, checked_loss
from .statistics import ValueStatistics


def calibrate(
    amp: AmpModule, batches: Iterable[Batch], *, loss: Loss | None = None, progress: bool | None = None
) -> Calibration:
    """Measures over batches which ranges the values and gradients of each node have in float32.

    Every batch runs the model's graphs without casts, node by node; values are dropped after their last use.
    The model stays as it was, buffers, gradients and random numbers included. Statistics are kept by graph
    and node: peak, smallest nonzero magnitude, exponents, and the shares that the low dtype would make zero
    or infinite.

    Args:
        amp: What `ampgraph.convert` returned, in the training mode that the evidence is for.
        batches: Tuples of positional arguments, dicts of keyword arguments, or tensors, the only argument.
        loss: Makes one number of what the model returns. Gradients are measured, too, times the loss scale.
        progress: Whether to show a progress bar. Default: where standard error is a terminal.

    Returns:
        A `Calibration`, which can be saved.

    Raises:
        AmpGraphError: The model is not converted, a batch has the wrong type, or there are no batches.

    Example:
        >>> found = ampgraph.calibrate(amp, ((x,) for x, _ in loader), loss=lambda y: y.square().mean())
        >>> found.save("ranges.json")
    """
    if loss is not None and not callable(loss):
        raise AmpGraphError(
            f"loss={loss!r}: expected a function that makes one number of the model's result."
        )
    if not isinstance(amp, AmpModule):
        raise AmpGraphError(f"expected what ampgraph.convert returns; got a {type(amp).__name__}.")
    is_scaled = loss is not None and amp.scaler.is_enabled()
    scale = float(amp.scaler.get_scale()) if is_scaled else 1.0
    found = Calibration(view.graph_name(amp), amp.options.low_dtype, scale)
    runner: ModelRunner | None = None
    for batch in with_progress(batches, "calibrating", progress):
        args, kwargs = arguments_of(batch, found.batches + 1, "calibrate")
        if runner is None:
            runner = ModelRunner(amp, args, kwargs)
        else:
            runner.take(args, kwargs)
        _Observed(found, loss).run(runner)
        found.batches += 1
    if runner is None:
        raise AmpGraphError("calibrate: there is no batch.")
    return found


class _Observed:
    """One batch: adds what its forward and backward show."""

    def __init__(self, found: Calibration, loss: Loss | None):
        self._found, self._loss = found, loss
        self._leaves: list[tuple[ValueStatistics, Tensor]] = []

    def run(self, runner: ModelRunner) -> None:
        result = runner(self._run_part, gradients=self._loss is not None)
        if self._loss is None:
            return
        with torch.enable_grad():
            value = checked_loss(self._loss(result))
        leaves = [leaf for _, leaf in self._leaves]
        gradients = torch.autograd.grad(value.sum(), leaves, allow_unused=True)
        for (statistics, _), gradient in zip(self._leaves, gradients, strict=True):
            self._add_gradient(statistics, gradient)

    def _run_part(self, part: Part, inputs: list[Any]) -> Sequence[Any]:
        seen = self._found.graphs.setdefault(fingerprint(part.float32), GraphStatistics())
        run = GraphRun(part.float32, inputs)
        for node, value in run:
            if view.is_item(node):
                continue
            if self._loss is not None:
                run.values[node] = self._with_gradients(seen, node, value)
            for tensor in floats(value):
                self._row(seen.values, node).add(tensor)
        return run.outputs

    def _with_gradients(self, seen: GraphStatistics, node: Node, value: Any) -> Any:
        """Lets the gradients of a node's tensors be seen; those of leaves end here."""
        if isinstance(value, Tensor) and value.is_leaf and value.requires_grad:
            alias = value.detach().requires_grad_()
            self._leaves.append((self._row(seen.gradients, node), alias))
            return alias
        for tensor in floats(value):
            if tensor.requires_grad:
                row = self._row(seen.gradients, node)
                tensor.register_hook(lambda gradient, row=row: self._add_gradient(row, gradient))
        return value

    def _add_gradient(self, row: ValueStatistics, gradient: Tensor | None) -> None:
        if gradient is not None:
            row.add(gradient * self._found.scale)

    def _row(self, rows: dict[str, ValueStatistics], node: Node) -> ValueStatistics:
        return rows.setdefault(node.name, ValueStatistics(self._found.low_dtype))
