"""`OutsideModules`: modules that are no parts of the model, and that forward uses or resets.

A teacher in a plain list, or all neurons of a process in an attribute of their class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from ..proxy.module_parts import OF_EVERY_MODULE, TABLES
from .code_place import GONE
from .held_objects import is_of_capture


class _Held(NamedTuple):
    """A dict of a module: its attributes, or a table of parameters, buffers or submodules."""

    module: nn.Module
    now: dict[str, Any]
    before: dict[str, Any]
    is_table: bool

    def lost(self, is_set: Callable[[nn.Module, str], bool]) -> list[str]:
        """Returns the names of what forward exchanged or removed, and a graph cannot.

        ``torch.func.functional_call`` exchanges tensors for a call, in which forward may touch the module
        first. So real tensors count only if forward sets them, and what was of the capture before never.

        Args:
            is_set: Whether forward assigned an attribute.
        """
        names = [n for n, v in self.before.items() if self.now.get(n, GONE) is not v and not is_of_capture(v)]
        names += [n for n in self.now if n not in self.before]
        return [n for n in names if self._is_lost(n) or (self.is_table and is_set(self.module, n))]

    def _is_lost(self, name: str) -> bool:
        return name not in self.now or is_of_capture(self.now[name])


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
        own = vars(module)
        tables = [own[kind] for kind in TABLES if isinstance(own.get(kind), dict)]
        if own.keys() <= OF_EVERY_MODULE and not any(tables):
            return
        self._held += [_Held(module, held, dict(held), held is not own) for held in (own, *tables)]

    def put_back(self, is_set: Callable[[nn.Module, str], bool]) -> None:
        """Gives the modules back what they lost.

        Args:
            is_set: Whether forward assigned an attribute of a module.
        """
        for held in self._held:
            if not (lost := held.lost(is_set)):
                continue
            self.changed += [f"{type(held.module).__name__}.{name}" for name in lost]
            sources = [(n, held.before if n in lost else held.now) for n in {**held.before, **held.now}]
            content = {name: source[name] for name, source in sources if name in source}
            held.now.clear()
            held.now.update(content)
        self._held.clear()
