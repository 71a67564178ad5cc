"""Claims of an experiment: a deterministic, pure function of its record.

A claim has the ratio of a candidate to the baseline over paired blocks, its interval, and a
verdict, for one metric. Six safeguards protect the verdict:

- *Looks*: the interval holds its level over every look at which the run may have stopped
  (`sequential.py`).
- *Launches*: if sides were started several times, the interval includes the variation between
  their processes (`launches.py`); such a run ends with its last launch, not at a look.
- *Several candidates*: Holm's procedure over the arms; an arm's verdict and interval use the error
  of its step of the procedure.
- *The guard*: in a tenth of the blocks the baseline runs twice. If the baseline differs from
  itself, at 99 %, no other claim is trusted.
- *Quality*: a cheaper candidate with worse results is not a win, and one that may change results
  is not a win until they were checked (`checks.py`).
- *The metric*: CPU time decides if every arm computes on one thread and only contention keeps it
  from its core; wall time if an arm waits or uses several threads. `carrier` returns the metric
  and the reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import InvalidArgumentError
from slipstream.measure import statistics
from slipstream.measure.checks import QualityCheck, QualityStatus, checks_of
from slipstream.measure.launches import by_launch, launch_of, launch_starts
from slipstream.measure.records import (
    AUTO,
    DIAGNOSTICS,
    RUN_DELAY,
    Claim,
    Experiment,
    Metric,
    Phase,
    Series,
    Verdict,
    guard_name,
)
from slipstream.measure.sequential import nominal_error
from slipstream.measure.statistics import Floats, Interval

GUARD_LEVEL = 0.99
# Metrics for which higher is better.
MORE_IS_BETTER = frozenset({"throughput"})
# Reasons to stop that do not depend on the samples; see `sequential.nominal_error`.
STOPPED_BLINDLY = frozenset({"budget", "blocks", "ended", "launches"})

# Share of wall time, explained by neither CPU time nor contention, above which an arm "waits".
_WAITING = 0.03
# A higher ratio of CPU to wall time requires a second thread.
_SEVERAL_THREADS = 1.05


def claims(experiment: Experiment) -> tuple[Claim, ...]:
    """Return all claims by candidate, the carrying metric first; the A/A guard's last.

    A metric gets no claim if the candidate or the baseline lacks it, or a value is not positive.
    """
    carrying, reason = carrier(experiment)
    metrics = [carrying, *(m for m in _metrics(experiment) if m != carrying)]
    guards = {m: guard for m in metrics if (guard := guard_claim(experiment, m)) is not None}
    judged = [
        claim
        for m in [*metrics, *experiment.settings.derived]
        for claim in _family(experiment, m, carrying, reason, guards.get(base_metric(m)))
    ]
    by_candidate = [c for arm in candidates(experiment) for c in judged if c.arm == arm]
    shown = [guard for m, guard in guards.items() if m in (carrying, "wall", "cpu")]
    return (*by_candidate, *shown)


def headline(found: Iterable[Claim]) -> tuple[Claim, ...]:
    """Return the claims that verdicts rest on, one per candidate."""
    return tuple(claim for claim in found if claim.carries)


def candidates(experiment: Experiment) -> tuple[str, ...]:
    """Return the names of the arms compared with the baseline, in order."""
    baseline = experiment.settings.baseline
    without = {baseline, guard_name(baseline)}
    return tuple(arm.name for arm in experiment.arms if arm.name not in without)


@dataclass(frozen=True)
class Pairs:
    """Two arms in the blocks that have both, in time order.

    Attributes:
        candidate, baseline: float64 [n]; several values of an arm in a block are averaged.
        launch: int64 [n], the launch of each block.
    """

    candidate: Floats
    baseline: Floats
    launch: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.candidate)

    @property
    def positive(self) -> bool:
        """Whether all values are positive, as ratios require."""
        return bool(np.all(self.candidate > 0) and np.all(self.baseline > 0))

    def log_ratios(self) -> list[Floats]:
        """Return float64 [blocks], one array per launch."""
        return by_launch(np.log(self.candidate / self.baseline), self.launch)


def paired(
    experiment: Experiment, metric: Metric, arm: str, other: str
) -> tuple[Floats, Floats] | None:
    """Return float64 [n] of both arms in the blocks that have both; None if no block has.

    Blocks are in time order; several values of an arm in a block are averaged.
    """
    pairs = _pairs(experiment, metric, arm, other)
    return None if pairs is None else (pairs.candidate, pairs.baseline)


def _pairs(experiment: Experiment, metric: Metric, arm: str, other: str) -> Pairs | None:
    a = experiment.series.get((arm, metric, Phase.MEASURE))
    b = experiment.series.get((other, metric, Phase.MEASURE))
    if a is None or b is None:
        return None
    blocks_a, values_a = _by_block(a)
    blocks_b, values_b = _by_block(b)
    both, at_a, at_b = np.intersect1d(blocks_a, blocks_b, assume_unique=True, return_indices=True)
    if len(at_a) == 0:
        return None
    launch = launch_of(both, launch_starts(experiment.events))
    return Pairs(values_a[at_a], values_b[at_b], launch)


def _by_block(series: Series) -> tuple[NDArray[np.int32], Floats]:
    if len(series.blocks) < 2 or bool(np.all(np.diff(series.blocks) > 0)):
        return series.blocks, series.values
    blocks, inverse, counts = np.unique(series.blocks, return_inverse=True, return_counts=True)
    sums = np.bincount(inverse, weights=series.values)
    return blocks, sums / counts


def ratio_between(experiment: Experiment, metric: Metric, arm: str, other: str) -> Interval:
    """Return the ratio of two arms at the run's level, not corrected for choosing the pair.

    Raises:
        InvalidArgumentError: The arms have no common block with this metric.
    """
    interval = _between(experiment, metric, arm, other, 1 - experiment.settings.level)
    if interval is None:
        raise InvalidArgumentError("metric", f"'{arm}' and '{other}' have no paired '{metric}'")
    return interval


def ranks(experiment: Experiment, metric: Metric | None = None) -> dict[str, tuple[int, int]]:
    """Return the best and worst rank of each arm, 1 being the cheapest.

    All pairs share the run's error equally, so that all ranks hold simultaneously.
    """
    metric = metric or carrier(experiment)[0]
    arms = [experiment.settings.baseline, *candidates(experiment)]
    pairs = len(arms) * (len(arms) - 1) // 2
    error = (1 - experiment.settings.level) / max(pairs, 1)
    below = [[False] * len(arms) for _ in arms]
    for i, arm in enumerate(arms):
        for j, other in enumerate(arms):
            interval = _between(experiment, metric, arm, other, error) if i != j else None
            if interval is not None:
                below[i][j] = interval.low > 1 if metric in MORE_IS_BETTER else interval.high < 1
    return dict(zip(arms, statistics.rank_intervals(below), strict=True))


def _between(
    experiment: Experiment, metric: Metric, arm: str, other: str, error: float
) -> Interval | None:
    """Return the ratio of two arms at this error; None without common, positive blocks."""
    pairs = _pairs(experiment, metric, arm, other)
    if pairs is None or not pairs.positive:
        return None
    launches = pairs.log_ratios()
    return _median_ratio(launches, 1 - _error(experiment, metric, launches, error))


def _median_ratio(launches: Sequence[Floats], level: float) -> Interval:
    if len(launches) > 1:
        return statistics.launches_interval(launches, level).exp()
    return statistics.median_interval(launches[0], level).exp()


# Which metric carries the claim.


def carrier(experiment: Experiment) -> tuple[Metric, str]:
    """Return the metric that verdicts rest on, and why."""
    settings = experiment.settings
    if settings.primary != AUTO:
        return settings.primary, settings.primary_because or f"{settings.primary} was requested"
    arms = [settings.baseline, *candidates(experiment)]
    failed = failures(experiment)
    used = 1.0
    for arm in arms:
        values = paired_metrics(experiment, arm)
        if values is None and arm in failed:
            # An arm without samples does not affect the choice of the clock.
            continue
        if values is None:
            return "wall", f"CPU time of '{arm}' was not recorded"
        wall, cpu, delay = values
        busy = float(np.median(cpu / wall))
        if busy > _SEVERAL_THREADS:
            return "wall", f"'{arm}' computes on several threads ({busy:.1f} cores at once)"
        waiting = _waiting(wall, cpu, delay)
        if waiting < -_WAITING:
            return "wall", f"'{arm}' computes on several threads that compete for cores"
        if waiting > _WAITING:
            return "wall", f"'{arm}' waits during {100 * waiting:.0f} % of its time"
        used = min(used, busy)
    if used >= 1 - _WAITING:
        return "cpu", "every arm computes on one thread and never waits"
    share = 100 * (1 - used)
    return "cpu", f"one thread each; waiting for a core ({share:.0f} % of wall) is contention"


def paired_metrics(experiment: Experiment, arm: str) -> tuple[Floats, Floats, Floats | None] | None:
    """Return wall, CPU and run-queue delay of an arm, float64 [n] each; None without CPU time."""
    wall = experiment.series.get((arm, "wall", Phase.MEASURE))
    cpu = experiment.series.get((arm, "cpu", Phase.MEASURE))
    delay = experiment.series.get((arm, RUN_DELAY, Phase.MEASURE))
    if wall is None or cpu is None or len(wall.values) != len(cpu.values) or not len(wall.values):
        return None
    if delay is None or len(delay.values) != len(wall.values):
        return wall.values, cpu.values, None
    return wall.values, cpu.values, delay.values


def _waiting(wall: Floats, cpu: Floats, delay: Floats | None) -> float:
    """Return the share of wall time in which the arm neither computed nor queued for a core."""
    if delay is not None:
        return float(np.median((wall - cpu - delay) / wall))
    # Without the run-queue delay, use the least disturbed samples: inherent waits occur there too.
    return float(np.quantile((wall - cpu) / wall, 0.1))


# Judging one metric over all candidates.


def _family(
    experiment: Experiment, metric: Metric, carrying: Metric, reason: str, guard: Claim | None
) -> list[Claim]:
    settings = experiment.settings
    pairs = {
        arm: arm_pairs
        for arm in candidates(experiment)
        if (arm_pairs := _pairs(experiment, base_metric(metric), arm, settings.baseline))
        and arm_pairs.positive
    }
    intervals = _holm_intervals(experiment, metric, pairs)
    checks = checks_of(experiment.events)
    carries = metric == carrying
    judged = []
    for arm, blocks in pairs.items():
        interval = intervals[arm]
        why = reason if carries else ""
        if isinstance(interval, str):
            judged.append(_refused(experiment, metric, arm, len(blocks), interval))
            continue
        verdict, further = _judge(interval, metric, len(blocks), settings.equivalence)
        if guard is not None and guard.verdict is Verdict.UNTRUSTWORTHY:
            verdict, further = Verdict.UNTRUSTWORTHY, None
            why = guard.reason
        elif carries and (failure := _failure(experiment, arm)):
            verdict, why = Verdict.INCONCLUSIVE, failure
        claim = claim_of(
            experiment,
            metric,
            arm,
            interval,
            _with_quality(verdict, checks.get(arm)),
            len(blocks),
            why,
        )
        launches = len(np.unique(blocks.launch))
        judged.append(replace(claim, further_blocks=further, carries=carries, launches=launches))
    return judged


def claim_of(
    experiment: Experiment,
    metric: Metric,
    arm: str,
    interval: Interval,
    verdict: Verdict,
    blocks: int,
    reason: str,
) -> Claim:
    """Return the claim about `arm` against the baseline from `interval`, at the run's level."""
    return Claim(
        metric=metric,
        arm=arm,
        baseline=experiment.settings.baseline,
        estimator=interval.estimator,
        ratio=interval.estimate,
        low=interval.low,
        high=interval.high,
        level=experiment.settings.level,
        verdict=verdict,
        detectable=statistics.detectable_difference(_half_width(interval), interval.level),
        blocks=blocks,
        reason=reason,
    )


def _holm_intervals(
    experiment: Experiment, metric: Metric, pairs: dict[str, Pairs]
) -> dict[str, Interval | str]:
    """Return, by arm, the interval at the error of its Holm step, or why it has none."""
    error = 1 - experiment.settings.level
    decided: dict[str, Interval | str] = {}
    waiting = list(pairs)
    while waiting:
        share = error / len(waiting)
        step = {arm: _interval(experiment, metric, pairs[arm], share) for arm in waiting}
        rejected = [
            arm for arm, answer in step.items() if isinstance(answer, str) or answer.excludes(1.0)
        ]
        decided |= {arm: step[arm] for arm in rejected} if rejected else step
        waiting = [arm for arm in waiting if arm not in decided]
    return decided


def _interval(experiment: Experiment, metric: Metric, pairs: Pairs, error: float) -> Interval | str:
    launches = pairs.log_ratios()
    level = 1 - _error(experiment, base_metric(metric), launches, error)
    if not is_derived(metric):
        return _median_ratio(launches, level)
    sides, seed = (pairs.candidate, pairs.baseline), experiment.settings.seed
    try:
        if (quantile := quantile_of(metric)) is not None:
            ratio = statistics.quantile_ratio(*sides, quantile, level, seed=seed)
        else:
            ratio = statistics.throughput_ratio(*sides, level, seed=seed)
    except InvalidArgumentError as refusal:
        return refusal.what
    if len(launches) < 2:
        return ratio
    # Launches are too few to resample; they widen this interval as they widen the median's.
    factor = math.exp(statistics.launches_excess(launches, level))
    return replace(ratio, low=ratio.low / factor, high=ratio.high * factor)


def _error(
    experiment: Experiment, metric: Metric, launches: Sequence[Floats], error: float
) -> float:
    """Return the error that one interval may use, given when and why the run stopped."""
    blocks = sum(map(len, launches))
    stops = [event for event in experiment.events if event.kind == "stop"]
    # Without a stop event, the run is in progress or was killed. Ctrl-C may follow a lucky look.
    blind = bool(stops) and stops[-1].detail.get("reason") in STOPPED_BLINDLY
    if blind and len(launches) > 1:
        return error  # looks end launches, all by the same rule, but never the run
    if metric not in ("wall", "cpu") and blocks < min(experiment.settings.looks, default=0):
        return error  # measured apart from the blocks (peak memory), so no look preceded the end
    return nominal_error(blocks, experiment.settings.looks, error, at_planned_look=not blind)


def _judge(
    interval: Interval, metric: Metric, blocks: int, equivalence: float
) -> tuple[Verdict, int | None]:
    if 1 - equivalence <= interval.low and interval.high <= 1 + equivalence:
        return Verdict.EQUIVALENT, None
    if interval.excludes(1.0):
        cheaper = (interval.estimate < 1) != (metric in MORE_IS_BETTER)
        return (Verdict.FASTER if cheaper else Verdict.SLOWER), None
    needed = statistics.minimum_blocks(interval.level)
    if blocks < needed:
        return Verdict.INCONCLUSIVE, needed - blocks
    if interval.estimator == statistics.BETWEEN_LAUNCHES:
        return Verdict.INCONCLUSIVE, None  # more launches are required, not blocks
    if not math.isfinite(_half_width(interval)):
        return Verdict.INCONCLUSIVE, blocks  # cannot extrapolate, so suggest doubling
    return Verdict.INCONCLUSIVE, statistics.blocks_to_settle(
        blocks, math.log(interval.estimate), _half_width(interval), interval.level, equivalence
    )


def _with_quality(verdict: Verdict, check: QualityCheck | None) -> Verdict:
    """Adjust the verdict on a cheaper candidate by its quality check."""
    if verdict is not Verdict.FASTER or check is None:
        return verdict
    if check.lost:
        return Verdict.QUALITY_LOST
    return Verdict.UNBACKED if check.status is QualityStatus.UNCHECKED else verdict


def _half_width(interval: Interval) -> float:
    """Return half the width of the log ratio's interval."""
    if interval.low <= 0 or not math.isfinite(interval.high):
        return math.inf
    return (math.log(interval.high) - math.log(interval.low)) / 2


def _refused(experiment: Experiment, metric: Metric, arm: str, blocks: int, reason: str) -> Claim:
    level = experiment.settings.level
    needed = statistics.tail_samples_needed(quantile_of(metric) or 0.5, level)
    unknown = Interval(math.nan, 0.0, math.inf, level, "refused")
    claim = claim_of(experiment, metric, arm, unknown, Verdict.INCONCLUSIVE, blocks, reason)
    return replace(claim, detectable=math.inf, further_blocks=max(needed - blocks, 1))


def guard_claim(experiment: Experiment, metric: Metric) -> Claim | None:
    """Return the A/A guard's claim about `metric`; None without guard blocks."""
    baseline = experiment.settings.baseline
    pairs = _pairs(experiment, metric, guard_name(baseline), baseline)
    if pairs is None or not pairs.positive:
        return None
    # Both sides share a process in every launch, so launches add no variation.
    interval = _median_ratio([np.concatenate(pairs.log_ratios())], GUARD_LEVEL)
    blocks = len(pairs)
    verdict, further = _judge(interval, metric, blocks, experiment.settings.equivalence)
    reason = ""
    if interval.excludes(1.0):
        verdict, further = Verdict.UNTRUSTWORTHY, None
        reason = (
            f"'{baseline}' differs from itself in {metric}: something else than the arms changed"
        )
    claim = claim_of(experiment, metric, guard_name(baseline), interval, verdict, blocks, reason)
    return replace(claim, level=GUARD_LEVEL, further_blocks=further)


def failures(experiment: Experiment) -> dict[str, str]:
    """Return the error of each arm that failed."""
    failed = [event.detail for event in experiment.events if event.kind == "failed"]
    return {str(detail.get("arm", "")): str(detail.get("what", "")) for detail in failed}


def _failure(experiment: Experiment, arm: str) -> str | None:
    names = {experiment.settings.baseline: "the baseline", arm: "it"}
    for event in experiment.events:
        if event.kind == "failed" and (name := names.get(event.detail.get("arm", ""))):
            return f"{name} failed in block {event.block}: {event.detail.get('what', '')}"
    return None


def _metrics(experiment: Experiment) -> list[Metric]:
    """Return the metrics with samples, times first, in recording order."""
    seen = {metric: None for _, metric, phase in experiment.series if phase is Phase.MEASURE}
    first = [m for m in ("wall", "cpu") if m in seen]
    return first + [m for m in seen if m not in DIAGNOSTICS and m not in first]


def base_metric(metric: Metric) -> Metric:
    """Return the source of a derived metric: wall for ``wall_p99`` and ``throughput``."""
    if metric == "throughput":
        return "wall"
    return metric.rpartition("_p")[0] if quantile_of(metric) is not None else metric


def is_derived(metric: Metric) -> bool:
    """Whether `metric` is a statistic of another: ``throughput``, ``wall_p99``."""
    return base_metric(metric) != metric


def quantile_of(metric: Metric) -> float | None:
    """Return 0.99 for ``wall_p99``; None if a metric is not a quantile."""
    head, _, digits = metric.rpartition("_p")
    if not head or not digits.replace(".", "", 1).isdigit():
        return None
    percent = float(digits)
    return percent / 100 if 0 < percent < 100 else None
