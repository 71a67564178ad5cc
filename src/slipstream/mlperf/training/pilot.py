"""A pilot: how many samples will a changed training need, from the first quarter of a run or two?

Both arms train from the same seed. Where the candidate has, at n samples, the training loss that
the baseline had at m, its training goes n / m as far; the ratio is taken to stay what it is. Losses
of single batches scatter, so a power law, log loss = a + b log n, is fitted to the second half of
the pilot, as learning curves are found to follow one (Hestness et al., "Deep Learning Scaling is
Predictable, Empirically", 2017).
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
"""Of a run, that a pilot trains."""
# Fewer steps in the second half of a pilot show no trend.
_LEAST_STEPS = 12


@dataclass(frozen=True)
class Pilot:
    """What pilots showed of one arm.

    Attributes:
        ratios: of samples, candidate over baseline, a seed each; NaN where it cannot be told.
        cpu_s: seconds of a processor that its runs took, the baseline's not counted.
        reason: why there is none; empty where there is.
    """

    ratios: tuple[float, ...]
    cpu_s: float
    reason: str = ""


def samples_ratio(baseline: Sequence[float], candidate: Sequence[float]) -> float:
    """How many times the samples the candidate needs for the same loss; NaN where neither falls.

    Args:
        baseline, candidate: losses of steps from the first, of the same batch size, positive.
    """
    steps = min(len(baseline), len(candidate))
    half = np.arange(steps // 2, steps)
    losses = np.array([baseline[:steps], candidate[:steps]], np.float64)[:, half]
    if len(half) < _LEAST_STEPS or not (np.isfinite(losses) & (losses > 0)).all():
        return math.nan
    at = np.log(half + 1.0)
    (slope, start), (slope2, start2) = (np.polyfit(at, np.log(one), 1) for one in losses)
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
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Pilot]:
    """The pilot of each arm against `first`; their logs are no result's, and are not kept."""
    most = SHARE * (task.typical or task.most_samples) / task.train_samples
    curves: dict[tuple[str, int], list[float]] = {}
    costs: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="slipstream-pilot-") as folder:

        def curve(name: str, seed: int) -> list[float]:
            if (name, seed) not in curves:
                say(f"pilot of {name}: {most * task.train_samples:,.0f} samples, seed {seed}")
                log = Path(folder) / f"{len(curves)}.txt"
                answer = train_once(
                    target, task, name, seed, log, threads, batch=batch, most_epochs=most
                )
                curves[name, seed] = answer["losses"]
                costs[name] = costs.get(name, 0.0) + answer["cpu_s"]
            return curves[name, seed]

        def pilot(name: str) -> Pilot:
            try:
                ratios = tuple(samples_ratio(curve(first, s), curve(name, s)) for s in seeds)
            except ChildError as error:
                return Pilot((), costs.get(name, 0.0), f"its pilot died: {error.what}")
            if not ratios:
                return Pilot((), 0.0, "no pilot was run")
            lost = any(map(math.isnan, ratios))
            return Pilot(ratios, costs[name], "the loss did not fall in its pilot" * lost)

        return {name: pilot(name) for name in arms}
