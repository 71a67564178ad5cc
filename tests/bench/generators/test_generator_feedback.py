"""Implicit feedback against its stated rank, popularity and best AUC."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import rankdata

from slipstream.errors import InvalidArgumentError
from slipstream_bench.generators import implicit_feedback


def test_log_intensity_has_the_stated_rank() -> None:
    feedback = implicit_feedback(200, 150, rank=5, seed=1)
    log_intensity = feedback.log_intensity(np.arange(200))
    # Without the row effect, and with popularity taken off, `rank` directions remain.
    low_rank = log_intensity - np.log(feedback.popularity)
    low_rank -= low_rank.mean(axis=1, keepdims=True)
    spectrum = np.linalg.svd(low_rank, compute_uv=False)
    assert spectrum[4] > 1e-3 * spectrum[0]
    assert spectrum[5] < 1e-12 * spectrum[0]


def test_expected_interactions_per_user_match_the_setting() -> None:
    feedback = implicit_feedback(50, 300, per_user=12, seed=2)
    intensity = np.exp(feedback.log_intensity(np.arange(50)))
    assert intensity.sum(axis=1) == pytest.approx(np.full(50, 12.0), rel=1e-12)


def test_pairs_occur_with_the_stated_probabilities() -> None:
    feedback = implicit_feedback(1500, 200, seed=3)
    probability = feedback.probability(np.arange(1500))
    data = feedback.data
    taken = np.zeros((1500, 200))
    taken[data.users, data.items] += 1
    taken[data.test_users, data.test_items] += 1
    # No pair twice, train and test apart.
    assert taken.max() == 1
    variance = probability * (1 - probability)
    assert abs(taken.sum() - feedback.expected_pairs) < 4 * variance.sum() ** 0.5
    # For each item and each decile of probability, not only overall.
    items = (taken - probability).sum(axis=0) / variance.sum(axis=0) ** 0.5
    assert abs(items).max() < 4.5
    order = np.argsort(probability.ravel())
    for part in np.array_split(order, 10):
        difference = (taken.ravel()[part] - probability.ravel()[part]).sum()
        assert abs(difference) < 4 * variance.ravel()[part].sum() ** 0.5


def test_true_scores_reach_the_stated_auc() -> None:
    feedback = implicit_feedback(2000, 200, seed=4)
    data = feedback.data
    taken = np.zeros((2000, 200), dtype=bool)
    taken[data.users, data.items] = True
    taken[data.test_users, data.test_items] = True
    ranks = rankdata(feedback.probability(np.arange(2000)).ravel())
    n = int(taken.sum())
    m = taken.size - n
    auc = (ranks[taken.ravel()].sum() - n * (n + 1) / 2) / (n * m)
    error = 4 * (feedback.bayes_auc * (1 - feedback.bayes_auc) / n) ** 0.5
    assert auc == pytest.approx(feedback.bayes_auc, abs=error)


def test_without_taste_only_popularity_remains() -> None:
    feedback = implicit_feedback(20_000, 100, taste=0, exponent=1.0, per_user=5, seed=5)
    data = feedback.data
    count = np.bincount(data.items, minlength=100) + np.bincount(data.test_items, minlength=100)
    # P(taken) = 1 - exp(-mean): turned back into the mean, its law is the stated power law.
    mean = np.sort(-np.log1p(-count / 20_000))[::-1]
    slope = np.polyfit(np.log(np.arange(1, 31)), np.log(mean[:30]), 1)[0]
    assert slope == pytest.approx(-1.0, abs=0.05)


def test_the_held_out_share_matches_the_setting() -> None:
    feedback = implicit_feedback(seed=6, test_share=0.3)
    n = len(feedback.data) + len(feedback.data.test_users)
    share = len(feedback.data.test_users) / n
    assert share == pytest.approx(0.3, abs=4 * (0.21 / n) ** 0.5)
    whole = implicit_feedback(seed=6, test_share=0)
    assert len(whole.data) == n
    assert len(whole.data.test_items) == 0


def test_blocks_of_users_do_not_show() -> None:
    feedback = implicit_feedback(1100, 20, seed=8)
    assert (np.diff(feedback.data.users) >= 0).all()
    assert feedback.data.users.max() == 1099


def test_arguments_out_of_range_are_named() -> None:
    for argument, value in [("users", 0), ("rank", 0), ("taste", -1), ("test_share", 1.0)]:
        with pytest.raises(InvalidArgumentError, match=argument):
            implicit_feedback(**{argument: value})  # type: ignore[arg-type]
