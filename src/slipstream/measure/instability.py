"""Whether several environments agree about the same items: devices, runtimes, a quantised model.

An item is unstable where one environment is right about it and another is wrong. Items that all get
wrong are not unstable, even where their wrong answers differ; without labels only divergence is
known: items whose answers are not all the same. Both grow with the number of environments, so that
shares of different numbers of them are never compared; means over pairs are.

Source: Cidon et al., "Characterizing and Taming Model Instability Across Edge Devices", MLSys 2021
(arXiv 2010.09028). The intervals are Wilson's; differences of models are McNemar's test.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import InvalidArgumentError
from slipstream.measure.quality import mcnemar, wilson
from slipstream.measure.statistics import Interval

_RESAMPLES = 10_000


def unstable(right: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Items [N] that some environment has right and another wrong, of right [E, N].

    Raises:
        InvalidArgumentError: fewer than two environments, or no items.
    """
    _check(right)
    return np.asarray(right.any(0) & ~right.all(0))


def diverging(answers: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Items [N] whose answers are not all the same, of answers [E, N].

    Raises:
        InvalidArgumentError: fewer than two environments, or no items.
    """
    _check(answers)
    return np.asarray((answers != answers[:1]).any(0))


def share(items: NDArray[np.bool_]) -> Interval:
    """The share of items [N] with Wilson's 95 % interval."""
    return wilson(int(items.sum()), len(items))


def pairwise(values: NDArray[np.int64] | NDArray[np.bool_]) -> NDArray[np.float64]:
    """Shares of items by which each pair differs, [E, E] of values [E, N].

    Of what is right it is the instability of the two, of answers their divergence.
    """
    _check(values)
    return np.array([(values != one).mean(1) for one in values])


def growth(right: NDArray[np.bool_], *, orders: int = 32, seed: int = 0) -> NDArray[np.float64]:
    """Mean instability of the first 2, 3, ... E environments, [E - 1], over random `orders`."""
    _check(right)
    rng = np.random.default_rng(seed)
    curves = []
    for _ in range(orders):
        shuffled = right[rng.permutation(len(right))]
        any_ = np.logical_or.accumulate(shuffled)
        all_ = np.logical_and.accumulate(shuffled)
        curves.append((any_ & ~all_).mean(1)[1:])
    return np.asarray(np.mean(curves, 0))


def spread_by_chance(
    right: NDArray[np.bool_], *, draws: int = 400, seed: int = 0
) -> tuple[float, float]:
    """By how much accuracies of environments that are equally good differ, of right [E, N].

    Each item's answers are dealt out to the environments anew: how many are right stays, and who is
    right is chance.

    Returns:
        The mean of the largest less the smallest accuracy, and what it exceeds in 5 % of draws.
    """
    _check(right)
    rng = np.random.default_rng(seed)
    spreads = [float(np.ptp(rng.permuted(right, axis=0).mean(1))) for _ in range(draws)]
    return float(np.mean(spreads)), float(np.quantile(spreads, 0.95))


@dataclass(frozen=True)
class Reduction:
    """Instability of one model beside another's, on the same items and environments.

    Attributes:
        before, after: with Wilson's interval.
        reduction: 1 - after / before, with the interval of a paired bootstrap over items.
        p_value: of no difference, McNemar's exact test.
    """

    before: Interval
    after: Interval
    reduction: Interval
    p_value: float

    @classmethod
    def of(cls, before: NDArray[np.bool_], after: NDArray[np.bool_], *, seed: int = 0) -> Reduction:
        """Of unstable items [N] of each.

        Raises:
            InvalidArgumentError: not the same items.
        """
        if before.shape != after.shape or not before.size:
            raise InvalidArgumentError(
                "items", f"{before.size} items of one model and {after.size} of the other"
            )
        # Resampling pairs of zeros and ones is drawing the four counts of their table.
        cells = np.bincount(2 * before + after, minlength=4)
        drawn = np.random.default_rng(seed).multinomial(
            before.size, cells / before.size, _RESAMPLES
        )
        first, second = drawn[:, 2] + drawn[:, 3], drawn[:, 1] + drawn[:, 3]
        ratios = 1 - second / np.maximum(first, 1)
        low, high = np.quantile(ratios, (0.025, 0.975))
        point = 1 - after.sum() / max(int(before.sum()), 1)
        reduction = Interval(float(point), float(low), float(high), 0.95, "paired_bootstrap")
        lost, gained = int(cells[2]), int(cells[1])
        return cls(share(before), share(after), reduction, mcnemar(lost, gained))


def _check(values: NDArray[np.bool_] | NDArray[np.int64]) -> None:
    if values.ndim != 2 or len(values) < 2:
        raise InvalidArgumentError(
            "environments",
            "one environment cannot disagree with itself",
            remedy="two paths at least: --path jpeg:50, or --paths default",
        )
    if not values.shape[1]:
        raise InvalidArgumentError("items", "there are none")


def top_classes(scores: NDArray[np.floating], k: int) -> NDArray[np.int64]:
    """The `k` classes of the largest scores, the largest first, int64 [N, k] of scores [N, C].

    Of equal scores the lower class comes first, on every machine.
    """
    order = np.argsort(-scores, axis=1, kind="stable")
    return order[:, :k].astype(np.int64)


def right_of(classes: NDArray[np.int64], labels: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether a label [N] is among an item's classes [..., N, k]: bool [..., N]."""
    right: NDArray[np.bool_] = (classes == np.asarray(labels)[:, None]).any(-1)
    return right
