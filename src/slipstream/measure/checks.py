"""Quality of a candidate from its first steps, compared with the baseline from the same seeds.

Without items that are right or wrong (see `quality`), both sides run the same steps from several
seeds, and their results are compared: a metric, the training loss, or the output. The reference
is the standard deviation of the baseline over its seeds: rounding that moves the loss by a
hundredth of that is harmless. Conclusions that a few steps do not support (whether a smaller model
still learns) are never drawn.
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
# The kind of change (see `technique.QualityKind`) whose effect a few steps show.
_SHOWN_BY_FEW_STEPS = "rounding"
_EVENT = "quality"
_MAX_SHARE = 10.0


class QualityStatus(StrEnum):
    """Verdict on a candidate's quality."""

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
        steps: Number of steps.
        losses: Return value of each step; None if these are not numbers.
        metric: The workload's metric after the last step (lower is better), or None.
        output: float64 [n], the first step's output, evenly subsampled if large; None if the step
            returned no tensor or a single number.
        shape: Shape of the whole output.
        training: Whether the steps train.
        answers: Predicted class of each item of the batch after the last step; empty if the model
            is not a classifier.
        targets: True class of each item; empty if unknown.
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
        """All losses, and the metric if present."""
        return (*(self.losses or ()), *(() if self.metric is None else (self.metric,)))

    @property
    def finite(self) -> bool:
        """Whether all `numbers` are finite."""
        return all(map(math.isfinite, self.numbers))

    def same_as(self, other: Trial) -> bool:
        """Whether both trials gave bitwise identical results."""
        if self.output is not None and other.output is not None:
            return np.array_equal(self.output, other.output, equal_nan=True)
        return repr(self.numbers) == repr(other.numbers)


@dataclass(frozen=True)
class QualityCheck:
    """Quality check of one candidate, as stored with the experiment.

    Attributes:
        kind, basis: The technique's declared effect on numerics, and the evidence for it.
        reason: Why the status is what it is; may be empty.
        measure: The compared quantity; empty if none.
        steps: Steps before the comparison.
        seeds: Seeds of the pairs.
        baseline, candidate: The compared values, one per seed.
        difference, low, high: Mean of candidate minus baseline over the seeds with its 95 %
            interval (Student's t; None with one seed). For outputs: the largest difference
            divided by the largest output, maximum over the seeds, without an interval.
        spread: Standard deviation of the baseline over all its seeds.
        losses_baseline, losses_candidate: Losses of all steps, one row per seed.
        items, diverging, unstable: For a classifier: items of the batches, items that the sides
            classify differently, and items that only one side classifies correctly; None if
            targets are unknown.
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
        """Share of unstable items, or of diverging ones if targets are unknown; 95 % Wilson."""
        if not self.items:
            return None
        return wilson(self.diverging if self.unstable is None else self.unstable, self.items)

    @property
    def lost(self) -> bool:
        """Whether the candidate failed or is worse, so that its speed does not count."""
        return self.status in (QualityStatus.FAILED, QualityStatus.WORSE)

    @property
    def one_run(self) -> bool:
        """Whether all seeds gave identical results on both sides, so that no interval exists."""
        sides = (self.baseline, self.losses_baseline), (self.candidate, self.losses_candidate)
        return len(self.seeds) > 1 and all(
            len(set(values)) == 1 and len(set(losses)) <= 1 for values, losses in sides
        )

    @property
    def verdict(self) -> str:
        """Short verdict for a table."""
        if self.status is QualityStatus.OPEN and self.kind != _SHOWN_BY_FEW_STEPS:
            return f"{self.status}: {self.kind.replace('-', ' ')}"
        return str(self.status)

    @property
    def scale(self) -> float | None:
        """Magnitude of the baseline's mean, the reference of shown differences; None if zero."""
        size = abs(float(np.mean(self.baseline))) if self.baseline else 1.0
        return size if size > 0 and math.isfinite(size) else None

    @property
    def sentence(self) -> str:
        """The full finding in words."""
        return self._judgement() + self._agreement()

    def _agreement(self) -> str:
        if not self.items:
            return ""
        right = "" if self.unstable is None else f", {self.unstable} correct on one side only"
        return f" Of {self.items} answers, {self.diverging} differ{right}."

    def _judgement(self) -> str:
        start = f"{self.arm}, quality: "
        if self.status is QualityStatus.EXACT:
            return f"{start}identical numerics by construction ({self.basis})."
        if self.status is QualityStatus.UNCHECKED:
            return f"{start}not checked: {self.reason}. Its speed-up has no quality check."
        if self.status is QualityStatus.FAILED:
            return f"{start}failed: {self.reason}. A speed-up does not make up for that."
        text = start + self._comparison()
        if self.status is QualityStatus.WORSE:
            return f"{text} That is worse than chance explains; a speed-up does not make up for it."
        if self.kind != _SHOWN_BY_FEW_STEPS:
            return f"{text} {self._open_reason()}"
        if self.status is QualityStatus.OPEN:
            return f"{text} Open: {self.reason}."
        return f"{text} {str(self.status).capitalize()}."

    def to_event(self) -> Event:
        """Return the event that stores this check in an experiment."""
        return Event(0, _EVENT, {**asdict(self), "status": str(self.status)})

    def _comparison(self) -> str:
        steps = f"{self.steps} step{'s' * (self.steps != 1)}"
        seeds = f"{len(self.seeds)} seed{'s' * (len(self.seeds) != 1)}"
        if self.one_run:
            seeds += f" (the workload sets its own seed: one run, not {len(self.seeds)})"
        if self.status is QualityStatus.SAME or (self.baseline and self.baseline == self.candidate):
            return f"{self.measure} after {steps} from {seeds} is bitwise identical."
        if self.difference is None:
            return f"{self.measure} after {steps} from {seeds} cannot be compared."
        if not self.baseline:
            most = f"at most {format_share(self.difference)} of the largest"
            return f"{self.measure} from {seeds} differs by {most}."
        interval = ""
        if self.low is not None and self.high is not None and not self.one_run:
            ends = (
                self.relative(end) if self.is_informative(end) else "–"
                for end in (self.low, self.high)
            )
            interval = f" [{', '.join(ends)}]"
        text = f"{self.measure} after {steps} from {seeds} differs by "
        text += self.relative(self.difference) + interval
        if self.spread:
            text += f"; seeds alone differ by {self.relative(self.spread).lstrip('+')}"
        return text + "."

    def relative(self, value: float) -> str:
        """Format a difference as a share of `scale`, or as a number if that is None."""
        scale = self.scale
        return f"{value:+.2g}" if scale is None else format_share(value / scale, signed=True)

    def is_informative(self, end: float) -> bool:
        """Whether an interval end is informative: within 1000 % of the baseline."""
        return abs(end) <= _MAX_SHARE * (self.scale or math.inf)

    def _open_reason(self) -> str:
        basis = f" ({self.basis})" if self.basis else ""
        return (
            f"That is not evidence of equal quality: {self.reason}{basis}; "
            "only full training runs from several seeds show the final quality."
        )


def judge(
    arm: str, kind: str, basis: str, baseline: Sequence[Trial], candidate: Sequence[Trial]
) -> QualityCheck:
    """Judge the candidate's quality from the trials of both sides, paired by seed.

    Within seed noise: the interval of the mean difference is within one standard deviation of
    the baseline's seeds. Worse: the interval is above even the upper 95 % limit of that
    deviation, so that a few unlucky seeds do not suffice. Lower is better throughout.
    """
    by_seed = {trial.seed: trial for trial in candidate}
    all_pairs = [(trial, by_seed[trial.seed]) for trial in baseline if trial.seed in by_seed]
    pairs = [(a, b) for a, b in all_pairs if a.finite]
    check = _with_answers(QualityCheck(arm, kind, QualityStatus.UNCHECKED, basis), all_pairs)
    if not pairs:
        reason = "the baseline's own numbers are not finite"
        return replace(check, reason=reason if all_pairs else "no seed ran on both sides")
    if not all(trial.numbers or trial.output is not None for pair in pairs for trial in pair):
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


def _with_answers(check: QualityCheck, pairs: Sequence[tuple[Trial, Trial]]) -> QualityCheck:
    """Add the counts of differing answers to the same items; identical runs count once."""
    distinct = {
        (a.answers, b.answers, a.targets)
        for a, b in pairs
        if a.answers and len(a.answers) == len(b.answers) and a.targets == b.targets
    }
    if not distinct:
        return check
    first, second, targets = (
        np.array([label for run in runs for label in run]) for runs in zip(*distinct, strict=True)
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
    with_metric = all(trial.metric is not None for trial in (*baseline, *(b for _, b in pairs)))
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
    """Return the stored quality checks, by arm."""
    # Outcomes on items (`quality.QualityRow`) are events of the same kind, without a status.
    details = [e.detail for e in events if e.kind == _EVENT and "status" in e.detail]
    return {detail["arm"]: _from_detail(detail) for detail in details}


def _from_detail(detail: Mapping[str, Any]) -> QualityCheck:
    def plain(value: Any) -> Any:
        return tuple(plain(item) for item in value) if isinstance(value, (list, tuple)) else value

    names = {field.name for field in fields(QualityCheck)}
    values = {name: plain(value) for name, value in detail.items() if name in names}
    return QualityCheck(**{**values, "status": QualityStatus(values["status"])})


def _value(trial: Trial, with_metric: bool) -> float:
    """Return the metric, or the mean loss over the second half of the steps."""
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


def _why_steps_are_no_evidence(kind: str) -> str:
    return "it needs training" if kind == "needs-training" else "its random numbers differ"


def _status(
    kind: str, low: float | None, high: float | None, spread: float | None, seeds: int
) -> tuple[QualityStatus, str]:
    if kind != _SHOWN_BY_FEW_STEPS:
        return QualityStatus.OPEN, _why_steps_are_no_evidence(kind)
    if low is None or high is None or spread is None:
        return QualityStatus.OPEN, "one seed gives no interval"
    if spread == 0:
        reason = "all seeds gave the same run, so seed noise is unknown"
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
    return QualityStatus.OPEN, "the interval is wider than the seed noise"


def _not_finite_at(trial: Trial) -> int | None:
    """Return the first step (from 1) with a non-finite loss, 0 for the metric, None if finite."""
    for step, value in enumerate(trial.losses or (), 1):
        if not math.isfinite(value):
            return step
    return 0 if trial.metric is not None and not math.isfinite(trial.metric) else None


def _judge_outputs(check: QualityCheck, pairs: Sequence[tuple[Trial, Trial]]) -> QualityCheck:
    worst = 0.0
    for a, b in pairs:
        if a.shape != b.shape or a.output is None or b.output is None:
            return replace(check, reason=f"the output shapes differ: {a.shape} and {b.shape}")
        # Intended infinities (masks) occur on both sides.
        finite = np.isfinite(a.output)
        if not np.isfinite(b.output[finite]).all():
            reason = f"outputs are not finite (seed {b.seed}), where the baseline's are"
            failed = QualityStatus.FAILED
            return replace(check, status=failed, reason=reason, measure="output", steps=1)
        apart = float(np.max(np.abs(b.output[finite] - a.output[finite]), initial=0.0))
        size = float(np.max(np.abs(a.output[finite]), initial=0.0))
        worst = max(worst, apart / size if size else (math.inf if apart else 0.0))
    status, reason = QualityStatus.OPEN, "no metric shows whether that matters"
    if check.kind != _SHOWN_BY_FEW_STEPS:
        reason = _why_steps_are_no_evidence(check.kind)
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
    """Format a share in percent with two significant digits, such as ``"+0.021 %"``."""
    if not math.isfinite(share):
        return "beyond measure"
    percent = 100 * share
    text = f"{percent:.0f}" if abs(percent) >= 99.5 else f"{percent:.2g}"
    if abs(percent) and abs(percent) < 1e-4:
        text = f"{percent:.0e}"
    return ("+" if signed and share and not text.startswith("-") else "") + f"{text} %"
