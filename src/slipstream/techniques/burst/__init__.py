"""Burst parallelism: a number of devices for each layer."""

from slipstream.techniques.burst.planner import BurstLayer, BurstPlan, pareto, plan

__all__ = ["BurstLayer", "BurstPlan", "pareto", "plan"]
