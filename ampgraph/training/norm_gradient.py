"""The gradient of layer norm and RMS norm from their normalized values, which are saved in a low dtype.

The gradient of a norm needs three things: the normalized values, 1/deviation of each row, and the weight. A
framework saves the float32 input and normalizes it again. The normalized values have mean square 1, so they
fit any low dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .._compat import never_compiled


class NormGradient(Function):
    """Returns the result of a norm that ran without gradients, and gives its inputs their gradients.

    The low values and 1/deviation are results too: a second derivative reaches the input through them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        result: Tensor,
        normalized: Tensor,
        inverse: Tensor,
        dims: int,
        is_centered: bool,
        low_dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:
        low, inverse = normalized.to(low_dtype, copy=True), inverse.detach()
        ctx.dims, ctx.is_centered = dims, is_centered
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(weight, low, inverse)
        return result.detach(), low, inverse

    @staticmethod
    @never_compiled
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        weight, normalized, inverse = ctx.saved_tensors
        by_x, by_weight, by_bias = ctx.needs_input_grad[:3]
        grad, dims = grads[0], tuple(range(-ctx.dims, 0))
        grad_x = _grad_of_input(grads, weight, normalized, inverse, dims, ctx.is_centered) if by_x else None
        grad_weight = grad_bias = None
        if grad is not None:
            # The product of float32 and low is float32. A cast here would let compilers keep float32 values.
            grad_weight = (grad * normalized).sum_to_size(weight.shape) if by_weight else None
            grad_bias = grad.sum_to_size(grad.shape[-ctx.dims :]) if by_bias else None
        return grad_x, grad_weight, grad_bias, None, None, None, None, None, None


def _grad_of_input(
    grads: tuple[Tensor | None, ...],
    weight: Tensor | None,
    normalized: Tensor,
    inverse: Tensor,
    dims: tuple[int, ...],
    is_centered: bool,
) -> Tensor | None:
    grad, of_normalized, of_inverse = grads
    scaled = grad if grad is None or weight is None else grad * weight
    if of_normalized is not None:
        scaled = of_normalized if scaled is None else scaled + of_normalized
    found = None
    if scaled is not None:
        found = scaled - normalized * (scaled * normalized).mean(dims, keepdim=True)
        if is_centered:
            found = found - scaled.mean(dims, keepdim=True)
        found = found * inverse
    if of_inverse is not None:
        count = normalized[(0,) * (normalized.dim() - len(dims))].numel()
        change = normalized * (of_inverse * inverse * inverse / count)
        found = -change if found is None else found - change
    return found


def norm_gradient(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    result: Tensor,
    normalized: Tensor,
    inverse: Tensor,
    dims: int,
    is_centered: bool,
    low_dtype: torch.dtype,
) -> Tensor:
    """The node at a norm whose backward reads low values; see `NormGradient`.

    Args:
        x: The input of the norm.
        weight: The factor, if there is one.
        bias: The summand, if there is one.
        result: The result, computed without gradients.
        normalized: The normalized values, in float32.
        inverse: 1/deviation, with the normalized dimensions kept.
        dims: The number of trailing dimensions that are normalized.
        is_centered: Whether the mean is subtracted.
        low_dtype: The dtype of the saved values.
    """
    return NormGradient.apply(x, weight, bias, result, normalized, inverse, dims, is_centered, low_dtype)[0]
