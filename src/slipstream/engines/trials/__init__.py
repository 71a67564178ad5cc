"""Schedule trials that share and span devices, simulated or on Ray."""

from slipstream.engines.trials.cluster_state import ClusterState
from slipstream.engines.trials.schedulers import (
    Fifo,
    Fluid,
    Level,
    Scheduler,
    Uniform,
    scheduler_by_name,
)
from slipstream.engines.trials.simulator import Clock, Interval, makespan, simulate
from slipstream.engines.trials.trialset import TrialSet, bound_s

__all__ = [
    "Clock",
    "ClusterState",
    "Fifo",
    "Fluid",
    "Interval",
    "Level",
    "Scheduler",
    "TrialSet",
    "Uniform",
    "bound_s",
    "makespan",
    "scheduler_by_name",
    "simulate",
]
