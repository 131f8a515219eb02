"""Side effects of forward: writes to container arguments, new attributes, replaced buffers and submodules."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from operator import is_, is_not
from typing import Any, NamedTuple

from torch import nn
from torch.utils import _pytree as pytree

from ..proxy.all_parameters import all_parameters
from ..proxy.module_parts import OF_EVERY_MODULE
from ..proxy.module_proxy import source_of
from .containers import is_plain


class _Seen(NamedTuple):
    """An argument and its content before forward."""

    value: Any
    leaves: list[Any]
    spec: pytree.TreeSpec

    def is_same(self) -> bool:
        leaves, spec = pytree.tree_flatten(self.value)
        return spec == self.spec and all(map(_is_same, leaves, self.leaves))


@contextlib.contextmanager
def noting_written_containers(model: nn.Module) -> Iterator[list[str]]:
    """Yields a list that collects the arguments whose lists, dicts or dataclasses forward changes.

    Tensors that forward writes in place do not count, because a graph writes them too.
    """
    found: list[str] = []
    calls: list[dict[str, _Seen]] = []

    def enter(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        named = named_arguments(module, args, kwargs)
        calls.append({name: _Seen(v, *pytree.tree_flatten(v)) for name, v in named})

    def leave(module: nn.Module, args: tuple, kwargs: dict[str, Any], result: object) -> None:
        written = [name for name, seen in calls.pop().items() if not seen.is_same()]
        found.extend(name for name in written if name not in found)

    before = model.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
    after = model.register_forward_hook(leave, with_kwargs=True)
    try:
        yield found
    finally:
        before.remove()
        after.remove()


@contextlib.contextmanager
def without_new_state(model: nn.Module) -> Iterator[None]:
    """Removes attributes, buffers, submodules and hooks that a capture adds to modules.

    It removes all of them, because forward may set an attribute that says that its hooks exist.
    """
    sources = list(map(source_of, model.modules()))
    before = [(table, set(table)) for module in sources for table in _tables(module)]
    empty = [(module, {k: v for k, v in vars(module).items() if v is None}) for module in sources]
    try:
        with tensor_attributes_restored(model):
            yield
    finally:
        for table, names in before:
            for name in table.keys() - names - OF_EVERY_MODULE:
                del table[name]
        for module, attributes in empty:  # a submodule in place of None leaves the attributes
            vars(module).update({k: v for k, v in attributes.items() if not hasattr(module, k)})


@contextlib.contextmanager
def tensor_attributes_restored(model: nn.Module) -> Iterator[None]:
    """Sets the attributes of parameters and buffers back: hooks count the calls of a layer there."""
    before = [(vars(tensor), {**vars(tensor)}) for tensor in (*all_parameters(model), *model.buffers())]
    try:
        yield
    finally:
        for held, attributes in before:
            if held.keys() != attributes.keys() or any(map(is_not, held.values(), attributes.values())):
                held.clear()
                held.update(attributes)


def _tables(module: nn.Module) -> Iterator[dict]:
    """Yields a module's attributes, and its hooks, buffers, parameters and submodules."""
    yield vars(module)
    yield from (v for k, v in vars(module).items() if k in OF_EVERY_MODULE and isinstance(v, dict))


def named_arguments(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """Returns the arguments of a call of a module with the names that its forward gives them."""
    try:
        return [*inspect.signature(module.forward).bind(*args, **kwargs).arguments.items()]
    except (TypeError, ValueError):  # no such signature, or none at all
        return [*((f"number {i}", v) for i, v in enumerate(args)), *kwargs.items()]


def _is_same(a: object, b: object) -> bool:
    return is_(a, b) or (is_plain(a) and type(a) is type(b) and a == b)
