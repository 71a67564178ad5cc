"""Run a step a few times under the profiler and turn what ran into a `Graph`."""

from slipstream.capture.compiling import put_compiled, use_compiled
from slipstream.capture.program import CaptureSettings, capture
from slipstream.capture.regions import covered_tasks, repeats
from slipstream.capture.statistics import STATISTICS

__all__ = [
    "STATISTICS",
    "CaptureSettings",
    "capture",
    "covered_tasks",
    "put_compiled",
    "repeats",
    "use_compiled",
]
