"""How torch applies a custom ``autograd.Function``."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

_Function = torch.autograd.Function
_SingleLevelFunction = torch.autograd.function._SingleLevelFunction
# The class whose ``apply`` is the native one, which runs for every custom function. From torch 2.14 on this
# is `Function`; before, its ``apply`` searches for wrappers of ``torch.func``.
# (tried on torch 2.11, 2.13, 2.14 and 2.15)
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
