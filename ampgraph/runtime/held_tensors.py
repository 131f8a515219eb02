"""`HeldTensors`: the kinds of a model's parameters and buffers, and which of them are one tensor."""

from __future__ import annotations

import weakref
from itertools import chain
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from .._compat import times_asked_in_all


class Kinds:
    """Names, sizes and dtypes of tensors, and which of them are one object; a value to compare and hash."""

    __slots__ = ("_hash", "_items")

    def __init__(self, names: list[str], values: list[Any]) -> None:
        first: dict[int, int] = {}
        numbers = [first.setdefault(id(v), i) for i, v in enumerate(values)]
        self._items = (*names, *map(_kind, values), *numbers)
        self._hash = hash(self._items)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Kinds) and self._items == other._items)

    def __hash__(self) -> int:
        return self._hash


def _kind(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, torch.Tensor) or is_lazy(value):
        return (type(value),)
    return value.shape, value.dtype


class HeldTensors:
    """The parameters and buffers in the dicts of a model's modules.

    A graph reads them where they are, so it may read other objects later. But it is right only for the
    sizes, dtypes and ties of its capture: ``model.half()``, a pruned weight, or an output layer that no
    longer shares the weight of the embedding, need another graph.

    Args:
        slots: The dicts.
        counts_data: Whether a counter tells that ``.data`` of a parameter was set. Otherwise every check
            reads all kinds.
    """

    def __init__(self, slots: list[dict[str, Any]], counts_data: bool) -> None:
        self._slots, self._counts_data = slots, counts_data
        self._note()

    def kinds(self) -> Kinds:
        """Returns the kinds now; the same object as long as nothing changes. Runs at every call."""
        if torch.compiler.is_dynamo_compiling():  # strict export does not trace the comparison
            return self._kinds
        if not (self.are_untouched() and [*map(id, self._values())] == self._ids):
            self._note(self._kinds)
        return self._kinds

    def are_untouched(self) -> bool:
        """Whether the kinds are known to be the same if the dicts hold the same objects."""
        return self._counts_data and not self._gone and times_asked_in_all() == self._asked

    def _values(self) -> chain[Any]:
        return chain.from_iterable(map(dict.values, self._slots))

    def _note(self, before: Kinds | None = None) -> None:
        self._asked = times_asked_in_all()  # first: another thread may set one now
        values = [*self._values()]
        self._ids = [*map(id, values)]
        # Another tensor may come to the address of one that is gone.
        self._gone: list[weakref.ref] = []
        self._known = [weakref.ref(v, self._gone.append) for v in values if v is not None]
        kinds = Kinds([*chain.from_iterable(self._slots)], values)
        self._kinds = before if before == kinds else kinds  # type: ignore[assignment]
