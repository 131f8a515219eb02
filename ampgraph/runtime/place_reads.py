"""Reads of many places at once, which tell in a few calls of C functions whether all hold the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

from ..capture.code_place import GONE, Place
from ..capture.containers import equal, is_container, items_of, same

_BUILT_IN = (dict, list, tuple, set, frozenset)
_COLUMN = 4  # so many holders of one name are read by name, fewer by holder
# A getter; its holder, or its holders; the values that it returned.
_Read = tuple[Callable[[Any], Any], Any, Any]


class PlainReads:
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


class ObjectReads:
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


class EmptyReads:
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


class ContainerReads:
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
        self._given = ObjectReads([(p, p.value()) for p, _ in self._places if id(p) not in odd])
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


def reads_of(
    plain: list[tuple[Place, Any]], objects: list[tuple[Place, Any]], empty: list[tuple[Place, Any]]
) -> list[PlainReads | ObjectReads | EmptyReads]:
    """Returns the reads of places; none for no places."""
    reads: list[PlainReads | ObjectReads | EmptyReads] = [PlainReads(plain)] if plain else []
    if objects:
        reads.append(ObjectReads(objects))
    if empty:
        reads.append(EmptyReads([place for place, _ in empty]))
    return reads


def _are_still(values: list[Any], seen: list[Any]) -> bool:
    return all(map(is_, values, seen)) or all(map(is_still, values, seen))


def is_still(value: Any, seen: Any) -> bool:
    """Whether a value is what it was, of the same type."""
    return value is seen or (same(value, seen) if is_container(seen) else equal(value, seen))


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
