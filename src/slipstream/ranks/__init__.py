"""Real processes that form a group: launch, joining, shaped links, measurement."""

from __future__ import annotations

from slipstream.ranks.calibration import calibrate, calibrated_here
from slipstream.ranks.netlab import Netlab, why_no_netlab

__all__ = ["Netlab", "calibrate", "calibrated_here", "why_no_netlab"]
