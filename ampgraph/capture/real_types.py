"""`real_types`: the classes of tensors and sizes for the model's code, also during a capture.

A capture runs the code on objects of other classes. ``type(x) is torch.Tensor`` and ``isinstance(n, int)``
would take the other branch, and so would ``x.__class__``, which ``functools.singledispatch`` reads.
"""

from __future__ import annotations

import builtins
import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from .._compat import TRACED_TENSORS, replaced
from .code import Code
from .user_code import is_asked_by_model

_NUMBERS: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
# Code with these names may read the ``__class__`` of a tensor, which ``isinstance`` does not need.
_READING_CLASS = {"__class__", "singledispatch", "singledispatchmethod"}


class _Asking(builtins.type):
    """Makes a call of the class a question for the type, and ``isinstance`` one for any class."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return _class_of(args[0]) if len(args) == 1 else builtins.type(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, builtins.type)

    def __subclasscheck__(cls, subclass: Any) -> bool:
        return issubclass(subclass, builtins.type)


class _Type(builtins.type, metaclass=_Asking):
    """Stands for ``type``."""


def _class_of(value: object) -> builtins.type:
    """Returns the class that a value has outside of a capture."""
    cls = builtins.type(value)
    if cls in TRACED_TENSORS:
        return nn.Parameter if isinstance(value, nn.Parameter) else torch.Tensor
    return _NUMBERS.get(cls, cls)


@contextlib.contextmanager
def real_types(code: Code, is_capturing: Callable[[], bool]) -> Iterator[None]:
    """Gives code another ``type``, and objects of captures another ``__class__``.

    Args:
        code: The code.
        is_capturing: Whether the current thread captures a model.
    """

    def attribute(value: Any, name: str) -> Any:
        if name == "__class__" and is_capturing() and is_asked_by_model(sys._getframe(1)):
            return _class_of(value)
        return object.__getattribute__(value, name)

    # Not always tensors, because each of their attributes takes longer.
    tensors = TRACED_TENSORS if code.names & _READING_CLASS else ()
    with contextlib.ExitStack() as stack:
        for names in code.namespaces.values():
            if "type" not in names:
                names["type"] = _Type
                stack.callback(names.pop, "type", None)
        for cls in (*_NUMBERS, *tensors):
            stack.enter_context(replaced(cls, "__getattribute__", attribute))
        yield
