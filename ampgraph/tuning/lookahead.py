"""Chooses what to measure next, if only a few measurements are left.

Each *world* is one possible truth: which sets meet the budget. Worlds are drawn from what is known. A
measurement divides them into those in which the set meets the budget and the others, and the next choice is
the best one in each part. So a choice counts for what it saves, and for what its result tells.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Measurements looked ahead; the number of cases is a power of it.
DEPTH = 3


def best_choice(saved: Sequence[float], met: Tensor, runs: int) -> tuple[float, int]:
    """Returns what the best choice will have saved in the end, on average, and its index.

    Args:
        saved: What each set saves if it meets the budget.
        met: Whether it does: (sets, worlds).
        runs: How many measurements are left.
    """
    worlds = met.shape[1]
    found = _best(torch.tensor(saved, dtype=torch.float64), met.double(), 0.0, min(runs, DEPTH))
    return found[0] / worlds, found[1]


def _best(saved: Tensor, met: Tensor, have: float, runs: int) -> tuple[float, int]:
    """Returns the sum of savings over all worlds, and the first choice; index -1 if nothing is worth it."""
    worlds = met.shape[1]
    if not worlds:
        return 0.0, -1
    if runs == 1:
        gains = (saved - have).clamp(min=0) * met.sum(1)
        index = int(gains.argmax())
        return have * worlds + float(gains[index]), index if gains[index] > 0 else -1
    found = have * worlds, -1
    for index in (saved > have).nonzero().flatten().tolist():
        yes = met[index].bool()
        total = _best(saved, met[:, yes], float(saved[index]), runs - 1)[0]
        total += _best(saved, met[:, ~yes], have, runs - 1)[0]
        if total > found[0]:
            found = total, index
    return found
