"""`OutsideModules`: modules that are no parts of the model, and that forward uses or resets.

A teacher in a plain list, or all neurons of a process in an attribute of their class.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any, NamedTuple

from torch import nn

from ..proxy.module_parts import OF_EVERY_MODULE, TABLES
from .code_place import GONE
from .held_objects import is_of_capture


class _Held(NamedTuple):
    """A dict of a module: its attributes, or a table of parameters, buffers or submodules."""

    owner: str
    now: dict[str, Any]
    before: dict[str, Any]
    is_table: bool

    def lost(self) -> list[str]:
        """Returns the names of what forward exchanged or removed, and a graph cannot."""
        exchanged = [n for n, value in self.before.items() if self.now.get(n, GONE) is not value]
        found = [n for n in exchanged if self.is_table or n not in self.now]
        return found + [n for n, v in self.now.items() if v is not self.before.get(n) and is_of_capture(v)]


class OutsideModules:
    """What such modules held when forward first touched them.

    Attributes:
        changed: What forward exchanged or removed there: tensors, submodules.
    """

    def __init__(self) -> None:
        self.changed: list[str] = []
        self._held: list[_Held] = []

    def add(self, module: nn.Module) -> None:
        """Takes down what a module holds, unless forward makes it now."""
        owner, own = type(module).__name__, vars(module)
        tables = [own[kind] for kind in TABLES if isinstance(own.get(kind), dict)]
        if own.keys() <= OF_EVERY_MODULE and not any(tables):
            return
        self._held += [_Held(owner, held, dict(held), held is not own) for held in (own, *tables)]

    def put_back(self) -> None:
        """Gives the modules back what they lost."""
        for held in self._held:
            if not (lost := dict.fromkeys(held.lost())):
                continue
            self.changed += [f"{held.owner}.{name}" for name in lost]
            content = held.before if held.is_table else _without(held.now, lost, held.before)
            held.now.clear()
            held.now.update(content)
        self._held.clear()


def _without(now: dict[str, Any], lost: Container[str], before: dict[str, Any]) -> dict[str, Any]:
    """Returns attributes with the earlier values of those that were lost."""
    kept = {name: value for name, value in now.items() if name not in lost}
    return {**kept, **{name: value for name, value in before.items() if name in lost}}
