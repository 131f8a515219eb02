"""The ``self`` of a source method: an object whose call runs the converted model.

In ``amp.generate(...)``, a method of the source, ``self(...)`` must run the converted forward. If ``self``
were the source, the method would silently run in float32. If ``self`` were the converted model, ``super()``
would fail and names such as ``policy`` would change their meaning. So ``self`` is an object of the source's
class that shares the source's ``__dict__`` and has another ``__call__``.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from torch import nn


class _Unannounced:
    """Hides a generated class from hooks and registries of its base classes."""

    __slots__ = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


def bound_proxy(source: nn.Module, owner: nn.Module) -> nn.Module:
    """Returns an object with the source's class, state and methods that runs ``owner`` when it is called.

    What moves its tensors (``self.to(...)``) moves the owner's too. Copies, pickles and new objects of its
    type are the source's: no other object runs ``owner``.
    """
    cls = type(source)

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return owner(*args, **kwargs)

    def _apply(self: nn.Module, fn: Callable, recurse: bool = True) -> nn.Module:
        owner._apply(fn, recurse)
        return self

    members = {
        "__call__": forward,
        "forward": forward,
        "_apply": _apply,
        "__reduce_ex__": lambda _, protocol: source.__reduce_ex__(protocol),
    }
    return over_dict_of(source, behind_the_scenes(cls, members))


def behind_the_scenes(cls: type[nn.Module], members: dict[str, Any]) -> type[nn.Module]:
    """Returns a subclass that looks like ``cls``; calling it creates a ``cls``."""
    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    made = {"__new__": lambda _, *args, **kwargs: cls(*args, **kwargs), **names, **members}
    metaclass: Any = type(cls)
    return metaclass(cls.__name__, (_Unannounced, cls), made)


def class_behind(cls: type) -> type:
    """Returns the class that a class of `behind_the_scenes` looks like; any other class itself."""
    return cls.__bases__[-1] if _Unannounced in cls.__bases__ else cls


def over_dict_of(source: nn.Module, cls: type[nn.Module]) -> nn.Module:
    """Returns an object of a class that shares the source's ``__dict__``; no constructor runs."""
    made = object.__new__(cls)
    object.__setattr__(made, "__dict__", source.__dict__)
    return made


def is_method_of(value: object, source: nn.Module) -> bool:
    """Whether ``value`` is a method bound to ``source``."""
    return isinstance(value, types.MethodType) and value.__self__ is source


def rebound(method: types.MethodType, made: nn.Module, owner: nn.Module) -> Callable[..., Any]:
    """Returns the method bound to a proxy; if the method returns the proxy, the result is ``owner``."""
    bound = types.MethodType(method.__func__, made)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = bound(*args, **kwargs)
        return owner if result is made else result

    return call
