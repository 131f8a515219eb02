"""Compares plain Python values: numbers, strings, dtypes, and lists, tuples, sets and dicts of them."""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from collections.abc import Iterator, Sized
from operator import is_
from typing import Any

import torch
from torch import nn

_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    slice,
    range,
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
# Equal values of these types may differ in a sign, or in the types of their parts.
_WRITTEN = (float, complex, slice, range)
_SEQUENCES = (list, tuple, deque)
_SETS = (set, frozenset)
_BASES = (OrderedDict, dict, *_SEQUENCES, *_SETS)
# A larger container is a look-up table; comparing it at every call would cost too much.
_MOST_LEAVES = 256
_DEEPEST = 8


def is_plain(value: object) -> bool:
    """Whether equality describes a value completely."""
    return isinstance(value, _PLAIN)


def is_container(value: object) -> bool:
    """Whether a value is a list, tuple, set or dict."""
    return isinstance(value, (*_SEQUENCES, *_SETS, dict))


def has_plain_leaves(value: object) -> bool:
    """Whether a value is plain, or a small container with only plain values."""
    leaves = _leaves(value, 0)
    return leaves is not None and all(map(is_plain, leaves))


def is_small(container: object) -> bool:
    """Whether a container is small enough to compare at every call."""
    return _leaves(container, 0) is not None


def _leaves(value: Any, depth: int) -> list[object] | None:
    """Returns the leaves, or None if there are too many."""
    if not is_container(value):
        return [value]
    if depth > _DEEPEST or length_of(value) > _MOST_LEAVES:
        return None
    found: list[object] = []
    for item in _inside(value):
        inner = _leaves(item, depth + 1)
        if inner is None or len(found) + len(inner) > _MOST_LEAVES:
            return None
        found += inner
    return found


def _inside(container: Any) -> Iterator[Any]:
    for key, item in items_of(container):
        if isinstance(container, dict):
            yield key
        yield item


def items_of(container: Any) -> list[tuple[Any, Any]]:
    """Returns keys or positions with the items, past what a class of the user's makes of item access."""
    base = _base(container)
    if issubclass(base, dict):
        return [*base.items(container)]
    return [*enumerate(base.__iter__(container))]


def length_of(container: Any) -> int:
    """Returns the number of items, past what a class of the user's makes of ``len``; e3nn's Irrep raises."""
    length: int = _base(container).__len__(container)
    return length


def copied(value: Any) -> Any:
    """Returns the content of a container in containers of Python's own types, with the same leaf objects."""
    base = _base(value)
    if base is type(None):
        return value
    if issubclass(base, dict):
        return base((key, copied(item)) for key, item in items_of(value))
    return base(copied(item) for _, item in items_of(value))


def restore(container: Any, content: Any) -> None:
    """Gives a container its earlier content; does not touch one that is unchanged: other threads read it.

    Args:
        container: A list, deque, set or dict of Python's own types.
        content: A copy of it.
    """
    if isinstance(container, set):
        is_same = {*map(id, container)} == {*map(id, content)}
    else:
        mine, other = _inside(container), _inside(content)
        is_same = len(container) == len(content) and all(map(is_, mine, other))
    if is_same:
        return
    container.clear()
    (container.extend if isinstance(container, (list, deque)) else container.update)(content)


def is_frozen(value: Any) -> bool:
    """Whether no code can change the content of a value with plain leaves."""
    if not is_container(value):
        return True
    return isinstance(value, (tuple, frozenset)) and all(is_frozen(item) for _, item in items_of(value))


def alike(a: object, b: object, depth: int = 0) -> bool:
    """Whether two values of different models are one object, or equal, plain and of one type.

    Stricter than `same`: a parameter is like no other.
    """
    if a is b:
        return True
    if type(a) is not type(b) or depth > _DEEPEST:
        return False
    if is_plain(a):
        return equal(a, b)
    if isinstance(a, _SETS) and isinstance(b, _SETS):
        return has_plain_leaves(a) and has_plain_leaves(b) and sorted(map(repr, a)) == sorted(map(repr, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return alike([*a.keys()], [*b.keys()], depth + 1) and alike([*a.values()], [*b.values()], depth + 1)
    if isinstance(a, _SEQUENCES) and isinstance(b, _SEQUENCES):
        mine, other = items_of(a), items_of(b)
        return len(mine) == len(other) and all(
            alike(x, y, depth + 1) for (_, x), (_, y) in zip(mine, other, strict=True)
        )
    return False


def equal(a: object, b: object) -> bool:
    """Whether two plain values are the same to any code: 1 is not True, 1.0 is not 1, 0.0 is not -0.0."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, _WRITTEN):
        return repr(a) == repr(b)
    result = a == b
    return not isinstance(result, Sized) and bool(result)  # arrays and tensors compare item by item


def same(a: object, b: object, depth: int = 0) -> bool:
    """Whether two values are one object, or `equal` and plain; in containers, item by item.

    Parameters count as equal, because a graph reads them directly.
    """
    if a is b or (isinstance(a, nn.Parameter) and isinstance(b, nn.Parameter)):
        return True
    base = _base(a)
    if base is type(None):
        return is_plain(a) and equal(a, b)
    if base is not _base(b) or depth > _DEEPEST:
        return False
    if base in _SETS:
        return bool(base.__eq__(a, b)) and sorted(map(repr, a)) == sorted(map(repr, b))  # type: ignore[call-overload]
    mine, other = items_of(a), items_of(b)
    return len(mine) == len(other) and all(
        equal(i, j) and same(x, y, depth + 1) for (i, x), (j, y) in zip(mine, other, strict=True)
    )


def _base(value: object) -> Any:
    """Returns the type of Python's own that a container is built on, or NoneType."""
    return next((base for base in _BASES if isinstance(value, base)), type(None))
