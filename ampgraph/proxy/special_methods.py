"""Methods of a proxy that the source's class decides: special methods, and what it overrides of `nn.Module`.

Python looks up ``len(x)``, ``x[i]`` and ``for y in x`` on the type of ``x`` and skips ``__getattr__``. So
the proxy of an ``nn.Sequential`` needs a class with the ``__len__`` of ``nn.Sequential``. A proxy is an
``nn.Module`` itself, so its own ``train`` would hide a ``train`` that keeps a batch norm frozen.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

# The proxy keeps its own methods that create, copy, show or run an object, or look up attributes.
# fmt: off
_OWN = frozenset((
    "__init__", "__new__", "__del__", "__call__", "__class__", "__class_getitem__", "__init_subclass__",
    "__subclasshook__", "__slots__", "__getattr__", "__getattribute__", "__setattr__", "__delattr__",
    "__dir__", "__repr__", "__str__", "__format__", "__sizeof__", "__copy__", "__deepcopy__",
    "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__",
    "__prepare_scriptable__", "__torch_function__",
))
# fmt: on
# torch asks the class whether it overrides these.
_OF_THE_CLASS = frozenset(("get_extra_state", "set_extra_state"))
# What concerns calls of the proxy itself, or prints it.
_CALLS = frozenset(("forward", "compile", "extra_repr"))
_made: weakref.WeakKeyDictionary[type, dict[type, type]] = weakref.WeakKeyDictionary()


def class_with_methods_of(source: type[nn.Module], cls: type) -> type:
    """Returns ``cls``, or a subclass that looks like it and has the source class's special methods."""
    known = _made.setdefault(source, {})
    if cls not in known:
        members = {name: _member(name, value) for name, value in _special(source).items()}
        passing = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        known[cls] = type(cls)(cls.__name__, (cls,), {**passing, **members}) if members else cls
    return known[cls]


def _special(source: type) -> dict[str, Any]:
    """Returns what a class adds to ``nn.Module`` that torch or Python asks the class for; None hides one."""
    found: dict[str, Any] = {}
    for base in reversed([base for base in source.__mro__ if base not in (nn.Module, object)]):
        members = {n: v for n, v in vars(base).items() if n in _OF_THE_CLASS or _is_special(n)}
        functions = {n: v for n, v in members.items() if v is None or isinstance(v, types.FunctionType)}
        found |= {name: value for name, value in functions.items() if name not in _OWN}
    if "__eq__" in found and found.get("__hash__") is None:  # torch itself keeps modules in sets
        found["__hash__"] = object.__hash__
    return found


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _member(name: str, value: Any) -> Any:
    if not isinstance(value, types.FunctionType):
        return value

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.__getattr__(name)(*args, **kwargs)

    method.__name__, method.__doc__ = name, value.__doc__
    return method


def follow_overrides(proxy: type[nn.Module]) -> type[nn.Module]:
    """Lets the public methods of `nn.Module` that a proxy class inherits follow what the source overrides.

    Methods that register hooks stay the proxy's, because the hooks run at calls of the proxy.
    """
    for name, method in vars(nn.Module).items():
        is_hook = name.startswith("register_") and name.endswith("_hook")
        is_own = name.startswith("_") or is_hook or name in _CALLS | _OF_THE_CLASS or name in vars(proxy)
        if isinstance(method, types.FunctionType) and not is_own:
            setattr(proxy, name, _following(name, method))
    return proxy


def _following(name: str, inherited: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inherited)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        source = self.__dict__["source"]
        if name in source.__dict__ or getattr(type(source), name) is not inherited:
            return self.__getattr__(name)(*args, **kwargs)
        return inherited(self, *args, **kwargs)

    return method
