"""Training on several ranks: wrappers around the model, and the local part of a tensor."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from .._compat import active_data_parallel
from ..errors import CaptureError, PolicyError

# How many modules an error names.
NAMED = 3


def is_distributed() -> bool:
    """Whether this process belongs to a group of several ranks."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def check_process_groups(groups: object) -> None:
    """Checks a value for `LossScaler.process_groups`.

    Raises:
        PolicyError: It is neither None nor a list or tuple of process groups.
    """
    if groups is None:
        return
    legal = "None (all ranks), () (only this rank) or a tuple of torch.distributed.ProcessGroup"
    if isinstance(groups, str) or not isinstance(groups, Sequence):
        raise PolicyError(f"scaler.process_groups is {legal}, got {groups!r}.")
    for group in groups:
        if not is_process_group(group):
            raise PolicyError(f"scaler.process_groups is {legal}, got {group!r} in it.")


def is_process_group(value: object) -> bool:
    """Whether the value is a process group that this rank belongs to."""
    return torch.distributed.is_available() and isinstance(value, torch.distributed.ProcessGroup)


def active_wrapper() -> DistributedDataParallel | None:
    """Returns the DistributedDataParallel whose forward runs now, if one does."""
    return active_data_parallel() if is_distributed() else None


def is_spread(value: object) -> bool:
    """Whether the value is a DTensor."""
    return isinstance(value, Tensor) and hasattr(value, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a tensor, without communication."""
    return tensor.to_local() if is_spread(tensor) else tensor  # type: ignore[attr-defined]


def check_wrappers(model: nn.Module, just_in_time: bool) -> None:
    """Raises an error for a model that a wrapper hides from capture.

    Raises:
        CaptureError: The model is wrapped or sharded; the message gives the right call.
    """
    if isinstance(model, DistributedDataParallel):
        raise CaptureError(
            "the model is wrapped in DistributedDataParallel, and a graph cannot contain its communication. "
            "Convert the inner model, then wrap it: DistributedDataParallel(ampgraph.convert(model, ...)); "
            "or convert it "
            "in place: ampgraph.convert_blocks(model, 'module')."
        )
    if just_in_time and _sharded_modules(model):
        return  # their hooks gather the parameters before code of theirs is captured
    if error := sharded_error(model):
        raise error


def sharded_error(model: nn.Module, *values: Any) -> CaptureError | None:
    """Returns the error for a graph that reads DTensors; None if there are none.

    Args:
        model: The model that is being captured.
        values: Its arguments, or other values of the graph, in nested containers.
    """
    name = type(model).__name__
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    spread = next(((path, t) for path, t in tensors if is_spread(t)), None)
    if spread is not None:
        if sharded := _sharded_modules(model):
            return CaptureError(f"{name}: {_advice(sharded)}")
        return CaptureError(f"{name}: {spread[0]!r} is {_described(spread[1])}. {_PARALLEL}")
    return spread_error(name, values)


def spread_error(name: str, values: Any) -> CaptureError | None:
    """Returns the error for DTensors among values in nested containers; None if there are none."""
    spread = next((value for value in tree_leaves(values) if is_spread(value)), None)
    if spread is None:
        return None
    return CaptureError(f"{name}: an argument or a value in forward is {_described(spread)}. {_PARALLEL}")


def _sharded_modules(model: nn.Module) -> list[str]:
    """Returns the paths of the modules that ``fully_shard`` wraps, ``""`` for the model itself."""
    from torch.distributed.fsdp import FSDPModule

    return [path for path, module in model.named_modules() if isinstance(module, FSDPModule)]


def _advice(sharded: list[str]) -> str:
    """Returns what to do with a module that ``fully_shard`` wraps, or wraps modules of."""
    inside = [path for path in sharded if path]
    named = f" inside it, {', '.join(map(repr, inside[:NAMED]))}{', ..' if len(inside) > NAMED else ''}"
    # The path of the block "model.layers.3" is "model.layers.*" for all of its list.
    globs = dict.fromkeys(
        ".".join("*" if part.isdecimal() else part for part in p.split(".")) for p in inside
    )
    which = repr([*globs]) if len(globs) > 1 else repr(next(iter(globs), "layers.*"))
    return (
        "its parameters are DTensors that fully_shard has made, and one graph of it does not call the modules"
        f" that gather them. Convert the modules that fully_shard wraps{named if inside else ''}, each by "
        f"itself: ampgraph.convert_blocks(model, {which}). Parameters that parallelize_module has split, "
        "too, stay DTensors when they are gathered; ampgraph decides no dtypes for them."
    )


def _described(tensor: Any) -> str:
    placements = ", ".join(map(str, tensor.placements))
    return f"a DTensor with the placements ({placements})"


_PARALLEL = (
    "ampgraph decides no dtypes for DTensors, the tensors of tensor, sequence and loss parallelism "
    "(parallelize_module). Convert only modules without DTensors (ampgraph.convert_blocks), or use "
    "torch.autocast with bfloat16, which needs no loss scaling."
)
