"""`Structure`: notices that a model has gained or lost a part."""

from __future__ import annotations

from itertools import chain

from torch import nn


class Structure:
    """The modules of a model, and the submodules, parameters and buffers that each of them had.

    Attributes:
        modules: All modules, at any depth.
    """

    def __init__(self, source: nn.Module) -> None:
        self.modules = tuple(source.modules())
        self._children = [m._modules for m in self.modules]
        self._tensors = [slots for m in self.modules for slots in (m._parameters, m._buffers)]
        self._seen = self._now()

    def is_current(self) -> bool:
        """Whether nothing came or went, None included. Runs at every call."""
        return self._seen == self._now()

    def _now(self) -> tuple[list[nn.Module | None], list[str], list[bool]]:
        children = list(chain.from_iterable(map(dict.values, self._children)))
        absent = [value is None for slots in self._tensors if slots for value in slots.values()]
        return children, list(chain.from_iterable(self._tensors)), absent
