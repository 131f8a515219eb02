"""The module whose call runs a function. Tried on torch 2.11, 2.13 and 2.14."""

from __future__ import annotations

import sys

from torch import nn

_CALL = nn.Module._call_impl.__code__


def calling_module() -> nn.Module | None:
    """Returns the module that calls the function that asks this; None if no module does."""
    frame = sys._getframe(2)
    if frame.f_code is not _CALL:
        return None
    module: nn.Module = frame.f_locals["self"]
    return module
