"""Click logs with power-law ids and an exact best possible AUC.

Every field adds a weight to the log-odds of a click. Weights are multiples of 1/64, so the log-odds
are on a grid. Fields are independent, so the distribution of the log-odds is the convolution of the
fields' distributions, and finite sums give the AUC and the log loss of the true model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, ndtr

from slipstream.data.kinds import ClickRows, Clicks
from slipstream.errors import InvalidArgumentError
from slipstream_bench.generators._random import positive, power_law, streams

# Grid steps per unit of log-odds; dense numbers and their weights have steps of 1/8 each.
_GRID = 64
_NUMBER_GRID = 8
# Numbers are normal, rounded to the grid and clipped here; the clipped mass is included.
_NUMBER_CLIP = 4
# Bounds of the intercept; beyond them floating point reaches every click rate.
_BIAS_RANGE = (-60.0, 60.0)


@dataclass(frozen=True)
class ClickLog:
    """A click log and its true model.

    Attributes:
        data: ids (shuffled, so not in order of popularity), dense numbers, labels; train and test.
        probabilities: float64 [train], the true click probability of each training row.
        test_probabilities: float64 [test].
        weights: per field, float64 [cardinality]: its part of the log-odds.
        dense_weights: float64 [D].
        bias: the intercept that gives the requested click rate.
        popularity: per field, float64 [cardinality]: the probability of each id.
        bayes_auc: AUC of the true probabilities over the whole population, the maximum of any
            model.
        bayes_log_loss: their log loss, in nats per row.
    """

    data: Clicks
    probabilities: NDArray[np.float64]
    test_probabilities: NDArray[np.float64]
    weights: tuple[NDArray[np.float64], ...]
    dense_weights: NDArray[np.float64]
    bias: float
    popularity: tuple[NDArray[np.float64], ...]
    bayes_auc: float
    bayes_log_loss: float


def click_log(
    rows: int,
    *,
    test_rows: int = 0,
    cardinalities: Sequence[int] = (10_000, 1_000, 100, 10),
    dense: int = 2,
    exponent: float = 1.1,
    click_rate: float = 0.2,
    signal: float = 0.6,
    digits: Callable[[int], Sequence[int]] | None = None,
    rank: int = 2,
    seed: int = 0,
) -> ClickLog:
    """Draw a click log.

    Args:
        rows, test_rows: numbers of training and test rows, drawn from the same true model.
        cardinalities: number of ids of each categorical field.
        dense: number of numeric fields, standard normal in steps of 1/8, clipped to -4..4.
        exponent: exponent of the power law of ids: P(rank k) ~ (k + 1)^-exponent.
        click_rate: expected share of clicks, exact in the population.
        signal: standard deviation of one field's weights, in log-odds.
        digits: returns, for a number of ids, the bases of the digits of an id, the most significant
            first, as in a catalogue whose numbers begin with the department. Weights are then
            sums of `rank` products of one factor per digit. By default ids are unrelated.
        seed: determines the true model and the sample.

    Raises:
        InvalidArgumentError: a size, rate or exponent is out of range.
    """
    positive(rows=rows, exponent=exponent, signal=signal, rank=rank)
    if test_rows < 0 or dense < 0:
        raise InvalidArgumentError("test_rows" if test_rows < 0 else "dense", "is negative")
    if not cardinalities or min(cardinalities) < 1:
        raise InvalidArgumentError("cardinalities", "at least one field of at least one id")
    if not 0 < click_rate < 1:
        raise InvalidArgumentError("click_rate", "must be between 0 and 1")
    truth, sample, test_sample = streams(seed, 3)

    steps = [
        np.rint(signal * _GRID * _weights(truth, size, digits, rank)).astype(np.int64)
        for size in cardinalities
    ]
    dense_steps = np.rint(truth.normal(0, signal * _NUMBER_GRID, dense)).astype(np.int64)
    # Ranks are shuffled over ids, so that a model cannot profit from the order of ids.
    popularity = [truth.permutation(power_law(size, exponent)) for size in cardinalities]

    log_odds, law = _law(steps, popularity, dense_steps)
    bias = _intercept(log_odds, law, click_rate)
    clicked = law * expit(log_odds + bias)
    skipped = law * expit(-(log_odds + bias))
    below = np.cumsum(skipped) - skipped
    # P(a click outranks a non-click), where ties count half (Hanley & McNeil 1982).
    auc = float((clicked * (below + skipped / 2)).sum() / (clicked.sum() * skipped.sum()))
    # log(1 + exp(-z)) without overflow.
    loss = clicked * np.logaddexp(0, -(log_odds + bias)) + skipped * np.logaddexp(
        0, log_odds + bias
    )

    def draw(generator: np.random.Generator, n: int) -> tuple[ClickRows, NDArray[np.float64]]:
        ids = np.stack(
            [generator.choice(len(law), size=n, p=law) for law in popularity], axis=1
        ).astype(np.int64)
        numbers = np.clip(
            np.rint(generator.normal(0, _NUMBER_GRID, (n, dense))),
            -_NUMBER_CLIP * _NUMBER_GRID,
            _NUMBER_CLIP * _NUMBER_GRID,
        ).astype(np.int64)
        total = numbers @ dense_steps
        for field, weights in enumerate(steps):
            total += weights[ids[:, field]]
        probability = expit(total / _GRID + bias)
        labels = (generator.random(n) < probability).astype(np.int64)
        return ClickRows(ids, (numbers / _NUMBER_GRID).astype(np.float32), labels), probability

    train, probabilities = draw(sample, rows)
    test, test_probabilities = draw(test_sample, test_rows)
    return ClickLog(
        Clicks(
            "click_log", train, test, tuple(cardinalities),
            tuple(f"field_{i}" for i in range(len(cardinalities))),
        ),
        probabilities,
        test_probabilities,
        tuple(weights / _GRID for weights in steps),
        dense_steps / _NUMBER_GRID,
        bias,
        tuple(popularity),
        auc,
        float(loss.sum()),
    )  # fmt: skip


def _weights(
    truth: np.random.Generator,
    size: int,
    digits: Callable[[int], Sequence[int]] | None,
    rank: int,
) -> NDArray[np.float64]:
    """Return weights of a field, float64 [size], variance 1: normal, or low-rank in its digits."""
    if digits is None:
        return truth.normal(0, 1, size)
    bases = tuple(digits(size))
    if math.prod(bases) < size:
        raise InvalidArgumentError("digits", f"{list(bases)} are too few for {size} ids")
    products = np.ones((rank, size))
    for factor, digit in zip(bases, np.unravel_index(np.arange(size), bases), strict=True):
        products *= truth.normal(0, 1, (rank, factor))[:, digit]
    weights: NDArray[np.float64] = products.sum(0) / math.sqrt(rank)
    return weights


def _law(
    steps: Sequence[NDArray[np.int64]],
    popularity: Sequence[NDArray[np.float64]],
    dense_steps: NDArray[np.int64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return values and probabilities of the log-odds without intercept, as two arrays [grid]."""
    reach = _NUMBER_CLIP * _NUMBER_GRID
    number = np.arange(-reach, reach + 1)
    upper = np.where(number == reach, math.inf, number + 0.5) / _NUMBER_GRID
    lower = np.where(number == -reach, -math.inf, number - 0.5) / _NUMBER_GRID
    number_law = ndtr(upper) - ndtr(lower)
    parts = list(zip(steps, popularity, strict=True))
    parts += [(number * int(weight), number_law) for weight in dense_steps]
    law = np.ones(1)
    lowest = 0
    for values, probabilities in parts:
        smallest = int(values.min())
        law = np.convolve(law, np.bincount(values - smallest, weights=probabilities))
        lowest += smallest
    return (lowest + np.arange(len(law))) / _GRID, law


def _intercept(log_odds: NDArray[np.float64], law: NDArray[np.float64], click_rate: float) -> float:
    low, high = _BIAS_RANGE
    # 100 bisections end at neighbouring floating-point numbers.
    for _ in range(100):
        middle = (low + high) / 2
        if float(law @ expit(log_odds + middle)) < click_rate:
            low = middle
        else:
            high = middle
    return (low + high) / 2
