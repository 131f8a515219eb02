"""Training on several ranks: wrappers around the model, and the local part of a tensor."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .._compat import active_data_parallel
from ..errors import CaptureError


def is_distributed() -> bool:
    """Whether this process belongs to a group of several ranks."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def active_wrapper() -> DistributedDataParallel | None:
    """Returns the DistributedDataParallel whose forward runs now, if one does."""
    return active_data_parallel() if is_distributed() else None


def is_spread(tensor: Tensor) -> bool:
    """Whether the tensor is a DTensor."""
    return hasattr(tensor, "device_mesh")


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
            "the model is wrapped in DistributedDataParallel, whose communication no graph can hold. Convert "
            "what is inside, then wrap: DistributedDataParallel(ampgraph.convert(model, ...)); or convert it "
            "in place: ampgraph.convert_blocks(model, 'module')."
        )
    if not just_in_time and any(is_spread(p) for p in model.parameters()):
        raise CaptureError(f"{type(model).__name__}: {_SHARDED}")


def sharded_error(model: nn.Module) -> CaptureError | None:
    """Returns the error for a graph of a whole model with sharded parameters; None for other models."""
    if any(is_spread(p) for p in model.parameters()):
        return CaptureError(f"{type(model).__name__}: {_SHARDED}")
    return None


_SHARDED = (
    "its parameters are sharded, and a graph of the whole model does not call the modules that gather them. "
    "Convert the modules that fully_shard wraps: ampgraph.convert_blocks(model, 'layers.*')."
)
