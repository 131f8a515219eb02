"""What the traffic of a labelling is weighed against: bytes of casts, or the error of rounding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ampgraph.plan import Cost

from ..analysis.precision import LOW
from ..analysis.problem import Problem
from .build_network import Price
from .choices import Search
from .labelling import Placement, place_optimally


class Amount(Protocol):
    """A quantity of labellings that a cut can price."""

    def traffic(self, cost: Cost) -> int:
        """Returns the traffic that it is weighed against."""

    def of(self, placement: Placement, cost: Cost) -> int:
        """Returns the amount of a labelling."""

    def cut(self, problem: Problem, traffic: int, price: int, search: Search) -> Placement:
        """Returns a labelling of least ``traffic`` times its traffic plus ``price`` times its amount."""


@dataclass(frozen=True)
class CastBytes:
    """The bytes of casts of activations."""

    def traffic(self, cost: Cost) -> int:
        return cost.traffic

    def of(self, placement: Placement, cost: Cost) -> int:
        return cost.activation_cast_bytes

    def cut(self, problem: Problem, traffic: int, price: int, search: Search) -> Placement:
        return place_optimally(
            problem, lambda cost: traffic * cost.traffic + price * cost.activation_cast_bytes, search
        )


@dataclass(frozen=True)
class Rounding:
    """The error of rounding: the sum of the prices that are paid.

    Attributes:
        prices: The mean square error that rounding each tensor makes in the result.
        stores_low: Whether the level keeps low copies of parameters, so that their casts are no traffic of a
            forward.
    """

    prices: tuple[Price, ...]
    stores_low: bool = False

    def traffic(self, cost: Cost) -> int:
        return moved(cost, self.stores_low)

    def of(self, placement: Placement, cost: Cost) -> int:
        low = {node for node, label in placement.labels.items() if label is LOW}
        return sum(price.amount for price in self.prices if not low.isdisjoint(price.nodes))

    def cut(self, problem: Problem, traffic: int, price: int, search: Search) -> Placement:
        weighed = [p._replace(amount=price * p.amount) for p in self.prices] if price else []
        return place_optimally(problem, lambda cost: traffic * self.traffic(cost), search, weighed)


def moved(cost: Cost, stores_low: bool) -> int:
    """Returns the bytes that one forward moves; with low copies of parameters, without their casts."""
    return cost.traffic - (cost.cast_bytes - cost.activation_cast_bytes if stores_low else 0)
