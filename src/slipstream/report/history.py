"""What was measured: of past predictions, to trust the next one; of this workload, to see it."""

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

# The latest ones; a page is no archive.
_SHOWN = 200


@dataclass(frozen=True)
class Past:
    """What the ledger says of predictions on this machine.

    Attributes:
        state: ``ready``; ``none`` when nothing predicted was measured yet; ``failed`` when the
            store cannot be read.
        note: the state in one sentence.
        scores: measured predictions, the latest last.
        total: how many there are.
        widen: (ratio, low, high) -> (low, high), as past errors demand; None without any.
        measured: by technique and metric, what the latest measurement of the workload on this
            machine found.
    """

    state: str
    note: str = ""
    scores: list[dict[str, Any]] = field(default_factory=list)
    total: int = 0
    widen: Callable[[float, float, float], tuple[float, float]] | None = None
    measured: Mapping[tuple[str, str], Measured] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As the document holds it."""
        return {
            "state": self.state, "note": self.note, "scores": self.scores, "total": self.total,
        }  # fmt: skip


def past_predictions(
    path: Path | None,
    environment: Environment,
    workload: str = "",
    comparisons: Sequence[Comparison] = (),
) -> Past:
    """What the results store at `path` (by default the usual one) knows; it is only read.

    A store that is not there, or cannot be read, is a state that the page shows.

    Args:
        workload: the name of the one whose measurements are told.
        comparisons: measurements of it besides those in the store; they count as the latest.

    Raises:
        InvalidArgumentError: a comparison that measured none of `workload`.
    """
    given = _given(workload, comparisons)
    path = path or default_path()
    if not path.exists():
        return Past("none", measured=given)
    try:
        with Store(path, read_only=True) as store:
            ledger = Ledger(store)
            scores = ledger.scores()
            note, widen = "none of them on this machine", None
            here = machine_id(environment)
            # Other software on the same machine is the same machine.
            ours = {e.env_id for e in store.environments() if machine_id(e) == here}
            if ours:
                calibration = ledger.calibration(environment, "cpu")
                note, widen = calibration.note, calibration.widen
            measured = latest_measured(store, workload, environment)
    except StoreError as error:
        return Past("failed", str(error), measured=given)
    shown = [_score(one) for one in scores[-_SHOWN:]]
    state = "ready" if scores else "none"
    return Past(state, note, shown, len(scores), widen, {**measured, **given})


def _given(workload: str, comparisons: Sequence[Comparison]) -> dict[tuple[str, str], Measured]:
    measured: dict[tuple[str, str], Measured] = {}
    for one in comparisons:
        about = dict(measured_in(one.experiment, one.claims, workload))
        if not about:
            raise InvalidArgumentError(
                "comparisons",
                f"'{one.experiment.title}' measured no technique on '{workload}'",
                remedy="give what ss.prove returned for the workload the graph is of",
            )
        measured |= about
    return measured


def _score(one: Score) -> dict[str, Any]:
    prediction, claim = one.prediction, one.claim
    return {
        "workload": prediction.workload,
        "technique": prediction.technique,
        "metric": str(prediction.metric),
        "created": prediction.created,
        "predicted": speedup(prediction) or (prediction.ratio, prediction.low, prediction.high),
        "measured": speedup(claim) or (claim.ratio, claim.low, claim.high),
        "level": claim.level,
        "blocks": claim.blocks,
        "inside": one.inside,
        "experiment": one.experiment_id,
    }
