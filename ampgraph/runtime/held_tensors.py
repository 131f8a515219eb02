"""`HeldTensors`: the kinds of a model's parameters and buffers, and which of them are tied."""

from __future__ import annotations

import weakref
from itertools import chain
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .._compat import has_content, new_lock, storage_key, times_asked_in_all, watch_data


class Kinds:
    """Names, sizes, dtypes and layouts of tensors, and which are one object, or buffers of one memory.

    There is one object per value, so that kinds are compared by identity: Dynamo of torch 2.11 traces no
    ``__hash__`` of an object. Call `of`.
    """

    __slots__ = ("__weakref__",)

    @staticmethod
    def of(names: list[str], values: list[Any]) -> Kinds:
        """Returns the kinds of tensors, the same object for the same names, kinds and ties."""
        first: dict[object, int] = {}
        numbers = [first.setdefault(_tie(v), i) for i, v in enumerate(values)]
        with _lock:
            return _all_kinds.setdefault((*names, *map(_kind, values), *numbers), Kinds())


_all_kinds: WeakValueDictionary[tuple[Any, ...], Kinds] = WeakValueDictionary()
_lock = new_lock()  # the garbage collector may run code inside


def _tie(value: Any) -> object:
    """Returns what tied tensors have in common: a graph that writes a buffer writes its views, too."""
    # Parameters, which are of a class of their own, are tied if they are one object.
    is_buffer = isinstance(value, torch.Tensor) and has_content(value)
    return ("memory", storage_key(value)) if is_buffer else id(value)


def _kind(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, torch.Tensor) or is_lazy(value):
        return (type(value),)
    return value.shape, value.dtype, value.layout


class HeldTensors:
    """The parameters and buffers in the dicts of a model's modules.

    A graph reads them where they are, so it may read other objects later. But it is right only for the
    sizes, dtypes, layouts and ties of its capture: ``model.half()``, a pruned weight, a matrix that became
    sparse, or an output layer that no longer shares the weight of the embedding, need another graph.

    Args:
        slots: The dicts.
        counts_data: Whether to count how often ``.data`` of a parameter was set. Otherwise every check reads
            all kinds.

    Attributes:
        counts_data: Whether it is counted now; never for parameters of another class, such as DTensors.
    """

    def __init__(self, slots: list[dict[str, Any]], counts_data: bool) -> None:
        self._slots, self._may_count = slots, counts_data
        self._note()

    def kinds(self) -> Kinds:
        """Returns the kinds now; the same object as long as nothing changes. Runs at every call."""
        if torch.compiler.is_dynamo_compiling():  # strict export does not trace the comparison
            return self._kinds
        if not (self.are_untouched() and [*map(id, self._values())] == self._ids):
            self._note()
        return self._kinds

    def are_untouched(self) -> bool:
        """Whether the kinds are known to be the same if the dicts hold the same objects."""
        return self.counts_data and not self._gone and times_asked_in_all() == self._asked

    def now(self) -> list[torch.Tensor]:
        """Returns the tensors that the dicts hold, one of them as often as it is held."""
        return [value for value in self._values() if value is not None]

    def _values(self) -> chain[Any]:
        return chain.from_iterable(map(dict.values, self._slots))

    def _note(self) -> None:
        self._asked = times_asked_in_all()  # first: another thread may set one now
        values = [*self._values()]
        self._ids = [*map(id, values)]
        parameters = [v for v in values if isinstance(v, nn.Parameter)]
        self.counts_data = self._may_count and all(issubclass(type(p), nn.Parameter) for p in parameters)
        if self.counts_data:
            for parameter in parameters:
                watch_data(parameter)
        # Another tensor may come to the address of one that is gone.
        self._gone: list[weakref.ref] = []
        self._known = [weakref.ref(v, self._gone.append) for v in values if v is not None]
        self._kinds = Kinds.of([*chain.from_iterable(self._slots)], values)
