"""Measure time to quality under the rules of MLPerf Training, with tasks that fit one machine.

judged = training.time_to_quality("fashion_cnn", ["lowrank:0.25"], runs=5)
print(judged.verdicts[0].sentence)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.late import late

if TYPE_CHECKING:
    from slipstream.mlperf.training.compare import Verdict
    from slipstream.mlperf.training.judge import TrainingResult, time_to_quality
    from slipstream.mlperf.training.rcp import Reference
    from slipstream.mlperf.training.rules import Violation, check_run, check_set
    from slipstream.mlperf.training.score import olympic_mean
    from slipstream.mlperf.training.suite.metrics import accuracy, auc
    from slipstream.mlperf.training.tasks import SUITE, Task, task

_HOMES = {
    "compare": ("Verdict",),
    "judge": ("TrainingResult", "time_to_quality"),
    "rcp": ("Reference",),
    "rules": ("Violation", "check_run", "check_set"),
    "score": ("olympic_mean",),
    "suite.metrics": ("accuracy", "auc"),
    "tasks": ("SUITE", "Task", "task"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "SUITE",
    "Reference",
    "Task",
    "TrainingResult",
    "Verdict",
    "Violation",
    "accuracy",
    "auc",
    "check_run",
    "check_set",
    "olympic_mean",
    "task",
    "time_to_quality",
]

__getattr__, __dir__ = late(__name__, _HOME_OF, __all__)
