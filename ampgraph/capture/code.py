"""`Code`: what the code of a model, or a function, reads outside of its modules' attributes.

That is globals, what functions close over, attributes of Python modules and of classes. A function that is
replaced counts, too: another ``forward`` of a class, another ``torch.nn.functional.gelu``.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Iterable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from ..own_files import AMPGRAPH, TORCH, is_pythons
from ..proxy.bound_proxy import class_behind
from ..proxy.module_parts import OF_EVERY_MODULE
from .bytecode import asked_for, codes_in, global_names, imported, names_set
from .code_place import GONE, Place
from .containers import copied, has_plain_leaves, is_container, is_frozen, is_small, items_of, same
from .user_code import is_foreign, is_foreign_module

_LAYERS = os.path.join(TORCH, "nn", "modules", "")
# The parts of torch whose functions are looked up.
_OF_TORCH = ("torch", "torch.nn.functional")
_BUILTINS = frozenset(dir(builtins))
_ARITHMETIC = (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow"),
    *("lshift", "rshift", "and", "or", "xor"),
)
_OTHER_OPERATORS = (
    *("call", "getattr", "getattribute", "getitem", "setitem", "missing", "contains", "len", "iter", "next"),
    *("enter", "exit", "get", "torch_function", "eq", "ne", "lt", "le", "gt", "ge", "hash", "bool", "int"),
    *("float", "index", "neg", "pos", "abs", "invert", "round"),
)
# The special methods that an expression or a statement runs.
_OPERATORS = {
    f"__{name}__"
    for name in (*_OTHER_OPERATORS, *(f"{side}{op}" for side in ("", "r", "i") for op in _ARITHMETIC))
}
_NO_TABLES = (type, ModuleType, FunctionType, nn.Module, torch.Tensor)
# What a capture itself replaces in torch meanwhile.
_REPLACED = ("is_grad_enabled",)
_NOT_READ = (TORCH, AMPGRAPH, "<frozen")
_OF_NN_MODULE = frozenset(vars(nn.Module)) - {"forward"}
_DEPTH = 3  # of objects inside what a module holds


class Code:
    """The places that the code of a model's modules, or of a function, names.

    Code says names alone, so that too much is found rather than too little: every attribute name is looked up
    in every class and Python module that the code can reach. What torch, Python and ampgraph read is left
    out, but for the methods of torch's layers.

    Args:
        roots: Modules, whose submodules count too, functions and callable objects.

    Attributes:
        names: All names in the code.
        strings: The strings in the code that may be names: ``getattr(config, "scale")``.
        places: The reads that were found, in order.
        hooks: The hooks of the modules: objects, and arguments of partials, may have settings.
        asking_types: The functions that read Python's own ``type``; those of torch are left out.
        names_set: The names of globals and attributes that the code sets; `add_settings` empties it first.
    """

    def __init__(self, *roots: Any) -> None:
        self.names: set[str] = set()
        self.strings: set[str] = set()
        self.places: dict[tuple[int, str], Place] = {}
        self.hooks: list[Place] = []
        self.asking_types: list[FunctionType] = []
        self.names_set: set[str] = set()
        self._functions: list[FunctionType] = []
        self._seen: set[int] = set()
        self._holders: dict[int, tuple[Any, str]] = {}
        self._looked_up: dict[int, set[str]] = {}
        self.follow(*roots)
        values = {key: place.value() for key, place in self.places.items()}
        settled = {key: v for key, v in values.items() if v is GONE or has_plain_leaves(v)}
        self._before = {key: copied(value) for key, value in settled.items()}

    def follow(self, *roots: Any) -> None:
        """Reads the code of more modules, functions and callable objects."""
        for root in roots:
            if not isinstance(root, nn.Module):
                self._follow(root)
                continue
            for module in root.modules():
                self._follow(class_behind(type(module)))
                own = [value for name, value in vars(module).items() if name not in OF_EVERY_MODULE]
                hooks = [*_hooks_of(module)]
                for value in (*own, *(hook.value() for hook in hooks)):
                    self._follow_held(value, _DEPTH)
                self.hooks += hooks
        self._read()

    def add_settings(self, *functions: FunctionType) -> None:
        """Adds the places that more functions read, which have run since this was made.

        What they set themselves, and containers that they may fill, are no settings: it is unknown what those
        held before.
        """
        known, self.names_set = set(self.places), set()
        self.follow(*functions)
        for key, place in [(k, p) for k, p in self.places.items() if k not in known]:
            if place.name in self.names_set or is_container(place.value()):
                del self.places[key]

    def changed(self) -> list[Place]:
        """Returns the places whose plain values are others than when this was made."""
        before = [(self.places[key], value) for key, value in self._before.items()]
        changed = [(place, value) for place, value in before if not same(place.value(), value)]
        return [place for place, value in changed if not _is_filled_cache(place, value)]

    def reaches(self, *functions: Any) -> bool:
        """Whether the code names one of these functions, or is decorated by one."""
        return any(id(function) in self._seen for function in functions)

    def functions(self) -> Iterator[Place]:
        """Yields the places in classes and in torch: a compiler does not look whether those are the same."""
        of_torch = id(vars(torch)), id(vars(nn.functional))
        for place in self.places.values():
            if isinstance(place.holder, type) or id(place.holder) in of_torch:
                yield place

    def _read(self) -> None:
        """Reads functions, and looks names up, until nothing new is found."""
        while self._functions:
            while self._functions:
                self._read_function(self._functions.pop())
            for key, (holder, path) in list(self._holders.items()):
                done = self._looked_up.setdefault(key, set())
                new = (self.names | self.strings) - done
                done |= new
                self._look_up(holder, path, new)

    def _read_function(self, function: FunctionType) -> None:
        codes = [*codes_in(function.__code__)]
        self.names |= {name for code in codes for name in code.co_names}
        constants = [constant for code in codes for constant in code.co_consts]
        self.strings |= {c for c in constants if isinstance(c, str) and c.isidentifier()}
        module, known = function.__module__ or "", function.__globals__
        globals_read = global_names(function.__code__)
        if "type" in globals_read and "type" not in known and not module.startswith("torch."):
            self.asking_types.append(function)
        for name in globals_read:
            if name in known or name not in _BUILTINS:  # a name that is not there may come
                self._add(known, name, f"{module}.{name}")
        self.names_set |= names_set(function.__code__)
        for path, name in asked_for(function.__code__):
            value = _found(known, path)
            held = (vars(value), value.__qualname__) if isinstance(value, FunctionType) else _holder(value)
            if held is not None:
                self._add(held[0], name, f"{held[1]}.{name}")
        for name in imported(function.__code__):
            self._follow(sys.modules.get(name))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._add(cell, "cell_contents", f"{function.__qualname__}.{name}")
            self._follow_table(Place(cell, "cell_contents", name).value(), function.__module__)
        if vars(function):
            self._holders[id(function)] = vars(function), function.__qualname__
        for name, defaults in (
            ("__defaults__", function.__defaults__),
            ("__kwdefaults__", function.__kwdefaults__),
        ):
            if not (has_plain_leaves(defaults) and is_frozen(defaults)):
                self._put(Place(function, name, f"{function.__qualname__}.{name}"))
                for _, default in items_of(defaults):
                    self._follow(default)
                    self._follow_table(default, function.__module__)

    def _look_up(self, holder: Any, path: str, names: Iterable[str]) -> None:
        if isinstance(holder, dict):
            found = [name for name in names if name in holder]
        else:
            found = [name for name in names if _has_own(holder, name)]
        for name in found:
            self._add(holder, name, f"{path}.{name}")

    def _add(self, holder: Any, name: str, path: str) -> None:
        is_other = name.startswith("__") or (name in _REPLACED and holder is vars(torch))
        if is_other or (id(holder), name) in self.places:
            return
        place = Place(holder, name, path)
        self._put(place)
        value = _static(holder, name) if isinstance(holder, type) else place.value()
        self._follow(value)
        self._follow_table(value, _module_of(holder))

    def _follow_table(self, table: Any, module: object) -> None:
        """Follows the functions and classes that a table or an object holds and ``module`` defines.

        Those of other modules, all activations of a library for example, read more than a call could compare.
        """
        items: Iterable[Any] = ()
        if is_container(table):
            items = [item for _, item in items_of(table)] if is_small(table) else ()
        elif not isinstance(table, _NO_TABLES):
            items = [*getattr(table, "__dict__", {}).values()]
        for item in items:
            if getattr(_function_of(item), "__module__", None) == module:
                self._follow(item)

    def _follow_held(self, value: Any, depth: int) -> None:
        """Follows what a module holds, also in containers and in objects of the user's classes."""
        self._follow(value)
        if (
            not depth
            or has_plain_leaves(value)
            or isinstance(value, (type, FunctionType, nn.Module, torch.Tensor))
        ):
            return
        if is_container(value):
            inner = [item for _, item in items_of(value)] if is_small(value) else []
        else:
            inner = [] if is_foreign(type(value)) else [*getattr(value, "__dict__", {}).values()]
            # A callback there belongs to others: its code may be run, but its object is no setting.
            inner = [_function_of(item) for item in inner]
        for item in inner:
            self._follow_held(item, depth - 1)

    def _look_at_operators(self, cls: type) -> None:
        """Adds the special methods of a user's class, which code calls without their names."""
        for base in cls.__mro__:
            for name, method in vars(base).items() if not is_foreign(base) else ():
                if name in _OPERATORS and isinstance(method, FunctionType):
                    self._put(Place(cls, name, f"{cls.__qualname__}.{name}"))
                    self._follow(_static(cls, name))

    def _put(self, place: Place) -> None:
        self.places[id(place.holder), place.name] = place

    def _follow(self, value: Any) -> None:
        """Takes down the functions to read, and the classes and Python modules to look names up in."""
        if id(value) in self._seen or has_plain_leaves(value):
            return
        self._seen.add(id(value))
        if isinstance(value, FunctionType):
            if _is_read(value.__code__.co_filename):
                self._functions.append(value)
                return
            for inner in _wrapped_in(value):
                self._follow(inner)
        elif isinstance(value, (ModuleType, type)):
            if (held := _holder(value)) is not None:
                self._holders[id(value)] = held
            if held is not None and isinstance(value, type):
                self.names.add("forward")
                self._look_up(value, value.__qualname__, ("forward",))
                self._look_at_operators(value)
        elif value is not GONE:
            if isinstance(value, MethodType) and not isinstance(value.__self__, nn.Module):
                self._put(Place(value, "__self__", f"the object of {value.__qualname__}"))
            for inner in _inside(value):
                self._follow(inner)


def _hooks_of(module: nn.Module) -> Iterator[Place]:
    """Yields the hooks that run around the forward of a module."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in hooks:
            yield Place(hooks, key, f"a hook of {type(module).__name__}")  # type: ignore[arg-type]


def _module_of(holder: Any) -> object:
    """Returns the name of the Python module whose globals a dict is, or in which a class is."""
    return holder.get("__name__") if isinstance(holder, dict) else getattr(holder, "__module__", None)


def _is_filled_cache(place: Place, before: Any) -> bool:
    """Whether a dict of an installed library has new keys alone, such as einops's table of backends.

    Classes may be the model's own, but those of numpy (``iinfo``) are not.
    """
    now, module = place.value(), str(_module_of(place.holder))
    if type(before) is not dict or type(now) is not dict:
        return False
    if not isinstance(place.holder, dict) and module.partition(".")[0] != "numpy":
        return False
    file = str(getattr(sys.modules.get(module), "__file__", None))
    is_installed = "site-packages" in file or "dist-packages" in file
    return is_installed and same({key: now.get(key, GONE) for key in before}, before)


def _holder(value: Any) -> tuple[Any, str] | None:
    """Returns where the names of a Python module or class are, and its own name; None if it is torch's."""
    if isinstance(value, ModuleType):
        is_read = value.__name__ in _OF_TORCH or not is_foreign_module(value.__name__)
        return (vars(value), value.__name__) if is_read else None
    if isinstance(value, type) and (issubclass(value, nn.Module) or not is_foreign(value)):
        return value, value.__qualname__
    return None


def _inside(value: Any) -> Iterator[Any]:
    """Yields the functions and classes that a callable, or an attribute of a class, stands for."""
    if isinstance(value, MethodType):
        yield value.__func__
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, property):
        yield from (value.fget,)
    elif isinstance(value, (staticmethod, classmethod)):
        yield value.__func__
    elif isinstance(value, functools.cached_property):
        yield value.func
    elif isinstance(wrapped := inspect.getattr_static(value, "__wrapped__", None), FunctionType):
        yield wrapped  # static, because the user's ``__getattr__`` may raise any error
    elif not isinstance(value, nn.Module):
        yield type(value)


def _function_of(value: Any) -> Any:
    """Returns the function of a bound method, also inside a partial; other values as they are."""
    while isinstance(value, functools.partial):
        value = value.func
    return value.__func__ if isinstance(value, MethodType) else value


def _wrapped_in(wrapper: FunctionType) -> Iterator[Any]:
    """Yields the functions that a wrapper calls: ``torch.no_grad()`` around forward, ``contextmanager``."""
    yield vars(wrapper).get("__wrapped__")
    for name, cell in zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=True):
        held = Place(cell, "cell_contents", name).value()
        if isinstance(held, (FunctionType, MethodType, functools.partial)):
            yield held
        elif isinstance(held, contextlib.ContextDecorator):
            yield from (getattr(held, "func", None), type(held))


def _found(known: dict[str, Any], path: tuple[str, ...]) -> Any:
    """Returns what a path of names leads to, through Python modules and classes only."""
    value = known.get(path[0], GONE)
    for name in path[1:]:
        if not isinstance(value, (ModuleType, type)):
            return GONE
        value = getattr(value, name, GONE)
    return value


def _is_read(filename: str) -> bool:
    if filename.startswith(_LAYERS):
        return True
    return not is_pythons(filename) and not filename.startswith(_NOT_READ)


def _has_own(cls: type, name: str) -> bool:
    """Whether a class has an attribute that is neither every module's nor Python's or torch's."""
    if name in _OF_NN_MODULE:
        return False
    owner = next((c for c in cls.__mro__ if name in vars(c)), None)
    return owner is not None and (issubclass(owner, nn.Module) or not is_foreign(owner))


def _static(cls: type, name: str) -> Any:
    return next((vars(c)[name] for c in cls.__mro__ if name in vars(c)), GONE)
