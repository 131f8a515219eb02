"""The dimensions that the equation of an ``einsum`` sums over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

_ELLIPSIS = "..."


def summed(equation: str, shapes: Sequence[Sequence[int]]) -> dict[str, list[int]]:
    """Returns the summed dimensions, each with its size in every operand that has it.

    Without ``->`` the result has the dimensions that occur once, and the dimensions of ``...``.
    """
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    if not arrow:
        count = Counter(inputs.replace(",", "").replace(".", ""))
        output = _ELLIPSIS + "".join(letter for letter, times in count.items() if times == 1)
    sizes: dict[str, list[int]] = {}
    for subscripts, shape in zip(inputs.split(","), shapes, strict=True):
        dimensions = zip(_dimensions(subscripts, len(shape)), shape, strict=True)
        for name, size in dict(dimensions).items():  # a diagonal has its dimension twice
            sizes.setdefault(name, []).append(size)
    return {name: found for name, found in sizes.items() if name.rstrip("0123456789") not in output}


def contracts(equation: str, shapes: Sequence[Sequence[int]]) -> bool:
    """Whether the equation is a matrix product: it sums over a dimension that two operands share.

    torch computes all others with ``mul``, ``sum`` and views. A size of 1 is broadcast, not summed over.
    """
    return any(sum(size != 1 for size in sizes) > 1 for sizes in summed(equation, shapes).values())


def _dimensions(subscripts: str, rank: int) -> list[str]:
    """Returns a name for each dimension of an operand; those of ``...`` are counted from the last one."""
    before, ellipsis, after = subscripts.partition(_ELLIPSIS)
    covered = rank - len(before) - len(after) if ellipsis else 0
    return [*before, *(f"{_ELLIPSIS}{at}" for at in range(covered, 0, -1)), *after]
