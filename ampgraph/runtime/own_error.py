"""`own_error`: the error that the model itself raises if a capture fails for its arguments."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..capture.side_effects import tensor_attributes_restored
from ..proxy.all_parameters import all_parameters
from .capture_lock import lock_of
from .low_storage import LowStorage
from .unchanged_model import unchanged


def own_error(source: nn.Module, stored: LowStorage, args: tuple, kwargs: dict[str, Any]) -> Exception | None:
    """Runs a copy of the source once and returns its error or None; the random state does not change.

    A source that cannot be copied runs itself; then its buffers, and attributes of its modules and tensors,
    are put back.

    For a bad shape, for example, the error at the user's line says more than an error of the capture.
    """
    args, kwargs = tree_map_only(Tensor, _copied, (args, kwargs))
    try:
        with lock_of(source).alone(), stored.as_float32(), _undisturbed(source):
            _replica(source)(*args, **kwargs)
    except Exception as error:
        return error
    return None


def _replica(source: nn.Module) -> nn.Module:
    """Returns a copy with the same memory for parameters; the source itself if it cannot be copied."""
    own = [p for p in source.parameters() if type(p) is nn.Parameter]
    memo = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in own}
    for parameter in own:
        vars(memo[id(parameter)]).update(vars(parameter))
    with contextlib.suppress(Exception):  # locks, streams, process groups, tensors with a grad_fn
        return copy.deepcopy(source, memo)
    return source


def _copied(tensor: Tensor) -> Tensor:
    if not tensor.is_leaf:
        return tensor.clone()
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def _undisturbed(source: nn.Module) -> Iterator[None]:
    devices = {t.device for t in (*all_parameters(source), *source.buffers()) if t.device.type == "cuda"}
    with (
        torch.random.fork_rng(devices=list(devices)),
        tensor_attributes_restored(source),
        unchanged(source),
    ):
        yield
