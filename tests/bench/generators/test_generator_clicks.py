"""The click log's stated truth against simulation, brute force and fitted laws."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.stats import rankdata

from slipstream.errors import InvalidArgumentError
from slipstream_bench.generators import click_log


def _auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Mann-Whitney, ties by average rank: another way than the generator's."""
    ranks = rankdata(scores)
    clicks = labels == 1
    n, m = clicks.sum(), (~clicks).sum()
    return float((ranks[clicks].sum() - n * (n + 1) / 2) / (n * m))


def test_stated_auc_and_loss_are_what_the_true_model_reaches() -> None:
    log = click_log(400_000, cardinalities=(2000, 100, 10), dense=2, seed=3)
    labels = log.data.train.labels
    p = log.probabilities
    n, m = labels.sum(), (labels == 0).sum()
    # Standard error of an AUC is at most sqrt(AUC (1 - AUC) / min(n, m)); four of them.
    error = 4 * math.sqrt(log.bayes_auc * (1 - log.bayes_auc) / min(n, m))
    assert _auc(p, labels) == pytest.approx(log.bayes_auc, abs=error)
    loss = -np.where(labels == 1, np.log(p), np.log1p(-p))
    assert loss.mean() == pytest.approx(log.bayes_log_loss, abs=4 * loss.std() / len(p) ** 0.5)
    assert labels.mean() == pytest.approx(0.2, abs=4 * 0.4 / len(p) ** 0.5)


def test_stated_auc_is_exact_on_a_population_that_can_be_listed() -> None:
    log = click_log(10, cardinalities=(4, 3, 2), dense=0, click_rate=0.3, signal=1.5, seed=1)
    cells = []
    for ids in itertools.product(range(4), range(3), range(2)):
        mass = math.prod(law[i] for law, i in zip(log.popularity, ids, strict=True))
        z = log.bias + sum(w[i] for w, i in zip(log.weights, ids, strict=True))
        cells.append((mass, 1 / (1 + math.exp(-z)), z))
    wins = sum(
        m * p * n * (1 - q) * (1.0 if z > y else 0.5 if z == y else 0.0)
        for m, p, z in cells
        for n, q, y in cells
    )
    rate = sum(m * p for m, p, _ in cells)
    assert rate == pytest.approx(0.3, rel=1e-12)
    assert log.bayes_auc == pytest.approx(wins / (rate * (1 - rate)), rel=1e-12)
    loss = -sum(m * (p * math.log(p) + (1 - p) * math.log(1 - p)) for m, p, _ in cells)
    assert log.bayes_log_loss == pytest.approx(loss, rel=1e-12)


def test_no_other_score_beats_the_stated_auc() -> None:
    log = click_log(100_000, cardinalities=(50, 20), dense=1, seed=5)
    labels = log.data.train.labels
    best = _auc(log.probabilities, labels)
    # Scores by the weights of a single field, and the true scores with noise, are worse.
    noise = np.random.default_rng(0).normal(0, 0.1, len(labels))
    assert _auc(log.weights[0][log.data.train.ids[:, 0]], labels) < best
    assert _auc(log.probabilities + noise, labels) < best


@pytest.mark.parametrize("exponent", [0.7, 1.1, 1.5])
def test_ids_follow_the_power_law(exponent: float) -> None:
    log = click_log(100_000, cardinalities=(1000,), dense=0, exponent=exponent, seed=2)
    # Ranks from the truth; the exponent by maximum likelihood over the finite support.
    rank = np.empty(1000, dtype=np.int64)
    rank[np.argsort(-log.popularity[0], kind="stable")] = np.arange(1, 1001)
    logs = np.log(rank[log.data.train.ids[:, 0]]).mean()
    support = np.log(np.arange(1, 1001))

    def negative(a: float) -> float:
        return a * logs + float(np.logaddexp.reduce(-a * support))

    fitted = minimize_scalar(negative, bounds=(0.1, 3), method="bounded").x
    # Fisher information of the exponent is the variance of log rank.
    law = np.sort(log.popularity[0])[::-1]
    information = law @ support**2 - (law @ support) ** 2
    assert fitted == pytest.approx(exponent, abs=4 / math.sqrt(information * 100_000))


def test_train_and_test_share_the_truth_but_no_samples() -> None:
    log = click_log(5_000, test_rows=5_000, cardinalities=(100, 10), seed=7)
    alone = click_log(5_000, cardinalities=(100, 10), seed=7)
    assert np.array_equal(log.data.train.ids, alone.data.train.ids)
    assert log.bayes_auc == alone.bayes_auc
    assert not np.array_equal(log.data.train.ids, log.data.test.ids)
    z = log.bias + log.data.test.dense @ log.dense_weights
    for field, weights in enumerate(log.weights):
        z = z + weights[log.data.test.ids[:, field]]
    assert np.allclose(1 / (1 + np.exp(-z)), log.test_probabilities)


def test_weights_of_a_catalogue_are_low_rank_in_the_digits_of_its_ids() -> None:
    def digits(size: int) -> tuple[int, ...]:
        return (6, 7, 8) if size == 300 else (size,)

    log = click_log(10, cardinalities=(300, 40), signal=2.0, digits=digits, rank=2, seed=4)
    weights = np.zeros(6 * 7 * 8)
    weights[:300] = log.weights[0]
    # Five departments are complete; each unfolding has two singular values well above the grid.
    cube = weights.reshape(6, 7, 8)[:5]
    for axis in range(3):
        values = np.linalg.svd(np.moveaxis(cube, axis, 0).reshape(cube.shape[axis], -1))[1]
        assert values[1] > 5 * values[2], axis
    assert 1 < log.weights[0].std() < 4
    plain = click_log(10, cardinalities=(300, 40), signal=2.0, seed=4)
    assert not np.array_equal(plain.weights[0], log.weights[0])
    with pytest.raises(InvalidArgumentError, match="too few"):
        click_log(10, cardinalities=(300,), digits=lambda size: (6, 7))


def test_seeds_repeat_and_differ() -> None:
    first, again, other = (click_log(100, seed=seed) for seed in (0, 0, 1))
    assert np.array_equal(first.data.train.ids, again.data.train.ids)
    assert np.array_equal(first.data.train.labels, again.data.train.labels)
    assert not np.array_equal(first.data.train.ids, other.data.train.ids)


def test_arguments_out_of_range_are_named() -> None:
    for argument, value in [
        ("rows", 0), ("test_rows", -1), ("cardinalities", ()), ("cardinalities", (0,)),
        ("dense", -1), ("exponent", 0.0), ("click_rate", 1.0), ("signal", float("nan")),
        ("seed", -1), ("rank", 0),
    ]:  # fmt: skip
        with pytest.raises(InvalidArgumentError, match=argument):
            click_log(**({"rows": 10} | {argument: value}))  # type: ignore[arg-type]
