"""`unchanged`: a run of a model that leaves the model as it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Puts back what runs inside do to a model: values of buffers, and attributes that modules set."""
    with_values = [b for b in model.buffers() if not b.is_meta and not is_lazy(b)]
    buffers = [(buffer, buffer.detach().clone()) for buffer in with_values]
    spaces = [space for module in model.modules() for space in (vars(module), module._buffers)]
    names = [(space, dict(space)) for space in spaces]
    try:
        yield
    finally:
        _put_back(names)
        _put_values_back(buffers)


def _put_back(names: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for space, before in names:
        if not _is_same(space, before):
            space.clear()
            space.update(before)


def _put_values_back(buffers: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for buffer, value in buffers:
            # A write would count as a change of what autograd has saved. No sparse tensor is compared.
            if buffer.layout is not torch.strided or not torch.equal(buffer, value):
                buffer.copy_(value)


def _is_same(space: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    return list(space) == list(before) and all(space[name] is value for name, value in before.items())
