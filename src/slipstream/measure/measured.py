"""Latest stored measurements of a workload, by technique."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.measure.environment import machine_id
from slipstream.measure.ledger import subject
from slipstream.measure.records import (
    Claim,
    Environment,
    Experiment,
    Metric,
    PredictionRecord,
    Verdict,
)
from slipstream.measure.render import change_json
from slipstream.measure.store import Store


@dataclass(frozen=True)
class Measured:
    """A claim about one technique on one workload, and when it was measured.

    Attributes:
        threads: Number of threads that the workload computed on; None if unknown.
        predicted: Prediction that the experiment started with; None without one.
    """

    claim: Claim
    created: str
    threads: int | None = None
    predicted: PredictionRecord | None = None

    @property
    def inside(self) -> bool | None:
        """Whether the claim is inside the predicted interval.

        None if untrustworthy, too noisy to tell, or not predicted.
        """
        if self.predicted is None or self.claim.verdict is Verdict.UNTRUSTWORTHY:
            return None
        return self.predicted.holds(self.claim)

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON, with the prediction that was measured."""
        claim = self.claim
        return {
            **change_json(claim),
            **({} if self.predicted is None else change_json(self.predicted, "predicted_")),
            "inside": self.inside,
            "level": claim.level,
            "metric": claim.metric,
            "blocks": claim.blocks,
            "verdict": str(claim.verdict),
            "created": self.created,
        }


def measured_in(
    experiment: Experiment, claims: Sequence[Claim], workload: str
) -> Iterator[tuple[tuple[str, Metric], Measured]]:
    """Yield an experiment's claims about techniques on `workload`, by technique and metric."""
    arms = {arm.name: arm for arm in experiment.arms}
    for claim in claims:
        arm = arms.get(claim.arm)
        if arm is None:
            continue
        about, technique = subject(experiment, arm)
        if about != workload or claim.baseline != experiment.settings.baseline:
            continue
        if 0 < claim.ratio < math.inf:
            predicted = experiment.predictions.get(claim.arm)
            threads = predicted.detail.get("threads") if predicted else None
            if predicted is not None and predicted.metric != claim.metric:
                predicted = None
            yield (
                (technique, claim.metric),
                Measured(claim, experiment.created, threads, predicted),
            )


def latest_measured(
    store: Store, workload: str, environment: Environment, threads: int | None = None
) -> dict[tuple[str, Metric], Measured]:
    """Return the latest stored claims about `workload` on the machine of `environment`.

    Args:
        threads: Skip claims known to have another number of threads; None for any number.
    """
    machine = machine_id(environment)
    here = {e.env_id for e in store.environments() if machine_id(e) == machine}
    latest: dict[tuple[str, Metric], Measured] = {}
    for summary in store.list():
        if summary.env_id not in here:
            continue
        experiment = store.outline(summary.experiment_id)
        claims = store.claims(summary.experiment_id)
        latest |= {
            key: measured
            for key, measured in measured_in(experiment, claims, workload)
            if threads is None or measured.threads in (None, threads)
        }
    return latest
