"""`real_types`: the classes of tensors and sizes for the model's code, also during a capture.

A capture runs the code on objects of other classes. ``type(x) is torch.Tensor`` and ``isinstance(n, int)``
would take the other branch, and so would ``x.__class__``, which ``functools.singledispatch`` reads.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
from torch import nn

from .._compat import TRACED_TENSORS, replaced
from .bytecode import only_calls
from .code import Code
from .user_code import is_asked_by_model

_NUMBERS: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
# Code with these names may read the ``__class__`` of a tensor, which ``isinstance`` does not need.
_READING_CLASS = {"__class__", "singledispatch", "singledispatchmethod"}
_NAME = "__ampgraph_type__"


@contextlib.contextmanager
def real_types(code: Code, is_capturing: Callable[[], bool]) -> Iterator[None]:
    """Lets functions call another ``type``, and gives objects of captures another ``__class__``.

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
        for function in code.asking_types:
            if _NAME not in function.__globals__:  # a capture inside a capture finds it there
                function.__globals__[_NAME] = _type
                stack.callback(function.__globals__.pop, _NAME, None)
            stack.callback(setattr, function, "__code__", function.__code__)
            function.__code__ = _with_other_type(function.__code__)
        for cls in (*_NUMBERS, *tensors):
            stack.enter_context(replaced(cls, "__getattribute__", attribute))
        yield


def _with_other_type(code: CodeType) -> CodeType:
    """Returns code that calls `_type` in place of ``type``, if it does nothing else with ``type``."""
    inner = [_with_other_type(c) if isinstance(c, CodeType) else c for c in code.co_consts]
    names = code.co_names
    if only_calls(code, "type"):
        names = tuple(_NAME if name == "type" else name for name in names)
    return code.replace(co_consts=tuple(inner), co_names=names)


def _type(*args: Any, **kwargs: Any) -> type:
    found = type(*args, **kwargs)
    return _class_of(args[0]) if len(args) == 1 else found


def _class_of(value: object) -> type:
    """Returns the class that a value has outside of a capture."""
    cls = type(value)
    if cls in TRACED_TENSORS:
        return nn.Parameter if isinstance(value, nn.Parameter) else torch.Tensor
    return _NUMBERS.get(cls, cls)
