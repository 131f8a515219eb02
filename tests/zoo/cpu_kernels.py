"""What CUDA's kernels do and the CPU's do not: for telling a kernel's error from a plan's."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def layer_norm_sums_in_float32() -> Iterator[None]:
    """Gives ``layer_norm``'s backward on a CPU the float32 sums over rows that its CUDA kernel has.

    The CPU kernel adds the gradients of weight and bias up in the low dtype: at 3136 rows of bfloat16 the
    gradient of the bias is off by dozens of eps (torch 2.11 and 2.13).
    """
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it overrides
        library.impl("native_layer_norm_backward", _backward, "CPU", allow_override=True)
    try:
        yield
    finally:
        library._destroy()


def _backward(
    grad: Tensor,
    x: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    rows, inner = tuple(range(x.dim() - len(shape))), tuple(range(x.dim() - len(shape), x.dim()))
    grad32 = grad.float()
    normal = (x.float() - mean.float().view(_outer(x, rows))) * rstd.float().view(_outer(x, rows))
    through = grad32 if weight is None else grad32 * weight.float()
    centered = through - through.mean(inner, keepdim=True)
    grad_x = (centered - normal * (through * normal).mean(inner, keepdim=True)) * rstd.float().view(
        _outer(x, rows)
    )
    return (
        grad_x.to(x.dtype) if wanted[0] else None,
        (grad32 * normal).sum(rows).to(weight.dtype) if weight is not None and wanted[1] else None,
        grad32.sum(rows).to(bias.dtype) if bias is not None and wanted[2] else None,
    )


def _outer(x: Tensor, rows: Sequence[int]) -> list[int]:
    return [size if dim in rows else 1 for dim, size in enumerate(x.shape)]
