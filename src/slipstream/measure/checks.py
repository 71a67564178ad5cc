"""Quality of a candidate from its first steps, beside the baseline's from the same seeds.

Where there are no items to be right or wrong about (see `quality`), the same steps are run on both
sides from several seeds, and what they end at is compared: a metric, the training loss, or the
output. The yardstick is how far the baseline's own seeds lie apart: rounding that moves the loss
by a hundredth of what another seed does is nothing to worry about. What a few steps cannot show
(whether a smaller model still learns) is never claimed from them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.measure.quality import wilson
from slipstream.measure.records import Event
from slipstream.measure.statistics import Interval

_LEVEL = 0.95
# The kind of change (see `technique.QualityKind`) of which a few steps show what it does.
_SHOWN_BY_FEW_STEPS = "rounding"
_EVENT = "quality"
_WIDEST = 10.0


class QualityStatus(StrEnum):
    """What may be said about a candidate's quality."""

    EXACT = "exact"
    SAME = "the same"
    WITHIN = "within seed noise"
    BETTER = "better"
    WORSE = "worse"
    OPEN = "open"
    FAILED = "failed"
    UNCHECKED = "not checked"


@dataclass(frozen=True)
class Trial:
    """The first steps from one seed.

    Attributes:
        steps: how many.
        losses: what each step returned; None where that is no number.
        metric: the workload's metric after the last of them (lower is better), or None.
        output: float64 [n] of the first step's output, evenly sampled where it is larger than
            can be kept; None where it returned no tensor, or a single number.
        shape: of the whole output.
        training: whether the steps train.
        answers: the class that the model gives each item of its batch after the last of them;
            empty where it is no classifier.
        targets: the class that each item has; empty where that is not known.
    """

    seed: int
    steps: int
    losses: tuple[float, ...] | None = None
    metric: float | None = None
    output: NDArray[np.float64] | None = None
    shape: tuple[int, ...] = ()
    training: bool = True
    answers: tuple[int, ...] = ()
    targets: tuple[int, ...] = ()

    @property
    def numbers(self) -> tuple[float, ...]:
        """Every single number it gave."""
        return (*(self.losses or ()), *(() if self.metric is None else (self.metric,)))

    @property
    def finite(self) -> bool:
        """Whether all of them are finite."""
        return all(map(math.isfinite, self.numbers))

    def same_as(self, other: Trial) -> bool:
        """Whether both gave the same to the last bit."""
        if self.output is not None and other.output is not None:
            return np.array_equal(self.output, other.output, equal_nan=True)
        return repr(self.numbers) == repr(other.numbers)


@dataclass(frozen=True)
class QualityCheck:
    """What became of one candidate's quality, as it is stored with the experiment.

    Attributes:
        kind, basis: what the technique says it does to the numbers, and what says so.
        reason: why the status is what it is, in a few words; may be empty.
        measure: what was compared; empty where nothing was.
        steps: steps before the comparison.
        seeds: of the pairs.
        baseline, candidate: what was compared, one value a seed.
        difference, low, high: mean of candidate minus baseline over the seeds with its 95 %
            interval (Student's t; none from one seed). Of outputs: the largest difference over
            the largest output, the worst of the seeds, without an interval.
        spread: standard deviation of the baseline over all its seeds.
        losses_baseline, losses_candidate: of every step, one row a seed.
        items, diverging, unstable: of a classifier: items of the batches, those that both sides
            answer differently, and those that one of them has right and the other wrong; None
            where targets are not known.
    """

    arm: str
    kind: str
    status: QualityStatus
    basis: str = ""
    reason: str = ""
    measure: str = ""
    steps: int = 0
    seeds: tuple[int, ...] = ()
    baseline: tuple[float, ...] = ()
    candidate: tuple[float, ...] = ()
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    spread: float | None = None
    losses_baseline: tuple[tuple[float, ...], ...] = ()
    losses_candidate: tuple[tuple[float, ...], ...] = ()
    items: int = 0
    diverging: int = 0
    unstable: int | None = None

    @property
    def instability(self) -> Interval | None:
        """Share of unstable items, of diverging ones where targets are unknown; Wilson's 95 %."""
        if not self.items:
            return None
        return wilson(self.diverging if self.unstable is None else self.unstable, self.items)

    @property
    def lost(self) -> bool:
        """Whether the candidate may not be called a win, however fast it is."""
        return self.status in (QualityStatus.FAILED, QualityStatus.WORSE)

    @property
    def one_run(self) -> bool:
        """Whether all seeds gave the same to the digit on both sides: no chance, no interval."""
        sides = (self.baseline, self.losses_baseline), (self.candidate, self.losses_candidate)
        return len(self.seeds) > 1 and all(
            len(set(values)) == 1 and len(set(losses)) <= 1 for values, losses in sides
        )

    @property
    def verdict(self) -> str:
        """A few words for a table."""
        if self.status is QualityStatus.OPEN and self.kind != _SHOWN_BY_FEW_STEPS:
            return f"{self.status}: {self.kind.replace('-', ' ')}"
        return str(self.status)

    @property
    def scale(self) -> float | None:
        """What differences are shown relative to: the baseline's mean size; None at zero."""
        size = abs(float(np.mean(self.baseline))) if self.baseline else 1.0
        return size if size > 0 and math.isfinite(size) else None

    @property
    def sentence(self) -> str:
        """The whole finding in words."""
        return self._judged() + self._agreed()

    def _agreed(self) -> str:
        if not self.items:
            return ""
        told = "" if self.unstable is None else f", {self.unstable} of them right on one side alone"
        return f" Of {self.items} answers {self.diverging} differ{told}."

    def _judged(self) -> str:
        start = f"{self.arm}, quality: "
        if self.status is QualityStatus.EXACT:
            return f"{start}the same numbers by construction ({self.basis})."
        if self.status is QualityStatus.UNCHECKED:
            return f"{start}not checked: {self.reason}. How fast it is rests on no quality check."
        if self.status is QualityStatus.FAILED:
            return f"{start}failed: {self.reason}. However fast it is, that is no win."
        text = start + self._found()
        if self.status is QualityStatus.WORSE:
            return f"{text} That is worse than chance explains; however fast it is, it is no win."
        if self.kind != _SHOWN_BY_FEW_STEPS:
            return f"{text} {self._left_open()}"
        if self.status is QualityStatus.OPEN:
            return f"{text} Open: {self.reason}."
        return f"{text} {str(self.status).capitalize()}."

    def to_event(self) -> Event:
        """As the experiment keeps it."""
        return Event(0, _EVENT, {**asdict(self), "status": str(self.status)})

    def _found(self) -> str:
        steps = f"{self.steps} step{'s' * (self.steps != 1)}"
        seeds = f"{len(self.seeds)} seed{'s' * (len(self.seeds) != 1)}"
        if self.one_run:
            seeds += f" (the workload sets its own seed: one run, not {len(self.seeds)})"
        if self.status is QualityStatus.SAME or (self.baseline and self.baseline == self.candidate):
            return f"{self.measure} after {steps} from {seeds} is the same to the last bit."
        if self.difference is None:
            return f"{self.measure} after {steps} from {seeds} cannot be compared."
        if not self.baseline:
            most = f"at most {format_share(self.difference)} of the largest"
            return f"{self.measure} from {seeds} differs by {most}."
        interval = ""
        if self.low is not None and self.high is not None and not self.one_run:
            ends = (self.relative(end) if self.tells(end) else "–" for end in (self.low, self.high))
            interval = f" [{', '.join(ends)}]"
        text = f"{self.measure} after {steps} from {seeds} differs by "
        text += self.relative(self.difference) + interval
        if self.spread:
            text += f"; seeds alone differ by {self.relative(self.spread).lstrip('+')}"
        return text + "."

    def relative(self, value: float) -> str:
        """A difference as a share of the baseline's size, where it has one."""
        scale = self.scale
        return f"{value:+.2g}" if scale is None else format_share(value / scale, signed=True)

    def tells(self, end: float) -> bool:
        """Whether an end of the interval says anything: not beyond 1000 % of the baseline."""
        return abs(end) <= _WIDEST * (self.scale or math.inf)

    def _left_open(self) -> str:
        basis = f" ({self.basis})" if self.basis else ""
        return (
            f"That is no evidence of equal quality: {self.reason}{basis}; "
            "only whole training runs from several seeds show what it ends at."
        )


def judge(
    arm: str, kind: str, basis: str, baseline: Sequence[Trial], candidate: Sequence[Trial]
) -> QualityCheck:
    """What the trials of both sides, paired by seed, say about the candidate's quality.

    Within seed noise: the interval of the mean difference lies inside one standard deviation of
    the baseline's seeds. Worse: it lies beyond even the upper 95 % limit of that deviation, so
    that few seeds do not condemn what is only unlucky. Lower is better throughout.
    """
    by_seed = {trial.seed: trial for trial in candidate}
    all_pairs = [(one, by_seed[one.seed]) for one in baseline if one.seed in by_seed]
    pairs = [(a, b) for a, b in all_pairs if a.finite]
    check = _compared(QualityCheck(arm, kind, QualityStatus.UNCHECKED, basis), all_pairs)
    if not pairs:
        reason = "the baseline's own numbers are not finite"
        return replace(check, reason=reason if all_pairs else "nothing was run on both sides")
    if not all(one.numbers or one.output is not None for pair in pairs for one in pair):
        return replace(check, reason="the step returns no number; give the workload a metric")
    if pairs[0][0].numbers or not all(b.finite for _, b in pairs):
        check = replace(
            check,
            steps=max(a.steps for a, _ in pairs),
            seeds=tuple(a.seed for a, _ in pairs),
            losses_baseline=tuple(a.losses or () for a, _ in pairs),
            losses_candidate=tuple(b.losses or () for _, b in pairs),
        )
        return _judge_numbers(check, pairs, [trial for trial in baseline if trial.finite])
    return _judge_outputs(check, pairs)


def _compared(check: QualityCheck, pairs: Sequence[tuple[Trial, Trial]]) -> QualityCheck:
    """With what both sides answered to the same items; a run that repeats itself counts once."""
    known = {
        (a.answers, b.answers, a.targets)
        for a, b in pairs
        if a.answers and len(a.answers) == len(b.answers) and a.targets == b.targets
    }
    if not known:
        return check
    first, second, targets = (
        np.array([one for run in runs for one in run]) for runs in zip(*known, strict=True)
    )
    unstable = None
    if len(targets) == len(first):
        unstable = int(((first == targets) != (second == targets)).sum())
    diverging = int((first != second).sum())
    return replace(check, items=len(first), diverging=diverging, unstable=unstable)


def _judge_numbers(
    check: QualityCheck, pairs: Sequence[tuple[Trial, Trial]], baseline: Sequence[Trial]
) -> QualityCheck:
    broken = {b.seed: at for _, b in pairs if (at := _not_finite_at(b)) is not None}
    if broken:
        first, seeds = min(broken.values()), ", ".join(map(str, broken))
        what = f"the loss is not finite from step {first} on"
        return replace(
            check,
            status=QualityStatus.FAILED,
            reason=f"{what if first else 'the metric is not finite'} (seed {seeds}), "
            "where the baseline's is",
            measure="loss" if first else "metric",
        )
    with_metric = all(one.metric is not None for one in (*baseline, *(b for _, b in pairs)))
    losses = "training loss" if pairs[0][0].training else "loss"
    before = tuple(_value(a, with_metric) for a, _ in pairs)
    after = tuple(_value(b, with_metric) for _, b in pairs)
    of_baseline = np.array([_value(trial, with_metric) for trial in baseline])
    spread = float(np.std(of_baseline, ddof=1)) if len(of_baseline) > 1 else None
    difference, low, high = _mean_interval(np.array(after) - np.array(before))
    status, reason = _status(check.kind, low, high, spread, len(of_baseline))
    if check.kind == _SHOWN_BY_FEW_STEPS and all(a.same_as(b) for a, b in pairs):
        status = QualityStatus.SAME
    return replace(
        check,
        status=status,
        reason=reason,
        measure="metric" if with_metric else losses,
        baseline=before,
        candidate=after,
        difference=difference,
        low=low,
        high=high,
        spread=spread,
    )


def checks_of(events: Iterable[Event]) -> dict[str, QualityCheck]:
    """The checks an experiment was stored with, by arm."""
    # Outcomes on items (`quality.QualityRow`) are events of the same kind, without a status.
    details = [e.detail for e in events if e.kind == _EVENT and "status" in e.detail]
    return {detail["arm"]: _from_detail(detail) for detail in details}


def _from_detail(detail: Mapping[str, Any]) -> QualityCheck:
    def plain(value: Any) -> Any:
        return tuple(plain(item) for item in value) if isinstance(value, (list, tuple)) else value

    known = {field.name for field in fields(QualityCheck)}
    values = {name: plain(value) for name, value in detail.items() if name in known}
    return QualityCheck(**{**values, "status": QualityStatus(values["status"])})


def _value(trial: Trial, with_metric: bool) -> float:
    """The metric, or the mean loss over the later half of the steps."""
    if with_metric and trial.metric is not None:
        return trial.metric
    losses = trial.losses or ()
    return float(np.mean(losses[len(losses) // 2 :]))


def _mean_interval(differences: NDArray[np.float64]) -> tuple[float, float | None, float | None]:
    mean, n = float(differences.mean()), len(differences)
    if n < 2:
        return mean, None, None
    from scipy.special import stdtrit

    quantile = float(stdtrit(n - 1, (1 + _LEVEL) / 2))
    half = quantile * float(differences.std(ddof=1)) / math.sqrt(n)
    return mean, mean - half, mean + half


def _why_steps_tell_nothing(kind: str) -> str:
    return "it needs training" if kind == "needs-training" else "its random numbers differ"


def _status(
    kind: str, low: float | None, high: float | None, spread: float | None, seeds: int
) -> tuple[QualityStatus, str]:
    if kind != _SHOWN_BY_FEW_STEPS:
        return QualityStatus.OPEN, _why_steps_tell_nothing(kind)
    if low is None or high is None or spread is None:
        return QualityStatus.OPEN, "one seed gives no interval"
    if spread == 0:
        reason = "with one and the same run for every seed, chance has no size here"
        return QualityStatus.OPEN, reason
    from scipy.special import chdtri

    df = seeds - 1
    at_most = spread * math.sqrt(df / float(chdtri(df, _LEVEL)))
    if low > at_most:
        return QualityStatus.WORSE, ""
    if high < -at_most:
        return QualityStatus.BETTER, ""
    if -spread <= low and high <= spread:
        return QualityStatus.WITHIN, ""
    return QualityStatus.OPEN, "the interval is wider than what seeds differ by"


def _not_finite_at(trial: Trial) -> int | None:
    """The first step (from 1) whose number is not finite; 0 for the metric; None if all are."""
    for step, value in enumerate(trial.losses or (), 1):
        if not math.isfinite(value):
            return step
    return 0 if trial.metric is not None and not math.isfinite(trial.metric) else None


def _judge_outputs(check: QualityCheck, pairs: Sequence[tuple[Trial, Trial]]) -> QualityCheck:
    worst = 0.0
    for a, b in pairs:
        if a.shape != b.shape or a.output is None or b.output is None:
            return replace(check, reason=f"the outputs have other shapes: {a.shape} and {b.shape}")
        # What is infinite by intention (masks) is so on both sides.
        there = np.isfinite(a.output)
        if not np.isfinite(b.output[there]).all():
            reason = f"outputs are not finite (seed {b.seed}), where the baseline's are"
            failed = QualityStatus.FAILED
            return replace(check, status=failed, reason=reason, measure="output", steps=1)
        apart = float(np.max(np.abs(b.output[there] - a.output[there]), initial=0.0))
        size = float(np.max(np.abs(a.output[there]), initial=0.0))
        worst = max(worst, apart / size if size else (math.inf if apart else 0.0))
    status, reason = QualityStatus.OPEN, "no metric says whether that matters"
    if check.kind != _SHOWN_BY_FEW_STEPS:
        reason = _why_steps_tell_nothing(check.kind)
    elif all(a.same_as(b) for a, b in pairs):
        status, reason = QualityStatus.SAME, ""
    return replace(
        check,
        status=status,
        reason=reason,
        measure="output",
        steps=1,
        seeds=tuple(a.seed for a, _ in pairs),
        difference=worst,
    )


def format_share(share: float, *, signed: bool = False) -> str:
    """In percent, two digits that mean something, however small: ``"+0.021 %"``."""
    if not math.isfinite(share):
        return "beyond measure"
    percent = 100 * share
    text = f"{percent:.0f}" if abs(percent) >= 99.5 else f"{percent:.2g}"
    if abs(percent) and abs(percent) < 1e-4:
        text = f"{percent:.0e}"
    return ("+" if signed and share and not text.startswith("-") else "") + f"{text} %"
