"""`Home`: the places of a model's parameters and submodules, which tell whether a call has lent it others."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

from torch import nn


class Home:
    """The places of a model's parameters and submodules, and what they hold when it is made."""

    def __init__(self, model: nn.Module | None) -> None:
        modules = model.modules() if model is not None else ()
        self._held: list[dict[str, Any]] = [h for m in modules for h in (m._parameters, m._modules) if h]
        # Another object may come to the address of one that is gone.
        self._gone: list[weakref.ref] = []
        self._known = [
            (held, name, _nothing if value is None else weakref.ref(value, self._gone.append))
            for held in self._held
            for name, value in held.items()
        ]
        self._ids = self._ids_now()

    def is_same(self) -> bool:
        """Whether each place holds what it held. Runs at every call."""
        if not self._gone and self._ids_now() == self._ids:
            return True
        return all(held.get(name) is known() for held, name, known in self._known)

    def has_own_parameters(self, model: nn.Module) -> bool:
        """Whether no module that stayed in the model has another parameter in the place of one.

        If one has, then parameters may be lent for a call, and those of new modules as well.
        """
        stayed = {id(m._parameters) for m in model.modules()}
        return all(
            held.get(name) is known() or name not in held
            for held, name, known in self._known
            if id(held) in stayed
        )

    def _ids_now(self) -> list[int]:
        return [*map(id, itertools.chain.from_iterable(map(dict.values, self._held)))]


def _nothing() -> None:
    """Stands for a weak reference to None."""
