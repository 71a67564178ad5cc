"""Run a step a few times under the profiler and turn what ran into a `Graph`."""

from slipstream.capture.program import CaptureSettings, capture

__all__ = ["CaptureSettings", "capture"]
