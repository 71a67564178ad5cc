"""Score repeated runs: the olympic mean, and the median window if there are more runs.

Source: mlcommons/training_policies, "Run results".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean

from slipstream.errors import InvalidArgumentError

MIN_RUNS = 3
"""Minimum number of runs of an olympic mean."""


def olympic(times: Sequence[float]) -> float:
    """Return the mean without the fastest and the slowest run.

    Args:
        times: times per run; infinite for a failed run. With two failures the mean is infinite.

    Raises:
        InvalidArgumentError: fewer than 3 runs, or a NaN.
    """
    if len(times) < MIN_RUNS:
        raise InvalidArgumentError(
            "runs", f"an olympic mean needs at least {MIN_RUNS} runs, got {len(times)}"
        )
    if any(map(math.isnan, times)):
        raise InvalidArgumentError("times", "a time is NaN")
    return mean(sorted(times)[1:-1])


def median_window(times: Sequence[float], runs: int) -> tuple[int, float]:
    """Return the window of `runs` consecutive runs with the median score.

    Used if there are more runs than count: the rules forbid choosing the best. For an even number
    of windows it is the slower of the two in the middle.

    Args:
        times: times in the order in which the runs were started.

    Returns:
        The index of the window's first run, and its score.
    """
    scores = [
        (olympic(times[first : first + runs]), first) for first in range(len(times) - runs + 1)
    ]
    score, first = sorted(scores)[len(scores) // 2]
    return first, score
