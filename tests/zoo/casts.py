"""What a run of the oracle reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class OracleCast:
    """One float-to-float conversion of a whole tensor.

    Attributes:
        node: Name of the node it happened in; nodes of a sub-graph are written ``outer.inner``.
        src: Dtype read.
        dst: Dtype written.
        numel: Number of elements.
        is_parameter: True for a parameter, a buffer, a constant, or a view of one.
    """

    node: str
    src: torch.dtype
    dst: torch.dtype
    numel: int
    is_parameter: bool

    @property
    def bytes_read(self) -> int:
        """Bytes of the source."""
        return self.numel * self.src.itemsize

    @property
    def bytes_written(self) -> int:
        """Bytes of the result."""
        return self.numel * self.dst.itemsize


@dataclass(frozen=True)
class OracleResult:
    """What one run found.

    Attributes:
        node_dtypes: Output dtype of every node that yields a tensor; a tuple for an op with several outputs,
            None in it for what is not a tensor. Nodes of a sub-graph are written ``outer.inner``.
        casts: The casts that autocast made.
        own_casts: The casts made with autocast off as well: those the graph holds and those inside kernels.
    """

    node_dtypes: dict[str, Any] = field(default_factory=dict)
    casts: list[OracleCast] = field(default_factory=list)
    own_casts: list[OracleCast] = field(default_factory=list)

    @property
    def activation_casts(self) -> list[OracleCast]:
        """The casts of everything but parameters and buffers."""
        return [cast for cast in self.casts if not cast.is_parameter]

    @property
    def activation_cast_bytes(self) -> int:
        """Bytes read plus bytes written by casts of activations."""
        return sum(cast.bytes_read + cast.bytes_written for cast in self.activation_casts)

    @property
    def activation_cast_bytes_written(self) -> int:
        """Bytes written by casts of activations."""
        return sum(cast.bytes_written for cast in self.activation_casts)
