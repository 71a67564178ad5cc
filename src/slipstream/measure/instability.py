"""Agreement of environments (devices, runtimes, a quantized model) about the same items.

An item is unstable if one environment is right about it and another is wrong. Items that all get
wrong are not unstable, even if their wrong answers differ. Without labels only divergence is known:
items whose answers differ. Both shares grow with the number of environments, so compare them only
for equal numbers, or as means over pairs.

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
    """Return the items [N] that one environment has right and another wrong, from right [E, N].

    Raises:
        InvalidArgumentError: There are fewer than two environments, or no items.
    """
    _check(right)
    return np.asarray(right.any(0) & ~right.all(0))


def diverging(answers: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return the items [N] whose answers differ, from answers [E, N].

    Raises:
        InvalidArgumentError: There are fewer than two environments, or no items.
    """
    _check(answers)
    return np.asarray((answers != answers[:1]).any(0))


def share(items: NDArray[np.bool_]) -> Interval:
    """Return the share of items [N] with Wilson's 95 % interval."""
    return wilson(int(items.sum()), len(items))


def pairwise(values: NDArray[np.int64] | NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the share of items in which each pair differs, [E, E], from values [E, N].

    This is a pair's instability if `values` are correctness, its divergence if they are answers.
    """
    _check(values)
    return np.array([(values != row).mean(1) for row in values])


def growth(right: NDArray[np.bool_], *, orders: int = 32, seed: int = 0) -> NDArray[np.float64]:
    """Return mean instability of the first 2, 3, ... E environments, [E - 1], over `orders`."""
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
    """Return by how much accuracies of equally good environments differ, from right [E, N].

    Each draw permutes every item's outcomes across the environments.

    Returns:
        The mean of the largest minus the smallest accuracy, and its 95 % quantile.
    """
    _check(right)
    rng = np.random.default_rng(seed)
    spreads = [float(np.ptp(rng.permuted(right, axis=0).mean(1))) for _ in range(draws)]
    return float(np.mean(spreads)), float(np.quantile(spreads, 0.95))


@dataclass(frozen=True)
class Reduction:
    """Instability of one model compared with another's, on the same items and environments.

    Attributes:
        before, after: Instability with Wilson's interval.
        reduction: 1 - after / before, with the interval of a paired bootstrap over items.
        p_value: McNemar's exact test of no difference.
    """

    before: Interval
    after: Interval
    reduction: Interval
    p_value: float

    @classmethod
    def of(cls, before: NDArray[np.bool_], after: NDArray[np.bool_], *, seed: int = 0) -> Reduction:
        """Compare the unstable items [N] of each model.

        Raises:
            InvalidArgumentError: The numbers of items differ or are 0.
        """
        if before.shape != after.shape or not before.size:
            raise InvalidArgumentError(
                "items", f"{before.size} items of one model and {after.size} of the other"
            )
        # Resampling pairs of bits is drawing the four counts of their table.
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
            "at least two environments are required",
            remedy="pass two or more paths: --path jpeg:50, or --paths default",
        )
    if not values.shape[1]:
        raise InvalidArgumentError("items", "there are no items")


def top_classes(scores: NDArray[np.floating], k: int) -> NDArray[np.int64]:
    """Return the `k` classes with the largest scores, int64 [N, k], from scores [N, C].

    The largest score comes first; of equal scores, the lower class.
    """
    order = np.argsort(-scores, axis=1, kind="stable")
    return order[:, :k].astype(np.int64)


def right_of(classes: NDArray[np.int64], labels: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return whether each label [N] is among the item's classes [..., N, k], bool [..., N]."""
    right: NDArray[np.bool_] = (classes == np.asarray(labels)[:, None]).any(-1)
    return right
