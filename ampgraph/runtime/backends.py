"""Backends of ``torch.compile`` by name: which one runs a rewritten graph, and in which mode."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace

import torch

from .._compat import find_backend, has_triton, inductor_modes, known_backends
from ..errors import PolicyError, did_you_mean, warn_user
from .options import UNDECIDED, Options


def choose_backend(
    backend: str | Callable | None, mode: str | None, device: torch.device, *, can_wait: bool = False
) -> tuple[str | Callable, str | None]:
    """Returns the backend for the rewritten graphs, and its mode.

    Args:
        backend: The name or function that the user gave.
        mode: The mode that the user gave.
        device: The device of the model.
        can_wait: Whether `UNDECIDED` is an answer for a model without values, on the device meta.

    Raises:
        PolicyError: ``torch.compile`` does not know the backend, inductor does not know the mode, or the
            backend takes no mode.
    """
    _check_backend(backend)
    if mode is not None:
        _check_mode(mode, backend)
    if backend is not None:
        return backend, mode
    if can_wait and device.type == "meta":
        return UNDECIDED, mode
    default = default_backend(device)
    if mode is None or default == "inductor":
        return default, mode
    warn_user(
        f"mode={mode!r} configures inductor and has no effect here: the default backend on "
        f"{device.type} is {default!r}. Pass backend='inductor' to compile."
    )
    return default, None


def decided(options: Options, device: torch.device) -> Options:
    """Returns the options of a model that was converted without values, for the device that it has now."""
    backend, mode = None if options.backend == UNDECIDED else options.backend, options.mode
    if backend is None:
        backend, mode = choose_backend(None, mode, device)
    policy = options.policy.resolved(device, backend, mode)
    return replace(options, policy=policy, backend=backend, mode=mode)


def _check_mode(mode: str, backend: str | Callable | None) -> None:
    if backend in (None, "inductor"):
        known = inductor_modes()
        if mode in known:
            return
        raise PolicyError(
            f"mode={mode!r} is not known to inductor; legal: {', '.join(known)}."
            + did_you_mean(str(mode), known)
        )
    if not _takes_mode(backend):
        raise PolicyError(f"mode={mode!r} configures inductor; backend={backend!r} has no modes.")


def _takes_mode(backend: str | Callable | None) -> bool:
    found = find_backend(backend) if isinstance(backend, str) else backend
    try:
        parameters = inspect.signature(found).parameters  # type: ignore[arg-type]
    except (TypeError, ValueError):  # a callable without a signature
        return True
    if "mode" in parameters:
        return True
    # torch's own backends take any keyword and ignore it.
    is_torchs = getattr(found, "__module__", "").startswith("torch.")
    return not is_torchs and any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _check_backend(backend: object) -> None:
    if backend is None or callable(backend):
        return
    known = known_backends()
    if backend in known:
        return
    usual = ["eager", "aot_eager", *torch.compiler.list_backends()]
    raise PolicyError(
        f"backend={backend!r} is not known to torch.compile; legal: {', '.join(usual)}, any other of "
        f"torch.compiler.list_backends(None), or a function.{did_you_mean(str(backend), known)}"
    )


def default_backend(device: torch.device) -> str:
    """Returns ``"inductor"`` for CUDA with Triton, else ``"eager"``."""
    if device.type != "cuda":
        return "eager"
    return "inductor" if has_triton() else "eager"


def next_backend(backend: str | Callable, mode: str | None) -> Callable:
    """Returns the function behind a backend's name, with the mode as ``torch.compile`` would pass it."""
    found: Callable = find_backend(backend) if isinstance(backend, str) else backend
    if mode in (None, "default"):
        return found
    if backend == "inductor":
        return functools.partial(found, config_patches=inductor_modes()[mode])
    return functools.partial(found, mode=mode)
