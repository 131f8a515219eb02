"""Asks FakeTensor for the results of an op with low operands; decides for ops that no table names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch.fx import Node

from ampgraph._compat import fake_mode_of, result_dtypes

# The errors of FakeTensor for arguments that an op does not accept.
_REFUSALS = (RuntimeError, TypeError, ValueError)


class LowRun(NamedTuple):
    """The behaviour of an op with low operands.

    Attributes:
        refusal: Why it cannot run low; empty if it can.
        wide: Results of a multi-output op, by index, that stay float32 beside low ones (statistics).
    """

    refusal: str = ""
    wide: frozenset[int] = frozenset()


def probe_low_dtype(node: Node, operands: Iterable[Node], low_dtype: torch.dtype) -> LowRun:
    """Runs a float32 op on fake values, ``operands`` of them in ``low_dtype``.

    Args:
        node: An ATen op that returns float32 in the source.
        operands: Its arguments that would be low.
        low_dtype: float16 or bfloat16.
    """
    low = dict.fromkeys(operands, low_dtype)
    if not low:
        return LowRun()
    try:
        dtypes = result_dtypes(node, fake_mode_of(node.graph), low)
    except _REFUSALS as error:
        first_line = str(error).partition("\n")[0]
        return LowRun(f"no low-precision kernel: {first_line}") if _runs_in_float32(node) else LowRun()
    if low_dtype not in dtypes:
        return LowRun("yields float32 from low operands too")
    return LowRun(wide=frozenset(i for i, dtype in enumerate(dtypes) if dtype == torch.float32))


def _runs_in_float32(node: Node) -> bool:
    """Whether FakeTensor accepts the op at all; it refuses ops of another device (cuDNN on a CPU)."""
    try:
        result_dtypes(node, fake_mode_of(node.graph))
    except _REFUSALS:
        return False
    return True
