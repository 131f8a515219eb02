"""The record of overflows: which step is picked on the device, and what the outputs tell of the forward."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampgraph.training.agreement import Peers
from ampgraph.training.overflow import MOST_NOTES, OverflowLog, largest

ONE = torch.tensor(1.0)
NAMES = ["a", "b"]


def log_of_steps(steps: list[int | None], reads: set[int], outputs: float | None = None) -> OverflowLog:
    """Notes steps, each with the slot that overflows or None; reads the log after those in ``reads``."""
    log = OverflowLog(NAMES, Peers(NAMES, 0))
    for index, slot in enumerate(steps):
        flags = torch.zeros(len(NAMES) + 1)
        if slot is not None:
            flags[slot] = 1.0
        told = None if outputs is None else torch.tensor(outputs)
        tensors = flags, ONE * (index + 1), flags.amax()
        log.note(index + 1, *tensors, outputs=told)
        log.end_round()
        if index in reads:
            log.last()
    return log


@given(
    steps=st.lists(st.sampled_from([None, None, 0, 1]), max_size=3 * MOST_NOTES),
    reads=st.sets(st.integers(0, 3 * MOST_NOTES), max_size=4),
    outputs=st.sampled_from([None, 0.0]),
)
def test_the_last_overflow_counts(steps, reads, outputs) -> None:
    last = log_of_steps(steps, reads, outputs).last()
    bad = [index for index, slot in enumerate(steps) if slot is not None]
    if not bad:
        assert last is None
        return
    index = bad[-1]
    assert (last.step, last.parameters, last.scale) == (index + 1, (NAMES[steps[index]],), index + 1.0)


@pytest.mark.parametrize(
    ("outputs", "in_forward"), [(3.0, False), (0.0, False), (math.inf, True), (math.nan, True)]
)
def test_what_the_outputs_of_a_graph_tell(outputs, in_forward) -> None:
    assert log_of_steps([0], set(), outputs).last().in_forward is in_forward


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ([], 0.0),
        ([torch.empty(0), torch.tensor([7])], 0.0),
        ([torch.tensor([1.0, -5.0]), torch.tensor(3.0, dtype=torch.float16)], 5.0),
        ([torch.tensor([1.0, math.nan]), torch.tensor(math.inf)], math.nan),
        ([torch.tensor(-math.inf, dtype=torch.bfloat16)], math.inf),
        ([torch.tensor(1e300, dtype=torch.float64)], 0.0),
        ([torch.tensor(math.inf, dtype=torch.float64)], math.nan),
    ],
)
def test_the_largest_output(outputs, expected) -> None:
    found = largest(outputs, ONE)
    assert (found.dtype, found.shape) == (ONE.dtype, ONE.shape)
    torch.testing.assert_close(float(found), expected, rtol=0, atol=0, equal_nan=True)
