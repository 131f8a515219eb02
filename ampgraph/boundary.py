"""The boundary of a converted graph: where gradients are scaled on entry, and unscaled and checked on exit.

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
        views = tuple(t.view_as(t) for t in outputs)
        ctx.mark_non_differentiable(*(v for v, needed in zip(views, ctx.needs_input_grad[1:], strict=True) if not needed))
        return views

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *(None if g is None else (g * ctx.scale).to(g.dtype) for g in grads)


class UnscaleGradients(Function):
    """Identity whose backward multiplies by 1/scale and reports non-finite gradients to the probe.

    Args of ``forward``: the probe, 1/scale, the slot of each tensor in the probe, the tensors.
    """

    @staticmethod
    def forward(ctx: Any, probe: Tensor, inverse: Tensor, slots: tuple[int, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.inverse, ctx.slots, ctx.size = inverse, slots, probe.shape[0]
        ctx.set_materialize_grads(False)
        views = tuple(t.view_as(t) for t in tensors)
        ctx.mark_non_differentiable(*(v for v, needed in zip(views, ctx.needs_input_grad[3:], strict=True) if not needed))
        return views

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        given = [g for g in grads if g is not None]
        if not given:
            return None, None, None, *grads
        unscaled = torch._foreach_mul(given, ctx.inverse)
        peaks = iter(torch._foreach_norm(unscaled, float("inf")))
        by_slot = {s: next(peaks) for s, g in zip(ctx.slots, grads, strict=True) if g is not None}
        nothing = ctx.inverse.new_zeros(())
        flags = torch.stack([by_slot.get(s, nothing).to(nothing.dtype) for s in range(ctx.size)])
        results = iter(unscaled)
        return (~flags.isfinite()).to(nothing.dtype), None, None, *(None if g is None else next(results) for g in grads)


def scale_gradients(scale: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
    """The node at the graph's outputs; see `ScaleGradients`."""
    return ScaleGradients.apply(scale, *outputs)


def unscale_gradients(probe: Tensor, inverse: Tensor, slots: tuple[int, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
    """The node at the graph's parameters and differentiable inputs; see `UnscaleGradients`."""
    return UnscaleGradients.apply(probe, inverse, slots, *tensors)
