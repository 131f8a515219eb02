"""A few planted faults of each kind; `tools/planted_faults.py` plants more."""

from __future__ import annotations

import pytest

from .planted_checks import backward_outcome, forward_outcome


@pytest.mark.parametrize("seed", [1, 2, 5, 11, 24, 41])
def test_fault_in_the_forward_is_named_and_cured(seed):
    outcome = forward_outcome(seed)
    assert outcome.named, outcome.detail
    assert outcome.cured, outcome.detail
    assert outcome.least is None or outcome.pinned <= outcome.least + 1


@pytest.mark.parametrize(("seed", "kind"), [(2, "settles"), (4, "remedy"), (6, "settles"), (15, "remedy")])
def test_fault_in_the_backward_is_named_and_cured_or_settles(seed, kind):
    outcome = backward_outcome(seed)
    assert outcome.kind == kind
    assert outcome.named, outcome.detail
    assert outcome.cured, outcome.detail
