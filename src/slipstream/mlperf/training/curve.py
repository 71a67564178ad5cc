"""Samples to the target by batch size: which batch size trains fastest.

A larger batch takes less time per sample and needs more samples to the target, so the fastest size
is in between. Points are pruned as the rules prune reference points, until the curve is convex; see
`slipstream.mlperf.training.rcp`, also for the critical batch size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.mlperf.training.compare import Outcome, Verdict
from slipstream.mlperf.training.judge import Report, describe, random_seeds, time_to_quality
from slipstream.mlperf.training.rcp import Point, Reference
from slipstream.mlperf.training.score import olympic_mean
from slipstream.mlperf.training.tasks import Task
from slipstream.tables import Field, Table
from slipstream.units import format_duration


@dataclass(frozen=True)
class BatchCurve:
    """Runs to the target by batch size: three or more per size, from the same seeds."""

    task: Task
    runs: Mapping[int, Sequence[Outcome]]

    @classmethod
    def measure(
        cls, target: str, batches: Sequence[int], *, runs: int = 4, threads: int = 1,
        most_epochs: float | None = None, folder: Path | None = None,
        report: Report = lambda line: None,
    ) -> BatchCurve:  # fmt: skip
        """Train a task `runs` times at each batch size, from random seeds.

        Args:
            most_epochs: limit after which a run has failed; by default four times the task's, since
                large batches need more samples.
            folder: folder for the logs; by default in the user's cache.

        Raises:
            UnknownNameError, WorkloadError: there is no such task, or its code fails.
        """
        task, seeds, done = describe(target, report), random_seeds(runs), {}
        for batch in sorted(set(batches)):
            report(f"batch size {batch}")
            judged = time_to_quality(
                target, seeds=seeds, batch=batch, most_epochs=most_epochs or 4 * task.most_epochs,
                threads=threads, folder=folder and folder / f"batch_{batch}", report=report,
            )  # fmt: skip
            done[batch] = judged.arms[0].runs
        return cls(task, done)

    @cached_property
    def epochs(self) -> dict[int, list[float]]:
        """Epochs to the target of every run, by batch size; infinite for a failed run."""
        size = self.task.train_samples
        return {batch: [run.to_target / size for run in done] for batch, done in self.runs.items()}

    @cached_property
    def points(self) -> tuple[Point, ...]:
        """A point per batch size at which at most one run failed."""
        return tuple(
            Point.of(batch, epochs)
            for batch, epochs in sorted(self.epochs.items())
            if math.isfinite(olympic_mean(epochs))
        )

    @cached_property
    def reference(self) -> Reference:
        """The points that remain after pruning.

        The rules prune once, which may leave a point above the line between its new neighbours.
        """
        remaining, reference = self.points, Reference(())
        while len(reference.points) != len(remaining):
            remaining = reference.points or remaining
            reference = Reference.of({p.batch: self.epochs[p.batch] for p in remaining})
        return reference

    @cached_property
    def fastest(self) -> int:
        """The batch size whose steps take least CPU time to the target; 0 without points."""
        return min((point.batch for point in self.points), key=self.steps_s, default=0)

    @cached_property
    def largest(self) -> int:
        """The largest batch size that reached the target; 0 without points."""
        return max((point.batch for point in self.points), default=0)

    @cached_property
    def larger(self) -> Verdict | None:
        """`largest` compared with `fastest`; None if they are equal."""
        if self.largest == self.fastest:
            return None
        name = f"batch size {self.largest}"
        return Verdict.of(name, self.runs[self.fastest], self.runs[self.largest])

    def sample_s(self, batch: int) -> float:
        """Return the CPU time per sample in s, median of the runs."""
        return float(np.median([run.sample_s for run in self.runs[batch]]))

    def steps_s(self, batch: int) -> float:
        """Return the CPU time of all steps to the target in s."""
        return olympic_mean(self.epochs[batch]) * self.task.train_samples * self.sample_s(batch)

    @property
    def sentence(self) -> str:
        """Whether faster samples make a faster training; empty without `larger`."""
        larger = self.larger
        if larger is None:
            return ""
        sample, whole = (
            factor.words("faster", "slower", "as fast") for factor in (larger.sample, larger.time)
        )
        turn = "but" if larger.sample.ratio < 1 < larger.time.ratio else "and"
        return (
            f"batch size {self.fastest} reaches the target first; at {self.largest} a sample "
            f"is {sample}, {turn} the training is {whole}"
        )

    def table(self) -> Table:
        """Return a table with a row per batch size."""
        remaining = {point.batch for point in self.reference.points}
        critical = self.reference.critical_batch
        failed = sorted(set(self.epochs) - {point.batch for point in self.points})
        notes = [
            "" if math.isnan(critical) else
            f"critical batch size {critical:,.0f}: a run at it takes twice the samples of one with "
            "small batches",
            f"target not reached at {', '.join(map(str, failed))}" * bool(failed),
            self.sentence,
        ]  # fmt: skip
        fields = (
            Field[Point].number("Batch", lambda point: str(point.batch)),
            Field[Point].number("Epochs", lambda point: f"{point.mean:.2f}"),
            Field[Point].number("Deviation", lambda point: f"{point.deviation:.2f}"),
            Field[Point].number("Time/sample", lambda point: _time(self.sample_s(point.batch))),
            Field[Point].number("Steps", lambda point: _time(self.steps_s(point.batch))),
            Field[Point].of("Counts", lambda p: "yes" if p.batch in remaining else "pruned"),
        )  # fmt: skip
        direction = "at least" if self.task.higher else "at most"
        title = f"{self.task.name}: {self.task.metric} of {direction} {self.task.target:g}"
        return Table.of(self.points, fields, title, [note for note in notes if note])

    def to_json(self) -> dict[str, Any]:
        """Return the curve as JSON."""
        return {
            "task": self.task.name, "epochs": self.epochs,
            "sample_s": {batch: self.sample_s(batch) for batch in self.runs},
            "fastest": self.fastest, "sentence": self.sentence,
            "reference_points": [vars(point) for point in self.reference.points],
            "critical_batch": self.reference.critical_batch,
        }  # fmt: skip


def _time(seconds: float) -> str:
    return format_duration(1e9 * seconds)
