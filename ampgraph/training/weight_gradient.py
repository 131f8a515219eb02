"""The gradient of a weight in float32, straight from the kernel of the matrix product that makes it.

Under a cast, the kernel rounds the gradient to the low dtype, and another kernel casts it to float32. The
product sums in float32 anyway, and CUDA's kernels can write the sums as they are.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .._compat import is_batched, is_compiling, never_compiled
from .local_switch import LocalSwitch
from .new_gradients import note_new

_low = LocalSwitch()


def low_weight_gradients() -> AbstractContextManager[None]:
    """Keeps the gradients of weights low, for a step whose update fuses with the casts to float32.

    It holds for each forward inside and for its backward, which autograd runs in another thread for CUDA.
    """
    return _low.on()


class WeightGradient(Function):
    """Returns a matrix product that ran without gradients, and gives its factors their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        result: Tensor,
        flat: Tensor,
        low: Tensor,
        is_transposed: bool,
    ) -> Tensor:
        ctx.shape, ctx.is_transposed = rows.shape, is_transposed
        ctx.is_low = _low.is_on
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(rows, weight, flat, low)
        return result.detach().reshape(*rows.shape[:-1], result.shape[-1])

    @staticmethod
    @never_compiled
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None, None, None, None, None
        rows, weight, flat, low = ctx.saved_tensors
        by_rows, by_weight, by_bias = ctx.needs_input_grad[:3]
        grad = grad.reshape(-1, grad.shape[-1])
        is_low = ctx.is_low
        if torch.is_grad_enabled() and not is_compiling():
            # A second derivative reaches both factors, and torch has none of a wide product.
            flat, low, is_low = rows.reshape(flat.shape), weight.to(low.dtype), True
        if not is_compiling() and is_batched(grad):  # vmap has no rule for a wide product
            is_low = True
        grad_rows = grad_weight = None
        if by_rows:
            grad_rows = torch.mm(grad, low if ctx.is_transposed else low.t()).reshape(ctx.shape)
        if by_weight:
            left, right = (grad, flat) if ctx.is_transposed else (flat, grad)
            left = left.t()
            if is_low:
                grad_weight = torch.mm(left, right)
            else:
                grad_weight = note_new(torch.mm(left, right, out_dtype=torch.float32))
        return grad_rows, grad_weight, grad.sum(0) if by_bias else None, None, None, None, None


def weight_gradient(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    result: Tensor,
    flat: Tensor,
    low: Tensor,
    is_transposed: bool,
) -> Tensor:
    """The node at a product whose weight gets a float32 gradient; see `WeightGradient`.

    Args:
        rows: The left factor, of shape (..., k), in the low dtype.
        weight: The float32 weight, of shape (k, n), or (n, k) if it is read transposed.
        bias: The summand, of shape (n,), in the low dtype, if there is one.
        result: The product of shape (m, n), computed without gradients.
        flat: The rows that it read, of shape (m, k), without gradients.
        low: The low weight, without gradients.
        is_transposed: Whether the product reads the weight transposed, as ``linear`` does.

    Returns:
        The product of shape (..., n), in the low dtype.
    """
    return WeightGradient.apply(rows, weight, bias, result, flat, low, is_transposed)
