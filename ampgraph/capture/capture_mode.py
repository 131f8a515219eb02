"""The mode of a thread that captures: one capture at a time, with no modes or hooks of the caller."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch.fx import traceback as fx_traceback

from .._compat import (
    errors_raised_not_logged,
    no_ambient_autocast,
    no_global_hooks,
    no_saved_tensor_hooks,
    scripts_not_optimized,
    tracing_lock,
)

_here = threading.local()


@contextlib.contextmanager
def capturing(gradients: bool = True) -> Iterator[None]:
    """Prepares a capture: keeps metadata, sets the grad mode, hides ambient modes, allows one at a time."""
    with (
        tracing_lock(),  # torch.fx.traceback keeps its state in globals
        fx_traceback.preserve_node_meta(),
        torch.set_grad_enabled(gradients),
        no_ambient_autocast(),
        no_global_hooks(),
        no_saved_tensor_hooks(),
        scripts_not_optimized(is_capturing_here),
        errors_raised_not_logged(is_capturing_here),
    ):
        outer, _here.is_capturing = is_capturing_here(), True
        try:
            yield
        finally:
            _here.is_capturing = outer


def is_capturing_here() -> bool:
    """Whether this thread is capturing a model."""
    return getattr(_here, "is_capturing", False)
