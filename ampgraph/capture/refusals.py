"""What a capture ahead of time cannot keep of a model: each check raises an error that says what helps."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..errors import AheadOfTimeError
from .kept_tensors import KeptTensors

OR_JUST_IN_TIME = 'or capture it just in time: ampgraph.convert(model, capture="just in time")'


def advice_of(error: Exception) -> str:
    """Returns what helps against an error of a capture ahead of time, or ``""``."""
    advice, known, _ = "\n".join(str(error).splitlines()[1:]).partition(f", {OR_JUST_IN_TIME}")
    return advice if known else ""


def _refused(model: nn.Module, what: str, advice: str) -> AheadOfTimeError:
    text = f"{type(model).__name__}: {what}\n{advice}, {OR_JUST_IN_TIME}."
    return AheadOfTimeError(text).because(is_known=True)


def check_opaque(model: nn.Module, found: list[str]) -> None:
    """Raises an error if forward's code names an object whose state no call could compare."""
    if found:
        what = f"forward uses {', '.join(found[:3])}, whose state no graph follows"
        raise _refused(model, what, "Use a number, a buffer or a list")


def check_caught(model: nn.Module, failed: list[str]) -> None:
    """Raises an error if forward caught an error of a read of values: a call may not raise it."""
    if failed:
        what = f"forward catches an error of {failed[0]}, which may come from the capture alone"
        raise _refused(model, what, "Ask without try")


def check_replaced(model: nn.Module, replaced: list[str]) -> None:
    """Raises an error if forward replaces buffers, parameters or submodules: a graph replaces nothing."""
    if replaced:
        what = f"forward replaces {', '.join(dict.fromkeys(replaced))}, which a graph cannot"
        raise _refused(model, what, "Write to buffers in place")


def check_kept(model: nn.Module, kept: KeptTensors) -> None:
    """Raises an error if forward keeps results of a call for a later one outside of the model."""
    if kept.depends:
        what = f"forward keeps results in {', '.join(kept.depends)}, which a graph cannot"
        raise _refused(model, what, "Return such values")


def check_written(model: nn.Module, written: list[str]) -> None:
    """Raises an error if forward changes a container argument: the caller of a graph would not see it."""
    if written:
        names, noun = ", ".join(map(repr, written)), "arguments" if len(written) > 1 else "argument"
        what = f"forward changes what its {noun} {names} holds, which a graph cannot"
        raise _refused(model, what, "Return the new values, write to tensors in place")


def check_random_numbers(model: nn.Module, found: list[str]) -> None:
    """Raises an error if forward draws numbers that a graph cannot draw: every call would have the same."""
    if found:
        what = f"forward {' and '.join(found)}, which a graph cannot"
        raise _refused(model, what, "Draw with torch from its default generator")


def check_inference_tensors(model: nn.Module) -> None:
    """Raises an error if a capture failed and parameters are inference tensors, which no trace can take."""
    if torch.is_inference_mode_enabled():
        return
    parameters = ((name, p) for name, p in model.named_parameters() if not is_lazy(p))
    found = [name for name, p in parameters if p.is_inference() and p.requires_grad]
    if found:
        what = (
            f"{found[0]} was made in inference mode, and no capture outside of it can trace such parameters"
        )
        raise _refused(model, what, "Make them outside of inference mode")
