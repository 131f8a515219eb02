"""The gradient of softmax from its probabilities, which are saved in a low dtype.

The gradient of a softmax needs the probabilities alone. A framework saves them in float32, and a compiler
saves the scores and computes the probabilities again. The product that reads them low saves low ones anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .._compat import never_compiled


class SoftmaxGradient(Function):
    """Returns the result of a softmax that ran without gradients, and gives its input the gradient.

    The low probabilities are a result too: a second derivative reaches the input through them.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, result: Tensor, dim: int, low_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        low = result.to(low_dtype, copy=True)
        ctx.dim, ctx.dtype = dim, x.dtype
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(low)
        return result.detach(), low

    @staticmethod
    @never_compiled
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (low,) = ctx.saved_tensors
        given = [grad for grad in grads if grad is not None]
        if not given:
            return None, None, None, None
        grad = sum(given[1:], given[0])
        # The product of float32 and low is float32. A cast here would let compilers keep float32 values.
        mean = (grad * low).sum(ctx.dim, keepdim=True)
        # Rounded probabilities do not sum to 1. Without the quotient equal gradients would not cancel.
        mean = mean / low.sum(ctx.dim, keepdim=True, dtype=mean.dtype)
        return (low * (grad - mean)).to(ctx.dtype), None, None, None


def softmax_gradient(x: Tensor, result: Tensor, dim: int, low_dtype: torch.dtype) -> Tensor:
    """The node at a softmax whose backward reads low probabilities; see `SoftmaxGradient`.

    Args:
        x: The input of the softmax.
        result: The probabilities in float32, computed without gradients.
        dim: The dimension over which they sum to 1.
        low_dtype: The dtype of the saved probabilities.
    """
    return SoftmaxGradient.apply(x, result, dim, low_dtype)[0]
