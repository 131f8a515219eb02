"""Undoes an optimizer's step: restores parameters, state, and the state of optimizers inside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import LoopError
from .nested_optimizers import nested


class Undo:
    """Copies everything that a step may change; calling the object restores it.

    Tensors in lists are not copied: optimizers append tensors to lists and do not write them later (LBFGS
    keeps a hundred directions).
    """

    def __init__(self, optimizer: Optimizer):
        self._optimizers = list(nested(optimizer))
        parameters = {id(p): p for o in self._optimizers for g in o.param_groups for p in g["params"]}
        self._listed: list[tuple[Tensor, int]] = []
        self._values = [(p, p.detach().clone()) for p in parameters.values()]
        self._states = [{key: self._kept(value) for key, value in o.state.items()} for o in self._optimizers]
        self._groups = [[self._kept(_settings(g)) for g in o.param_groups] for o in self._optimizers]
        self._numbers = [_numbers(o) for o in self._optimizers]

    def __call__(self) -> None:
        """Restores everything.

        Raises:
            LoopError: The optimizer wrote a tensor that it keeps in a list.
        """
        with torch.no_grad():
            for parameter, value in self._values:
                parameter.copy_(value)
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
            vars(optimizer).update(self._numbers[i])

    def _kept(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().clone()
        if isinstance(value, dict):
            return {key: self._kept(item) for key, item in value.items()}
        if isinstance(value, list):
            self._listed += [(item, item._version) for item in value if isinstance(item, Tensor)]
            return list(value)
        return value


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _numbers(optimizer: Optimizer) -> dict[str, Any]:
    return {name: value for name, value in vars(optimizer).items() if isinstance(value, (bool, int, float))}
