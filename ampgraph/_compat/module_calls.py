"""The module whose call runs a function. Tried on torch 2.11, 2.13 and 2.14."""

from __future__ import annotations

import sys
from types import CodeType

from torch import nn

_CALL = nn.Module._call_impl.__code__
# With hooks, a function inside calls forward.
_CALLS = {_CALL, *(constant for constant in _CALL.co_consts if isinstance(constant, CodeType))}


def calling_module() -> nn.Module | None:
    """Returns the module that calls the function that asks this; None if no module does."""
    frame = sys._getframe(2)
    if frame.f_code not in _CALLS:
        return None
    module: nn.Module = frame.f_locals["self"]
    return module


def is_shallow_copy(module: nn.Module, other: nn.Module) -> bool:
    """Whether a module has the attributes of another one, and so its very tables of hooks."""
    return module is not other and module._backward_hooks is other._backward_hooks
