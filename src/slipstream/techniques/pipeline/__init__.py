"""Pipelines of stages: schedules, predictions and stable learning rates.

import slipstream as ss

ss.pipeline.largest_stable_rate(delay=3, curvature=40.0)
"""

from slipstream.techniques.pipeline.stability import largest_stable_rate
from slipstream.techniques.pipeline.technique import Pipeline

__all__ = ["Pipeline", "largest_stable_rate"]
