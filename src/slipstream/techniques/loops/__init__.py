"""Schedules of affine loops, chosen by a learned cost model and verified by execution."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.late import late

if TYPE_CHECKING:
    from slipstream.techniques.loops.dataset import Measured, generate_samples, read_samples
    from slipstream.techniques.loops.generate import random_program, random_schedule
    from slipstream.techniques.loops.model import Accuracy, CostModel, Estimate, evaluate, train
    from slipstream.techniques.loops.programs import (
        Apply,
        Axis,
        Buffer,
        Const,
        Fuse,
        IllegalScheduleError,
        Index,
        Interchange,
        Load,
        Parallel,
        Program,
        ProgramError,
        Reverse,
        Schedule,
        ScheduleError,
        Shift,
        Skew,
        Statement,
        Tile,
        Unroll,
        Vectorise,
        apply,
        einsum,
        emit,
        is_legal,
        read_program,
        schedule,
    )  # fmt: skip
    from slipstream.techniques.loops.running import Runner, Timing
    from slipstream.techniques.loops.searching import Candidate, SearchResult, autoschedule

_HOMES = {
    "dataset": ("Measured", "generate_samples", "read_samples"),
    "generate": ("random_program", "random_schedule"),
    "model": ("Accuracy", "CostModel", "Estimate", "evaluate", "train"),
    "programs": (
        "Apply", "Axis", "Buffer", "Const", "Fuse", "IllegalScheduleError", "Index", "Interchange",
        "Load", "Parallel", "Program", "ProgramError", "Reverse", "Schedule", "ScheduleError",
        "Shift", "Skew", "Statement", "Tile", "Unroll", "Vectorise", "apply", "einsum", "emit",
        "is_legal", "read_program", "schedule",
    ),
    "running": ("Runner", "Timing"),
    "searching": ("Candidate", "SearchResult", "autoschedule"),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Accuracy", "Apply", "Axis", "Buffer", "Candidate", "Const", "CostModel", "Estimate", "Fuse",
    "IllegalScheduleError", "Index", "Interchange", "Load", "Measured", "Parallel", "Program",
    "ProgramError", "Reverse", "Runner", "Schedule", "ScheduleError", "SearchResult", "Shift",
    "Skew", "Statement", "Tile", "Timing", "Unroll", "Vectorise", "apply", "autoschedule", "einsum",
    "emit", "evaluate", "generate_samples", "is_legal", "random_program", "random_schedule",
    "read_program", "read_samples", "schedule", "train",
]  # fmt: skip

__getattr__, __dir__ = late(__name__, _HOME_OF, __all__)
