"""Predicates that an op list may put on a node: named functions that return an objection or None."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

import torch

from .._compat import OpOverload, size_hint
from .einsum import contracts
from .kernels import argument_names
from .low_range import misfit

Predicate: TypeAlias = Callable[[torch.fx.Node, torch.dtype], "str | None"]


def scalars_fit(node: torch.fx.Node, low_dtype: torch.dtype) -> str | None:
    """Objects if a Python scalar operand overflows in the low dtype or is below its smallest normal number.

    ``masked_fill(mask, -1e9)`` overflows in float16.
    """
    reasons = (misfit(value, low_dtype) for value in _scalar_operands(node))
    return next(filter(None, reasons), None)


def overwrites(node: torch.fx.Node, low_dtype: torch.dtype) -> str | None:
    """Objects if the op adds into its target (``accumulate=True``) instead of overwriting it."""
    bound = _bind(node)
    return "adds into its result, one rounding per term" if bound.get("accumulate") else None


def has_weight_gradient(node: torch.fx.Node, low_dtype: torch.dtype) -> str | None:
    """Objects to 3-D convolutions in bfloat16 on a CPU, where torch gets the gradient of their weight wrong.

    Kernels of 5x5x5 and larger give NaN or memory that nothing wrote (torch 2.11 and 2.13, oneDNN).
    """
    weight = _bind(node).get("weight")
    value = weight.meta.get("val") if isinstance(weight, torch.fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.dim() != 5 or value.device.type != "cpu":
        return None
    if low_dtype != torch.bfloat16:
        return None
    return "the gradient of a 3-D weight is wrong in bfloat16 on a CPU"


def sums_products(node: torch.fx.Node, low_dtype: torch.dtype) -> str | None:
    """Objects to an ``einsum`` or a ``tensordot`` that sums over no dimension that its operands share.

    Such a one is arithmetic element by element (an outer product, a scaling) or a view, and no GEMM.
    """
    bound = _bind(node)
    if "equation" not in bound:
        return None if bound.get("dims_self") else "an outer product: arithmetic element by element"
    values = [operand.meta.get("val") for operand in bound["tensors"]]  # type: ignore[attr-defined]
    if not all(isinstance(value, torch.Tensor) for value in values):
        return None
    shapes = [[size_hint(size, fallback=2) for size in value.shape] for value in values]
    if contracts(str(bound["equation"]), shapes):
        return None
    return "sums over no dimension that its operands share: arithmetic element by element"


def _scalar_operands(node: torch.fx.Node) -> list[float]:
    # A small integer that steers the op (dim) always fits, so it needs no exception.
    values = _bind(node).values()
    return [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]


def _bind(node: torch.fx.Node) -> dict[str, object]:
    """Returns the node's arguments by schema name."""
    assert isinstance(node.target, OpOverload)
    return {**dict(zip(argument_names(node.target), node.args, strict=False)), **node.kwargs}


PREDICATES: Mapping[str, Predicate] = MappingProxyType(
    {
        function.__name__: function
        for function in (has_weight_gradient, overwrites, scalars_fit, sums_products)
    }
)
