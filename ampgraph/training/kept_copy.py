"""`kept_copy`: a copy that a compiler's backward reads from memory."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("ampgraph::kept_copy", mutates_args=())
def _kept_copy(tensor: Tensor) -> Tensor:
    return tensor.clone()


@_kept_copy.register_fake
def _(tensor: Tensor) -> Tensor:
    return tensor.clone()


def _backward(ctx: object, grad: Tensor) -> Tensor:
    return grad


_kept_copy.register_autograd(_backward)

kept_copy = torch.ops.ampgraph.kept_copy.default
"""A copy that partitioners do not compute again: they know no op of a library's own."""
