"""Run a step a few times under the profiler and record it as a `Graph`."""

from slipstream.capture.compiling import put_compiled, use_compiled
from slipstream.capture.program import MIN_STEPS, CaptureSettings, capture
from slipstream.capture.regions import covered_tasks, max_repeats
from slipstream.capture.statistics import STATISTICS

__all__ = [
    "MIN_STEPS",
    "STATISTICS",
    "CaptureSettings",
    "capture",
    "covered_tasks",
    "max_repeats",
    "put_compiled",
    "use_compiled",
]
