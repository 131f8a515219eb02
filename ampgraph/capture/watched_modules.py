"""Records in `Reads` what a capture reads of modules: patches of ``nn.Module`` for as long as it lasts."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from .._compat import replaced
from ..proxy.module_parts import TABLES
from .containers import copied, has_plain_leaves, is_container, same
from .reads import OF_NN_MODULE, Reads


@contextlib.contextmanager
def recorded(reads: Reads, is_capturing: Callable[[], bool]) -> Iterator[None]:
    """Records the reads of forward in threads that are capturing; restores attributes."""
    set_attribute, delete_attribute = nn.Module.__setattr__, nn.Module.__delattr__
    outer = vars(nn.Module).get("__getattribute__")  # a capture inside a capture

    def watched_set(self: nn.Module, name: str, value: Any) -> None:
        if name not in OF_NN_MODULE and is_capturing():
            reads.note_set(self, name, value)
        set_attribute(self, name, value)

    def watched_delete(self: nn.Module, name: str) -> None:
        if is_capturing():
            reads.watches(self)
        delete_attribute(self, name)

    def watched_hash(self: nn.Module) -> int:
        if is_capturing():
            reads.asks.note_itself()
        return object.__hash__(self)

    before = {key: dict(vars(module)) for key, module in reads.modules.items()}
    for module in reads.elsewhere.values():  # an earlier trace of the same capture has found them
        reads.outside.add(module)
    try:
        with (
            replaced(nn.Module, "__hash__", watched_hash),
            replaced(nn.Module, "__setattr__", watched_set),
            replaced(nn.Module, "__delattr__", watched_delete),
            replaced(nn.Module, "__getattribute__", _WatchedGet(outer, reads, is_capturing)),
            replaced(torch, "is_grad_enabled", _WatchedQuestion(torch.is_grad_enabled, reads, is_capturing)),
        ):
            yield
    finally:
        _put_back(reads, before)
        reads.outside.put_back(reads.was_set)


def _put_back(reads: Reads, before: dict[int, dict[str, Any]]) -> None:
    """Restores the model's lists and dicts, which torch.export replaces by copies, and notes what changed."""
    for key, attributes in before.items():
        held = vars(reads.modules[key])
        for name, value in attributes.items():
            now, is_read = held.get(name), (key, name) in reads.attributes
            is_replaced = is_container(value) and now is not value
            if is_replaced and same(now, value):
                held[name] = value
            elif not is_read:
                continue
            elif is_replaced:
                reads.note_carried((key, name), copied(value))
            elif has_plain_leaves(now) and not same(now, reads.attributes[key, name]):
                reads.note_carried((key, name), now)  # through vars(), in a set


class _WatchedGet:
    """``nn.Module.__getattribute__`` as an object, because Dynamo traces into a function."""

    def __init__(self, outer: Any, reads: Reads, is_capturing: Callable[[], bool]) -> None:
        self._outer, self._reads, self._is_capturing = outer, reads, is_capturing

    def __get__(self, module: nn.Module | None, owner: type | None = None) -> Callable[..., Any]:
        # Dynamo captures bodies of torch.cond; it calls this on the class, with the module as an argument.
        return self._get if module is None else functools.partial(self._get, module)

    def _get(self, module: nn.Module, name: str) -> Any:
        try:
            value = (
                self._outer.__get__(module)(name) if self._outer else object.__getattribute__(module, name)
            )
        except AttributeError:
            if not name.startswith("__") and self._is_capturing() and self._reads.counts(module, name):
                self._reads.note_missing(module, name)
            raise
        if name in TABLES and self._is_capturing():
            self._reads.watches(module)  # ``teacher.parameters()`` asks for nothing else
        if name == "__dict__" and self._is_capturing() and self._reads.asks.note_itself():
            self._reads.note_all(module)
        if not name.startswith("__") and self._is_capturing() and self._reads.counts(module, name):
            self._reads.note_read(module, name, value)
        return value


class _WatchedQuestion:
    """``torch.is_grad_enabled`` with recording; equal to it, because Dynamo looks functions up in tables."""

    def __init__(self, function: Callable[[], bool], reads: Reads, is_capturing: Callable[[], bool]) -> None:
        self._function, self._reads, self._is_capturing = function, reads, is_capturing

    def __call__(self) -> bool:
        if self._is_capturing():
            self._reads.asks.note_gradients()
        return self._function()

    def __eq__(self, other: object) -> bool:
        return other is self or other == self._function

    def __hash__(self) -> int:
        return hash(self._function)
