"""`Places`: values in dicts, classes and objects, and whether they are still the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter, is_, itemgetter
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from ..capture.code import GONE, Place, is_foreign
from ..capture.containers import copied, has_plain_leaves, is_container, is_small, items_of, same

_DEPTH = 3  # of objects inside objects: model.config.rope.base
_MOST_SETTINGS = 256
_EQUAL_IF_SAME = (FunctionType, BuiltinFunctionType, MethodType, ModuleType, type)
_NO_SETTINGS = (torch.Tensor, nn.Module)


class Places:
    """Some places, and what they held when they were added; of objects there, their attributes as well.

    Plain values are compared, of everything else it counts whether it is the same object. Objects are looked
    into as far as they may be settings: configurations, namespaces, dataclasses, also inside containers.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], Place] = {}
        self._plain: dict[int, list[Place]] = {}
        self._objects: dict[int, list[Place]] = {}
        self._containers: list[tuple[Place, Any]] = []
        self._sizes: list[dict[str, Any]] = []

    def add(self, place: Place, depth: int = _DEPTH) -> None:
        """Adds a place, if there is anything."""
        key, value = (id(place.holder), place.name), place.value()
        if key in self._known or value is GONE:
            return
        self._known[key] = place
        if has_plain_leaves(value) or isinstance(value, _EQUAL_IF_SAME):
            self._plain.setdefault(key[0], []).append(place)
        elif is_container(value):
            self._add_container(place, value, depth)
        elif isinstance(value, nn.Parameter):
            pass  # graphs read those where they are
        elif place.value() is value:  # not made at each access
            self._objects.setdefault(key[0], []).append(place)
            self._look_into(value, place.path, depth)

    def settle(self) -> None:
        """Takes down what the places hold now."""
        self._plain_groups = [(_getter(places), places[0].holder) for places in self._plain.values()]
        self._seen = [copied(get(held)) for get, held in self._plain_groups]
        getters = [
            (_getter(places, always_tuple=True), places[0].holder) for places in self._objects.values()
        ]
        self._object_groups = [(get, held, get(held)) for get, held in getters]
        self._seen_sizes = [*map(len, self._sizes)]

    def are_same(self) -> bool:
        """Whether all places hold the same. Runs at every call."""
        try:
            if [get(held) for get, held in self._plain_groups] != self._seen:
                return False
            for get, held, seen in self._object_groups:
                if not all(map(is_, get(held), seen)):
                    return False
        # Gone, or an array now, which compares item by item; ValueError is an empty cell's as well.
        except (KeyError, AttributeError, ValueError, RuntimeError):
            return False
        if self._seen_sizes and [*map(len, self._sizes)] != self._seen_sizes:
            return False
        return not self._containers or all(same(place.value(), seen) for place, seen in self._containers)

    def changed(self) -> list[str]:
        """Returns the places that hold something else now, as a user writes them."""
        pairs = [*self._containers]
        for places, seen in zip(self._plain.values(), self._seen, strict=True):
            pairs += zip(places, seen if len(places) > 1 else (seen,), strict=True)
        for places, (_, _, seen) in zip(self._objects.values(), self._object_groups, strict=True):
            pairs += zip(places, seen[: len(places)], strict=True)
        return [place.path for place, seen in pairs if not same(place.value(), seen)]

    def seen(self) -> list[Any]:
        """Returns all places with what they held, to compare with those of another model."""
        pairs = [(place.path, value) for place, value in self._containers]
        for places, values in zip(self._plain.values(), self._seen, strict=True):
            each = values if len(places) > 1 else (values,)
            pairs += [(place.path, value) for place, value in zip(places, each, strict=True)]
        for places, (_, _, values) in zip(self._objects.values(), self._object_groups, strict=True):
            pairs += [(place.path, value) for place, value in zip(places, values, strict=False)]
        return [pairs, self._seen_sizes]

    def _add_container(self, place: Place, value: Any, depth: int) -> None:
        if not is_small(value):
            return
        self._containers.append((place, copied(value)))
        for key, item in items_of(value):
            self._look_into(item, f"{place.path}[{key!r}]", depth)

    def _look_into(self, value: Any, path: str, depth: int) -> None:
        """Adds the attributes of an object, such as a configuration, that forward may read."""
        if not depth:
            return
        if is_container(value):
            for key, item in items_of(value) if is_small(value) else ():
                self._look_into(item, f"{path}[{key!r}]", depth - 1)
            return
        if isinstance(value, _NO_SETTINGS) or is_foreign(type(value)):
            return
        held = getattr(value, "__dict__", {})
        if len(held) > _MOST_SETTINGS:
            return
        if held:
            self._sizes.append(held)
        for name in [name for name, inner in held.items() if _may_be_setting(inner)]:
            self.add(Place(held, name, f"{path}.{name}"), depth - 1)
        for name in _settings_of_class(type(value)):
            if name not in held:
                self.add(Place(value, name, f"{path}.{name}"), depth - 1)


def _may_be_setting(value: object) -> bool:
    return has_plain_leaves(value) or is_container(value) or hasattr(value, "__dict__") or _has_slots(value)


def _has_slots(value: object) -> bool:
    return not is_foreign(type(value)) and any("__slots__" in vars(c) for c in type(value).__mro__)


def _settings_of_class(cls: type) -> Iterator[str]:
    """Yields the slots of a class, and the attributes that its objects share."""
    for base in cls.__mro__:
        for name, value in vars(base).items() if not is_foreign(base) else ():
            if not name.startswith("__") and (
                isinstance(value, MemberDescriptorType) or has_plain_leaves(value)
            ):
                yield name


def _getter(places: list[Place], always_tuple: bool = False) -> Callable[[Any], Any]:
    """Returns what reads all places of one holder in one call; of a single place, it gives no tuple."""
    names = [place.name for place in places]
    if always_tuple and len(names) == 1:
        names *= 2
    return (itemgetter if isinstance(places[0].holder, dict) else attrgetter)(*names)
