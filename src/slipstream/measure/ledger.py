"""The prediction ledger: predictions, later measurements of them, and the resulting calibration.

Every prediction is stored. When a claim about the same workload, technique and metric is measured
on the same machine with the same number of threads, the prediction is *scored*: its residual is
``log(measured / predicted)``, and its *stretch* is the factor by which its 90 % interval (in
logarithms) must be widened to reach the measured ratio; a stretch of at most 1 is a hit.

The interval of the next prediction on a machine is widened by the 90 % quantile of the stretches of
past ones. With the quantile at rank ``ceil(0.9 (n + 1))`` of n this holds its level for any
distribution of errors, if the next prediction is exchangeable with the past ones (split conformal
prediction with normalized scores:
V. Vovk, A. Gammerman and G. Shafer, "Algorithmic Learning in a Random World", 2005; J. Lei et al.,
"Distribution-Free Predictive Inference for Regression", 2018). It needs 9 past predictions; with
fewer, the largest stretch has level n / (n + 1), which `Calibration` reports.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from slipstream.measure.environment import machine_id
from slipstream.measure.quality import wilson
from slipstream.measure.records import (
    ArmRecord,
    Claim,
    Environment,
    Experiment,
    Metric,
    PredictionRecord,
    Verdict,
)
from slipstream.measure.store import Store

_LEVEL = 0.9
# Minimum half-width (relative), since an interval of width 0 would give infinite stretches.
_MIN_HALF_WIDTH = 1e-3


@dataclass(frozen=True)
class Score:
    """A prediction compared with its measurement.

    Attributes:
        residual: log(measured / predicted); 0.1 is 10 % more than predicted.
        stretch: Factor by which the interval must be widened to contain the measured ratio; at
            most 1 is a hit.
        experiment_id: Experiment that measured it.
    """

    prediction: PredictionRecord
    claim: Claim
    experiment_id: str
    residual: float
    stretch: float

    @property
    def inside(self) -> bool:
        """Whether the measured ratio is inside the predicted interval."""
        return bool(self.prediction.holds(self.claim))


@dataclass(frozen=True)
class Calibration:
    """Calibration of a new prediction's interval from past predictions.

    Attributes:
        factor: Factor for the half-widths of the log ratio's interval; at least 1.
        level: Confidence of the widened interval: 0.9, less with fewer than 9 predictions, None
            without any.
        n: Number of distinct past predictions.
        coverage: Fraction of them that were hits; None without any.
        coverage_low, coverage_high: 95 % interval of `coverage` (Wilson).
        bias: Median residual; positive if predictions are too optimistic.
        note: The calibration in one sentence.
    """

    factor: float
    level: float | None
    n: int
    coverage: float | None
    coverage_low: float
    coverage_high: float
    bias: float | None
    note: str

    def widen(self, ratio: float, low: float, high: float) -> tuple[float, float]:
        """Return the interval of a new prediction, widened by `factor`."""
        below = math.log(ratio / low) if low > 0 else math.inf
        above = math.log(high / ratio)
        return ratio * math.exp(-self.factor * below), ratio * math.exp(self.factor * above)


class Ledger:
    """Predictions and their scores, in a results store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def record(self, prediction: PredictionRecord, environment: Environment | None = None) -> None:
        """Store a prediction before its measurement.

        Args:
            environment: Environment of the prediction, by which `calibration` finds its machine.

        Raises:
            StoreError: The store cannot be written.
        """
        self._store.record_prediction(prediction, environment)

    def scores(self) -> tuple[Score, ...]:
        """Return one score per predicted claim, in the order of the measurements.

        An experiment scores the predictions it started with. Other claims score the latest earlier
        prediction of the same workload, technique and machine, which then counts as scored.
        Untrustworthy claims and those too noisy to tell score nothing.
        """
        waiting = list(self._store.predictions())
        machines = {e.env_id: machine_id(e) for e in self._store.environments()}
        scored: list[Score] = []
        for summary in self._store.list():
            claims = self._store.claims(summary.experiment_id)
            if not claims:
                continue
            experiment = self._store.outline(summary.experiment_id)
            arms = {arm.name: arm for arm in experiment.arms}
            for claim in claims:
                arm = arms.get(claim.arm)
                if arm is None or not _usable(claim):
                    continue
                attached = experiment.predictions.get(claim.arm)
                if attached is not None and attached.metric == claim.metric:
                    waiting = [other for other in waiting if other != attached]
                    scored.append(_score(attached, claim, summary.experiment_id))
                    continue
                fitting = [
                    prediction
                    for prediction in waiting
                    if prediction.metric == claim.metric
                    and (prediction.workload, prediction.technique) == subject(experiment, arm)
                    and machines.get(prediction.env_id) == machines[summary.env_id]
                    and prediction.created <= summary.created
                ]
                if fitting:
                    waiting = [other for other in waiting if other not in fitting]
                    scored.append(_score(fitting[-1], claim, summary.experiment_id))
        return tuple(score for score in scored if score.prediction.holds(score.claim) is not None)

    def calibration(self, environment: str | Environment, metric: Metric = "wall") -> Calibration:
        """Calibrate predictions of `metric` on the machine of `environment`, which may be its id.

        Measurements with other software and code on the same machine count; those on other machines
        do not. Of several predictions of one workload and technique, the latest measured counts.

        Raises:
            UnknownNameError: The store has no environment with this id.
        """
        if isinstance(environment, str):
            environment = self._store.environment(environment)
        machine = machine_id(environment)
        here = {e.env_id for e in self._store.environments() if machine_id(e) == machine}
        # Match the measurement's environment: a prediction's may not be stored.
        done = {summary.experiment_id for summary in self._store.list() if summary.env_id in here}
        latest = {
            (score.prediction.workload, score.prediction.technique): score
            for score in self.scores()
            if score.prediction.metric == metric and score.experiment_id in done
        }
        return calibrate(tuple(latest.values()), where=str(self._store.path))


def calibrate(scores: Sequence[Score], *, where: str = "the store") -> Calibration:
    """Calibrate the next prediction from `scores`, one per distinct prediction.

    Args:
        where: Name of the store, for the note.
    """
    n = len(scores)
    if n == 0:
        note = (
            f"history: {where} has no prediction that `slipstream prove` checked on this machine "
            "yet, so intervals are those of the simulation"
        )
        return Calibration(1.0, None, 0, None, 0.0, 1.0, None, note)
    stretches = sorted(score.stretch for score in scores)
    rank = math.ceil(_LEVEL * (n + 1))
    level = _LEVEL if rank <= n else n / (n + 1)
    factor = max(1.0, stretches[min(rank, n) - 1])
    hits = sum(score.inside for score in scores)
    held = wilson(hits, n)
    bias = median(score.residual for score in scores)
    note = _in_words(hits, n, factor, level)
    return Calibration(factor, level, n, held.estimate, held.low, held.high, bias, note)


def _in_words(hits: int, n: int, factor: float, level: float) -> str:
    """Describe the number of checks, their outcome, and the effect on intervals."""
    checked = f"{n} earlier prediction{'s were' if n > 1 else ' was'} checked on this machine"
    if n == 1:
        held = "the measured speed-up was " + ("inside" if hits else "outside") + " its interval"
    else:
        held = f"the measured speed-up was inside the interval of {hits}"
    text = f"history: {checked} by `slipstream prove`, and {held}; "
    if factor < 1.005:
        text += "so intervals are those of the simulation"
    else:
        text += f"so intervals are {factor:.2f} times as wide as those of the simulation"
    if level < _LEVEL:
        give = "gives" if n == 1 else "give"
        text += f" (90 % confidence needs nine predictions; {n} {give} {100 * level:.0f} %)"
    return text


def subject(experiment: Experiment, arm: ArmRecord) -> tuple[str, str]:
    """Return the workload and technique of an arm, as named in the ledger.

    They default to the experiment's title and the arm's name, as for `prove`.
    """
    return arm.workload or experiment.title, arm.technique or arm.name


def _usable(claim: Claim) -> bool:
    return claim.verdict is not Verdict.UNTRUSTWORTHY and 0 < claim.ratio < math.inf


def _score(prediction: PredictionRecord, claim: Claim, experiment_id: str) -> Score:
    residual = math.log(claim.ratio / prediction.ratio)
    end = prediction.high if residual > 0 else prediction.low
    reach = max(abs(math.log(end / prediction.ratio)), _MIN_HALF_WIDTH)
    return Score(prediction, claim, experiment_id, residual, abs(residual) / reach)
