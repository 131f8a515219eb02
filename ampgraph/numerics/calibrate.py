"""`calibrate`: the ranges of a model's float32 values and gradients, over batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from ..errors import AmpGraphError, warn_user
from ..module import AmpModule
from ..passes.analysis.fingerprint import fingerprint
from ..report import graph_view as view
from ..runtime.progress import with_progress
from ..runtime.run_graph import GraphRun, floats
from .batches import Batch, arguments_of, listable
from .calibration import Calibration, GraphStatistics
from .run_model import ModelRunner, Part
from .side_run import Loss, checked_loss
from .statistics import ValueStatistics


def calibrate(
    amp: AmpModule, batches: Iterable[Batch], *, loss: Loss | None = None, progress: bool | None = None
) -> Calibration:
    """Measures the ranges of each node's values and gradients in float32, over several batches.

    Every batch runs the model's graphs without casts, node by node. A value is freed after its last use.
    Buffers, gradients and the random state are restored. Each node gets these statistics: peak, smallest
    nonzero magnitude, binary exponents, and the shares that would become zero or infinite in the low dtype.

    Args:
        amp: The converted model, in the training mode to measure.
        batches: An iterable. A batch is a tuple of positional arguments, a dict of keyword arguments, or a
            tensor (a single argument).
        loss: A function from the model's result to a 0-dim tensor. If given, gradients are measured too,
            multiplied by the loss scale.
        progress: Whether to show a progress bar. Default: only if standard error is a terminal.

    Returns:
        A `Calibration`, which can be saved.

    Raises:
        AmpGraphError: The model is not converted, a batch has the wrong type, or ``batches`` is empty.

    Example:
        >>> found = ampgraph.calibrate(amp, ((x,) for x, _ in loader), loss=lambda y: y.square().mean())
        >>> found.save("ranges.json")
    """
    if loss is not None and not callable(loss):
        raise AmpGraphError(
            f"loss={loss!r}: expected a function that returns one number for the model's result."
        )
    if not isinstance(amp, AmpModule):
        raise AmpGraphError(f"expected what ampgraph.convert returns; got a {type(amp).__name__}.")
    is_scaled = loss is not None and amp.scaler.is_enabled()
    scale = float(amp.scaler.get_scale()) if is_scaled else 1.0
    found = Calibration(view.graph_name(amp), amp.options.low_dtype, scale)
    runner: ModelRunner | None = None
    is_told = False
    for batch in with_progress(listable(batches, "calibrate"), "calibrating", progress):
        args, kwargs = arguments_of(batch, found.batches + 1, "calibrate")
        if runner is None:
            runner = ModelRunner(amp, args, kwargs)
        else:
            runner.take(args, kwargs)
        result = _Observed(found, loss).run(runner)
        found.batches += 1
        if not is_told and not all(map(_is_number, floats(tree_leaves(result)))):
            is_told = True
            warn_user(
                f"calibrate: the result of batch {found.batches} is NaN or infinite in float32 already; "
                "ranges of such values say nothing."
            )
    if runner is None:
        raise AmpGraphError("calibrate: batches is empty; expected at least one batch.")
    return found


def _is_number(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite; minus infinity is a mask."""
    return not bool((tensor.isnan() | tensor.isposinf()).any())


class _Observed:
    """One batch: adds what its forward and backward show."""

    def __init__(self, found: Calibration, loss: Loss | None):
        self._found, self._loss = found, loss
        self._leaves: list[tuple[ValueStatistics, Tensor]] = []

    def run(self, runner: ModelRunner) -> Any:
        """Returns the model's result."""
        result = runner(self._run_part, gradients=self._loss is not None)
        if self._loss is None:
            return result
        with torch.enable_grad():
            value = checked_loss(self._loss(result))
        leaves = [leaf for _, leaf in self._leaves]
        gradients = torch.autograd.grad(value.sum(), leaves, allow_unused=True)
        for (statistics, _), gradient in zip(self._leaves, gradients, strict=True):
            self._add_gradient(statistics, gradient)
        return result

    def _run_part(self, part: Part, inputs: list[Any]) -> Sequence[Any]:
        seen = self._found.graphs.setdefault(fingerprint(part.float32), GraphStatistics())
        run = GraphRun(part.float32, inputs)
        for node, value in run:
            if view.is_item(node):
                continue
            if self._loss is not None:
                run.values[node] = self._with_gradients(seen, node, value)
            for tensor in floats(value) if node not in run.unwritten else ():
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
