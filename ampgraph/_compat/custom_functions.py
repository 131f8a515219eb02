"""How torch applies a custom ``autograd.Function``. Tried on torch 2.11, 2.13, 2.14 and 2.15."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

_Function = torch.autograd.Function
_SingleLevelFunction = torch.autograd.function._SingleLevelFunction
# The class whose ``apply`` is the native one, which runs for every custom function. From torch 2.14 on this
# is `Function`; before, its ``apply`` searches for wrappers of ``torch.func``.
AppliedFunction = (
    _Function
    if isinstance(vars(_Function)["apply"], types.ClassMethodDescriptorType)
    else _SingleLevelFunction
)


def native_apply(cls: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Returns the ``apply`` of a function without the search of each argument for wrappers of ``torch.func``.

    For use outside of the transforms of ``torch.func`` and of tracing.
    """
    apply: Callable[..., Any] = super(_SingleLevelFunction, cls).apply  # type: ignore[misc]
    return apply


def function_of(context: BackwardCFunction) -> type[torch.autograd.Function]:
    """Returns the custom function that a context belongs to."""
    return context._forward_cls  # type: ignore[attr-defined, no-any-return]
