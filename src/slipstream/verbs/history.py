"""What this machine's past says of predictions: the ledger, for one command or call."""

from __future__ import annotations

import contextlib
import sqlite3
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from slipstream.errors import SlipstreamWarning, StoreError
from slipstream.graph import Graph
from slipstream.measure.environment import capture
from slipstream.measure.ledger import Ledger, Score
from slipstream.measure.measured import Measured, latest_measured
from slipstream.measure.records import Environment, PredictionRecord
from slipstream.measure.store import Store, default_path
from slipstream.verbs.results import Prediction, applying


class History:
    """The ledger of predictions: widens intervals, keeps new predictions.

    Attributes:
        note: how past predictions turned out, in a sentence.
        kept: whether new predictions can be kept.
    """

    def __init__(self, store: Store, environment: Environment, *, kept: bool = True) -> None:
        self.store = store
        self.kept = kept
        self.environment = environment
        self._ledger = Ledger(store)
        self._calibration = self._ledger.calibration(environment, "cpu")
        self.note = self._calibration.note

    def widen(self, ratio: float, low: float, high: float) -> tuple[float, float]:
        """The interval of a prediction, as wide as this machine's past errors demand."""
        return self._calibration.widen(ratio, low, high)

    def keep(self, predictions: Iterable[Prediction], workload: str) -> None:
        """Record what was predicted, to be scored by a later measurement."""
        for prediction in applying(predictions):
            self.record(prediction.to_record(workload, self.environment.env_id))

    def record(self, prediction: PredictionRecord) -> None:
        """Keep one."""
        if self.kept:
            self._ledger.record(prediction, self.environment)

    def measured(
        self, predictions: Iterable[Prediction], workload: str, graph: Graph
    ) -> dict[str, Measured]:
        """By technique: what the latest measurement of it found on this machine."""
        threads = graph.meta.get("threads")
        latest = latest_measured(self.store, workload, self.environment, threads)
        return {
            p.technique: latest[p.technique, p.metric]
            for p in predictions
            if (p.technique, p.metric) in latest
        }

    def shown_before(self, experiment_id: str) -> list[Score]:
        """Scores, by that experiment, of what was shown before it; the latest of each."""
        scores = self._ledger.evidence()
        return [one for one in scores if one.experiment_id == experiment_id and not one.attached]


@contextlib.contextmanager
def history(path: Path | None, *, measures: bool = False) -> Iterator[History]:
    """The ledger in the results store at `path`.

    Without a `path` predictions are shown also where none can be kept, as in a folder that may only
    be read: with the past that can be read there, and a `SlipstreamWarning`.

    Args:
        measures: whether measurements are kept there, too, which nothing is done without.

    Raises:
        StoreError: the file is no store of ours, or it cannot be written and has to be.
    """
    try:
        store, kept = Store(path), True
    except StoreError as refused:
        unwritable = isinstance(refused.__cause__, OSError | sqlite3.OperationalError)
        if measures or path is not None or not unwritable:
            raise
        warnings.warn(
            f"this prediction is not kept, and no later measurement scores it: {refused.what}; "
            "--store names a file that can be written",
            SlipstreamWarning,
            stacklevel=3,
        )
        store, kept = _readable(default_path()), False
    with store:
        yield History(store, capture(torch=False), kept=kept)


def _readable(path: Path) -> Store:
    """What is kept there, to be looked at; an empty store in memory where nothing can be read."""
    with contextlib.suppress(StoreError):
        return Store(path, read_only=True)
    return Store(":memory:")
