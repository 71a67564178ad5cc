"""Samples to the target over the batch size: which sizes are worth their samples.

A curve of runs is pruned as the rules prune reference points, until it is convex, and has a
critical batch size: see `slipstream.mlperf.training.rcp`. A sample of a larger batch takes less
time, and the target takes more of them: the fastest size lies between.
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
from slipstream.mlperf.training.judge import Say, describe, drawn, time_to_quality
from slipstream.mlperf.training.rcp import Point, Reference
from slipstream.mlperf.training.score import olympic
from slipstream.mlperf.training.tasks import Task
from slipstream.tables import Field, Table
from slipstream.units import format_duration


@dataclass(frozen=True)
class BatchCurve:
    """Runs to the target by batch size: three or more of each, from the same seeds."""

    task: Task
    runs: Mapping[int, Sequence[Outcome]]

    @classmethod
    def measure(
        cls, target: str, batches: Sequence[int], *, runs: int = 4, threads: int = 1,
        most_epochs: float | None = None, folder: Path | None = None, say: Say = lambda line: None,
    ) -> BatchCurve:  # fmt: skip
        """Train a task `runs` times at each batch size, from seeds that are drawn.

        Args:
            most_epochs: after which a run has failed; four times the task's by default, since
                large batches need more samples.
            folder: for the logs; by default among this user's cached files.

        Raises:
            UnknownNameError, WorkloadError: there is no such task, or its code fails.
        """
        task, seeds, done = describe(target, say), drawn(runs), {}
        for batch in sorted(set(batches)):
            say(f"batches of {batch}")
            judged = time_to_quality(
                target, seeds=seeds, batch=batch, most_epochs=most_epochs or 4 * task.most_epochs,
                threads=threads, folder=folder and folder / f"batch_{batch}", say=say,
            )  # fmt: skip
            done[batch] = judged.arms[0].runs
        return cls(task, done)

    @cached_property
    def epochs(self) -> dict[int, list[float]]:
        """Of every run, infinite where it failed."""
        whole = self.task.train_samples
        return {batch: [one.to_target / whole for one in done] for batch, done in self.runs.items()}

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
        """The points that pruning leaves.

        The rules prune once, which may leave a point above the line between its new neighbours.
        """
        left, reference = self.points, Reference(())
        while len(reference.points) != len(left):
            left = reference.points or left
            reference = Reference.of({one.batch: self.epochs[one.batch] for one in left})
        return reference

    @cached_property
    def fastest(self) -> int:
        """The batch size whose steps take the least processor time to the target; 0 of none."""
        return min((one.batch for one in self.points), key=self.steps_s, default=0)

    @cached_property
    def largest(self) -> int:
        """The largest batch size that reached the target; 0 of none."""
        return max((one.batch for one in self.points), default=0)

    @cached_property
    def larger(self) -> Verdict | None:
        """`largest` against `fastest`; None where they are the same."""
        if self.largest == self.fastest:
            return None
        name = f"batches of {self.largest}"
        return Verdict.of(name, self.runs[self.fastest], self.runs[self.largest])

    def sample_s(self, batch: int) -> float:
        """Processor time of a sample, median of the runs."""
        return float(np.median([one.sample_s for one in self.runs[batch]]))

    def steps_s(self, batch: int) -> float:
        """Processor time of the steps to the target."""
        return olympic(self.epochs[batch]) * self.task.train_samples * self.sample_s(batch)

    @property
    def sentence(self) -> str:
        """Whether a faster sample is a faster training; empty where there is nothing to compare."""
        one = self.larger
        if one is None:
            return ""
        sample, whole = (
            part.words("faster", "slower", "as fast") for part in (one.sample, one.time)
        )
        turn = "but" if one.sample.ratio < 1 < one.time.ratio else "and"
        return (
            f"batches of {self.fastest} reach the target first; of {self.largest} a sample "
            f"is {sample}, {turn} the training is {whole}"
        )

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
            self.sentence,
        ]  # fmt: skip
        fields = (
            Field[Point].number("Batch", lambda one: str(one.batch)),
            Field[Point].number("Epochs", lambda one: f"{one.mean:.2f}"),
            Field[Point].number("Deviation", lambda one: f"{one.deviation:.2f}"),
            Field[Point].number("A sample", lambda one: _time(self.sample_s(one.batch))),
            Field[Point].number("Steps", lambda one: _time(self.steps_s(one.batch))),
            Field[Point].of("Counts", lambda one: "yes" if one.batch in left else "pruned"),
        )  # fmt: skip
        direction = "at least" if self.task.higher else "at most"
        title = f"{self.task.name}: {self.task.metric} of {direction} {self.task.target:g}"
        return Table.of(self.points, fields, title, [one for one in notes if one])

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "task": self.task.name, "epochs": self.epochs,
            "sample_s": {batch: self.sample_s(batch) for batch in self.runs},
            "fastest": self.fastest, "sentence": self.sentence,
            "reference_points": [vars(one) for one in self.reference.points],
            "critical_batch": self.reference.critical_batch,
        }  # fmt: skip


def _time(seconds: float) -> str:
    return format_duration(1e9 * seconds)
