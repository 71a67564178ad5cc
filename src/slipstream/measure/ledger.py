"""The prediction ledger: what was predicted, what was measured later, and what that teaches.

Every prediction is kept. When a claim about the same workload, technique and metric is measured on
the same machine with as many threads, the prediction is *scored*: its residual is
``log(measured / predicted)``, and its *stretch* how many times wider the 90 % interval would have
had to be (in logarithms) to reach the measured ratio; a stretch of at most 1 is a hit.

From the stretches of this machine's past predictions follows a factor for the next one: widen its
interval by the stretch that nine in ten of the past ones did not exceed. With the quantile taken
at ``ceil(0.9 (n + 1))`` of n this holds its level for any distribution of errors, as long as the
next prediction is one more like the past ones (split conformal prediction with normalised scores:
V. Vovk, A. Gammerman and G. Shafer, "Algorithmic Learning in a Random World", 2005; J. Lei et al.,
"Distribution-Free Predictive Inference for Regression", 2018). It needs 9 past predictions; with
fewer, the largest stretch seen holds for n in n + 1 of them, and `Calibration` says that level.
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
# Half an interval narrower than this (relative) would make any error an endless stretch; nobody
# predicts a ratio to a part in a thousand.
_NARROWEST = 1e-3


@dataclass(frozen=True)
class Score:
    """A prediction beside what was measured.

    Attributes:
        residual: log(measured / predicted); 0.1 is 10 % more than predicted.
        stretch: by how much the interval must be widened to hold the measured ratio; below 1 is a
            hit.
        experiment_id: where it was measured.
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
    """What past predictions say about the next one's interval.

    Attributes:
        factor: multiply the half-widths of the log ratio's interval by this; at least 1.
        level: the confidence the widened interval has: 0.9, less with fewer than 9 predictions,
            None without any.
        n: distinct past predictions it rests on.
        coverage: fraction of them whose own interval held; None without any.
        coverage_low, coverage_high: its 95 % interval (Wilson).
        bias: median residual; positive means that we promise too much.
        note: the same in one sentence.
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
        """The interval of a new prediction, widened by `factor`."""
        below = math.log(ratio / low) if low > 0 else math.inf
        above = math.log(high / ratio)
        return ratio * math.exp(-self.factor * below), ratio * math.exp(self.factor * above)


class Ledger:
    """Predictions and their scores, in a results store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def record(self, prediction: PredictionRecord, environment: Environment | None = None) -> None:
        """Keep a prediction, before anything is measured.

        Args:
            environment: what it was made in, so that `calibration` finds the machine again.

        Raises:
            StoreError: it cannot be written.
        """
        self._store.record_prediction(prediction, environment)

    def scores(self) -> tuple[Score, ...]:
        """One score per claim about something predicted, in the order of the measurements.

        An experiment scores the predictions it was begun with. A claim without one scores the
        latest prediction made before, of the same workload, technique and machine, and no other
        claim scores that. Claims that are not trustworthy, or too noisy to tell, score nothing.
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
        """How far to trust predictions of `metric` on the machine of `environment`, or of its id.

        Other software and other code on the same machine count too; other machines do not. Several
        predictions of one workload and technique are one piece of evidence: the latest measurement.

        Raises:
            UnknownNameError: an id in which nothing was ever recorded.
        """
        if isinstance(environment, str):
            environment = self._store.environment(environment)
        machine = machine_id(environment)
        here = {e.env_id for e in self._store.environments() if machine_id(e) == machine}
        # Of the measurement: only experiments are sure to have kept theirs.
        done = {one.experiment_id for one in self._store.list() if one.env_id in here}
        latest = {
            (score.prediction.workload, score.prediction.technique): score
            for score in self.scores()
            if score.prediction.metric == metric and score.experiment_id in done
        }
        return calibrate(tuple(latest.values()), where=str(self._store.path))


def calibrate(scores: Sequence[Score], *, where: str = "the store") -> Calibration:
    """What `scores`, one a distinct prediction, say about the next one.

    Args:
        where: what holds them, for the note: others' predictions lie in other stores.
    """
    n = len(scores)
    if n == 0:
        note = (
            f"history: {where} holds no prediction that `slipstream prove` checked on this machine "
            "yet; so intervals here are the simulation's own"
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
    """What was checked, how it turned out, and what it did to the intervals."""
    checked = f"{n} earlier prediction{'s were' if n > 1 else ' was'} checked on this machine"
    if n == 1:
        held = "the measured speed-up was " + ("inside" if hits else "outside") + " its interval"
    else:
        held = f"the measured speed-up was inside the interval of {hits}"
    text = f"history: {checked} by `slipstream prove`, and {held}; "
    if factor < 1.005:
        text += "so intervals here are the simulation's own"
    else:
        text += f"so intervals here are {factor:.2f} times as wide as the simulation's own"
    if level < _LEVEL:
        text += f" (nine are needed to vouch for 90 %; so few vouch for {100 * level:.0f} %)"
    return text


def subject(experiment: Experiment, arm: ArmRecord) -> tuple[str, str]:
    """Workload and technique of an arm, in the words of the ledger.

    An arm without words of its own is named by the title and its own name, as `prove` names them.
    """
    return arm.workload or experiment.title, arm.technique or arm.name


def _usable(claim: Claim) -> bool:
    return claim.verdict is not Verdict.UNTRUSTWORTHY and 0 < claim.ratio < math.inf


def _score(prediction: PredictionRecord, claim: Claim, experiment_id: str) -> Score:
    residual = math.log(claim.ratio / prediction.ratio)
    end = prediction.high if residual > 0 else prediction.low
    reach = max(abs(math.log(end / prediction.ratio)), _NARROWEST)
    return Score(prediction, claim, experiment_id, residual, abs(residual) / reach)
