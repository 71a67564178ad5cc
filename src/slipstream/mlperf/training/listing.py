"""What the commands show besides a comparison: the suite's tasks, and a folder of logs checked."""

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
from slipstream.mlperf.training.score import LEAST_RUNS, olympic
from slipstream.mlperf.training.tasks import SUITE, Task, load, recorded
from slipstream.tables import Field, Table
from slipstream.units import format_duration


@dataclass(frozen=True)
class Listing:
    """Tasks, with what the recorded reference runs took."""

    tasks: tuple[Task, ...]

    @classmethod
    def of_suite(cls) -> Listing:
        """Those that come with slipstream."""
        return cls(tuple(load(name) for name in SUITE))

    def table(self) -> Table:
        """A row each."""
        return Table.of(self.tasks, _FIELDS, notes=["slipstream mlperf train TASK -t TECHNIQUE"])

    def to_json(self) -> list[dict[str, Any]]:
        """Facts and references."""
        return [{**one.to_json(), "reference": recorded(one.name)} for one in self.tasks]


def _samples(task: Task) -> str:
    record = recorded(task.name)
    samples = record["samples"].get(str(task.batch), []) if record else []
    return f"{median(samples):,.0f}" if samples else "-"


_FIELDS = (
    Field[Task].of("Task", lambda one: one.name),
    Field[Task].of("What", lambda one: one.about),
    Field[Task].of(
        "Target", lambda one: f"{one.metric} {'>=' if one.higher else '<='} {one.target:g}"
    ),
    Field[Task].number("Samples to it", _samples),
)


@dataclass(frozen=True)
class Checked:
    """A folder of logs against the rules.

    Attributes:
        score: olympic time in seconds; NaN of fewer than 3 runs.
    """

    task: Task
    folder: Path
    runs: int
    score: float
    violations: tuple[Violation, ...]

    @classmethod
    def of(cls, target: str, folder: Path, runs: int | None, *, as_checker: bool = False
           ) -> Checked:  # fmt: skip
        """Read ``result_*.txt`` of a folder.

        Raises:
            UsageError: there are none.
            LogError: one is malformed.
        """
        paths = sorted(folder.glob("result_*.txt"), key=lambda path: (len(path.name), path.name))
        if not paths:
            raise UsageError(
                f"there is no result_0.txt in {folder}", remedy="the folder of one arm: OUT/arm_0"
            )
        task = describe(target)
        logs = [read(path) for path in paths]
        record = recorded(task.name) if ":" not in target else None
        reference = None
        if record is not None and len(logs) >= LEAST_RUNS:
            points = {
                int(batch): [one / task.train_samples for one in samples]
                for batch, samples in record["samples"].items()
            }
            reference = Reference.of(points, as_checker=as_checker)
        wrong = check_set(
            logs, task, runs=runs or len(logs), reference=reference,
            optimizer=record["optimizer"] if record else "",
        )  # fmt: skip
        times = [seconds_of(one) for one in logs]
        score = olympic(times) if len(times) >= LEAST_RUNS else math.nan
        return cls(task, folder, len(logs), score, tuple(wrong))

    def table(self) -> Table:
        """Violations, or that there are none."""
        summary = f"{self.runs} runs of {self.task.name}: "
        summary += "a result that counts" if not self.violations else "no result that counts"
        score = "" if not math.isfinite(self.score) else (
            f"olympic score {format_duration(self.score * 1e9)}"
        )  # fmt: skip
        return Table.of(self.violations, _WRONG, summary, [score])

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "task": self.task.name, "runs": self.runs, "score_s": self.score,
            "violations": [vars(one) for one in self.violations],
        }  # fmt: skip


_WRONG = (
    Field[Violation].of("Rule", lambda one: one.rule),
    Field[Violation].of("Found", lambda one: one.text),
    Field[Violation].of("Where", lambda one: one.where),
)
