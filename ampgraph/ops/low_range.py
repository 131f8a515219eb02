"""The one check whether a low dtype holds a number."""

from __future__ import annotations

import math

import torch


def is_outside(number: float, low_dtype: torch.dtype) -> bool:
    """Whether a finite number overflows in the low dtype. Every dtype holds infinities and NaN."""
    return torch.finfo(low_dtype).max < abs(number) < math.inf


def misfit(number: float, low_dtype: torch.dtype) -> str | None:
    """Returns the reason why the low dtype does not hold a number; None if it does.

    Zero is the same in every dtype. A number below the smallest normal one loses digits or becomes zero, so
    ``x + 1e-12`` loses its guard in float16.
    """
    if is_outside(number, low_dtype):
        return f"the constant {number:.4g} is outside {low_dtype}'s range"
    if 0 < abs(number) < torch.finfo(low_dtype).tiny:
        return f"the constant {number:.4g} is below {low_dtype}'s smallest normal number"
    return None
