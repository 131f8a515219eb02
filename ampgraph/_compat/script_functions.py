"""Keeps the optimizer of TorchScript out of a trace. Tried on torch 2.13."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .replaced_attribute import replaced


@contextlib.contextmanager
def scripts_not_optimized(is_tracing: Callable[[], bool]) -> Iterator[None]:
    """Runs functions of ``torch.jit.script`` op by op in the trace of this thread.

    From its second call on, a scripted function detaches its inputs and computes the backward itself. A trace
    would record the detached tensors, without gradients for what comes before the function.

    Args:
        is_tracing: Whether the current thread traces.
    """
    script = torch.jit.ScriptFunction
    call = script.__call__

    def op_by_op(function: Any, *args: Any, **kwargs: Any) -> Any:
        if is_tracing():
            function._debug_flush_compilation_cache()  # the first call after it runs op by op
        return call(function, *args, **kwargs)

    with replaced(script, "__call__", op_by_op):
        yield
