"""Measure what is cheaper, by how much, and whether that can be believed.

    from slipstream import measure

    result = measure.compare({"base": f, "fast": g}, budget="60s")
    print(result)

Nothing is imported before it is used; importing this module does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.late import late

if TYPE_CHECKING:
    from slipstream.measure.arms import Arm, CallableArm, CommandArm, WorkerArm, time_function
    from slipstream.measure.comparison import Comparison, compare
    from slipstream.measure.gate import Gate, detectable_change
    from slipstream.measure.memory import memory_phase, peak_memory
    from slipstream.measure.phases import phase
    from slipstream.measure.records import (
        Claim,
        Environment,
        Experiment,
        ExperimentSettings,
        Verdict,
    )
    from slipstream.measure.revisions import Revisions
    from slipstream.measure.runner import ArmFailedError, RunPlan, run

_HOMES = {
    "arms": ("Arm", "CallableArm", "CommandArm", "WorkerArm", "time_function"),
    "comparison": ("Comparison", "compare"),
    "gate": ("Gate", "detectable_change"),
    "memory": ("memory_phase", "peak_memory"),
    "phases": ("phase",),
    "records": ("Claim", "Environment", "Experiment", "ExperimentSettings", "Verdict"),
    "revisions": ("Revisions",),
    "runner": ("ArmFailedError", "RunPlan", "run"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Arm",
    "ArmFailedError",
    "CallableArm",
    "Claim",
    "CommandArm",
    "Comparison",
    "Environment",
    "Experiment",
    "ExperimentSettings",
    "Gate",
    "Revisions",
    "RunPlan",
    "Verdict",
    "WorkerArm",
    "compare",
    "detectable_change",
    "memory_phase",
    "peak_memory",
    "phase",
    "run",
    "time_function",
]

__getattr__, __dir__ = late(__name__, _HOME_OF, __all__)
