"""`Places`: values in dicts, classes and objects, and whether they are still the same."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, is_, itemgetter
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..capture.code import GONE, Place, is_foreign
from ..capture.containers import (
    copied,
    equal,
    has_plain_leaves,
    is_container,
    is_frozen,
    is_small,
    items_of,
    same,
)

_DEPTH = 3  # of objects inside objects: model.config.rope.base
_MOST_SETTINGS = 256
_EQUAL_IF_SAME = (FunctionType, BuiltinFunctionType, MethodType, ModuleType, type)
_NO_SETTINGS = (torch.Tensor, nn.Module)
_BUILT_IN = (dict, list, tuple, set, frozenset)
_COLUMN = 4  # so many holders of one name are read by name, fewer by holder
# A getter; its holder, or its holders; the values that it returned.
_Read = tuple[Callable[[Any], Any], Any, Any]


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


class _Plain:
    """Reads of plain values, which are compared in a few calls of C functions.

    Args:
        places: The places, with the values.
    """

    def __init__(self, places: list[tuple[Place, Any]]) -> None:
        self._columns, rest = _columns(places)
        self._rows = _rows(rest)
        self._seen = [*chain.from_iterable(seen for _, _, seen in self._rows)]

    def are_same(self) -> bool:
        """Whether all places hold the same; may raise what a place raises that has gone."""
        rows = [get(held) for get, held, _ in self._rows]
        if not _are_still([*chain.from_iterable(rows)], self._seen):
            return False
        return all(_are_still([*map(get, holders)], seen) for get, holders, seen in self._columns)


class _Objects:
    """Reads of objects that must stay the same, likewise.

    Args:
        places: The places, with the objects.
    """

    def __init__(self, places: list[tuple[Place, Any]]) -> None:
        self._columns, rest = _columns(places)
        self._rows = _rows(rest)

    def are_same(self) -> bool:
        """Whether all places hold the same; may raise what a place raises that has gone."""
        for get, held, seen in self._rows:
            if not all(map(is_, get(held), seen)):
                return False
        return all(all(map(is_, map(get, holders), seen)) for get, holders, seen in self._columns)


class _Empty:
    """Places that must stay empty: code asked whether an attribute or a global is there.

    Args:
        places: The places.
    """

    def __init__(self, places: list[Place]) -> None:
        in_dicts = [place for place in places if isinstance(place.holder, dict)]
        self._dicts = [place.holder for place in in_dicts]
        self._keys = [place.name for place in in_dicts]
        self._others = [place for place in places if not isinstance(place.holder, dict)]

    def are_same(self) -> bool:
        """Whether nothing is there yet."""
        if any(map(dict.__contains__, self._dicts, self._keys)):
            return False
        return all(place.value() is GONE for place in self._others)


class _Containers:
    """Reads of containers, whose content is compared by object first, in a few calls of C functions.

    Args:
        places: The places, with copies of what the containers held.
    """

    def __init__(self, places: list[tuple[Place, Any]]) -> None:
        self._places = places
        self._note()

    def are_same(self) -> bool:
        """Whether all containers hold the same; may raise what a place raises that has gone."""
        if self._are_untouched():
            return True
        self._note()  # first: another thread may write now
        if all(same(place.value(), seen) for place, seen in self._places):
            return True
        self._sizes = [-1]  # what was noted is not what was seen
        return False

    def _note(self) -> None:
        held: dict[int, Any] = {}
        self._odd = [pair for pair in self._places if not _note_parts(pair[0].value(), held)]
        odd = {id(place) for place, _ in self._odd}
        self._given = _Objects([(p, p.value()) for p, _ in self._places if id(p) not in odd])
        parts = held.values()
        self._dicts = [part for part in parts if isinstance(part, dict)]
        self._parts = [*parts]
        self._sizes = [*map(len, self._parts)]
        self._content = [*self._items()]

    def _items(self) -> Iterator[Any]:
        return chain(chain.from_iterable(self._parts), chain.from_iterable(map(dict.values, self._dicts)))

    def _are_untouched(self) -> bool:
        if [*map(len, self._parts)] != self._sizes or not self._given.are_same():
            return False
        if not all(map(is_, self._items(), self._content)):
            return False
        return all(same(place.value(), seen) for place, seen in self._odd)


def _note_parts(value: Any, held: dict[int, Any]) -> bool:
    """Adds a container and those inside it to ``held``; False if one is of a class of the user's."""
    if not is_container(value):
        return True
    if type(value) not in _BUILT_IN:
        return False
    held[id(value)] = value
    are_built_in = [_note_parts(item, held) for _, item in items_of(value)]
    return all(are_built_in)


class Places:
    """Some places, and what they held when they were added; of objects there, their attributes as well.

    Plain values are compared, of everything else it counts whether it is the same object. Objects are looked
    into as far as they may be settings: configurations, namespaces, dataclasses, also inside containers. A
    check compares objects first, and values where the object is another: a value of another type counts as
    changed (1.0 for 1).

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
        self._others = _reads(other_plain, other_objects, other_empty)
        self._reads = [*_reads(watched_plain, watched_objects, watched_empty), *self._others]
        self._seen_sizes = [*map(len, self._sizes)]
        self._contents = _Containers(self._containers)

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
        if self._computed and not all(_is_still(place.value(), seen) for place, seen in self._computed):
            return False
        if self._seen_sizes and [*map(len, self._sizes)] != self._seen_sizes:
            return False
        return not self._containers or self._contents.are_same()

    def changed(self) -> list[str]:
        """Returns the places that hold something else now, as a user writes them."""
        return [place.path for place, seen in self._pairs() if not _is_still(place.value(), seen)]

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
        elif is_container(value) and is_small(value):
            kinds.containers.append((place, copied(value)))
            return True
        elif is_container(value):
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
        if isinstance(value, functools.partial):
            for name in ("args", "keywords"):
                self._add(Place(value, name, f"{path}.{name}"), self._inside, depth - 1)
            return
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
        for name in [name for name, inner in held.items() if self._counts(name) and _may_be_setting(inner)]:
            self._add(Place(held, name, f"{path}.{name}"), self._inside, depth - 1)
        for name in _settings_of_class(type(value)):
            if name not in held and self._counts(name):
                self._add(Place(value, name, f"{path}.{name}"), self._inside, depth - 1)

    def _counts(self, name: str) -> bool:
        return self._names is None or name in self._names


def _are_still(values: list[Any], seen: list[Any]) -> bool:
    return all(map(is_, values, seen)) or all(map(_is_still, values, seen))


def _is_still(value: Any, seen: Any) -> bool:
    """Whether a value is what it was, of the same type."""
    return value is seen or (same(value, seen) if is_container(seen) else equal(value, seen))


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


def _reads(
    plain: list[tuple[Place, Any]], objects: list[tuple[Place, Any]], empty: list[tuple[Place, Any]]
) -> list[_Plain | _Objects | _Empty]:
    """Returns the reads of places; none for no places."""
    reads: list[_Plain | _Objects | _Empty] = [_Plain(plain)] if plain else []
    if objects:
        reads.append(_Objects(objects))
    if empty:
        reads.append(_Empty([place for place, _ in empty]))
    return reads


def _divided(places: list[tuple[Place, Any]], dicts: Collection[int]) -> tuple[list, list]:
    """Returns the places in dicts with these ids, and the others."""
    found: tuple[list, list] = [], []
    for place, seen in places:
        found[id(place.holder) not in dicts].append((place, seen))
    return found


def _columns(places: list[tuple[Place, Any]]) -> tuple[list[_Read], list[tuple[Place, Any]]]:
    """Returns reads of one name from many holders, and the places that are left."""
    named: dict[tuple[bool, str], list[tuple[Place, Any]]] = {}
    for place, value in places:
        named.setdefault((isinstance(place.holder, dict), place.name), []).append((place, value))
    columns: list[_Read] = []
    rest: list[tuple[Place, Any]] = []
    for (is_dict, name), pairs in named.items():
        if len(pairs) < _COLUMN:
            rest += pairs
            continue
        get = (itemgetter if is_dict else attrgetter)(name)
        columns.append((get, [place.holder for place, _ in pairs], [value for _, value in pairs]))
    return columns, rest


def _rows(pairs: list[tuple[Place, Any]]) -> list[_Read]:
    """Returns reads of all names from one holder, each as a tuple of at least two values."""
    held: dict[int, list[tuple[Place, Any]]] = {}
    for place, value in pairs:
        held.setdefault(id(place.holder), []).append((place, value))
    rows: list[_Read] = []
    for of_one in held.values():
        holder = of_one[0][0].holder
        if len(of_one) == 1:
            of_one *= 2
        get = (itemgetter if isinstance(holder, dict) else attrgetter)(*[place.name for place, _ in of_one])
        values = tuple(value for _, value in of_one)
        rows.append((get, holder, values))
    return rows
