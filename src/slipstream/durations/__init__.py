"""Durations of operator calls on this machine: measured in advance, looked up in predictions."""

from slipstream.durations.durations import Durations, Ratio, Timing, TimingRequest, usable_cores
from slipstream.durations.rescale import (
    UNKNOWN,
    CallChanges,
    common_spread,
    pace,
    ratio_columns,
    required_timings,
    rescale,
)

__all__ = [
    "UNKNOWN",
    "CallChanges",
    "Durations",
    "Ratio",
    "Timing",
    "TimingRequest",
    "common_spread",
    "pace",
    "ratio_columns",
    "required_timings",
    "rescale",
    "usable_cores",
]
