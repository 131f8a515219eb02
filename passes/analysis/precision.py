"""The decision for a node: the policy's low dtype or float32."""

from __future__ import annotations

import enum
from collections.abc import Iterable

import torch


class Precision(enum.Enum):
    """The two dtypes that a node may get. It has no truth value: float32 must not pass for "none"."""

    LOW = "low"
    FP32 = "fp32"

    @classmethod
    def of(cls, dtype: torch.dtype | None, low_dtype: torch.dtype) -> Precision:
        """Returns the precision of a dtype: low, or everything else."""
        return LOW if dtype == low_dtype else FP32

    @classmethod
    def following(cls, inputs: Iterable[Precision]) -> Precision:
        """Returns the precision of an op that follows its inputs: low if all of them are."""
        return FP32 if FP32 in inputs else LOW

    @property
    def other(self) -> Precision:
        """The other precision."""
        return Precision.FP32 if self is Precision.LOW else Precision.LOW

    def dtype(self, low_dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype that it means."""
        return low_dtype if self is Precision.LOW else torch.float32

    # The members are singletons, and the cost model looks them up in the inner loop.
    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        raise TypeError(f"{self} has no truth value; compare it with Precision.LOW or Precision.FP32.")


LOW, FP32 = Precision.LOW, Precision.FP32
