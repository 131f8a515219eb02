"""`convert`: converts a model to mixed precision."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn
from torch.export import AdditionalInputs, ExportedProgram, ShapesCollection

from ._compat import is_compiled
from .errors import CaptureError, PolicyError, did_you_mean, warn_user
from .export import convert_program
from .module import AmpModule
from .policy.policy import Policy
from .runtime.backends import choose_backend
from .runtime.device import device_of, device_of_tensors
from .runtime.options import AUTO, JUST_IN_TIME, Options, check_capture, check_keywords
from .training.distributed import check_wrappers
from .training.fsdp1 import refuse_fsdp1

if TYPE_CHECKING:
    from .numerics.calibration import Calibration

# The relative error of the outputs that policy="auto" allows.
AUTO_BUDGET = 1e-2


@overload
def convert(
    model: ExportedProgram,
    *,
    policy: Policy | str | PathLike[str] | None = ...,
    dtype: torch.dtype | str | None = ...,
) -> ExportedProgram: ...
@overload
def convert(
    model: nn.Module,
    args: tuple | None = ...,
    kwargs: Mapping[str, Any] | None = ...,
    *,
    policy: Policy | str | PathLike[str] | None = ...,
    dtype: torch.dtype | str | None = ...,
    backend: str | Callable | None = ...,
    mode: str | None = ...,
    dynamic_shapes: Any = ...,
    capture: str | None = ...,
    calibration: Calibration | None = ...,
) -> AmpModule: ...


def convert(
    model: nn.Module | ExportedProgram,
    args: tuple | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    policy: Policy | str | PathLike[str] | None = None,
    dtype: torch.dtype | str | None = None,
    backend: str | Callable | None = None,
    mode: str | None = None,
    dynamic_shapes: Any = None,
    capture: str | None = None,
    calibration: Calibration | None = None,
) -> AmpModule | ExportedProgram:
    """Converts a model to automatic mixed precision.

    Args:
        model: An ``nn.Module``, an ``fx.GraphModule`` or an ``ExportedProgram``. It does not change.
        args: Example positional arguments for the capture: a tuple, or a single argument that is not a list.
            Without them the model is captured at its first call.
        kwargs: Example keyword arguments.
        policy: A `Policy`, the name of a level (``"O2"``) or of a peer (``"torch"``), the path of a policy
            file, or None for O1 with the default lists; see `Policy.of`. ``"auto"`` is what `tune` finds on
            the example inputs, at level O2: a relative error of the outputs of at most 1e-2.
        dtype: The low dtype or its name, if the policy does not set one.
        backend: ``"eager"`` or any ``torch.compile`` backend; it runs the rewritten graph. Default:
            ``"inductor"`` if the parameters are on CUDA and Triton is installed, else ``"eager"``.
        mode: The mode of ``torch.compile``, for inductor (``"reduce-overhead"``: CUDA graphs) and for custom
            backends that take a mode.
        dynamic_shapes: As for ``torch.export.export``. Only for a capture ahead of time.
        capture: ``"ahead of time"`` captures the whole graph with ``torch.export`` or raises an error.
            ``"just in time"`` captures with the front end of ``torch.compile`` at the first call.
            ``"auto"`` captures ahead of time. If this fails or would lose gradients, it captures just in time
            and warns. Default: ``"auto"`` with example inputs, else ``"just in time"``.
        calibration: What `calibrate` found, evidence beside the hazards that a graph shows: what makes or
            reads a value that left the low range in a batch stays float32, by rules in the policy of the
            result. Needs example inputs, and level O1 or O2.

    Returns:
        An `AmpModule`, or an ExportedProgram for an ExportedProgram.

    Raises:
        PolicyError: The policy, its rules or another option is not legal for this model.
        CaptureError: The model cannot be captured; the message names the source line.
        AmpGraphError: The calibration has not seen this graph.

    Example:
        >>> amp = ampgraph.convert(model, (x,), policy="O1", dtype=torch.bfloat16)
        >>> loss = criterion(amp(x), y)
    """
    check_keywords(kwargs, "convert")
    if isinstance(policy, str) and policy == "auto":
        policy = _tuned(model, args, kwargs, dtype, dynamic_shapes, capture)
    policy = Policy.of(policy, dtype)
    if isinstance(model, ExportedProgram):
        if any(given is not None for given in (args, kwargs, dynamic_shapes, capture, calibration)):
            raise CaptureError(
                "an ExportedProgram is captured already: args, kwargs, dynamic_shapes, capture and "
                "calibration do not apply."
            )
        return convert_program(model, policy)
    source = _checked_model(model)
    has_examples = args is not None or kwargs is not None
    if capture is None:
        capture = AUTO if has_examples else JUST_IN_TIME
    check_capture(capture)
    refuse_fsdp1(source)
    check_wrappers(source, capture == JUST_IN_TIME)
    device = device_of(source, device_of_tensors((args, dict(kwargs or {}))))
    if backend is None:
        _warn_if_compiled(source)
    backend, mode = choose_backend(backend, mode, device)
    policy = policy.resolved(device, backend, mode)
    policy.check_outputs("convert")
    args = as_tuple(args)
    if capture == JUST_IN_TIME and dynamic_shapes is not None:
        raise CaptureError(
            "dynamic_shapes is for a capture ahead of time: pass example inputs, "
            'convert(model, args, dynamic_shapes=...), or capture="ahead of time".'
        )
    _check_dynamic_shapes(source, dynamic_shapes)
    options = Options(policy, backend, mode, dynamic_shapes, capture)
    if calibration is not None:
        options = _with_evidence(source, options, calibration, args, kwargs)
    amp = AmpModule(source, options)
    if has_examples and capture != JUST_IN_TIME:
        amp._capture_now(args or (), dict(kwargs or {}))
    return amp


def _check_dynamic_shapes(source: nn.Module, shapes: object) -> None:
    """Checks the shapes, because a capture just in time ignores them.

    Raises:
        CaptureError: The shapes are no container, or name an argument that forward does not have.
    """
    if shapes is None or isinstance(shapes, (tuple, list, ShapesCollection, AdditionalInputs)):
        return
    if not isinstance(shapes, Mapping):
        raise CaptureError(
            f"dynamic_shapes={shapes!r}: expected a dict by argument, a tuple or a list, as for "
            "torch.export.export."
        )
    parameters = inspect.signature(source.forward).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    for name in shapes.keys() - parameters.keys():
        raise CaptureError(
            f"dynamic_shapes: {type(source).__name__}.forward has no argument {name!r}."
            + did_you_mean(name, parameters)
        )


def _warn_if_compiled(source: nn.Module) -> None:
    if is_compiled(source):
        warn_user(
            f"{type(source).__name__} is compiled by torch.compile. The converted model does not use that "
            'compilation: name its backend, ampgraph.convert(..., backend="inductor"), or backend="eager".'
        )


def _with_evidence(
    source: nn.Module,
    options: Options,
    calibration: Calibration,
    args: tuple | None,
    kwargs: Mapping[str, Any] | None,
) -> Options:
    """Returns the options with rules for what left the low range in the calibrated batches."""
    from .numerics.evidence import checked, policy_for

    checked(calibration, "convert")
    if args is None and kwargs is None:
        raise PolicyError("calibration= needs example inputs: convert(model, args, calibration=ranges).")
    if options.policy.level not in ("O1", "O2"):
        raise PolicyError(f"calibration= is for the levels O1 and O2; the policy has {options.policy.level}.")
    amp = AmpModule(source, dataclasses.replace(options, backend="eager", mode=None))
    policy = policy_for(amp, calibration, args or (), dict(kwargs or {}))
    return dataclasses.replace(options, policy=policy)


def _tuned(
    model: nn.Module | ExportedProgram,
    args: tuple | None,
    kwargs: Mapping[str, Any] | None,
    dtype: torch.dtype | str | None,
    dynamic_shapes: Any,
    capture: str | None,
) -> Policy:
    """Returns the policy of ``policy="auto"``."""
    from .tuning.result_error import ResultError
    from .tuning.tuner import Tuner

    if isinstance(model, ExportedProgram) or (args is None and kwargs is None):
        raise PolicyError(
            'policy="auto" runs the model on example inputs: convert(model, args, policy="auto"). For an '
            "ExportedProgram, tune the model that it comes from."
        )
    amp = convert(
        model,
        args,
        kwargs,
        policy="O2",
        dtype=dtype,
        backend="eager",
        dynamic_shapes=dynamic_shapes,
        capture=capture,
    )
    batch = as_tuple(args) or (), dict(kwargs or {})
    return Tuner(amp, [batch], AUTO_BUDGET, ResultError(None)).run().policy


def as_tuple(args: object) -> tuple | None:
    """Returns the positional arguments; a value other than a tuple is the single argument."""
    if isinstance(args, list):
        raise CaptureError(
            "args is a list, which may be the positional arguments or one argument: pass a tuple, "
            "(x, y), or ([x, y],) for a forward that takes a list."
        )
    return args if args is None or isinstance(args, tuple) else (args,)


def _checked_model(model: object) -> nn.Module:
    if isinstance(model, AmpModule):
        raise PolicyError("the model is converted already; convert its .source with the new policy.")
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError(
            "a TorchScript module has no Python code to capture; convert the nn.Module it came from."
        )
    if not isinstance(model, nn.Module):
        raise CaptureError(
            "convert takes an nn.Module, an fx.GraphModule or an ExportedProgram, got "
            f"{type(model).__name__}.{' Call it to get an instance.' if isinstance(model, type) else ''}"
        )
    scripted = [name for name, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule)]
    if scripted:
        raise CaptureError(
            f"submodule {scripted[0]!r} is a TorchScript module, which has no Python code to capture; put "
            "the nn.Module it came from in its place, or convert the other submodules: "
            "ampgraph.convert_blocks."
        )
    if getattr(model.forward, "__func__", None) is nn.Module.forward:
        _tell_of_missing_forward(model)
    return model


def _tell_of_missing_forward(model: nn.Module) -> None:
    if isinstance(model, (nn.ParameterList, nn.ParameterDict)):
        return  # nothing in it runs
    children = tuple(name for name, _ in model.named_children())
    told = (
        f"{type(model).__name__} has no forward, and ampgraph converts nothing else. To convert its "
        f"submodules, which other code calls: ampgraph.convert_blocks(model, {children})."
    )
    if not isinstance(model, (nn.ModuleList, nn.ModuleDict)):
        raise CaptureError(told)
    warn_user(f"ampgraph: {told}")
