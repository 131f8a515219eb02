"""`real_tensor_types`: the class of a tensor for the model's code, also during a capture.

A capture runs the code on tensors of other classes. ``type(x) is torch.Tensor`` would take the other branch,
and so would ``x.__class__``, which ``functools.singledispatch`` reads.
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

# Code with these names may read ``x.__class__``.
_READING_CLASS = {"__class__", "singledispatch", "singledispatchmethod"}


class _Asking(builtins.type):
    """Makes a call of the class a question for the type, and ``isinstance`` one for any class."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        found = builtins.type(*args, **kwargs)
        return _class_of(args[0]) if len(args) == 1 and found in TRACED_TENSORS else found

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, builtins.type)

    def __subclasscheck__(cls, subclass: Any) -> bool:
        return issubclass(subclass, builtins.type)


class _Type(builtins.type, metaclass=_Asking):
    """Stands for ``type``."""


def _class_of(traced: torch.Tensor) -> builtins.type:
    return nn.Parameter if isinstance(traced, nn.Parameter) else torch.Tensor


@contextlib.contextmanager
def real_tensor_types(code: Code, is_capturing: Callable[[], bool]) -> Iterator[None]:
    """Gives code that asks for types another ``type``, and tensors of captures another ``__class__``.

    Args:
        code: The code.
        is_capturing: Whether the current thread captures a model.
    """
    with contextlib.ExitStack() as stack:
        for names in code.asking_types.values():
            if "type" not in names:
                names["type"] = _Type
                stack.callback(names.pop, "type", None)
        if code.names & _READING_CLASS:  # not always: each attribute takes longer
            for cls in TRACED_TENSORS:
                stack.enter_context(replaced(cls, "__getattribute__", _with_real_class(is_capturing)))
        yield


def _with_real_class(is_capturing: Callable[[], bool]) -> Callable:
    def get(tensor: torch.Tensor, name: str) -> Any:
        if name == "__class__" and is_capturing() and is_asked_by_model(sys._getframe(1)):
            return _class_of(tensor)
        return object.__getattribute__(tensor, name)

    return get
