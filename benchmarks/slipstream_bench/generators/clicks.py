"""Click logs with power-law ids and a best possible AUC that is known, not estimated.

Every field adds a weight to the log-odds of a click. Weights are multiples of 1/64, so that the
log-odds live on a grid; fields are independent, so that the law of the log-odds is the convolution
of the fields' laws: finite sums give the AUC and the log loss of the true model.
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

# Steps of the log-odds grid in one unit; numbers and their weights have steps of 1/8 each.
_GRID = 64
_NUMBER_GRID = 8
# Numbers are normal, rounded to the grid and clipped here; the clipped mass is accounted for.
_NUMBER_CLIP = 4
# Solving for the intercept: log-odds beyond these make every click rate in floating point.
_BIAS_RANGE = (-60.0, 60.0)


@dataclass(frozen=True)
class ClickLog:
    """A log and its truth.

    Attributes:
        data: ids (by rank of popularity shuffled), dense numbers, labels; train and test.
        probabilities: float64 [train], the true click probability of each training row.
        test_probabilities: float64 [test].
        weights: one float64 [cardinality] a field: its part of the log-odds.
        dense_weights: float64 [D].
        bias: the intercept that makes the click rate as asked.
        popularity: one float64 [cardinality] a field: the probability of each id.
        bayes_auc: AUC of the true probabilities over the whole population; no model does better.
        bayes_log_loss: their log loss, in nats a row.
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
        rows, test_rows: how many training and test rows; both come from the same truth.
        cardinalities: ids of each categorical field.
        dense: numeric fields, standard normal in steps of 1/8, clipped to -4..4.
        exponent: of the power law of ids: P(rank k) ~ (k + 1)^-exponent.
        click_rate: expected share of clicks, met exactly in the population.
        signal: standard deviation of one field's weights, in log-odds.
        digits: the bases in which ids of a field of so many ids are read, the most significant
            digit first, as of a catalogue whose numbers begin with the department: weights are then
            sums of `rank` products of a number for each digit. Without it ids have nothing in
            common.
        seed: one truth and one sample a seed.

    Raises:
        InvalidArgumentError: a size, rate or exponent out of range.
    """
    positive(rows=rows, exponent=exponent, signal=signal, rank=rank)
    if test_rows < 0 or dense < 0:
        raise InvalidArgumentError("test_rows" if test_rows < 0 else "dense", "is negative")
    if not cardinalities or min(cardinalities) < 1:
        raise InvalidArgumentError("cardinalities", "at least one field of at least one id")
    if not 0 < click_rate < 1:
        raise InvalidArgumentError("click_rate", "must lie between 0 and 1")
    truth, sample, test_sample = streams(seed, 3)

    steps = [
        np.rint(signal * _GRID * _weights(truth, size, digits, rank)).astype(np.int64)
        for size in cardinalities
    ]
    dense_steps = np.rint(truth.normal(0, signal * _NUMBER_GRID, dense)).astype(np.int64)
    # Which id has which rank is shuffled: a model must not profit from the order of ids.
    popularity = [truth.permutation(power_law(size, exponent)) for size in cardinalities]

    log_odds, law = _law(steps, popularity, dense_steps)
    bias = _intercept(log_odds, law, click_rate)
    clicked = law * expit(log_odds + bias)
    skipped = law * expit(-(log_odds + bias))
    below = np.cumsum(skipped) - skipped
    # P(a click outranks a non-click), ties counting half (Hanley & McNeil 1982).
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
    """Of one field, float64 [size], of variance 1: normal, or low-rank in the digits of its ids."""
    if digits is None:
        return truth.normal(0, 1, size)
    bases = tuple(digits(size))
    if math.prod(bases) < size:
        raise InvalidArgumentError("digits", f"{list(bases)} are too few for {size} ids")
    made = np.ones((rank, size))
    for factor, digit in zip(bases, np.unravel_index(np.arange(size), bases), strict=True):
        made *= truth.normal(0, 1, (rank, factor))[:, digit]
    weights: NDArray[np.float64] = made.sum(0) / math.sqrt(rank)
    return weights


def _law(
    steps: Sequence[NDArray[np.int64]],
    popularity: Sequence[NDArray[np.float64]],
    dense_steps: NDArray[np.int64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Values and probabilities of the log-odds without intercept, as two arrays [grid]."""
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
    # 100 halvings end at neighbouring floating-point numbers.
    for _ in range(100):
        middle = (low + high) / 2
        if float(law @ expit(log_odds + middle)) < click_rate:
            low = middle
        else:
            high = middle
    return (low + high) / 2
