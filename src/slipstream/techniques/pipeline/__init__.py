"""Pipelines of stages: schedules, predictions, simulated training and stable learning rates.

import slipstream as ss

ss.pipeline.largest_stable_rate(delay=3, curvature=40.0)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.late import late
from slipstream.techniques.pipeline.stability import StableRates, largest_stable_rate, stable_rates
from slipstream.techniques.pipeline.technique import Pipeline

if TYPE_CHECKING:
    from slipstream.techniques.pipeline.simulation import PipelineHistory, simulate

# These import torch, and are therefore imported on first use.
_LATE = {"PipelineHistory": "simulation", "simulate": "simulation"}

__all__ = [
    "Pipeline", "PipelineHistory", "StableRates", "largest_stable_rate", "simulate", "stable_rates",
]  # fmt: skip

__getattr__, __dir__ = late(__name__, _LATE, __all__)
