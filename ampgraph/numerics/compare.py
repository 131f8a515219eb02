"""`compare`: a converted model beside float32, node by node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..module import AmpModule
from ..origin import module_stack
from ..report import graph_view as view
from ..runtime.boundary import has_low
from .gradient_tape import Key
from .lockstep import Lockstep, Measured
from .numeric_comparison import ComparedNode, NumericComparison, marked_negligible
from .run_model import ModelRunner, Part
from .side_run import Loss, check_is_loss, checked_loss


def compare(
    amp: AmpModule, args: tuple, kwargs: Mapping[str, Any] | None = None, *, loss: Loss | None = None
) -> NumericComparison:
    """Runs a converted model beside its float32 source and measures what low precision does at each node.

    Both graphs run together, node by node. Each value is freed after its last use, so the peak memory is
    about that of both forwards; with a loss, 1.5 times that of both forwards and backwards. Buffers,
    gradients, the random state and the loss scale are restored. Dropout uses the same masks in both graphs.
    The converted graph runs eagerly, with any backend of the model.

    With capture just in time, one call may run several graphs, with Python code between them. Each graph is
    compared separately: its inputs and the gradients of its outputs are float32 values, so accumulated errors
    start at zero in each graph. Parts that are not captured run in float32. A higher-order op
    (``torch.cond``, a scan) counts as one node.

    Args:
        amp: The converted model. It is compared in its current training mode.
        args: Positional arguments.
        kwargs: Keyword arguments.
        loss: A function from the model's result to a 0-dim tensor. If given, gradients are compared too,
            scaled by the present loss scale.

    Returns:
        A `NumericComparison`.

    Raises:
        AmpGraphError: ``amp`` is not a converted model, or the loss does not depend on the output.

    Example:
        >>> print(ampgraph.compare(amp, (x,), loss=lambda y: criterion(y, target)))
    """
    check_is_loss(loss)
    runner = ModelRunner(amp, args, kwargs)
    session = _Session(amp, loss)
    result = runner(session.run_part, gradients=loss is not None)
    losses = session.run_backward(result)
    return NumericComparison(
        model=view.graph_name(amp),
        policy=repr(amp.policy),
        low_dtype=view.dtype_name(amp.options.low_dtype),
        scale=session.scale,
        loss=losses,
        rows=marked_negligible(session.rows()),
    )


class _Session:
    """One comparison: the rows that the graphs of one call add."""

    def __init__(self, amp: AmpModule, loss: Loss | None):
        self._loss, self._is_just_in_time = loss, amp.is_just_in_time
        self._low = amp.options.low_dtype
        self._graphs = 0
        self._tokens: list[Tensor] = []
        self._last: Lockstep | None = None
        self._rows: list[ComparedNode] = []
        self._gradient_rows: list[ComparedNode] = []
        is_scaled = loss is not None and amp.scaler.is_enabled()
        self.scale = float(amp.scaler.get_scale()) if is_scaled else 1.0

    def rows(self) -> list[ComparedNode]:
        return [*self._rows, *self._gradient_rows]

    def run_part(self, part: Part, inputs: list[Any]) -> Sequence[Any]:
        """Runs one graph beside its source; returns what the source returns."""
        self._graphs += 1
        graph, records = self._graphs, self._loss is not None and torch.is_grad_enabled()

        def note(measured: Measured) -> None:
            rows = self._gradient_rows if measured.is_gradient else self._rows
            rows.append(_row(measured, graph, self._low))

        scale = self.scale if has_low(part.plan) else 1.0
        steps = Lockstep(part.graph_module, part.plan, inputs, note, records, scale)
        if records and self._is_just_in_time:
            self._tokens.append(torch.zeros((), requires_grad=True))
            return _Stepped.apply(self._tokens[-1], steps, *inputs)
        steps.forward()
        self._last = steps
        return steps.exact.outputs

    def run_backward(self, result: Any) -> tuple[float, float | None] | None:
        """Runs the backwards, where there is a loss; returns the loss in float32 and converted."""
        if self._loss is None:
            return None
        with torch.enable_grad():
            if self._is_just_in_time:
                return self._run_through(checked_loss(self._loss(result)))
            assert self._last is not None
            exact, true = self._last.exact.output_gradients(self._loss)
            low, found = self._last.low.output_gradients(self._loss)
        self._last.backward(true, found)
        return exact, low

    def _run_through(self, value: Tensor) -> tuple[float, None]:
        """Runs the backward through all graphs; the tokens are what it is for, so no gradient is stored."""
        torch.autograd.grad(value.sum(), self._tokens, allow_unused=True)
        return float(value.detach()), None


class _Stepped(Function):
    """A graph beside its source, between Python code that autograd knows: float32 goes in and comes out."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, steps: Lockstep, *inputs: Any) -> tuple[Any, ...]:
        with torch.enable_grad():
            steps.forward()
        ctx.steps, ctx.inputs = steps, len(inputs)
        ctx.set_materialize_grads(False)
        exact, low = steps.exact, steps.low
        assert exact.tape is not None
        assert low.tape is not None
        ctx.keys = [
            (exact.tape.key_of(a), low.tape.key_of(b))
            for a, b in zip(exact.outputs, low.outputs, strict=True)
        ]
        results = tuple(v.detach() if isinstance(v, Tensor) else v for v in exact.outputs)
        constant = [v for v, (key, _) in zip(results, ctx.keys, strict=True) if key is None]
        ctx.mark_non_differentiable(*(v for v in constant if isinstance(v, Tensor)))
        exact.outputs = low.outputs = ()
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        true: dict[Key, Tensor] = {}
        found: dict[Key, Tensor] = {}
        for (exact_key, low_key), gradient in zip(ctx.keys, gradients, strict=True):
            for key, sums in ((exact_key, true), (low_key, found)):
                if gradient is not None and key is not None:
                    sums[key] = sums[key] + gradient if key in sums else gradient
        ended = ctx.steps.backward(true, found)
        names = [n.name for n in ctx.steps.exact.graph_module.graph.find_nodes(op="placeholder")]
        return None, None, *(ended.get(Key(name, 0)) for name in names)


def _row(measured: Measured, graph: int, low: torch.dtype) -> ComparedNode:
    node, exact, own = measured.node, measured.exact, measured.own
    stack = module_stack(node)
    return ComparedNode(
        node=node.name,
        label=view.label_of(node),
        direction="backward" if measured.is_gradient else "forward",
        kind=view.kind_of(node),
        op=view.op_name(node),
        module=stack[-1] if stack else "",
        line=view.short_line(line) if (line := view.user_line(node)) else "",
        dtype=view.dtype_of(node),
        shape=view.shape_of(node),
        graph=graph,
        own=None if own is None else own.error,
        accumulated=measured.accumulated.error,
        largest=exact.peak,
        headroom=exact.peak / torch.finfo(low).max,
        zeroed=0.0 if own is None else own.zeroed_share,
        own_nonfinite=0 if own is None else own.nonfinite,
        nonfinite=measured.accumulated.nonfinite,
        exponents=dict(exact.exponents),
    )
