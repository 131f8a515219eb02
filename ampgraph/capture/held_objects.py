"""Objects that modules hold (caches, statistics, settings), and their attributes that forward sets."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from .._compat import FakeTensor
from ..proxy.module_parts import OF_EVERY_MODULE
from .code_place import GONE
from .containers import copied, has_plain_leaves, is_plain, same
from .user_code import is_foreign

_DEPTH = 3  # of objects inside objects
_NO_STATE = (torch.Tensor, nn.Module, type, ModuleType, FunctionType, MethodType)


class Change(NamedTuple):
    """The value of an attribute before forward, GONE for none, and the value that forward set."""

    before: object
    after: object

    def is_decision(self) -> bool:
        """Whether forward settled what was open, such as the kind of loss: no number, no tensor."""
        is_number = isinstance(self.after, (int, float, complex)) and not isinstance(self.after, bool)
        return (self.before is None or self.before is GONE) and is_plain(self.after) and not is_number


@contextlib.contextmanager
def noting_set_attributes(model: nn.Module) -> Iterator[dict[str, Change]]:
    """Yields a dict that collects the attributes of held objects that forward sets, as paths from the model.

    Tensors and sizes that a capture sets there hold no data: these attributes get their values back.
    """
    before = [
        (path, held, {name: copied(v) if has_plain_leaves(v) else v for name, v in held.items()})
        for path, held in _objects(model)
    ]
    found: dict[str, Change] = {}
    try:
        yield found
    finally:
        for path, held, values in before:
            _note_changes(found, path, held, values)


def _note_changes(found: dict[str, Change], path: str, held: dict[str, Any], values: dict[str, Any]) -> None:
    for name in {**values, **held}:
        change = Change(values.get(name, GONE), held.get(name, GONE))
        if same(change.after, change.before):
            continue
        found[f"{path}.{name}"] = change
        if is_of_capture(change.after):
            _put_back(held, name, values)


def _objects(model: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in OF_EVERY_MODULE:
                yield from objects_inside(value, f"{path}.{name}".lstrip("."), seen)
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            yield from objects_inside(hook, f"{path}.{type(hook).__name__}".lstrip("."), seen)


def objects_inside(value: object, path: str, seen: set[int]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the attributes of an object and of objects that it holds, as paths and dicts.

    Args:
        value: Any value.
        path: Its path.
        seen: The ``id`` of objects to leave out; gets those that are yielded.
    """
    yield from _inside(value, path, _DEPTH, seen)


def _inside(value: object, path: str, depth: int, seen: set[int]) -> Iterator[tuple[str, dict[str, Any]]]:
    if type(value) in weakref.ProxyTypes:  # its object may be dead
        return
    if not depth or id(value) in seen or isinstance(value, _NO_STATE) or not hasattr(value, "__dict__"):
        return
    if is_foreign(type(value)):
        return
    seen.add(id(value))
    yield path, vars(value)
    for name, inner in vars(value).items():
        yield from _inside(inner, f"{path}.{name}", depth - 1, seen)


def is_of_capture(value: object) -> bool:
    """Whether a value is, or holds, a tensor or a size without data."""
    without_data = (FakeTensor, torch.SymInt, torch.SymFloat, torch.SymBool)
    return any(isinstance(leaf, without_data) for leaf in tree_leaves(value))


def _put_back(held: dict[str, Any], name: str, values: dict[str, Any]) -> None:
    if name in values:
        held[name] = values[name]
    else:
        del held[name]
