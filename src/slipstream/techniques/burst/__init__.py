"""Burst parallelism: a number of devices for each layer.

import slipstream as ss

plan = ss.burst.plan(layers, devices=[1, 2, 4], amplification=2.0)
"""

from slipstream.techniques.burst.background import BackgroundWork, background
from slipstream.techniques.burst.planner import BurstLayer, BurstPlan, pareto, plan
from slipstream.techniques.burst.technique import Burst

__all__ = [
    "BackgroundWork", "Burst", "BurstLayer", "BurstPlan", "background", "pareto", "plan",
]  # fmt: skip
