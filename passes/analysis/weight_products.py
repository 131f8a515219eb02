"""Matrix products of rows and a weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from .arguments import argument

aten = torch.ops.aten

# By op: the names of its rows, weight and bias, and whether it reads the weight transposed.
_PRODUCTS = {
    aten.linear.default: ("input", "weight", "bias", True),
    aten.matmul.default: ("self", "other", None, False),
    aten.mm.default: ("self", "mat2", None, False),
    aten.addmm.default: ("mat1", "mat2", "self", False),
}


@dataclass(frozen=True)
class WeightProduct:
    """One product, ``rows @ weight + bias``.

    Attributes:
        output: The node that returns the result, of shape (..., n).
        rows: The left factor, of shape (..., k).
        weight: The right factor, of shape (k, n), or (n, k) if it is read transposed.
        bias: The summand, of shape (n,), if there is one.
        is_transposed: Whether the op reads the weight transposed.
    """

    output: Node
    rows: Node
    weight: Node
    bias: Node | None
    is_transposed: bool

    @property
    def size(self) -> int:
        """Returns k."""
        return self.weight.meta["val"].shape[1 if self.is_transposed else 0]


def weight_product_at(node: Node) -> WeightProduct | None:
    """Returns the product that a node is, or None; nothing else is known of the weight than its shape."""
    if node.target not in _PRODUCTS:
        return None
    rows_name, weight_name, bias_name, is_transposed = _PRODUCTS[node.target]
    rows, weight = argument(node, rows_name), argument(node, weight_name)
    bias = argument(node, bias_name) if bias_name else None
    if rows.meta["val"].dim() < 2 or weight.meta["val"].dim() != 2:
        return None
    if bias is not None and bias.meta["val"].dim() != 1:
        return None
    if any(argument(node, name) not in (None, 1) for name in ("beta", "alpha")):
        return None
    given = [rows, weight, *([] if bias is None else [bias])]
    if len({*given}) < len(given):  # compilers take each input of an autograd function once
        return None
    return WeightProduct(node, rows, weight, bias, is_transposed)
