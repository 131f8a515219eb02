"""Ahead-of-time capture of a whole graph by ``torch.export`` (non-strict)."""

from __future__ import annotations

import contextlib
import threading
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import traceback as fx_traceback

from .._compat import no_ambient_autocast
from ..errors import CaptureError

# torch.fx.traceback keeps its state in globals.
capture_lock = threading.RLock()

_OURS = Path(__file__).parents[1]
_TORCH = Path(torch.__file__).parent
_JUST_IN_TIME = "or call ampgraph.convert(model) without example inputs to capture just in time"


def capture_program(
    model: nn.Module, args: tuple, kwargs: dict[str, Any] | None = None, dynamic_shapes: Any = None
) -> ExportedProgram:
    """Captures ``model`` whole for the given example inputs.

    Args:
        model: Any ``nn.Module``, a ``torch.fx.GraphModule`` included; not changed.
        args: Example positional arguments; only their structure, shapes, dtypes and devices matter.
        kwargs: Example keyword arguments.
        dynamic_shapes: As for ``torch.export.export``.

    Raises:
        CaptureError: The model cannot be captured for these inputs; names the user's source line.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError(
            f"{type(model).__name__} is a TorchScript module, which has no Python code to capture; "
            "convert the nn.Module it was made from."
        )
    try:
        with capturing(), _warn_about_custom_functions(type(model).__name__):
            return torch.export.export(model, args, kwargs or {}, dynamic_shapes=dynamic_shapes, strict=False)
    except Exception as error:
        raise CaptureError(_explain(model, error)) from error


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """The state in which a capture runs: metadata kept, gradients on, no autocast, one at a time."""
    with capture_lock, fx_traceback.preserve_node_meta(), torch.enable_grad(), no_ambient_autocast():
        yield


@contextlib.contextmanager
def _warn_about_custom_functions(model: str) -> Iterator[None]:
    """Says so when export inlines an ``autograd.Function`` of the user's and so drops its backward."""
    apply = torch.autograd.Function.__dict__["apply"]
    seen: dict[str, None] = {}

    def watched(cls: type, *args: Any, **kwargs: Any) -> Any:
        if not cls.__module__.startswith("torch."):
            seen[cls.__qualname__] = None
        return apply.__get__(None, cls)(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(watched)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
    if seen:
        warnings.warn(
            f"{model}: capture ahead of time takes only the forward of {', '.join(seen)}; gradients are then "
            "those of that forward, not of the custom backward. Convert without example inputs to keep it.",
            stacklevel=5,
        )


def _explain(model: nn.Module, error: Exception) -> str:
    message = str(error).strip().splitlines() or [type(error).__name__]
    hint = ""
    if any(
        w in str(error)
        for w in ("data-dependent", "data dependent", "DataDependent", "is_nonzero", "unbacked")
    ):
        hint = f" Control flow depends on tensor values: use torch.cond, {_JUST_IN_TIME}."
    where = user_line(error)
    return (
        f"{type(model).__name__} could not be captured{f' at {where}' if where else ''}: "
        f"{type(error).__name__}: {message[0]}{hint}"
    )


def user_line(error: BaseException) -> str:
    """Returns ``file:line (code)`` of the innermost frame outside torch and ampgraph, or ``""``."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.suffix != ".py" or _TORCH in path.parents or _OURS in path.parents:
            continue
        return f"{frame.filename}:{frame.lineno}" + (f" ({frame.line})" if frame.line else "")
    return ""
