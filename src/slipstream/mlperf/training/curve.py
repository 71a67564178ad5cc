"""Samples to the target over the batch size: which sizes are worth their samples.

A curve of runs is pruned as the rules prune reference points; what is left is convex, and has a
critical batch size: see `slipstream.mlperf.training.rcp`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from slipstream.mlperf.training.judge import Say, describe, time_to_quality
from slipstream.mlperf.training.rcp import Point, Reference
from slipstream.mlperf.training.score import olympic
from slipstream.mlperf.training.tasks import Task
from slipstream.tables import Field, Table


@dataclass(frozen=True)
class BatchCurve:
    """Epochs to the target by batch size.

    Attributes:
        epochs: of every run, infinite where it failed; three or more a size.
        sample_s: median processor time of a sample.
    """

    task: Task
    epochs: Mapping[int, Sequence[float]]
    sample_s: Mapping[int, float]

    @classmethod
    def measure(
        cls, target: str, batches: Sequence[int], *, runs: int = 4, threads: int = 1,
        most_epochs: float | None = None, folder: Path | None = None, say: Say = lambda line: None,
    ) -> BatchCurve:  # fmt: skip
        """Train a task `runs` times at each batch size, every run from a seed of its own.

        Args:
            most_epochs: after which a run has failed; four times the task's by default, since
                large batches need more samples.
            folder: for the logs; by default among this user's cached files.

        Raises:
            UnknownNameError, WorkloadError: there is no such task, or its code fails.
        """
        task = describe(target, say)
        epochs, sample_s = {}, {}
        for batch in sorted(set(batches)):
            say(f"batches of {batch}")
            judged = time_to_quality(
                target, runs=runs, batch=batch, most_epochs=most_epochs or 4 * task.most_epochs,
                threads=threads, folder=folder and folder / f"batch_{batch}", say=say,
            )  # fmt: skip
            done = judged.arms[0].runs
            epochs[batch] = [one.to_target / task.train_samples for one in done]
            sample_s[batch] = sorted(one.sample_s for one in done)[len(done) // 2]
        return cls(task, epochs, sample_s)

    @cached_property
    def points(self) -> tuple[Point, ...]:
        """Of all batch sizes that reached the target, but in at most one run."""
        return tuple(
            Point.of(batch, epochs)
            for batch, epochs in sorted(self.epochs.items())
            if math.isfinite(olympic(epochs))
        )

    @cached_property
    def reference(self) -> Reference:
        """The points that pruning leaves."""
        return Reference.of({one.batch: self.epochs[one.batch] for one in self.points})

    def table(self) -> Table:
        """A row a batch size."""
        left = {one.batch for one in self.reference.points}
        critical = self.reference.critical_batch
        lost = sorted(set(self.epochs) - {one.batch for one in self.points})
        notes = [
            "" if math.isnan(critical) else
            f"critical batch size {critical:,.0f}: there a run takes twice the samples of a small "
            "batch's",
            f"not reached at {', '.join(map(str, lost))}" * bool(lost),
        ]  # fmt: skip
        fields = (
            Field[Point].number("Batch", lambda one: str(one.batch)),
            Field[Point].number("Epochs", lambda one: f"{one.mean:.2f}"),
            Field[Point].number("Deviation", lambda one: f"{one.deviation:.2f}"),
            Field[Point].number("Processor time", lambda one: f"{self._steps_s(one):.2f} s"),
            Field[Point].of("Counts", lambda one: "yes" if one.batch in left else "pruned"),
        )  # fmt: skip
        direction = "at least" if self.task.higher else "at most"
        title = f"{self.task.name}: {self.task.metric} of {direction} {self.task.target:g}"
        return Table.of(self.points, fields, title, [one for one in notes if one])

    def _steps_s(self, point: Point) -> float:
        """Processor time of a run's steps."""
        return point.mean * self.task.train_samples * self.sample_s[point.batch]

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "task": self.task.name, "epochs": self.epochs, "sample_s": self.sample_s,
            "reference_points": [vars(one) for one in self.reference.points],
            "critical_batch": self.reference.critical_batch,
        }  # fmt: skip
