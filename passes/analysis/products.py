"""How many products one element of a matrix product adds up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod

from torch.fx import Node

from ampgraph._compat import size_hint
from ampgraph.ops import kernels

from .arguments import argument

_ELLIPSIS = "..."


def terms(node: Node) -> int | None:
    """Returns the number of products; None for an op that is no matrix product."""
    if (summed := kernels.contracted(node.target)) is not None:  # type: ignore[arg-type]
        sizes: list[int] = [_size(node.args[at], dim) for at, dim in summed]  # type: ignore[arg-type]
        return prod(sizes)
    name = kernels.packet_name(node.target).removeprefix("aten.")  # type: ignore[arg-type]
    if name == "einsum":
        return _of_equation(argument(node, "equation"), argument(node, "tensors"))
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


def _of_equation(equation: str, operands: Sequence[Node]) -> int:
    """Returns the product of the sizes of all dimensions that the result of an ``einsum`` lacks.

    Without ``->`` the result has what stands before it only once, and the dimensions of ``...``.
    """
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    if not arrow:
        count = Counter(inputs.replace(",", "").replace(".", ""))
        output = _ELLIPSIS + "".join(letter for letter, times in count.items() if times == 1)
    sizes: dict[str, int] = {}
    for subscripts, operand in zip(inputs.split(","), operands, strict=True):
        shape = [size_hint(size) for size in operand.meta["val"].shape]
        for name, size in zip(_dimensions(subscripts, len(shape)), shape, strict=True):
            sizes[name] = max(size, sizes.get(name, 1))  # a size of 1 is broadcast
    return prod(size for name, size in sizes.items() if name.rstrip("0123456789") not in output)


def _dimensions(subscripts: str, rank: int) -> list[str]:
    """Returns a name for each dimension of an operand; those of ``...`` are counted from the last one."""
    before, ellipsis, after = subscripts.partition(_ELLIPSIS)
    covered = rank - len(before) - len(after) if ellipsis else 0
    return [*before, *(f"{_ELLIPSIS}{at}" for at in range(covered, 0, -1)), *after]
