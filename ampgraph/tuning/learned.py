"""`Learned`: corrects the predicted squared errors of roundings by what trials measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import sqrt
from statistics import NormalDist

import torch

# Standard deviations of a prediction, as shares of it: of one charge, and of all charges together.
OF_ONE, OF_ALL = 0.5, 0.3
# The share that each measurement adds.
OWN = 0.05
# A corrected charge, and a corrected sum, is at least this share of what was predicted.
LEAST = 0.05
# Random worlds that are drawn.
WORLDS = 256


@dataclass
class Learned:
    """A Gaussian estimate of the charges: squared errors that roundings make, which add up.

    Each charge and a factor of all are uncertain. A trial measures the sum of some charges. So the estimate
    after trials is that of linear regression (kriging): charges that large trials share grow, others fall.

    Measured errors scatter around these sums. Two runs round alike up to the first charge in which they
    differ. From there on their values differ a little, so their rounding errors are independent.

    Args:
        squares: The predicted charges, in the order of execution.
        scatter: Standard deviation of a set's squared error, as a share of it: errors do not just add up.
    """

    squares: Sequence[float]
    scatter: float
    _trials: list[tuple[frozenset[int], float]] = field(default_factory=list)

    def add(self, charged: frozenset[int], error: float) -> None:
        """Takes a measurement.

        Args:
            charged: The charges that counted, by index.
            error: The error that was measured.
        """
        if self._sum(charged) > 0:
            self._trials.append((charged, error**2))
            self.__dict__.pop("_solved", None)

    def corrected(self) -> list[float]:
        """Returns the charges as trials correct them."""
        single = [frozenset([index]) for index in range(len(self.squares))]
        return [
            max(LEAST * square, square + self._shift(one))
            for square, one in zip(self.squares, single, strict=True)
        ]

    def chance(self, charged: frozenset[int], budget: float) -> float:
        """Returns how likely it is that the error of these charges is within the budget."""
        predicted = self._sum(charged)
        if predicted == 0:
            return 1.0
        near = self._near(charged)
        known = float(near @ torch.linalg.solve(self._solved[0], near)) if self._trials else 0.0
        spread = self._together(charged, charged) - known
        return NormalDist(self._middle(charged), sqrt(max(spread, 1e-12 * predicted**2))).cdf(budget**2)

    def met(self, sets: Sequence[frozenset[int]], budget: float) -> torch.Tensor:
        """Returns whether each set is within the budget, in random worlds that fit the trials.

        Args:
            sets: The charges that count in each set.
            budget: The allowed error.

        Returns:
            Booleans: (sets, worlds).
        """
        covariance = torch.stack([_column(self._together(one, other) for other in sets) for one in sets])
        if self._trials:
            near = torch.stack([self._near(one) for one in sets])
            covariance = covariance - near @ torch.linalg.solve(self._solved[0], near.T)
        values, vectors = torch.linalg.eigh(covariance)
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(len(sets), WORLDS, generator=generator, dtype=torch.float64)
        squares = vectors @ (values.clamp(min=0).sqrt()[:, None] * drawn)
        return squares + _column(self._middle(one) for one in sets)[:, None] <= budget**2

    def _middle(self, charged: frozenset[int]) -> float:
        predicted = self._sum(charged)
        return max(LEAST * predicted, predicted + self._shift(charged))

    def _shift(self, charged: frozenset[int]) -> float:
        return float(self._near(charged) @ self._solved[1]) if self._trials else 0.0

    def _near(self, charged: frozenset[int]) -> torch.Tensor:
        return _column(self._together(charged, other) for other, _ in self._trials)

    @cached_property
    def _solved(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The covariance of the trials, and their weights."""
        sums = _column(self._sum(charged) for charged, _ in self._trials)
        covariance = torch.stack([self._near(charged) for charged, _ in self._trials])
        covariance = covariance + torch.diag((OWN * sums).square())
        measured = _column(square for _, square in self._trials)
        return covariance, torch.linalg.solve(covariance, measured - sums)

    def _together(self, one: frozenset[int], other: frozenset[int]) -> float:
        """Returns the covariance of two sums."""
        shared = sum(self.squares[index] ** 2 for index in one & other)
        split = min(one ^ other, default=len(self.squares))
        alike = self._sum(index for index in one & other if index < split)
        of_all = OF_ALL**2 * self._sum(one) * self._sum(other)
        return OF_ONE**2 * shared + of_all + (self.scatter * alike) ** 2

    def _sum(self, charged: Iterable[int]) -> float:
        return sum(self.squares[index] for index in charged)


def _column(values: Iterable[float]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.float64)
