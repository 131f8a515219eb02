"""`Surroundings`: what a loss function reads besides its arguments, as it was when a step was traced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import chain
from operator import is_
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..capture.code import Code
from ..capture.code_place import Place
from ..capture.containers import is_container, is_plain, items_of
from ..capture.user_code import is_foreign
from ..module import AmpModule
from ..proxy.module_parts import OF_EVERY_MODULE
from ..runtime.module_structure import Structure
from ..runtime.places import Places

_DEPTH = 4  # of objects inside objects
_MANY = 4096  # items of one container
_MOST = 65536
_NOT_ENTERED = (Tensor, ModuleType, type, FunctionType, MethodType)


class Surroundings:
    """The values that a loss function names: settings, tensors, other modules such as a teacher.

    Attributes:
        reason: Why a graph cannot hold one of them; None if it can.
        objects: Their dicts, lists and sets by path, and those that the function can reach from them.
    """

    def __init__(self, loss_fn: Callable, amp: AmpModule) -> None:
        self.reason: str | None = None
        self.objects: list[tuple[str, Any]] = []
        self._amp = amp
        self._own = set(map(id, amp.source.modules()))
        self._modules: dict[int, tuple[str, nn.Module]] = {}
        self._outer: list[nn.Module] = []
        self._seen: set[int] = {id(amp)}
        roots = dict(_roots(loss_fn))
        self._code = Code(*roots.values())
        names = self._names()
        self.places = [*(Place(roots, name, f"loss_fn{name}") for name in roots)]
        self._reach()
        self._places = Places(self._names())
        for place in self.places:
            self._places.add(place)
        for path, module in amp.source.named_modules():
            self.objects.append((f"model.{path}".rstrip("."), vars(module)))
            self._add_attributes(module, f"model.{path}".rstrip("."), names)
        for path, module in self._modules.values():
            self._add_attributes(module, path, self._names())
        self._places.settle()
        self._structures = [(found := Structure(m.modules()), found.training_modes()) for m in self._outer]
        others = [module for _, module in self._modules.values()]
        tables: list[dict[str, Any]] = [table for m in others for table in (m._parameters, m._buffers)]
        self._tables = [table for table in tables if table]
        self._attributes = [*map(vars, others)]
        self._sizes = [*map(len, self._attributes)]
        self._entries = [*chain.from_iterable(map(dict.values, self._tables))]
        held = chain(self._entries, self._places.tensors())
        self._tensors = [t for t in held if isinstance(t, Tensor)]
        self._layouts = [*map(layout_of, self._tensors)]

    def is_same(self) -> bool:
        """Whether the function would read the same. Runs at every step."""
        if not self._places.are_same() or not self._has_same_layouts():
            return False
        if not self._modules:
            return True
        entries = [*chain.from_iterable(map(dict.values, self._tables))]
        return (
            [*map(len, self._attributes)] == self._sizes
            and len(entries) == len(self._entries)
            and all(map(is_, entries, self._entries))
            and all(s.is_current() and s.training_modes() == modes for s, modes in self._structures)
        )

    def changed(self) -> str:
        """Returns what is another now, as a user writes it."""
        if paths := self._places.changed():
            return ", ".join(paths[:3])
        if not self._has_same_layouts():
            return "sizes, strides, dtype or requires_grad of a tensor that loss_fn names"
        return "an attribute or a module of an object that loss_fn names"

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor must stay the same object for `is_same`."""
        return any(t is tensor for t in chain(self._entries, self._places.tensors()))

    def values(self) -> Iterator[tuple[Any, str]]:
        """Yields values that may hold random generators, with their paths."""
        return ((place.value(), place.path) for place in self.places)

    def _has_same_layouts(self) -> bool:
        """Whether tensors, whose values a graph reads where they are, are of the same kind."""
        return [*map(layout_of, self._tensors)] == self._layouts

    def _names(self) -> set[str]:
        return self._code.names | self._code.strings

    def _reach(self) -> None:
        """Finds objects and modules from the places, and reads the code of these modules, to the end."""
        known = -1
        while known != (known := len(self.places) + len(self._modules)):
            places = {(id(place.holder), place.name): place for place in self.places}
            self.places = [*{**places, **self._code.places}.values()]
            names = self._names()
            for place in self.places:
                self._enter(place.value(), place.path, _DEPTH, names)
            self._code.follow(*(module for _, module in self._modules.values()))

    def _enter(self, value: Any, path: str, depth: int, names: set[str]) -> None:
        if id(value) in self._seen or is_plain(value) or isinstance(value, _NOT_ENTERED):
            return
        if len(self._seen) > _MOST:
            return
        self._seen.add(id(value))
        if isinstance(value, nn.Module):
            self._enter_module(value, path)
        elif is_container(value):
            self.objects.append((path, value))
            for key, item in items_of(value)[:_MANY]:
                self._enter(item, f"{path}[{key!r}]", depth, names)
        elif (what := _changing(value)) is not None:
            self._refuse(f"loss_fn refers to {path}, {what}")
        elif depth and not is_foreign(type(value)) and hasattr(value, "__dict__"):
            self.objects.append((path, vars(value)))
            for name in [name for name in vars(value) if name in names]:
                self._enter(vars(value)[name], f"{path}.{name}", depth - 1, names)

    def _enter_module(self, root: nn.Module, path: str) -> None:
        for name, module in root.named_modules():
            inner = f"{path}.{name}".rstrip(".")
            if isinstance(module, AmpModule) and module is not self._amp:
                self._refuse(f"loss_fn refers to {inner}, another converted model")
            if id(module) in self._own or id(module) in self._modules or isinstance(module, AmpModule):
                continue
            self._modules[id(module)] = inner, module
            self.objects += [(inner, vars(module)), (inner, module._buffers), (inner, module._modules)]
        if id(root) in self._modules:
            self._outer.append(root)

    def _add_attributes(self, module: nn.Module, path: str, names: set[str]) -> None:
        held = vars(module)
        for name in [name for name in held if name in names and name not in OF_EVERY_MODULE]:
            self._places.add(Place(held, name, f"{path}.{name}"))

    def _refuse(self, reason: str) -> None:
        self.reason = self.reason or reason


def layout_of(tensor: Tensor) -> tuple:
    """Returns what ops read of a tensor besides its values."""
    strides: tuple = ()
    if tensor.layout == torch.strided:
        strides = tensor.stride(), tensor.storage_offset(), tensor.is_conj(), tensor.is_neg()
    return tensor.shape, tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad, strides


def _roots(function: Any) -> Iterator[tuple[str, Any]]:
    """Yields what a function brings along, by a name: itself, its object, arguments, defaults."""
    while isinstance(function, functools.partial):
        yield f" argument {len(function.args)}", function.args
        yield " keywords", function.keywords
        function = function.func
    yield "", function
    if isinstance(function, MethodType):
        yield ".__self__", function.__self__
        function = function.__func__
    yield ".__defaults__", getattr(function, "__defaults__", None)
    yield ".__kwdefaults__", getattr(function, "__kwdefaults__", None)
    if not isinstance(function, (FunctionType, nn.Module)):  # the code of a module is read anyway
        yield ".__call__", vars(type(function)).get("__call__")


def _changing(value: Any) -> str | None:
    """Returns what an object is whose content a graph cannot follow; None for others."""
    if isinstance(value, (Optimizer, LRScheduler)):
        return "whose numbers change; pass them as tensors"
    if hasattr(type(value), "__array__") and hasattr(type(value), "__setitem__"):
        return "an array; pass it as a tensor"
    if hasattr(type(value), "__next__"):
        return "an iterator; pass its items as arguments"
    return None
