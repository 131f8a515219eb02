"""Where a converted graph reads low copies of parameters (`ampgraph.runtime.shadow_weights`).

A plain ``autograd.Function`` call and a node of the graph: the gradients of the copies go to the parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .._compat import (
    FakeTensor,
    is_batched,
    is_compiling,
    native_apply,
    never_compiled,
    returns_no_argument,
)
from .compiler_traces import is_for_a_compiler
from .new_gradients import note_new

# A step as one graph is traced with fake tensors.
_PLAIN = (Tensor, FakeTensor)
_LOW = (torch.float16, torch.bfloat16)


class ReadCopies(Function):
    """Returns the low copies of parameters; each gradient, in its parameter's dtype, is the parameter's.

    Args of ``forward``: the copies, then each parameter.
    """

    @staticmethod
    @returns_no_argument
    def forward(ctx: Any, copies: tuple[Tensor, ...], *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.fuses = is_for_a_compiler()
        views = tuple([t.detach() for t in copies])
        needed = ctx.needs_input_grad[1:]
        if not all(needed):
            ctx.mark_non_differentiable(*(v for v, n in zip(views, needed, strict=True) if not n))
        return views

    @staticmethod
    @never_compiled
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if not ctx.fuses and any(g is not None and g.is_cuda for g in grads):
            return None, *_widened(grads)
        # Autograd casts a gradient to the dtype of its input, faster than a call of `to` for each.
        return None, *grads


def _widened(grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Returns gradients with the plain ones among them in float32.

    CUDA's kernel for a list of copies moves the same bytes as casts in half the time (H200, torch 2.11), and
    is one for many gradients.
    """
    if torch.is_grad_enabled() or any(g is not None and is_batched(g) for g in grads):
        return [*grads]
    low = [g for g in grads if g is not None and _is_plain_low(g)]
    wide = [note_new(torch.empty_like(g, dtype=torch.float32)) for g in low]
    if low:
        torch._foreach_copy_(wide, low)
    made = iter(wide)
    return [next(made) if g is not None and _is_plain_low(g) else g for g in grads]


def _is_plain_low(grad: Tensor) -> bool:
    return type(grad) in _PLAIN and grad.dtype in _LOW and grad.layout == torch.strided


def shadow_weights(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The node at parameters with low copies, which come first; see `ReadCopies`."""
    count = len(tensors) // 2
    copies, parameters = tensors[:count], tensors[count:]
    # Without gradients Dynamo traces `forward`. It counts its arguments, and leaves out the context for two.
    if is_compiling() and not any(p.requires_grad for p in parameters):
        return tuple([t.detach() for t in copies])
    return ReadCopies.apply(copies, *parameters)


_read_copies = native_apply(ReadCopies)


def shadow_weights_eagerly(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Does the same as `shadow_weights` in less time, in code that no tracer sees."""
    count = len(tensors) // 2
    return _read_copies(tensors[:count], *tensors[count:])
