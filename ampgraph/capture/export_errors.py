"""Explains why ``torch.export`` could not capture a model: the user's line, the cause, and what helps."""

from __future__ import annotations

import inspect
import traceback
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import AheadOfTimeError
from .converted_parts import ANOTHER_POLICY
from .refusals import OR_JUST_IN_TIME, check_inference_tensors
from .user_code import user_line

_DATA_DEPENDENT = ("data-dependent", "data dependent", "DataDependent", "is_nonzero", "unbacked")
_VALUE_SIZED = ("DynamicOutputShape", "DataDependentOutput")  # aten.linalg_lstsq, aten._ctc_loss
# (part of the name or message of the error, function it came through or "", what helps); the first that fits.
_HINTS = (
    (
        ANOTHER_POLICY,
        "",
        "Give both one policy, convert the whole from unconverted parts (amp.source, blocks.restore()), "
        f"{OR_JUST_IN_TIME}.",
    ),
    (
        "Couldn't swap",
        "module.py:_apply",
        f"Convert parameters before the call, not in forward (module.to(..), .float()), {OR_JUST_IN_TIME}.",
    ),
    *(
        (cause, "rnn.py:forward", "Lengths of packed sequences are tensor values: pass the padded batch.")
        for cause in ("got FakeTensor", *_DATA_DEPENDENT)
    ),
    *(
        (
            cause,
            "",
            f"What the op returns depends on tensor values: leave it out of the model, {OR_JUST_IN_TIME}.",
        )
        for cause in _VALUE_SIZED
    ),
    *(
        (cause, "", f"Control flow depends on tensor values: use torch.cond, {OR_JUST_IN_TIME}.")
        for cause in _DATA_DEPENDENT
    ),
    *(
        (
            cause,
            function,
            "Make a dataclass among inputs or outputs known with torch.export.register_dataclass(TheClass); "
            "of other types (caches, for instance), take and return their tensors, turn them off "
            f"(use_cache=False), {OR_JUST_IN_TIME}.",
        )
        for cause, function in (
            ("in output, which is not a known type", ""),
            ("Unsupported input type", ""),
            ("unhashable type", "weakref.py:__contains__"),  # torch 2.11, of an output
        )
    ),
    *(
        (cause, "", f"Gradients inside forward: take them outside of the model, {OR_JUST_IN_TIME}.")
        for cause in (
            "fake tensor in the exported program constant's list",
            "functorch tensor",
            "Expected FakeTensor, got <class 'torch.Tensor'>",  # torch 2.11
        )
    ),
)


def explained(model: nn.Module, args: tuple, kwargs: dict[str, Any], error: Exception) -> AheadOfTimeError:
    """Returns the error that explains why a trace failed."""
    if isinstance(error, TypeError) and (mismatch := _mismatch(model, args, kwargs)):
        return AheadOfTimeError(mismatch)
    check_inference_tensors(model)
    return AheadOfTimeError(_explain(model, error)).because(is_known=bool(_hint(error)))


def _mismatch(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> str:
    """Returns how these arguments differ from those that forward takes; ``""`` if it takes them."""
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as mismatch:
        named = [f"{n}={type(v).__name__}" for n, v in kwargs.items()]
        given = [*(type(value).__name__ for value in args), *named]
        return (
            f"{type(model).__name__}.forward takes {signature}, but the example inputs are "
            f"({', '.join(given)}): {mismatch}."
        )
    return ""


def _explain(model: nn.Module, error: Exception) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    what = lines[0].partition(". If this type holds tensors")[0]  # the hint says what to do
    where = user_line(error)
    return (
        f"{type(model).__name__} could not be captured{f' at {where}' if where else ''}: "
        f"{type(error).__name__}: {what}{_hint(error)}"
    )


def _hint(error: BaseException) -> str:
    """Returns advice for causes that torch's message does not name."""
    frames = traceback.extract_tb(error.__traceback__)
    through = {f"{Path(frame.filename).name}:{frame.name}" for frame in frames}
    for cause, function, hint in _HINTS:
        if cause in f"{type(error).__name__}: {error}" and (not function or function in through):
            return f"\n{hint}"
    return ""
