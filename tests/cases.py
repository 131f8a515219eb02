"""Cases of long tables: which of them `make test` takes, and which are exhaustive."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def one_in(step: int, cases: Iterable[Any]) -> list[Any]:
    """Returns all cases; all but each ``step``-th are marked as exhaustive."""
    return [
        case if number % step == 0 else pytest.param(case, marks=pytest.mark.exhaustive)
        for number, case in enumerate(cases)
    ]


def every_pair(*choices: tuple[Any, Any]) -> list[Any]:
    """Returns all combinations; half of them are exhaustive, and any two values meet in the others."""
    found = []
    for places in itertools.product((0, 1), repeat=len(choices)):
        values = [of[at] for of, at in zip(choices, places, strict=True)]
        found.append(pytest.param(*values, marks=[pytest.mark.exhaustive] * (sum(places) % 2)))
    return found
