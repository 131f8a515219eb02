"""The source model as its own methods see it: calling it runs the converted model.

``amp.generate(...)`` is a method of the source in which ``self(...)`` has to be the converted forward.
Bound to the source, it would run in float32 without a word. Bound to the converted model, ``super()`` would
fail in it, and names such as ``policy`` would mean something else. So ``self`` is an object of the source's
own class, over the source's very own ``__dict__``, whose call is another.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from torch import nn


class _Unannounced:
    """Keeps a class that is made behind the scenes from hooks and registries of the classes it extends."""

    __slots__ = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


def stand_in(source: nn.Module, call: Callable[..., Any]) -> nn.Module:
    """Returns an object with the source's class, state and methods that runs ``call`` when it is called.

    What it copies, pickles or makes of its own type is the source's: no other object runs ``call``.
    """
    cls = type(source)

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    members = {
        "__call__": forward,
        "forward": forward,
        "__reduce_ex__": lambda _, protocol: source.__reduce_ex__(protocol),
    }
    return over_dict_of(source, behind_the_scenes(cls, members))


def behind_the_scenes(cls: type[nn.Module], members: dict[str, Any]) -> type[nn.Module]:
    """Returns a subclass that passes for ``cls``; what is made of it by a call is a ``cls``."""
    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    made = {"__new__": lambda _, *args, **kwargs: cls(*args, **kwargs), **names, **members}
    metaclass: Any = type(cls)
    return metaclass(cls.__name__, (_Unannounced, cls), made)


def over_dict_of(source: nn.Module, cls: type[nn.Module]) -> nn.Module:
    """Returns an object of a class whose attributes are the source's very own; no constructor runs."""
    made = object.__new__(cls)
    object.__setattr__(made, "__dict__", source.__dict__)
    return made


def is_method_of(value: object, source: nn.Module) -> bool:
    """Whether ``value`` is a method bound to ``source``."""
    return isinstance(value, types.MethodType) and value.__self__ is source


def rebound(method: types.MethodType, made: nn.Module, owner: nn.Module) -> Callable[..., Any]:
    """Returns the method bound to a stand-in; where it returns that, it returns ``owner``."""
    bound = types.MethodType(method.__func__, made)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = bound(*args, **kwargs)
        return owner if result is made else result

    return call
