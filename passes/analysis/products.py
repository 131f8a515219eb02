"""The number of products that one element of a matrix product sums."""

from __future__ import annotations

from math import prod

from torch.fx import Node

from ampgraph._compat import size_hint
from ampgraph.ops import einsum, kernels

from .arguments import argument


def terms(node: Node) -> int | None:
    """Returns the number of products; None for an op that is not a matrix product."""
    if (summed := kernels.contracted(node.target)) is not None:  # type: ignore[arg-type]
        sizes: list[int] = [_size(node.args[at], dim) for at, dim in summed]  # type: ignore[arg-type]
        return prod(sizes)
    name = kernels.packet_name(node.target).removeprefix("aten.")  # type: ignore[arg-type]
    if name == "einsum":
        shapes = [[size_hint(size) for size in n.meta["val"].shape] for n in argument(node, "tensors")]
        return prod(max(sizes) for sizes in einsum.summed(argument(node, "equation"), shapes).values())
    if name == "tensordot":
        return prod(_size(argument(node, "self"), dim) for dim in argument(node, "dims_self"))
    if name == "linalg_vecdot":
        dim = argument(node, "dim")
        return _size(argument(node, "x"), -1 if dim is None else dim)
    if name in ("linalg_multi_dot", "chain_matmul"):
        factors = argument(node, "tensors") or argument(node, "matrices")
        return prod(_size(factor, -1) for factor in factors[:-1])
    return None


def _size(tensor: Node, dim: int) -> int:
    shape = tensor.meta["val"].shape
    return size_hint(shape[dim]) if shape else 1
