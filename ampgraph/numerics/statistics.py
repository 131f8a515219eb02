"""Statistics of tensors in blocks: exact to float64, with little memory for tensors of any size."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# Elements that are converted at a time; about 3 MB of temporaries.
BLOCK = 1 << 16
# Subnormal float32 values count with this exponent.
_SUBNORMAL = -127
_EXPONENT_BITS = {torch.float32: (torch.int32, 23, 0xFF, 127), torch.float64: (torch.int64, 52, 0x7FF, 1023)}


@dataclass
class ValueStatistics:
    """Running statistics of the values of one tensor over any number of batches.

    Shares are of all elements but those that are zero; whether an element fits is decided by rounding it.

    Attributes:
        low_dtype: The low dtype that ``zeroed`` and ``beyond`` are about.
        elements: Elements seen.
        zeros: Those that are zero.
        nonfinite: Those that are infinite or NaN.
        peak: The largest finite magnitude.
        smallest: The smallest magnitude that is not zero; infinite if all are zero.
        zeroed: How many nonzero elements rounding to the low dtype makes zero.
        beyond: How many finite elements rounding to the low dtype makes infinite.
        exponents: How many finite nonzero elements have the exponent e: ``2**e <= abs(x) < 2**(e + 1)``.
    """

    low_dtype: torch.dtype
    elements: int = 0
    zeros: int = 0
    nonfinite: int = 0
    peak: float = 0.0
    smallest: float = math.inf
    zeroed: int = 0
    beyond: int = 0
    exponents: Counter[int] = field(default_factory=Counter)

    @property
    def zeroed_share(self) -> float:
        """Share of the nonzero elements that the low dtype would make zero."""
        return _share(self.zeroed, self.elements - self.zeros)

    @property
    def beyond_share(self) -> float:
        """Share of the nonzero elements that are finite and beyond the low dtype's maximum."""
        return _share(self.beyond, self.elements - self.zeros)

    def add(self, tensor: Tensor) -> None:
        """Counts the elements of a floating-point tensor."""
        for (block,) in blocks(tensor.detach()):
            self._add_block(block)

    def _add_block(self, block: Tensor) -> None:
        size = block.abs()
        finite, zero = size.isfinite(), size == 0
        self.elements += block.numel()
        self.zeros += int(zero.sum())
        self.nonfinite += block.numel() - int(finite.sum())
        inner = size[finite & ~zero]
        if not inner.numel():
            return
        rounded = inner.to(self.low_dtype)
        self.peak = max(self.peak, float(inner.max()))
        self.smallest = min(self.smallest, float(inner.min()))
        self.zeroed += int((rounded == 0).sum())
        self.beyond += int(rounded.isinf().sum())
        self.exponents.update(exponents_of(inner))

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values; exponents in order."""
        names = ("elements", "zeros", "nonfinite", "peak", "zeroed", "beyond")
        smallest = None if math.isinf(self.smallest) else self.smallest
        exponents = {str(e): count for e, count in sorted(self.exponents.items())}
        return {name: getattr(self, name) for name in names} | {"smallest": smallest, "exponents": exponents}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], low_dtype: torch.dtype) -> ValueStatistics:
        """Reads what `to_dict` returned.

        Raises:
            ValueError: The numbers contradict each other; nothing can have been counted like this.
        """
        names = ("elements", "zeros", "nonfinite", "peak", "zeroed", "beyond")
        smallest = math.inf if data["smallest"] is None else float(data["smallest"])
        exponents = Counter({int(e): count for e, count in data["exponents"].items()})
        row = cls(low_dtype, smallest=smallest, exponents=exponents, **{name: data[name] for name in names})
        row._check()
        return row

    def _check(self) -> None:
        counts = (
            self.elements,
            self.zeros,
            self.nonfinite,
            self.zeroed,
            self.beyond,
            *self.exponents.values(),
        )
        if any(type(count) is not int or count < 0 for count in counts):
            raise ValueError(f"expected counts of elements, got {counts}")
        if type(self.peak) not in (int, float) or not 0 <= self.peak < math.inf:
            raise ValueError(f"peak={self.peak!r}: expected a finite number that is not negative")
        inner = self.elements - self.zeros - self.nonfinite
        if self.exponents.total() != inner or max(self.zeroed, self.beyond) > inner:
            raise ValueError(f"the counts of {self.elements} elements do not add up")
        exponent = math.frexp(self.peak)[1] - 1
        greatest = max(self.exponents, default=exponent)
        fits = greatest == exponent or greatest <= _SUBNORMAL
        if inner and not (fits and 0 < self.smallest <= self.peak):
            raise ValueError(f"peak={self.peak!r} and smallest={self.smallest!r} contradict the exponents")
        if not inner and (self.peak or self.smallest != math.inf):
            raise ValueError(f"peak={self.peak!r} and smallest={self.smallest!r} without finite elements")


@dataclass
class Deviation:
    """How far a tensor is from an exact one; several tensors of one node add up.

    Attributes:
        difference: Sum of the squares of the differences, over elements that are finite in both.
        norm: Sum of the squares of the exact elements, where they are finite.
        zeroed: Elements that are zero and are not in the exact tensor.
        nonzero: Elements of the exact tensor that are finite and not zero.
        nonfinite: Elements that are infinite or NaN and finite in the exact tensor.
        other_shape: Whether the shapes differ.
    """

    difference: float = 0.0
    norm: float = 0.0
    zeroed: int = 0
    nonzero: int = 0
    nonfinite: int = 0
    other_shape: bool = False

    @property
    def error(self) -> float:
        """2-norm of the difference over that of the exact values; infinite where something is not finite."""
        if self.nonfinite or self.other_shape:
            return math.inf
        if self.norm == 0:
            return math.inf if self.difference else 0.0
        return math.sqrt(self.difference / self.norm)

    @property
    def zeroed_share(self) -> float:
        """Share of the exact tensor's nonzero elements that are zero here."""
        return _share(self.zeroed, self.nonzero)

    def add(self, found: Tensor, exact: Tensor, factor: float = 1.0) -> None:
        """Compares ``found * factor`` with ``exact``."""
        if found.shape != exact.shape:
            self.other_shape = True
            return
        for ours, theirs in blocks(found.detach(), exact.detach()):
            self._add_block(ours, theirs, factor)

    def _add_block(self, found: Tensor, exact: Tensor, factor: float) -> None:
        found, exact = found.double(), exact.double()
        finite = exact.isfinite()
        both = finite & found.isfinite()
        nonzero = finite & (exact != 0)
        self.nonfinite += int((finite & ~both).sum())
        self.nonzero += int(nonzero.sum())
        self.zeroed += int((nonzero & (found == 0)).sum())
        difference = torch.where(both, found * factor - exact, 0.0)
        self.difference += float(difference.square_().sum())
        self.norm += float(torch.where(finite, exact, 0.0).square_().sum())


def blocks(*tensors: Tensor, size: int = BLOCK) -> Iterator[tuple[Tensor, ...]]:
    """Yields pieces of tensors of one shape, side by side; nothing is copied, expanded tensors included."""
    first = tensors[0]
    if first.layout != torch.strided:
        tensors = tuple(t.to_dense() for t in tensors)
        first = tensors[0]
    if first.numel() == 0:
        return
    if first.numel() <= size:
        yield tensors
        return
    dim = next(d for d, length in enumerate(first.shape) if length > 1)
    step = max(1, size * first.shape[dim] // first.numel())
    for pieces in zip(*(t.split(step, dim) for t in tensors), strict=True):
        yield from blocks(*pieces, size=size)


def exponents_of(values: Tensor) -> dict[int, int]:
    """Counts the exponents of positive finite values; subnormal ones count with the least exponent less 1."""
    values = values if values.dtype in _EXPONENT_BITS else values.float()
    integer, shift, mask, bias = _EXPONENT_BITS[values.dtype]
    found = (values.contiguous().view(integer) >> shift) & mask
    counts = torch.bincount(found.flatten()).tolist()
    return {exponent - bias: count for exponent, count in enumerate(counts) if count}


def _share(count: int, whole: int) -> float:
    return count / whole if whole else 0.0
