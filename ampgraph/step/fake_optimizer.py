"""Gives an optimizer fake tensors for its parameters and state, while a trace records its step."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..errors import NoStateError
from ..training.optimizer_step import parameters_of


@contextlib.contextmanager
def optimizer_on(optimizer: Optimizer, fakes: dict[int, Tensor], rates: Sequence[Tensor]) -> Iterator[None]:
    """Gives an optimizer fake parameters, state and learning rates."""
    state, groups = optimizer.state, [dict(group) for group in optimizer.param_groups]
    now, fake_state = iter(rates), _fake_state(optimizer, fakes)
    try:
        for group in optimizer.param_groups:
            group["params"] = [fakes[id(parameter)] for parameter in group["params"]]
            is_tensor = isinstance(group["lr"], Tensor)
            group["lr"] = fakes[id(group["lr"])] if is_tensor else next(now)
        optimizer.state = fake_state
        before = {id(fake): set(held) for fake, held in fake_state.items()}
        yield
        if before != {id(fake): set(held) for fake, held in fake_state.items()}:
            raise NoStateError
    finally:
        optimizer.state = state
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.update(values)


def _fake_state(optimizer: Optimizer, fakes: dict[int, Tensor]) -> defaultdict[Tensor, Any]:
    found: defaultdict[Tensor, Any] = defaultdict(dict)
    for parameter in parameters_of(optimizer):
        if known := optimizer.state.get(parameter, {}):
            found[fakes[id(parameter)]] = {name: fakes.get(id(v), v) for name, v in known.items()}
    return found
