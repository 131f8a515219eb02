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


def test_sets_scatter_alike_up_to_where_they_differ() -> None:
    """A set that is too bad by chance makes those unlikely that only differ late; no others."""
    plain = Learned([1.0, *[2.0] * 4, 1.0], scatter=0.5)
    bad, budget = frozenset(range(5)), 3.0
    late, early = frozenset(range(6)), frozenset(range(1, 6))
    before = [plain.chance(charged, budget) for charged in (late, early)]
    plain.add(frozenset(range(1, 5)), math.sqrt(8.0))
    plain.add(bad, math.sqrt(16.0))
    after = [plain.chance(charged, budget) for charged in (late, early)]
    assert after[0] < 0.05 < before[0]
    assert after[1] > before[1] / 2


def test_worlds_agree_with_chances_and_with_each_other() -> None:
    plain = Learned([4.0, 1.0, 1.0, 1.0], scatter=0.3)
    plain.add(EVERYTHING, math.sqrt(7.0))
    sets = [frozenset({0, 1}), frozenset({0, 1, 2}), frozenset({1, 2})]
    met = plain.met(sets, math.sqrt(5.0))
    shares = met.double().mean(1).tolist()
    assert shares == pytest.approx([plain.chance(s, math.sqrt(5.0)) for s in sets], abs=0.1)
    both = (met[0] & met[1]).double().mean()
    assert both > shares[0] * shares[1] + 0.05


def test_nothing_predicted_is_no_trial() -> None:
    found = Learned([0.0, 1.0], 0.1)
    found.add(frozenset({0}), 3.0)
    assert found.corrected() == [0.0, 1.0]
