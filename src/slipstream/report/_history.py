"""Predictions that were measured later: how far to trust the next one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.errors import StoreError
from slipstream.measure.environment import machine_id
from slipstream.measure.ledger import Ledger, Score
from slipstream.measure.records import Environment
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
    """

    state: str
    note: str = ""
    scores: list[dict[str, Any]] = field(default_factory=list)
    total: int = 0
    widen: Callable[[float, float, float], tuple[float, float]] | None = None

    def to_json(self) -> dict[str, Any]:
        """As the document holds it."""
        return {
            "state": self.state, "note": self.note, "scores": self.scores, "total": self.total,
        }  # fmt: skip


def past_predictions(path: Path | None, environment: Environment) -> Past:
    """What the results store at `path` (by default the usual one) knows; it is only read.

    A store that is not there, or cannot be read, is a state that the page shows.
    """
    path = path or default_path()
    if not path.exists():
        return Past("none")
    try:
        with Store(path, read_only=True) as store:
            ledger = Ledger(store)
            scores = ledger.scores()
            note, widen = "none of them on this machine", None
            here = machine_id(environment)
            for known in store.environments():
                # Other software on the same machine is the same machine.
                if machine_id(known) == here:
                    calibration = ledger.calibration(known.env_id, "cpu")
                    note, widen = calibration.note, calibration.widen
                    break
    except StoreError as error:
        return Past("failed", str(error))
    shown = [_score(one) for one in scores[-_SHOWN:]]
    return Past("ready" if scores else "none", note, shown, len(scores), widen)


def _score(one: Score) -> dict[str, Any]:
    prediction, claim = one.prediction, one.claim
    return {
        "workload": prediction.workload,
        "technique": prediction.technique,
        "metric": str(prediction.metric),
        "created": prediction.created,
        "predicted": [prediction.ratio, prediction.low, prediction.high],
        "measured": [claim.ratio, claim.low, claim.high],
        "level": claim.level,
        "blocks": claim.blocks,
        "within": one.within,
        "experiment": one.experiment_id,
    }
