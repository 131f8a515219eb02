"""Cases of long tables: which of them `make test` takes, and which are exhaustive."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(step: int, cases: Iterable[Any]) -> list[Any]:
    """Returns all cases; all but each ``step``-th are marked as exhaustive."""
    return [
        case if number % step == 0 else pytest.param(case, marks=pytest.mark.exhaustive)
        for number, case in enumerate(cases)
    ]
