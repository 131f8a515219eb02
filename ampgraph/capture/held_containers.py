"""The lists, dicts and sets in attributes of modules, which are after a capture as they were before it."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..proxy.module_parts import OF_EVERY_MODULE
from ..proxy.module_proxy import source_of
from .containers import is_container, items_of, restore

_RESTORABLE = (list, dict, set, deque, OrderedDict, defaultdict)


class HeldContainers:
    """Takes down what the attributes of a model hold.

    ``torch.export`` puts a copy of its own into each attribute afterwards. Modules that share a list would
    then have two, and neither would be the one that other objects know.

    Args:
        model: The model.

    Attributes:
        content: The path of an attribute, a container in it, and a copy of the container.
    """

    def __init__(self, model: nn.Module) -> None:
        attributes = [(path, vars(source_of(module))) for path, module in model.named_modules()]
        self._held = [
            (held, name, value)
            for _, held in attributes
            for name, value in held.items()
            if name not in OF_EVERY_MODULE and is_container(value)
        ]
        paths = {id(held): path for path, held in attributes}
        seen: set[int] = set()
        self.content = [
            (f"{paths[id(held)]}.{name}".lstrip("."), container, copy.copy(container))
            for held, name, value in self._held
            for container in _inside(value, seen)
        ]

    def put_back(self) -> None:
        """Puts the containers into the attributes, and their content into them."""
        for _, container, content in self.content:
            restore(container, content)
        for held, name, value in self._held:
            if held.get(name) is not value:  # a set attribute tells other threads of a change
                held[name] = value


def _inside(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yields a container that code can change, and those inside it, each once."""
    if not is_container(value) or id(value) in seen:
        return
    seen.add(id(value))
    if type(value) in _RESTORABLE:
        yield value
    for _, item in items_of(value):
        yield from _inside(item, seen)
