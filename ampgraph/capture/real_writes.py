"""Undoes what forward writes during a capture to tensors that are neither parameters nor buffers.

torch.export runs a write to such a tensor (``self.steps += 1``) on the tensor itself, and records it, too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .._compat import FakeTensor, no_modes, outside_transforms, without_transforms

# The setters of a tensor's attributes, with what reads the attribute.
_SETTERS = {getattr(Tensor, name).__set__: getattr(Tensor, name).__get__ for name in ("data", "grad")}


class RealWrites:
    """The tensors of the user that forward writes, with their values before."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self._held: dict[tuple[Callable, int], tuple[Tensor, Tensor | None]] = {}

    def note(self, function: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
        """Records the values that a call is about to write over."""
        if function in _SETTERS:
            self._note_set(function, args[0])
            return
        if not writes(function) and "out" not in kwargs:
            return
        written = [leaf for leaf in tree_leaves((args[:1], kwargs.get("out"))) if isinstance(leaf, Tensor)]
        for tensor in map(without_transforms, written):
            if not isinstance(tensor, FakeTensor) and id(tensor) not in self._before:
                with no_modes(), outside_transforms():
                    self._before[id(tensor)] = tensor, tensor.detach().clone()

    def _note_set(self, setter: Callable, tensor: Tensor) -> None:
        if not isinstance(tensor, FakeTensor) and (setter, id(tensor)) not in self._held:
            with no_modes():
                self._held[setter, id(tensor)] = tensor, _SETTERS[setter](tensor)

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Afterwards the tensors are as they were."""
        try:
            yield
        finally:
            for (setter, _), (tensor, before) in self._held.items():
                setter(tensor, before)
            with torch.no_grad():
                for tensor, before in reversed(self._before.values()):  # a view may come after its base
                    tensor.detach().copy_(before)


@functools.lru_cache(maxsize=4096)
def writes(function: Callable) -> bool:
    """Whether a function of torch writes its first argument: ``add_``, ``+=``, ``x[0] = y``."""
    name = getattr(function, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and hasattr(Tensor, f"__{name[3:]}"))
    return name.endswith("_")
