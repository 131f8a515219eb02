"""`ColourScale`: colours for numbers on nodes, by orders of magnitude."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..errors import AmpGraphError, did_you_mean

# From pale to dark, so that the order shows without colours too.
_STEPS = ("#FFF3D6", "#FBD08F", "#F2A05C", "#DE6B48", "#A8324A")
# The darkest is this many times the palest at least, so that values which hardly differ look alike.
_SPAN = 1000.0
_ZERO, _NOT_FINITE, _LIGHT_TEXT = "#FFFFFF", "#000000", "#FFFFFF"


@dataclass(frozen=True)
class ColourScale:
    """Numbers by node, and the colours that stand for them.

    Attributes:
        values: By node name; none below 0.
        least: The smallest one above 0.
        most: Where the scale ends; no finite value is larger.
    """

    values: Mapping[str, float]
    least: float
    most: float

    @classmethod
    def of(cls, values: Mapping[str, float], nodes: Iterable[str]) -> ColourScale:
        """Returns the scale for some numbers.

        Raises:
            AmpGraphError: No node has this name, or a value is not a number of 0 or more.
        """
        legal = set(nodes)
        for name, value in values.items():
            if name not in legal:
                raise AmpGraphError(
                    f"draw: values: the graph has no node {name!r}.{did_you_mean(str(name), legal)}"
                )
            if not isinstance(value, (int, float)) or value < 0:
                raise AmpGraphError(f"draw: values: {name!r} has {value!r}; expected a number, 0 or more.")
        above = [value for value in values.values() if 0 < value < math.inf]
        least = min(above, default=1.0)
        return cls(values, least, max([*above, least * _SPAN]))

    def style(self, value: float) -> dict[str, str]:
        """Returns how a node with that value is filled."""
        if not math.isfinite(value):
            return {"fillcolor": _NOT_FINITE, "fontcolor": _LIGHT_TEXT}
        if value == 0:
            return {"fillcolor": _ZERO}
        step = _STEPS[self._step(value)]
        return {"fillcolor": step} | ({"fontcolor": _LIGHT_TEXT} if step == _STEPS[-1] else {})

    def worst(self, nodes: Iterable[str]) -> float | None:
        """Returns the largest value of some nodes; None where none has one."""
        found = [self.values[name] for name in nodes if name in self.values]
        return max(found, key=lambda value: math.inf if math.isnan(value) else value, default=None)

    def legend(self) -> list[tuple[str, dict[str, str]]]:
        """Returns words and look of each colour that occurs, small values first."""
        finite = [value for value in self.values.values() if math.isfinite(value)]
        found = [("0", self.style(0.0))] if 0 in finite else []
        ratio = self.most / self.least
        bounds = [self.least * ratio ** (i / len(_STEPS)) for i in range(len(_STEPS) + 1)]
        steps = {self._step(value) for value in finite if value > 0}
        for i in sorted(steps):
            middle = math.sqrt(bounds[i] * bounds[i + 1])
            found.append((f"{bounds[i]:.1e} .. {bounds[i + 1]:.1e}", self.style(middle)))
        if len(finite) < len(self.values):
            found.append(("not finite", self.style(math.inf)))
        return found

    def _step(self, value: float) -> int:
        place = math.log(value / self.least) / math.log(self.most / self.least)
        return min(len(_STEPS) - 1, max(0, int(place * len(_STEPS))))
