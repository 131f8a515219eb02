"""`State`: the Python values with which a step was traced; `Refused`: a state that has no graph."""

from __future__ import annotations

from ..module import AmpModule
from ..runtime.captured_graph import CapturedGraph
from .surroundings import Surroundings


class State:
    """What model and loss read while a step was traced.

    Args:
        amp: The model.
        surroundings: What ``loss_fn`` reads.
        used: The captured graphs of the model that ran.
    """

    def __init__(self, amp: AmpModule, surroundings: Surroundings, used: list[CapturedGraph]) -> None:
        self._amp, self._surroundings, self._used = amp, surroundings, used
        self._structure = amp._graphs.structure
        self._code = [captured.code_of_graph for captured in used]
        shadows = amp._graphs.shadows
        self._replaced = 0 if shadows is None else shadows.replaced

    def is_current(self) -> bool:
        """Whether parts, graphs and low copies are the same; replaced ones stay away. Runs at every step."""
        shadows = self._amp._graphs.shadows
        if shadows is not None and shadows.replaced != self._replaced:
            return False
        if self._amp._graphs.structure is not self._structure:
            return False
        return all(c.is_as_with(code) for c, code in zip(self._used, self._code, strict=True))

    def is_valid(self) -> bool:
        """Whether model and loss would read the same Python values. Runs at every step."""
        return self._surroundings.is_same() and all(c.state is None or c.state.is_same() for c in self._used)

    def changed(self) -> str:
        """Returns the Python values that are others now, as a user writes them."""
        paths = [path for c in self._used if c.state is not None for path in c.state.changed()]
        return ", ".join(paths[:3]) or self._surroundings.changed()


class Refused(State):
    """A state in which a step cannot be one graph: with others it may be one.

    Attributes:
        reason: Why.
    """

    def __init__(
        self, amp: AmpModule, surroundings: Surroundings, used: list[CapturedGraph], reason: str
    ) -> None:
        super().__init__(amp, surroundings, used)
        self.reason = reason
        self._captured = [*amp._graphs]

    @classmethod
    def in_place_of(cls, state: State, reason: str) -> Refused:
        """Returns the refusal of a state that a graph was made for."""
        return cls(state._amp, state._surroundings, state._used, reason)

    def is_current(self) -> bool:
        """Whether the model has captured nothing since, which may be what the trace missed."""
        return super().is_current() and [*map(id, self._amp._graphs)] == [*map(id, self._captured)]
