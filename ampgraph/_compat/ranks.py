"""The store of the default process group, and the results of collectives. Tried on torch 2.13."""

from __future__ import annotations

import datetime
import sys
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only


class RankStore:
    """Values by key, that every rank may write and read without the others."""

    def __init__(self, store: torch.distributed.Store):
        self._store = store

    def set(self, key: str, value: str) -> None:
        """Writes a value."""
        self._store.set(key, value)

    def get(self, key: str) -> str:
        """Returns a value; waits for it if nobody has written it."""
        return self._store.get(key).decode()

    def check(self, keys: list[str]) -> bool:
        """Whether all keys have values."""
        return self._store.check(keys)

    def wait_for(self, keys: list[str], seconds: float) -> bool:
        """Waits until all keys have values; returns False if some have none after that time."""
        try:
            self._store.wait(keys, datetime.timedelta(seconds=seconds))
        except RuntimeError:  # DistStoreError; a FileStore raises its parent
            return self._store.check(keys)
        return True


def store_of_ranks() -> RankStore | None:
    """Returns the store of the default group; None for groups without one, as of the fake backend."""
    if torch.distributed.get_backend() == "fake":
        return None
    store = torch.distributed.distributed_c10d._get_default_store()
    return None if store is None else RankStore(store)


def without_wait(value: Any) -> Any:
    """Returns the tensor inside one whose collective nobody has waited for yet; else the value itself.

    Row-wise parallel modules return such wrappers. Ops on fake ones do not yield the dtypes of real ones.
    """
    if (wrapper := _wrapper()) is None or not isinstance(value, wrapper):
        return value
    return value.elem.detach().requires_grad_(value.requires_grad)


def waited(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Returns arguments with plain tensors in place of such wrappers. Runs at every call on several ranks.

    AOTAutograd loses the way that gradients take through a wrapper.
    """
    if (wrapper := _wrapper()) is None or (not kwargs and all(type(a) is torch.Tensor for a in args)):
        return args, kwargs
    if not any(isinstance(leaf, wrapper) for leaf in tree_leaves((args, kwargs))):
        return args, kwargs
    found: tuple[tuple, dict[str, Any]] = tree_map_only(wrapper, _Waited.apply, (args, kwargs))
    return found


def _wrapper() -> Any:
    module = sys.modules.get("torch.distributed._functional_collectives")  # torch imports it at first use
    return getattr(module, "AsyncCollectiveTensor", None)  # another thread may be loading it


class _Waited(torch.autograd.Function):
    """The plain tensor inside a wrapper; its gradient is the wrapper's."""

    @staticmethod
    def forward(ctx: Any, wrapper: Any) -> torch.Tensor:
        tensor: torch.Tensor = wrapper.trigger_wait().detach()
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient
