"""Instability follows its definition, and equal models are seldom declared different."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.errors import InvalidArgumentError
from slipstream.measure import instability as metric


def test_a_table_of_four_environments_by_hand() -> None:
    labels = np.array([0, 1, 2, 3, 4])
    answers = np.array(
        [
            [0, 1, 7, 8, 4],  # item 2 is wrong everywhere, in two ways; item 3 in one
            [0, 9, 7, 8, 4],
            [0, 1, 5, 8, 4],
            [0, 1, 7, 8, 6],
        ]
    )
    right = answers == labels
    assert metric.unstable(right).tolist() == [False, True, False, False, True]
    assert metric.diverging(answers).tolist() == [False, True, True, False, True]
    assert metric.pairwise(right)[0].tolist() == [0, 0.2, 0, 0.2]
    assert metric.pairwise(answers)[0].tolist() == [0, 0.2, 0.2, 0.2]
    curve = metric.growth(right)
    assert curve[-1] == pytest.approx(0.4)
    assert (np.diff(curve) > 0).all()


def test_shares_have_wilsons_interval() -> None:
    share = metric.share(np.arange(200) < 16)
    assert (round(share.low, 3), round(share.high, 3)) == (0.050, 0.126)


def test_ties_of_scores_go_to_the_lower_class() -> None:
    scores = np.array([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]])
    assert metric.top_classes(scores, 2).tolist() == [[1, 2], [0, 1]]
    assert metric.right_of(metric.top_classes(scores, 2), np.array([2, 2])).tolist() == [
        True,
        False,
    ]


def test_equal_models_seldom_differ() -> None:
    rng = np.random.default_rng(0)
    declared = 0
    for _ in range(500):
        # Items differ in how easily they are disturbed; both models are disturbed equally.
        chance = rng.beta(0.5, 4, 400)
        first, second = (rng.random(400) < chance for _ in range(2))
        declared += metric.Reduction.of(first, second).p_value < 0.05
    assert declared <= 25


def test_a_reduction_and_its_interval() -> None:
    before = np.arange(1000) < 200
    after = (np.arange(1000) < 60) | (np.arange(1000) >= 980)
    found = metric.Reduction.of(before, after)
    assert found.reduction.estimate == pytest.approx(0.6)
    assert found.reduction.low < 0.6 < found.reduction.high
    assert 0.1 < found.reduction.high - found.reduction.low < 0.2
    assert found.p_value < 1e-9


@pytest.mark.parametrize("shape", [(1, 5), (3, 0)])
def test_inputs_that_cannot_disagree_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(InvalidArgumentError):
        metric.unstable(np.zeros(shape, bool))


def test_reductions_require_the_same_items() -> None:
    with pytest.raises(InvalidArgumentError, match=r"items.*\b3\b.*\b4\b"):
        metric.Reduction.of(np.zeros(3, bool), np.zeros(4, bool))


def test_equally_good_environments_differ_by_chance() -> None:
    rng = np.random.default_rng(0)
    within = 0
    for _ in range(40):
        easy = rng.beta(8, 1, 200)
        right = rng.random((16, 200)) < easy
        within += np.ptp(right.mean(1)) <= metric.spread_by_chance(right, draws=100)[1]
    assert within >= 34
    right[3] &= rng.random(200) < 0.7
    mean, most = metric.spread_by_chance(right, draws=100)
    assert mean < most < np.ptp(right.mean(1))
    assert metric.spread_by_chance(np.array([[True, False], [True, False]])) == (0.0, 0.0)
