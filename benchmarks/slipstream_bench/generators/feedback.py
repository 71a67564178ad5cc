"""Implicit feedback from low-rank taste and power-law popularity.

User u encounters item i a Poisson number of times with mean

    intensity[u, i] = per_user * softmax_i( <taste_u, trait_i> + log popularity_i )

and takes it if that number is not zero. The log intensity is a matrix of rank `rank` plus a row
vector and a column vector; pairs are independent given the true model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from slipstream.errors import InvalidArgumentError
from slipstream_bench.datasets import Interactions
from slipstream_bench.generators._random import positive, power_law, streams

# Users per block, to limit memory to a few arrays of [512, items].
_BLOCK = 512


@dataclass(frozen=True)
class ImplicitFeedback:
    """Interactions and their true model.

    Attributes:
        data: taken pairs, split randomly into train and test.
        tastes: float64 [users, rank]; traits: float64 [items, rank].
        popularity: float64 [items], sums to 1.
        per_user: mean number of encounters per user.
        bayes_auc: the probability, over all pairs and in the limit of many users, that a taken pair
            has a higher true probability than one not taken.
        expected_pairs: expected number of taken pairs, train and test together.
    """

    data: Interactions
    tastes: NDArray[np.float64]
    traits: NDArray[np.float64]
    popularity: NDArray[np.float64]
    per_user: float
    bayes_auc: float
    expected_pairs: float

    def log_intensity(self, users: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the natural logarithm of the mean number of encounters, float64 [users, items]."""
        return _log_intensity(self.tastes[users], self.traits, self.popularity, self.per_user)

    def probability(self, users: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the probability that each user takes each item, float64 [users, items]."""
        return -np.expm1(-np.exp(self.log_intensity(users)))


def implicit_feedback(
    users: int = 1000,
    items: int = 500,
    *,
    rank: int = 8,
    per_user: float = 30.0,
    taste: float = 1.0,
    exponent: float = 0.8,
    test_share: float = 0.2,
    seed: int = 0,
) -> ImplicitFeedback:
    """Draw users, items and the items that each user takes.

    Args:
        per_user: mean encounters per user; repeated ones count once.
        taste: standard deviation of the low-rank part of the log intensity.
        exponent: exponent of the power law of popularity; items are shuffled.
        test_share: share of the taken pairs in the test set.

    Raises:
        InvalidArgumentError: a size or share is out of range.
    """
    positive(users=users, items=items, rank=rank, per_user=per_user)
    if taste < 0 or exponent < 0:
        raise InvalidArgumentError("taste" if taste < 0 else "exponent", "is negative")
    if not 0 <= test_share < 1:
        raise InvalidArgumentError("test_share", "must be between 0 and 1")
    truth, sample, split = streams(seed, 3)
    # Each of `rank` products has variance scale^4; together they give taste^2.
    scale = (taste / rank**0.5) ** 0.5
    tastes = truth.normal(0, scale, (users, rank))
    traits = truth.normal(0, scale, (items, rank))
    popularity = truth.permutation(power_law(items, exponent))

    pairs: list[NDArray[np.int64]] = []
    every = np.empty((users, items))
    for start in range(0, users, _BLOCK):
        block = slice(start, min(start + _BLOCK, users))
        rates = _log_intensity(tastes[block], traits, popularity, per_user)
        every[block] = -np.expm1(-np.exp(rates))
        taken = np.argwhere(sample.random(every[block].shape) < every[block])
        pairs.append(taken + np.array([start, 0]))
    taken_pairs = np.concatenate(pairs)
    held_out = split.random(len(taken_pairs)) < test_share
    train, test = taken_pairs[~held_out].T.copy(), taken_pairs[held_out].T.copy()
    return ImplicitFeedback(
        Interactions("implicit_feedback", train[0], train[1], test[0], test[1], users, items),
        tastes,
        traits,
        popularity,
        per_user,
        _auc(every.ravel()),
        float(every.sum()),
    )


def _log_intensity(
    tastes: NDArray[np.float64],
    traits: NDArray[np.float64],
    popularity: NDArray[np.float64],
    per_user: float,
) -> NDArray[np.float64]:
    scores = tastes @ traits.T + np.log(popularity)
    normal: NDArray[np.float64] = np.asarray(logsumexp(scores, axis=1, keepdims=True))
    rates: NDArray[np.float64] = scores - normal + np.log(per_user)
    return rates


def _auc(probabilities: NDArray[np.float64]) -> float:
    """Return the AUC of independent labels ranked by these, their true probabilities."""
    values, index = np.unique(probabilities, return_inverse=True)
    count = np.bincount(index).astype(np.float64)
    taken, left = count * values, count * (1 - values)
    below = np.cumsum(left) - left
    return float((taken * (below + left / 2)).sum() / (taken.sum() * left.sum()))
