"""Undoes an optimizer's step: restores parameters, state, and the state of optimizers inside it."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._compat import has_content
from ..errors import LoopError
from .nested_optimizers import nested

_LISTS = (list, deque)
_KINDS = (bool, int, float, Tensor, *_LISTS)
_TORCHS = ("param_groups", "state", "defaults")


class Undo:
    """Copies everything that a step may change; calling the object restores it.

    That is parameters, state, settings of groups, and the optimizer's own numbers, tensors and lists.
    Tensors in lists and tuples are not copied: optimizers append tensors to lists and do not write them later
    (LBFGS keeps a hundred directions). In the state, a write to one is an error. Lists of the optimizer's own
    may hold parameters and gradients, which are written.
    """

    def __init__(self, optimizer: Optimizer):
        self._optimizers = list(nested(optimizer))
        parameters = {id(p): p for o in self._optimizers for g in o.param_groups for p in g["params"]}
        self._listed: list[tuple[Tensor, int]] = []
        self._values = [(p, p.detach().clone()) for p in parameters.values()]
        self._states = [{key: self._kept(value) for key, value in o.state.items()} for o in self._optimizers]
        self._groups = [[self._kept(_settings(g)) for g in o.param_groups] for o in self._optimizers]
        self._own = [dict(_own(o)) for o in self._optimizers]
        held = {id(v): v for own in self._own for v in own.values()}
        tensors = [v for key, v in held.items() if key not in parameters and _is_restorable(v)]
        self._values += [(t, t.detach().clone()) for t in tensors]
        self._lists = [(v, copy.copy(v)) for v in held.values() if isinstance(v, _LISTS)]

    def __call__(self) -> None:
        """Restores everything.

        Raises:
            LoopError: The optimizer wrote a tensor in a list or tuple of its state.
        """
        with torch.no_grad():
            for tensor, value in self._values:
                if tensor.shape != value.shape:
                    tensor.resize_(value.shape)
                tensor.copy_(value)
        if any(tensor._version != version for tensor, version in self._listed):
            raise LoopError(
                f"{type(self._optimizers[0]).__name__} changed tensors in a list of its state in place, so "
                "its step cannot be undone after an overflow. Use bfloat16, which needs no loss scale."
            )
        for i, optimizer in enumerate(self._optimizers):
            optimizer.state.clear()
            optimizer.state.update(self._states[i])
            for group, settings in zip(optimizer.param_groups, self._groups[i], strict=True):
                group.update(settings)
            vars(optimizer).update(self._own[i])
        for container, items in self._lists:
            container.clear()
            container.extend(items)

    def _kept(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().clone()
        if isinstance(value, dict):
            return {key: self._kept(item) for key, item in value.items()}
        if isinstance(value, (list, tuple, deque)):
            self._listed += [(item, item._version) for item in value if isinstance(item, Tensor)]
        return _copied(value)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _copied(value: Any) -> Any:
    """Returns a container with the same items; any other value itself."""
    return copy.copy(value) if isinstance(value, _LISTS) else value


def _own(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """Yields the attributes in which an optimizer may keep state besides `state` and its groups."""
    for name, value in vars(optimizer).items():
        if name not in _TORCHS and not name.startswith("_amp") and isinstance(value, _KINDS):
            yield name, value


def _is_restorable(value: Any) -> bool:
    """Whether values can be written into it: a plain tensor without elements that share memory."""
    return isinstance(value, Tensor) and has_content(value) and 0 not in value.stride()
