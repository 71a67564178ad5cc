"""List the suite's tasks, and check a folder of logs against the rules."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from slipstream.errors import UsageError
from slipstream.mlperf.training.judge import describe
from slipstream.mlperf.training.log import read
from slipstream.mlperf.training.rcp import Reference
from slipstream.mlperf.training.rules import Violation, check_set, seconds_of
from slipstream.mlperf.training.score import MIN_RUNS, olympic_mean
from slipstream.mlperf.training.tasks import SUITE, Task, load, recorded, recorded_epochs
from slipstream.tables import Field, Table
from slipstream.units import format_duration


@dataclass(frozen=True)
class Listing:
    """Tasks with their recorded reference runs."""

    tasks: tuple[Task, ...]

    @classmethod
    def of_suite(cls) -> Listing:
        """List the tasks that come with slipstream."""
        return cls(tuple(load(name) for name in SUITE))

    def table(self) -> Table:
        """Return a table with a row per task."""
        return Table.of(self.tasks, _FIELDS, notes=["slipstream mlperf train TASK -t TECHNIQUE"])

    def to_json(self) -> list[dict[str, Any]]:
        """Return the tasks with their reference runs as JSON."""
        return [{**task.to_json(), "reference": recorded(task.name)} for task in self.tasks]


def _samples(task: Task) -> str:
    record = recorded(task.name)
    samples = record["samples"].get(str(task.batch), []) if record else []
    return f"{median(samples):,.0f}" if samples else "-"


_FIELDS = (
    Field[Task].of("Task", lambda task: task.name),
    Field[Task].of("Description", lambda task: task.about),
    Field[Task].of(
        "Target", lambda task: f"{task.metric} {'>=' if task.higher else '<='} {task.target:g}"
    ),
    Field[Task].number("Samples to target", _samples),
)


@dataclass(frozen=True)
class CheckResult:
    """The result of checking a folder of logs against the rules.

    Attributes:
        score: olympic time in s; NaN for fewer than 3 runs.
    """

    task: Task
    folder: Path
    runs: int
    score: float
    violations: tuple[Violation, ...]

    @classmethod
    def of(cls, target: str, folder: Path, runs: int | None, *, as_checker: bool = False
           ) -> CheckResult:  # fmt: skip
        """Check the ``result_*.txt`` of a folder.

        Raises:
            UsageError: the folder has no logs.
            LogError: a log is malformed.
        """
        paths = sorted(folder.glob("result_*.txt"), key=lambda path: (len(path.name), path.name))
        if not paths:
            raise UsageError(
                f"there is no result_0.txt in {folder}",
                remedy="pass the folder of one arm, such as OUT/arm_0",
            )
        task = describe(target)
        logs = [read(path) for path in paths]
        record = recorded(task.name) if ":" not in target else None
        reference = None
        if record is not None and len(logs) >= MIN_RUNS:
            reference = Reference.of(recorded_epochs(record, task), as_checker=as_checker)
        violations = check_set(
            logs, task, runs=runs or len(logs), reference=reference,
            optimizer=record["optimizer"] if record else "",
        )  # fmt: skip
        times = [seconds_of(events) for events in logs]
        score = olympic_mean(times) if len(times) >= MIN_RUNS else math.nan
        return cls(task, folder, len(logs), score, tuple(violations))

    def table(self) -> Table:
        """Return a table with a row per violation."""
        summary = f"{self.runs} runs of {self.task.name}: "
        summary += "not a valid result" if self.violations else "a valid result"
        score = "" if not math.isfinite(self.score) else (
            f"olympic score {format_duration(self.score * 1e9)}"
        )  # fmt: skip
        return Table.of(self.violations, _VIOLATION_FIELDS, summary, [score])

    def to_json(self) -> dict[str, Any]:
        """Return the score and the violations as JSON."""
        return {
            "task": self.task.name, "runs": self.runs, "score_s": self.score,
            "violations": [vars(violation) for violation in self.violations],
        }  # fmt: skip


_VIOLATION_FIELDS = (
    Field[Violation].of("Rule", lambda violation: violation.rule),
    Field[Violation].of("Found", lambda violation: violation.text),
    Field[Violation].of("Where", lambda violation: violation.where),
)
