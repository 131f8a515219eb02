"""`best_choice`: what to measure next if few measurements are left."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ampgraph.tuning.lookahead import best_choice

# Each set is met in a world if all sets that save less are: worlds 0 to 7, sets 0 to 7.
NESTED = torch.arange(8)[:, None] <= torch.arange(8)[None, :]


def independent(*chances: float) -> Tensor:
    drawn = torch.rand(len(chances), 4096, generator=torch.Generator().manual_seed(0))
    return drawn < torch.tensor(chances)[:, None]


def test_the_last_measurement_is_the_best_bet() -> None:
    gain, index = best_choice([1.0, 2.0, 3.0], independent(0.9, 0.6, 0.3), 1)
    assert index == 1
    assert gain == pytest.approx(1.2, abs=0.05)


def test_more_measurements_dare_more() -> None:
    """A failure costs little while others are left: the best bet comes last."""
    saved, met = [1.0, 2.0, 3.0], independent(0.9, 0.6, 0.3)
    choices = [best_choice(saved, met, runs) for runs in (1, 2, 3)]
    assert [index for _, index in choices][1:] != [1, 1]
    gains = [gain for gain, _ in choices]
    assert gains == sorted(gains)
    assert gains[2] == pytest.approx(3 * 0.3 + 0.7 * (2 * 0.6 + 0.4 * 0.9), abs=0.05)


def test_nested_sets_are_halved() -> None:
    """Seven sets that are met one inside the other take three measurements."""
    gain, index = best_choice([float(i) for i in range(8)], NESTED, 3)
    assert index == 4
    assert gain == pytest.approx(NESTED.sum(0).sub(1).double().mean())


def test_nothing_saved_is_no_choice() -> None:
    assert best_choice([1.0, 2.0], torch.zeros(2, 8, dtype=torch.bool), 3) == (0.0, -1)
    assert best_choice([0.0], torch.ones(1, 8, dtype=torch.bool), 1) == (0.0, -1)
