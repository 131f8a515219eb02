"""The module whose call runs a function. Tried on torch 2.11, 2.13 and 2.14."""

from __future__ import annotations

import sys
from types import CodeType, FrameType

from torch import nn

_CALL = nn.Module._call_impl.__code__
# With hooks, a function inside calls forward; while `torch.jit.trace` runs, another method does.
_CALLS = {
    _CALL,
    nn.Module._slow_forward.__code__,
    *(constant for constant in _CALL.co_consts if isinstance(constant, CodeType)),
}
# The tables of a module: its parameters, children and hooks. Each module creates its own.
_TABLES = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, (dict, set)))


def calling_module() -> nn.Module | None:
    """Returns the module that calls the function that asks this; None if no module does."""
    frame = sys._getframe(2)
    if frame.f_code is _CALL:  # nearly always
        module: nn.Module = frame.f_locals["self"]
        return module
    return _module_of(frame)


def module_that_calls(function: CodeType) -> nn.Module | None:
    """Returns the module that calls a function further out; None if no module does.

    Between that function and the one that asks this may be frames of Dynamo, which also replaces code.
    """
    where = function.co_filename, function.co_name
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_filename, frame.f_code.co_name) != where:
        frame = frame.f_back
    return _module_of(frame.f_back) if frame is not None and frame.f_back is not None else None


def _module_of(frame: FrameType) -> nn.Module | None:
    """Returns the module that a frame calls. The class of a module may define ``__call__``."""
    if frame.f_code not in _CALLS and frame.f_code.co_name != "__call__":
        return None
    module = frame.f_locals.get("self")
    return module if isinstance(module, nn.Module) else None


def is_copy(module: nn.Module, other: nn.Module) -> bool:
    """Whether a module was made from another one that it does not hold: from its attributes or its class.

    The copy of a ``__dict__`` has some of the very tables of the other module, even if a library replaces
    those of parameters. A library may generate a subclass for a copy, and give it new tables. Wrappers are no
    copies, though they use functions of the other module. They have another class, or the same class and
    new tables, or the very ``__dict__``.
    """
    own, given = vars(module), vars(other)
    if own is given:
        return False
    if any(name in own and own[name] is given.get(name) for name in _TABLES):
        return True
    is_derived = type(other) is not nn.Module and type(other) in type(module).__mro__[1:]
    return is_derived and not any(inner is other for inner in module.modules())
