"""Predict the samples that a changed training needs, from pilots of a quarter of a run.

Both arms train from the same seed. If the candidate needs n samples to reach the training loss that
the baseline reached at m, the ratio n / m is assumed to hold until the target. Losses of single
batches are noisy, so a power law, log loss = a + b log n, is fitted to the second half of the pilot
(Hestness et al., "Deep Learning Scaling is Predictable, Empirically", 2017).
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slipstream.errors import ChildError
from slipstream.mlperf.training.judge import train_once
from slipstream.mlperf.training.tasks import Task

SHARE = 0.25
"""Share of a run that a pilot trains."""
# Fewer steps in the second half of a pilot do not show a trend.
_MIN_STEPS = 12


@dataclass(frozen=True)
class Pilot:
    """Results of one arm's pilots.

    Attributes:
        ratios: ratio of samples, candidate over baseline, per seed; NaN without a trend.
        cpu_s: CPU time of the candidate's runs.
        reason: why there is no prediction; empty if there is one.
    """

    ratios: tuple[float, ...]
    cpu_s: float
    reason: str = ""


def samples_ratio(baseline: Sequence[float], candidate: Sequence[float]) -> float:
    """Return the candidate's samples over the baseline's for equal loss; NaN unless both fall.

    Args:
        baseline, candidate: positive losses per step from the first, at the same batch size.
    """
    steps = min(len(baseline), len(candidate))
    half = np.arange(steps // 2, steps)
    losses = np.array([baseline[:steps], candidate[:steps]], np.float64)[:, half]
    if len(half) < _MIN_STEPS or not (np.isfinite(losses) & (losses > 0)).all():
        return math.nan
    at = np.log(half + 1.0)
    (slope, start), (slope2, start2) = (np.polyfit(at, np.log(loss), 1) for loss in losses)
    if slope >= 0 or slope2 >= 0:
        return math.nan
    reached_at = (start2 + slope2 * at - start) / slope
    return float(np.exp(np.median(at - reached_at)))


def pilots(
    target: str,
    task: Task,
    first: str,
    arms: Sequence[str],
    seeds: Sequence[int],
    *,
    threads: int = 1,
    batch: int | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Pilot]:
    """Run pilots of each arm and of the baseline `first`, without keeping their logs."""
    epochs = SHARE * (task.typical or task.most_samples) / task.train_samples
    curves: dict[tuple[str, int], list[float]] = {}
    costs: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="slipstream-pilot-") as folder:

        def curve(name: str, seed: int) -> list[float]:
            if (name, seed) not in curves:
                report(f"pilot of {name}: {epochs * task.train_samples:,.0f} samples, seed {seed}")
                log = Path(folder) / f"{len(curves)}.txt"
                answer = train_once(
                    target, task, name, seed, log, threads, batch=batch, most_epochs=epochs
                )
                curves[name, seed] = answer["losses"]
                costs[name] = costs.get(name, 0.0) + answer["cpu_s"]
            return curves[name, seed]

        def pilot(name: str) -> Pilot:
            try:
                ratios = tuple(samples_ratio(curve(first, s), curve(name, s)) for s in seeds)
            except ChildError as error:
                return Pilot((), costs.get(name, 0.0), f"its pilot failed: {error.what}")
            if not ratios:
                return Pilot((), 0.0, "no pilot was run")
            flat = any(map(math.isnan, ratios))
            return Pilot(ratios, costs[name], "the loss did not fall in its pilot" * flat)

        return {name: pilot(name) for name in arms}
