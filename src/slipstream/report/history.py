"""Measurements of past predictions on this machine and of this workload."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.errors import InvalidArgumentError, StoreError
from slipstream.measure.comparison import Comparison
from slipstream.measure.environment import machine_id
from slipstream.measure.ledger import Ledger, Score
from slipstream.measure.measured import Measured, latest_measured, measured_in
from slipstream.measure.records import Environment
from slipstream.measure.render import speedup
from slipstream.measure.store import Store, default_path

# Number of latest scores that the page shows.
_SHOWN = 200


@dataclass(frozen=True)
class Past:
    """Past predictions on this machine, from the ledger.

    Attributes:
        state: ``ready``; ``none`` if no prediction was measured yet; ``failed`` if the store cannot
            be read.
        note: the state in a sentence.
        scores: latest measured predictions, oldest first.
        total: number of measured predictions.
        widen: (ratio, low, high) -> (low, high), widened by past errors; None without any.
        measured: latest measurement of the workload on this machine, by technique and metric.
    """

    state: str
    note: str = ""
    scores: list[dict[str, Any]] = field(default_factory=list)
    total: int = 0
    widen: Callable[[float, float, float], tuple[float, float]] | None = None
    measured: Mapping[tuple[str, str], Measured] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the part of the document."""
        return {
            "state": self.state, "note": self.note, "scores": self.scores, "total": self.total,
        }  # fmt: skip


def past_predictions(
    path: Path | None,
    environment: Environment,
    workload: str = "",
    comparisons: Sequence[Comparison] = (),
) -> Past:
    """Read past predictions from the results store at `path`, by default the usual one.

    The page shows a missing or unreadable store as a state.

    Args:
        workload: name of the workload whose measurements are returned.
        comparisons: further measurements of it, which count as the latest.

    Raises:
        InvalidArgumentError: a comparison did not measure `workload`.
    """
    passed = _passed(workload, comparisons)
    path = path or default_path()
    if not path.exists():
        return Past("none", measured=passed)
    try:
        with Store(path, read_only=True) as store:
            ledger = Ledger(store)
            scores = ledger.scores()
            note, widen = "none of them on this machine", None
            here = machine_id(environment)
            # Includes environments with other software on this machine.
            ours = {e.env_id for e in store.environments() if machine_id(e) == here}
            if ours:
                calibration = ledger.calibration(environment, "cpu")
                note, widen = calibration.note, calibration.widen
            measured = latest_measured(store, workload, environment)
    except StoreError as error:
        return Past("failed", str(error), measured=passed)
    shown = [_score(score) for score in scores[-_SHOWN:]]
    state = "ready" if scores else "none"
    return Past(state, note, shown, len(scores), widen, {**measured, **passed})


def _passed(workload: str, comparisons: Sequence[Comparison]) -> dict[tuple[str, str], Measured]:
    measured: dict[tuple[str, str], Measured] = {}
    for comparison in comparisons:
        claims = measured_in(comparison.experiment, comparison.claims, workload)
        by_technique = dict(claims)
        if not by_technique:
            raise InvalidArgumentError(
                "comparisons",
                f"'{comparison.experiment.title}' measured no technique on '{workload}'",
                remedy="pass what ss.prove returned for the workload of the graph",
            )
        measured |= by_technique
    return measured


def _score(score: Score) -> dict[str, Any]:
    prediction, claim = score.prediction, score.claim
    return {
        "workload": prediction.workload,
        "technique": prediction.technique,
        "metric": str(prediction.metric),
        "created": prediction.created,
        "predicted": speedup(prediction) or (prediction.ratio, prediction.low, prediction.high),
        "measured": speedup(claim) or (claim.ratio, claim.low, claim.high),
        "level": claim.level,
        "blocks": claim.blocks,
        "inside": score.inside,
        "experiment": score.experiment_id,
    }
