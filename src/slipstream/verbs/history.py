"""What this machine's past says of predictions: the ledger, for one command or call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from slipstream.graph import Graph
from slipstream.measure.environment import capture
from slipstream.measure.ledger import Ledger, Score
from slipstream.measure.measured import Measured, latest_measured
from slipstream.measure.records import Environment
from slipstream.measure.store import Store
from slipstream.verbs.results import Prediction, applying


class History:
    """The ledger of predictions: widens intervals, keeps new predictions.

    Attributes:
        note: how past predictions turned out, in a sentence.
    """

    def __init__(self, store: Store, environment: Environment) -> None:
        self.store = store
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
            record = prediction.to_record(workload, self.environment.env_id)
            self._ledger.record(record, self.environment)

    def measured(
        self, predictions: Iterable[Prediction], workload: str, graph: Graph
    ) -> dict[str, Measured]:
        """By technique: what the latest measurement of it found on this machine."""
        threads = graph.meta.get("threads")
        found = latest_measured(self.store, workload, self.environment, threads)
        return {
            p.technique: found[p.technique, p.metric]
            for p in predictions
            if (p.technique, p.metric) in found
        }

    def shown_before(self, experiment_id: str) -> list[Score]:
        """Scores, by that experiment, of what was shown before it; the latest of each."""
        scores = self._ledger.evidence()
        return [one for one in scores if one.experiment_id == experiment_id and not one.attached]


@contextlib.contextmanager
def history(path: Path | None) -> Iterator[History]:
    """The ledger in the results store at `path`."""
    with Store(path) as store:
        yield History(store, capture(torch=False))
