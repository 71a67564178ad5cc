"""Live analysis of a workload while it is edited: costs per source line, what-ifs, batch size."""

from slipstream.live.analysis import Analysis, Analyst, Problem
from slipstream.live.costs import Costs, LineCost, ModuleCost

__all__ = ["Analysis", "Analyst", "Costs", "LineCost", "ModuleCost", "Problem"]
