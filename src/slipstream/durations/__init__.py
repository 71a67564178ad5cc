"""Durations of operator calls on this machine: measured in advance, looked up in predictions."""

from slipstream.durations.durations import Answer, Durations, Question, Ratio, usable_cores
from slipstream.durations.rescale import (
    UNKNOWN,
    Changed,
    common_spread,
    pace,
    ratio_columns,
    required_timings,
    rescale,
)

__all__ = [
    "UNKNOWN",
    "Answer",
    "Changed",
    "Durations",
    "Question",
    "Ratio",
    "common_spread",
    "pace",
    "ratio_columns",
    "required_timings",
    "rescale",
    "usable_cores",
]
