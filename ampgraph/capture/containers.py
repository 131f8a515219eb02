"""Compares plain Python values: numbers, strings, dtypes, and lists, tuples, sets and dicts of them."""

from __future__ import annotations

import copy
import enum
from collections import deque
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
_SEQUENCES = (list, tuple, deque)
_SETS = (set, frozenset)
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
    if depth > _DEEPEST or len(value) > _MOST_LEAVES:
        return None
    found: list[object] = []
    for item in (*value.keys(), *value.values()) if isinstance(value, dict) else value:
        inner = _leaves(item, depth + 1)
        if inner is None or len(found) + len(inner) > _MOST_LEAVES:
            return None
        found += inner
    return found


def copied(value: Any) -> Any:
    """Returns a copy of a container with the same leaf objects."""
    if isinstance(value, tuple):
        items = [copied(item) for item in value]
        is_unchanged = all(a is b for a, b in zip(items, value, strict=True))
        return value if is_unchanged else getattr(type(value), "_make", type(value))(items)
    if not is_container(value):
        return value
    made = copy.copy(value)
    if isinstance(value, _SETS):
        return made
    for place in value if isinstance(value, dict) else range(len(value)):
        made[place] = copied(value[place])
    return made


def same(a: object, b: object, depth: int = 0) -> bool:
    """Whether two values are one object, or equal and plain; in containers, item by item.

    Parameters count as equal, because a graph reads them directly.
    """
    if a is b or (isinstance(a, nn.Parameter) and isinstance(b, nn.Parameter)):
        return True
    if type(a) is not type(b) or depth > _DEEPEST:
        return False
    if is_plain(a) or isinstance(a, _SETS):
        return a == b
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(same(a[k], b[k], depth + 1) for k in a)
    if isinstance(a, _SEQUENCES) and isinstance(b, _SEQUENCES):
        return len(a) == len(b) and all(same(x, y, depth + 1) for x, y in zip(a, b, strict=True))
    return False
