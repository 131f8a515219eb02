"""torch's encoders and decoders without a look at the values of a mask. Tried on torch 2.11, 2.13 and 2.14.

They compare a mask with a causal one, to tell attention that it may leave the mask out. No capture can branch
on that. Attention that is told nothing reads the mask.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.modules import transformer

# The module that has the function, the function's name, and the function.
CAUSAL_HINT = transformer, "_detect_is_causal_mask", transformer._detect_is_causal_mask


def given_hint(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Returns the hint of the caller while a capture runs; else what torch returns."""
    if is_causal is None and torch.compiler.is_compiling():
        return False
    return CAUSAL_HINT[2](mask, is_causal, size)
