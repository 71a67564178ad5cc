"""Scores of repeated runs: the olympic mean, and the median of windows where there are more runs.

Source: mlcommons/training_policies, "Run results".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean

from slipstream.errors import InvalidArgumentError

LEAST_RUNS = 3
"""An olympic mean of fewer is of nothing."""


def olympic(times: Sequence[float]) -> float:
    """Mean without the fastest and the slowest; infinite where two runs or more failed.

    Args:
        times: of each run, infinite where it failed: that one may be the slowest.

    Raises:
        InvalidArgumentError: fewer than 3 runs, or a NaN.
    """
    if len(times) < LEAST_RUNS:
        raise InvalidArgumentError(
            "runs", f"an olympic score of {len(times)} runs is of nothing", remedy="3 at least"
        )
    if any(map(math.isnan, times)):
        raise InvalidArgumentError("times", "one is NaN")
    return mean(sorted(times)[1:-1])


def median_window(times: Sequence[float], runs: int) -> tuple[int, float]:
    """Where more runs were made than count: the window of `runs` in a row with the median score.

    Choosing the best one instead is forbidden. Of an even number of windows it is the slower of
    both in the middle.

    Args:
        times: in the order in which runs were begun.

    Returns:
        The window's first run, and its score.
    """
    scores = [
        (olympic(times[first : first + runs]), first) for first in range(len(times) - runs + 1)
    ]
    score, first = sorted(scores)[len(scores) // 2]
    return first, score
