"""The arguments of a batch, as `calibrate` and `tune` take them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from ..errors import AmpGraphError

Batch = tuple | Mapping[str, Any] | Tensor


def listable(batches: Iterable[Batch], caller: str) -> Iterable[Batch]:
    """Returns the batches.

    Raises:
        AmpGraphError: They are one batch, or not iterable; the message names the caller.
    """
    if isinstance(batches, (Tensor, Mapping, str)) or not isinstance(batches, Iterable):
        raise AmpGraphError(
            f"{caller}: batches is a {type(batches).__name__}; expected an iterable of batches, "
            "such as [(x,)]."
        )
    return batches


def arguments_of(batch: object, number: int, caller: str) -> tuple[tuple, dict[str, Any]]:
    """Returns the positional and keyword arguments of one batch.

    Raises:
        AmpGraphError: It is something else; the message names the caller and the batch.
    """
    if isinstance(batch, tuple):
        return batch, {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, Tensor):
        return (batch,), {}
    raise AmpGraphError(
        f"{caller}: batch {number} is a {type(batch).__name__}; expected a tuple of positional arguments, a "
        "dict of keyword arguments, or a tensor, the only argument."
    )
