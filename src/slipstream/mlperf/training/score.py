"""Score repeated runs: the olympic mean.

Source: mlcommons/training_policies, "Run results".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean

from slipstream.errors import InvalidArgumentError

MIN_RUNS = 3
"""Minimum number of runs of an olympic mean."""


def olympic_mean(times: Sequence[float]) -> float:
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
