"""How torch applies a custom ``autograd.Function``. Tried on torch 2.11, 2.13, 2.14 and 2.15."""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

_DECORATED = "decorate_fwd"
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_Function = torch.autograd.Function
_SingleLevelFunction = torch.autograd.function._SingleLevelFunction
# The class whose ``apply`` is the native one, which runs for every custom function. From torch 2.14 on this
# is `Function`; before, its ``apply`` searches for wrappers of ``torch.func``.
AppliedFunction = (
    _Function
    if isinstance(vars(_Function)["apply"], types.ClassMethodDescriptorType)
    else _SingleLevelFunction
)


def float32_forward(cls: type[torch.autograd.Function]) -> types.CodeType | None:
    """Returns the code of a forward under ``torch.amp.custom_fwd(cast_inputs=torch.float32)``, or None.

    The decorator asks at each call whether ``torch.autocast`` is on. Tried on torch 2.11, 2.13 and 2.14.
    """
    decorated = cls.forward
    code = getattr(decorated, "__code__", None)
    if code is None or code.co_name != _DECORATED:
        return None
    cells = zip(code.co_freevars, decorated.__closure__ or (), strict=True)
    held = {name: cell.cell_contents for name, cell in cells}
    return getattr(held["fwd"], "__code__", None) if held.get("cast_inputs") is torch.float32 else None


def in_float32_forward(stack_trace: str) -> bool:
    """Whether an op comes from such a forward, by the lines of its stack trace."""
    if f"in {_DECORATED}\n" not in stack_trace:
        return False
    frames = [(file, int(line)) for file, line in _FRAME.findall(stack_trace)]
    return any(
        (file, line) == (code.co_filename, at)
        for code in filter(None, map(float32_forward, _subclasses(_Function)))
        for _, _, at in code.co_lines()
        for file, line in frames
    )


def _subclasses(cls: type[torch.autograd.Function]) -> Iterator[type[torch.autograd.Function]]:
    subclasses: list[type[torch.autograd.Function]] = cls.__subclasses__()
    for inner in subclasses:
        yield inner
        yield from _subclasses(inner)


def native_apply(cls: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Returns the ``apply`` of a function without the search of each argument for wrappers of ``torch.func``.

    For use outside of the transforms of ``torch.func`` and of tracing.
    """
    apply: Callable[..., Any] = super(_SingleLevelFunction, cls).apply  # type: ignore[misc]
    return apply


def has_freed(context: BackwardCFunction) -> bool:
    """Whether autograd has freed what a custom function has saved: its backward ran, and will not run again.

    Only an error tells. ``saved_tensors`` raises it too, but runs hooks before. Tried on torch 2.11, 2.13 and
    2.14.
    """
    try:
        context._raw_saved_tensors  # type: ignore[attr-defined]  # noqa: B018
    except RuntimeError:
        return True
    return False


def function_of(context: BackwardCFunction) -> type[torch.autograd.Function]:
    """Returns the custom function that a context belongs to."""
    return context._forward_cls  # type: ignore[attr-defined, no-any-return]
