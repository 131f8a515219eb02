"""The boundary of a converted graph: where gradients are scaled on entry, and unscaled and checked on exit.

A parameter with a low copy (`ampgraph.shadow`) is read through the boundary too.

Both are plain ``autograd.Function`` calls that stand as nodes in the graph, so the same arithmetic runs
in eager and is traced by AOTAutograd into the backward graph of every backend: ``tangent * scale`` at
each output, ``gradient * inverse`` and a finite check at each parameter and differentiable input.

What is not finite travels as the gradient of the *probe*, a vector with one element per parameter (and one
for the inputs): autograd itself adds it up over micro-batches, sub-graphs and repeated uses, without
any write that a compiler or the version counter could object to. `ampgraph.scaler.LossScaler` reads it.

The scale is read in the forward and never written in place, so a backward always multiplies and divides
by the same number, whatever happens to the scaler in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


class ScaleGradients(Function):
    """Identity whose backward multiplies by the scale; on the graph's outputs."""

    @staticmethod
    def forward(ctx: Any, scale: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.scale = scale
        ctx.set_materialize_grads(False)
        views = tuple(t.detach() for t in outputs)  # a view would refuse in-place writes such as loss /= 4
        needed = ctx.needs_input_grad[1:]
        ctx.mark_non_differentiable(*(v for v, n in zip(views, needed, strict=True) if not n))
        return views

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *(None if g is None else next(iter(_times([g], ctx.scale))) for g in grads)


class UnscaleGradients(Function):
    """Identity whose backward multiplies by 1/scale and reports non-finite gradients to the probe.

    Args of ``forward``: the probe, 1/scale, the slot of each tensor in the probe, the tensors.
    """

    @staticmethod
    def forward(
        ctx: Any, probe: Tensor, inverse: Tensor, slots: tuple[int, ...], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.inverse, ctx.slots, ctx.size = inverse, slots, probe.shape[0]
        ctx.set_materialize_grads(False)
        views = tuple(t.detach() for t in tensors)
        needed = ctx.needs_input_grad[3:]
        ctx.mark_non_differentiable(*(v for v, n in zip(views, needed, strict=True) if not n))
        return views

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        given = [g for g in grads if g is not None]
        if not given:
            return None, None, None, *grads
        unscaled = _times(given, ctx.inverse)
        slots = [s for s, g in zip(ctx.slots, grads, strict=True) if g is not None]
        results = iter(unscaled)
        flags = non_finite(unscaled, slots, ctx.size)
        return flags, None, None, *(None if g is None else next(results) for g in grads)


class _Times(Function):
    """Multiplies by a factor, and passes its own gradients on as they are.

    For second derivatives: what flows back through a backward crosses the boundary once more, and is scaled
    and unscaled there. To count the factor here again would leave it 1/scale too small.
    """

    @staticmethod
    def forward(ctx: Any, factor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple((t * factor).to(t.dtype) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *grads


def _times(tensors: list[Tensor], factor: Tensor) -> Sequence[Tensor]:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # backward(create_graph=True)
        return _Times.apply(factor, *tensors)
    if len(tensors) == 1:
        return [(tensors[0] * factor).to(tensors[0].dtype)]
    return torch._foreach_mul(tensors, factor)


def non_finite(tensors: Sequence[Tensor], slots: Sequence[int], size: int) -> Tensor:
    """Returns a float32 vector of ``size`` elements, 1 in the slots whose tensors are not all finite."""
    by_slot: dict[int, list[Tensor]] = {}
    values = [(t._values() if t.is_sparse else t).detach() for t in tensors]
    peaks = torch._foreach_norm(values, float("inf"))
    for slot, peak in zip(slots, peaks, strict=True):
        by_slot.setdefault(slot, []).append((~peak.isfinite()).to(torch.float32))
    pieces, end = [], 0
    for slot in sorted(by_slot):
        flags = by_slot[slot]
        if slot > end:
            pieces.append(flags[0].new_zeros(slot - end))
        pieces.append(torch.stack(flags).amax(0, keepdim=True) if len(flags) > 1 else flags[0].reshape(1))
        end = slot + 1
    if end < size:
        pieces.append(pieces[0].new_zeros(size - end))
    return torch.cat(pieces)


class ShadowWeight(Function):
    """Returns a parameter's low copy; its gradient, in the parameter's dtype, is the parameter's."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, shadow: Tensor) -> Tensor:
        ctx.dtype = parameter.dtype
        return shadow.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None


def shadow_weight(parameter: Tensor, shadow: Tensor) -> Tensor:
    """The node at a parameter with a low copy; see `ShadowWeight`."""
    return ShadowWeight.apply(parameter, shadow)


def scale_gradients(scale: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
    """The node at the graph's outputs; see `ScaleGradients`."""
    return ScaleGradients.apply(scale, *outputs)


def unscale_gradients(
    probe: Tensor, inverse: Tensor, slots: tuple[int, ...], *tensors: Tensor
) -> tuple[Tensor, ...]:
    """The node at the graph's parameters and differentiable inputs; see `UnscaleGradients`."""
    return UnscaleGradients.apply(probe, inverse, slots, *tensors)
