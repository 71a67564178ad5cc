"""See a step while it is edited: costs beside the source lines, what-if by hand, live."""

from slipstream.live.analysis import Analysis, Analyst, Problem
from slipstream.live.costs import Costs, LineCost, ModuleCost

__all__ = ["Analysis", "Analyst", "Costs", "LineCost", "ModuleCost", "Problem"]
