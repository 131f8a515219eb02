"""`Learned`: measured errors correct the predicted charges."""

from __future__ import annotations

import math

import pytest

from ampgraph.tuning.learned import LEAST, Learned

EVERYTHING = frozenset(range(4))


def learned(*trials: tuple[set[int], float], scatter: float = 0.05) -> Learned:
    found = Learned([4.0, 1.0, 1.0, 1.0], scatter)
    for charged, square in trials:
        found.add(frozenset(charged), math.sqrt(square))
    return found


def test_without_trials_nothing_changes() -> None:
    assert learned().corrected() == [4.0, 1.0, 1.0, 1.0]


def test_a_factor_of_all_is_found() -> None:
    found = learned((EVERYTHING, 14.0), ({0}, 8.0), ({1, 2, 3}, 6.0))
    assert sum(found.corrected()) == pytest.approx(14.0, rel=0.1)


def test_the_charge_that_trials_share_takes_the_blame() -> None:
    found = learned((EVERYTHING, 3.8), ({0, 1}, 2.0), ({1, 2, 3}, 2.8))
    large, *others = found.corrected()
    assert large == pytest.approx(1.0, abs=0.35)
    assert all(charge == pytest.approx(0.95, abs=0.15) for charge in others)


def test_charges_stay_positive() -> None:
    found = learned((EVERYTHING, 1e-6), ({0}, 1e-6))
    assert all(c >= LEAST * s for c, s in zip(found.corrected(), found.squares, strict=True))


def test_chance() -> None:
    found = learned((EVERYTHING, 7.0))
    chances = [found.chance(frozenset({0, 1}), math.sqrt(square)) for square in (2.0, 5.0, 12.0)]
    assert chances == sorted(chances)
    assert chances[0] < 0.2
    assert 0.3 < chances[1] < 0.7
    assert chances[2] > 0.95
    assert found.chance(frozenset(), 0.0) == 1.0


def test_sets_that_are_nearly_the_same_scatter_alike() -> None:
    """A set whose error was too large by chance makes its neighbours unlikely, not others."""
    plain = Learned([0.01, *[1.0] * 8], scatter=0.5)
    left, right = frozenset({1, 2, 3, 4}), frozenset({5, 6, 7, 8})
    before = plain.chance(left | {0}, 2.1), plain.chance(right, 2.1)
    plain.add(frozenset(range(9)), math.sqrt(8.01))
    plain.add(left, math.sqrt(7.0))
    assert plain.chance(left | {0}, 2.1) < 0.05 < before[0]
    assert plain.chance(right, 2.1) > before[1] / 2


def test_nothing_predicted_is_no_trial() -> None:
    found = Learned([0.0, 1.0], 0.1)
    found.add(frozenset({0}), 3.0)
    assert found.corrected() == [0.0, 1.0]
