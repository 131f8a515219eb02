"""Lists, dicts and sets of Python's own types in attributes of modules: after a capture as before it."""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..proxy.module_parts import OF_EVERY_MODULE
from ..proxy.module_proxy import source_of
from .containers import has_plain_leaves, is_container, items_of, restore

_RESTORABLE = (list, dict, set, deque, OrderedDict, defaultdict)


class HeldContainers:
    """Records the containers in the attributes of a model, and what they hold.

    After a capture ``torch.export`` leaves a new copy in each attribute. Modules that shared a list would
    then have two lists, and other objects would still hold the old one.

    Args:
        model: The model.

    Attributes:
        visible: The path of an attribute, a container in it and a copy of the container, where somebody may
            look at what a call puts there. Left out are dicts that nothing else holds, and that are empty or
            hold plain values: those are caches.
    """

    def __init__(self, model: nn.Module) -> None:
        attributes = [(path, vars(source_of(module))) for path, module in model.named_modules()]
        self._held = [
            (held, name, value)
            for _, held in attributes
            for name, value in held.items()
            if name not in OF_EVERY_MODULE and is_container(value)
        ]
        shared = _shared(self._held)
        paths = {id(held): path for path, held in attributes}
        seen: set[int] = set()
        self._content: list[tuple[Any, Any]] = []
        self.visible: list[tuple[str, Any, Any]] = []
        for held, name, value in self._held:
            found = [(container, copy.copy(container)) for container in _inside(value, seen)]
            self._content += found
            if not (isinstance(value, dict) and id(value) not in shared and has_plain_leaves(value)):
                path = f"{paths[id(held)]}.{name}".lstrip(".")
                self.visible += [(path, *pair) for pair in found]

    def records(self) -> tuple[object, ...]:
        """Returns the containers that hold what is recorded."""
        return self._held, self._content, self.visible

    def empty(self) -> None:
        """Takes out what a capture has put into the containers that are not visible."""
        kept = {id(container) for _, container, _ in self.visible}
        for container, content in self._content:
            if id(container) not in kept:
                restore(container, content)

    def put_back(self) -> None:
        """Puts the containers into the attributes, and their content into them."""
        for container, content in self._content:
            restore(container, content)
        for held, name, value in self._held:
            if held.get(name) is not value:
                held[name] = value


def _shared(records: list[tuple[dict, str, Any]]) -> set[int]:
    """Returns the ids of the values of attributes that anything else holds, too.

    Args:
        records: The dict of an object, the name of an attribute, and its value, which nothing else needs.
    """
    alone = {"": [None]}
    every = [*records, *((alone, name, value) for name, value in alone.items())]
    counts = [sys.getrefcount(value) for _, _, value in every]
    return {id(value) for (_, _, value), count in zip(records, counts, strict=False) if count > counts[-1]}


def _inside(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yields a container that code can change, and those inside it, each once."""
    if not is_container(value) or id(value) in seen:
        return
    seen.add(id(value))
    if type(value) in _RESTORABLE:
        yield value
    if isinstance(value, (set, frozenset)):  # whose items nothing changes
        return
    for _, item in items_of(value):
        yield from _inside(item, seen)
