"""What was measured of a workload and kept: by technique, the latest."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.measure.environment import machine_id
from slipstream.measure.ledger import subject
from slipstream.measure.records import Claim, Environment, Experiment, Metric, Verdict
from slipstream.measure.store import Store


@dataclass(frozen=True)
class Measured:
    """A claim about one technique on one workload, and when it was measured.

    Attributes:
        threads: how many the workload computed on; None where that is not known.
    """

    claim: Claim
    created: str
    threads: int | None = None

    def to_json(self, low: float, high: float) -> dict[str, Any]:
        """As results are shown, beside a predicted ratio of `low` to `high`."""
        claim = self.claim
        trusted = claim.verdict is not Verdict.UNTRUSTWORTHY
        return {
            "ratio": claim.ratio,
            "interval": [claim.low, claim.high],
            "level": claim.level,
            "metric": claim.metric,
            "blocks": claim.blocks,
            "verdict": str(claim.verdict),
            "created": self.created,
            "within": low <= claim.ratio <= high if trusted else None,
        }


def measured_in(
    experiment: Experiment, claims: Sequence[Claim], workload: str
) -> Iterator[tuple[tuple[str, Metric], Measured]]:
    """The claims of one experiment about techniques on `workload`, by technique and metric."""
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
            yield (technique, claim.metric), Measured(claim, experiment.created, threads)


def latest_measured(
    store: Store, workload: str, environment: Environment, threads: int | None = None
) -> dict[tuple[str, Metric], Measured]:
    """What `store` holds of `workload` on the machine of `environment`; the latest wins.

    Args:
        threads: leave out what is known to be of another number of them; None for any.
    """
    here = machine_id(environment)
    ours = {e.env_id for e in store.environments() if machine_id(e) == here}
    latest: dict[tuple[str, Metric], Measured] = {}
    for summary in store.list():
        if summary.env_id not in ours:
            continue
        experiment = store.outline(summary.experiment_id)
        claims = store.claims(summary.experiment_id)
        latest |= {
            key: one
            for key, one in measured_in(experiment, claims, workload)
            if threads is None or one.threads in (None, threads)
        }
    return latest
