"""`Places`: values in dicts, classes and objects, and whether they are still the same."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..capture.code_place import GONE, Place
from ..capture.containers import (
    copied,
    has_plain_leaves,
    is_container,
    is_frozen,
    is_small,
    items_of,
)
from ..capture.user_code import is_foreign
from .place_reads import ContainerReads, is_still, reads_of

_DEPTH = 3  # of objects inside objects: model.config.rope.base
_MOST_SETTINGS = 256
_EQUAL_IF_SAME = (FunctionType, BuiltinFunctionType, MethodType, ModuleType, type)
_NO_SETTINGS = (torch.Tensor, nn.Module)
_PARTS = {functools.partial: ("func", "args", "keywords"), MethodType: ("__self__",)}


@dataclass
class _Kinds:
    """Places by the way in which they are compared.

    Attributes:
        plain: Places of plain values.
        objects: Places of objects that must stay the same.
        containers: Places of containers, with their contents.
        empty: Places that hold nothing.
    """

    plain: list[Place] = field(default_factory=list)
    objects: list[Place] = field(default_factory=list)
    containers: list[tuple[Place, Any]] = field(default_factory=list)
    empty: list[Place] = field(default_factory=list)


@dataclass
class _Inside(_Kinds):
    """The places inside objects.

    Attributes:
        sizes: The dicts of the objects and of their classes, which must not grow.
        seen: See `Places.seen`.
    """

    sizes: list[Mapping[str, Any]] = field(default_factory=list)
    seen: list[Any] | None = None

    def __len__(self) -> int:
        places = len(self.plain) + len(self.objects) + len(self.containers) + len(self.empty)
        return places + len(self.sizes)


class Places:
    """Some places, and what they held when they were added; of objects there, their attributes as well.

    A check compares plain values. Of every other value it compares the identity. It looks into objects that
    may be settings: configurations, namespaces, dataclasses, also inside containers. It compares objects
    first, and values where the object is another. A value of another type counts as changed (1.0 for 1).

    Args:
        names: The attributes of objects that count; None: all.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        self._names = names
        self._known: dict[tuple[int, str], Place] = {}
        self._given = _Kinds()
        self._inside = _Inside()
        self._classes: set[int] = set()
        self._opened: dict[str, Any] = {}

    def add(self, place: Place) -> None:
        """Adds a place, if there is anything, and what is inside."""
        before = len(self._inside)
        self._add(place, self._given, _DEPTH)
        if len(self._inside) > before:
            self._opened[place.path] = place.value()

    def like(self, places: Sequence[Place], watched: Collection[int]) -> Places | None:
        """Returns the places of a model that holds the same objects, settled; None if it holds others.

        What is inside these objects is not looked for again.
        """
        if not self.are_same():
            return None
        made, missing = Places(self._names), set(self._opened)
        for place in places:
            if place.path in missing and place.value() is self._opened[place.path]:
                made._put(place, made._given)
                missing.discard(place.path)
            else:
                made.add(place)
        if missing or made._inside:
            return None
        made._inside, made._opened = self._inside, self._opened
        made.settle(watched)
        return made

    def settle(self, watched: Collection[int] = ()) -> None:
        """Takes down what the places hold now.

        Args:
            watched: The ids of dicts of which the caller of `are_same` may know that nothing was written.
        """
        given, inside = self._given, self._inside
        self._plain, self._objects = [*given.plain, *inside.plain], [*given.objects, *inside.objects]
        self._containers, self._sizes = [*given.containers, *inside.containers], inside.sizes
        self._seen_plain = [place.value() for place in self._plain]
        self._seen_objects = [place.value() for place in self._objects]
        plain = list(zip(self._plain, self._seen_plain, strict=True))
        self._computed = [(place, seen) for place, seen in plain if place.value() is not seen]
        plain = [(place, seen) for place, seen in plain if place.value() is seen]
        objects = list(zip(self._objects, self._seen_objects, strict=True))
        watched_plain, other_plain = _divided(plain, watched)
        watched_objects, other_objects = _divided(objects, watched)
        self._empty = [*given.empty, *inside.empty]
        watched_empty, other_empty = _divided([(place, GONE) for place in self._empty], watched)
        self._others = reads_of(other_plain, other_objects, other_empty)
        self._reads = [*reads_of(watched_plain, watched_objects, watched_empty), *self._others]
        self._seen_sizes = [*map(len, self._sizes)]
        self._contents = ContainerReads(self._containers)

    def are_same(self, is_untouched: bool = False) -> bool:
        """Whether all places hold the same. Runs at every call.

        Args:
            is_untouched: Whether nothing was written to the watched dicts since they held the same.
        """
        try:
            for reads in self._others if is_untouched else self._reads:
                if not reads.are_same():
                    return False
        # Gone, or an array now, which compares item by item; ValueError is an empty cell's as well.
        except (KeyError, AttributeError, ValueError, RuntimeError):
            return False
        if self._computed and not all(is_still(place.value(), seen) for place, seen in self._computed):
            return False
        if self._seen_sizes and [*map(len, self._sizes)] != self._seen_sizes:
            return False
        return not self._containers or self._contents.are_same()

    def changed(self) -> list[str]:
        """Returns the places that hold something else now, as a user writes them."""
        return [place.path for place, seen in self._pairs() if not is_still(place.value(), seen)]

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yields the tensors, except parameters, that must stay the same objects."""
        for value in [*self._seen_objects, *tree_leaves([seen for _, seen in self._containers])]:
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                yield value

    def seen(self) -> list[Any]:
        """Returns all places with what they held, to compare with those of another model."""
        given, inside = self._given, self._inside
        if inside.seen is None:
            inside.seen = self._held(inside, len(given.plain), len(given.objects))
        return [self._held(given, 0, 0), inside.seen, self._seen_sizes]

    def _held(self, kinds: _Kinds, first_plain: int, first_object: int) -> list[Any]:
        plain = zip(kinds.plain, self._seen_plain[first_plain:], strict=False)
        objects = zip(kinds.objects, self._seen_objects[first_object:], strict=False)
        empty = ((place, GONE) for place in kinds.empty)
        return [(place.path, value) for place, value in (*kinds.containers, *plain, *objects, *empty)]

    def _pairs(self) -> list[tuple[Place, Any]]:
        plain = zip(self._plain, self._seen_plain, strict=True)
        objects = zip(self._objects, self._seen_objects, strict=True)
        return [*self._containers, *plain, *objects, *((place, GONE) for place in self._empty)]

    def _add(self, place: Place, kinds: _Kinds, depth: int) -> None:
        value = place.value()
        if self._put(place, kinds):
            # What is in a container is as deep as the container.
            self._look_into(value, place.path, depth + is_container(value))

    def _put(self, place: Place, kinds: _Kinds) -> bool:
        """Adds a place without what is inside; returns whether settings may be inside."""
        key, value = (id(place.holder), place.name), place.value()
        if key in self._known:
            return False
        self._known[key] = place
        if value is GONE:
            kinds.empty.append(place)
            return False
        is_plain = has_plain_leaves(value) or isinstance(value, _EQUAL_IF_SAME)
        if is_plain and is_frozen(value):
            kinds.plain.append(place)
            return isinstance(value, MethodType)
        if is_container(value) and is_small(value):
            kinds.containers.append((place, copied(value)))
            return True
        if is_container(value):
            kinds.objects.append(place)  # a table: its content does not count
        elif not isinstance(value, nn.Parameter) and place.value() is value:
            kinds.objects.append(place)  # neither read by graphs where it is, nor made at each access
            return True
        return False

    def _look_into(self, value: Any, path: str, depth: int) -> None:
        """Adds the attributes of an object, such as a configuration, that forward may read."""
        if not depth:
            return
        if is_container(value):
            for key, item in items_of(value) if is_small(value) else ():
                self._look_into(item, f"{path}[{key!r}]", depth - 1)
            return
        for name in _PARTS.get(type(value), ()):  # as deep as the partial or method
            self._add(Place(value, name, f"{path}.{name}"), self._inside, depth)
        if isinstance(value, _NO_SETTINGS) or is_foreign(type(value)):
            return
        held = getattr(value, "__dict__", None) or {}
        if len(held) > _MOST_SETTINGS:
            return
        if hasattr(value, "__dict__"):
            self._inside.sizes.append(value.__dict__)
        for base in type(value).__mro__:
            if not is_foreign(base) and id(base) not in self._classes:
                self._classes.add(id(base))
                self._inside.sizes.append(vars(base))
        for name in filter(self._counts, list(held)):
            self._add(Place(held, name, f"{path}.{name}"), self._inside, depth - 1)
        for name in _settings_of_class(type(value)):
            if name not in held and self._counts(name):
                self._add(Place(value, name, f"{path}.{name}"), self._inside, depth - 1)

    def _counts(self, name: str) -> bool:
        return self._names is None or name in self._names


def _settings_of_class(cls: type) -> Iterator[str]:
    """Yields the slots of a class, and the attributes that its objects share."""
    for base in cls.__mro__:
        for name, value in vars(base).items() if not is_foreign(base) else ():
            if not name.startswith("__") and _is_setting_of_class(value):
                yield name


def _is_setting_of_class(value: object) -> bool:
    """Whether an entry of a class is a slot or a value that its objects share; a list of them is none."""
    if isinstance(value, MemberDescriptorType) or has_plain_leaves(value):
        return True
    return not is_container(value) and not hasattr(type(value), "__get__")


def _divided(places: list[tuple[Place, Any]], dicts: Collection[int]) -> tuple[list, list]:
    """Returns the places in dicts with these ids, and the others."""
    found: tuple[list, list] = [], []
    for place, seen in places:
        found[id(place.holder) not in dicts].append((place, seen))
    return found
