"""Version tags of dicts, which CPython keeps and does not publish (PEP 509). Tried on CPython 3.11.

CPython 3.11 gives a dict another number at each write, and never gives a number twice. So equal numbers mean
that nothing was written between two looks, for thousands of dicts at the cost of one copy by numpy. There is
no function for it: the numbers are read from the memory of the dicts. Later versions of CPython keep none.
"""

from __future__ import annotations

import functools
import importlib
import platform
import sys
from collections.abc import Callable, Sequence
from typing import Any

_TRIED = ((3, 11),)
_WORD = 8
# In bytes after the address of an object: its class, and the version of a dict.
_CLASS, _VERSION = 8, 24
_SIZES = {object: 16, dict: 48}
_STORES = 64  # so many make CPython specialise the code that stores


class DictVersions:
    """The versions of some dicts, and the classes of some objects; it keeps both alive.

    Args:
        dicts: The dicts.
        objects: The objects.
    """

    def __init__(self, dicts: Sequence[dict[Any, Any]], objects: Sequence[object] = ()) -> None:
        np = _numpy()
        self._kept = [*dicts], [*objects]
        # In the order of memory, for the cache.
        places = sorted({*(id(d) + _VERSION for d in dicts), *(id(o) + _CLASS for o in objects)})
        first = places[0] if places else 0
        words = (places[-1] - first) // _WORD + 1 if places else 0
        memory = np.asarray(_Memory(first, words)) if places else np.empty(0, np.int64)
        self._take = memory.take
        self._at = np.array([(place - first) // _WORD for place in places], np.intp)

    def now(self) -> bytes:
        """Returns a value that equals an earlier one if nothing was written since. Runs at every call."""
        found: bytes = self._take(self._at, None, None, "clip").tobytes()
        return found


class _Memory:
    """Words of this process, for numpy to read."""

    def __init__(self, first: int, words: int) -> None:
        self.__array_interface__ = {"data": (first, True), "shape": (words,), "typestr": "<i8", "version": 3}


def dict_versions(
    dicts: Sequence[dict[Any, Any]], objects: Sequence[object] = ()
) -> Callable[[], bytes] | None:
    """Returns `DictVersions.now`; None where this Python has no such versions."""
    if not has_dict_versions() or not all(isinstance(held, dict) for held in dicts):
        return None
    return DictVersions(dicts, objects).now


@functools.cache
def has_dict_versions() -> bool:
    """Whether this Python, tried here and now, gives a dict another version at each kind of write."""
    if platform.python_implementation() != "CPython" or sys.version_info[:2] not in _TRIED:
        return False
    if sys.byteorder != "little" or any(cls.__basicsize__ != size for cls, size in _SIZES.items()):
        return False
    return _numpy() is not None and all(map(_is_seen, _writes())) and _is_each_store_seen()


@functools.cache
def _numpy() -> Any:
    try:
        return importlib.import_module("numpy")
    except ImportError:
        return None


class _Thing:
    pass


class _OtherThing:
    pass


def _is_seen(write: Callable[[_Thing], object]) -> bool:
    """Whether a write, and nothing else, shows."""
    thing = _Thing()
    vars(thing).update(a=1, b=2)
    versions = DictVersions([vars(thing)], [thing])
    before = versions.now()
    if "a" not in vars(thing) or thing.b != 2 or versions.now() != before:  # type: ignore[attr-defined]
        return False
    write(thing)
    return versions.now() != before


def _writes() -> list[Callable[[Any], object]]:
    return [
        lambda thing: setattr(thing, "a", 0),
        lambda thing: setattr(thing, "c", 0),
        lambda thing: delattr(thing, "a"),
        lambda thing: setattr(thing, "__class__", _OtherThing),
        lambda thing: vars(thing).__setitem__("a", 0),
        lambda thing: vars(thing).__delitem__("a"),
        lambda thing: vars(thing).__ior__({"a": 0}),
        lambda thing: vars(thing).update(c=0),
        lambda thing: vars(thing).setdefault("c", 0),
        lambda thing: vars(thing).pop("a"),
        lambda thing: vars(thing).popitem(),
        lambda thing: vars(thing).clear(),
    ]


def _is_each_store_seen() -> bool:
    """Whether stores show that CPython has specialised."""
    thing = _Thing()
    versions = DictVersions([vars(thing)])
    seen = set()
    for i in range(_STORES):
        thing.a = i  # type: ignore[attr-defined]
        seen.add(versions.now())
    return len(seen) == _STORES
