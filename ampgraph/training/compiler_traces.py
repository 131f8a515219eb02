"""Whether a trace is for a compiler, which fuses what it gets."""

from __future__ import annotations

from contextlib import AbstractContextManager

from .._compat import is_compiling
from .local_switch import LocalSwitch

_traced = LocalSwitch()


def traced_for_a_compiler() -> AbstractContextManager[None]:
    """Lets a trace by ``make_fx`` have the arithmetic that a compiler fuses, as one by AOTAutograd has it.

    It holds for each forward inside and for its backward, which autograd runs in another thread for CUDA.
    """
    return _traced.on()


def is_for_a_compiler() -> bool:
    """Whether what this thread traces now is for a compiler, which fuses it."""
    return is_compiling() or _traced.is_on
