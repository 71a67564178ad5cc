"""Past predictions and measurements of this machine, for one command or call."""

from __future__ import annotations

import contextlib
import sqlite3
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.errors import SlipstreamWarning, StoreError
from slipstream.graph import Graph
from slipstream.measure.environment import capture, machine_id
from slipstream.measure.ledger import Ledger
from slipstream.measure.measured import Measured, latest_measured
from slipstream.measure.records import Environment, PredictionRecord
from slipstream.measure.store import Store, default_path
from slipstream.verbs.request import Request
from slipstream.verbs.results import Prediction, applying

if TYPE_CHECKING:
    from slipstream.cluster import Cluster


class History:
    """The ledger of predictions: widens intervals and records new predictions.

    Attributes:
        note: a sentence on how past predictions compared with measurements.
        writable: whether new predictions can be recorded.
    """

    def __init__(self, store: Store, environment: Environment, *, writable: bool = True) -> None:
        self.store = store
        self.writable = writable
        self.environment = environment
        self._ledger = Ledger(store)
        self._calibration = self._ledger.calibration(environment, "cpu")
        self.note = self._calibration.note

    def widen(self, ratio: float, low: float, high: float) -> tuple[float, float]:
        """Widen the interval of a prediction to this machine's past errors."""
        return self._calibration.widen(ratio, low, high)

    def keep(self, predictions: Iterable[Prediction], workload: str) -> dict[str, PredictionRecord]:
        """Record predictions for later scoring; returns the records by technique."""
        env_id = self.environment.env_id
        records = {p.technique: p.to_record(workload, env_id) for p in applying(predictions)}
        for record in records.values():
            self.record(record)
        return records

    def record(self, prediction: PredictionRecord) -> None:
        if self.writable:
            self._ledger.record(prediction, self.environment)

    def measured(
        self, predictions: Iterable[Prediction], workload: str, graph: Graph
    ) -> dict[str, Measured]:
        """Return the latest measurement of each technique on this machine."""
        threads = graph.meta.get("threads")
        latest = latest_measured(self.store, workload, self.environment, threads)
        return {
            p.technique: latest[p.technique, p.metric]
            for p in predictions
            if (p.technique, p.metric) in latest
        }

    def shown(
        self, request: Request, cluster: Cluster | None = None
    ) -> dict[str, PredictionRecord]:
        """Return the latest predictions shown for `request` on this machine, by technique.

        Those for another version of the file, other arguments or threads, or another cluster are
        left out.
        """
        name, fingerprint = request.workload().name, request.fingerprint()
        here = machine_id(self.environment)
        ours = {e.env_id for e in self.store.environments() if machine_id(e) == here}
        return {
            record.technique: record
            for record in self.store.predictions()
            if (record.workload, record.detail.get("request")) == (name, fingerprint)
            and record.env_id in ours
            and record.detail.get("cluster") in (None, cluster and cluster.name)
        }


@contextlib.contextmanager
def history(path: Path | None, *, measures: bool = False) -> Iterator[History]:
    """Open the ledger in the results store at `path`.

    Without a `path`, an unwritable default store gives a `SlipstreamWarning` and is only read.

    Args:
        measures: whether measurements will be recorded, which requires a writable store.

    Raises:
        StoreError: the file is not a results store, or has to be written and cannot.
    """
    try:
        store, writable = Store(path), True
    except StoreError as error:
        unwritable = isinstance(error.__cause__, OSError | sqlite3.OperationalError)
        if measures or path is not None or not unwritable:
            raise
        warnings.warn(
            f"this prediction is not recorded, so no measurement can score it: {error.what}; "
            "pass --store with a writable file",
            SlipstreamWarning,
            stacklevel=3,
        )
        store, writable = _readable(default_path()), False
    with store:
        yield History(store, capture(torch=False), writable=writable)


def _readable(path: Path) -> Store:
    """Open the store read-only; an empty store in memory if it cannot be read."""
    with contextlib.suppress(StoreError):
        return Store(path, read_only=True)
    return Store(":memory:")
