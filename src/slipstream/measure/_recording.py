"""An experiment while it is being recorded: a block at a time, packed into columns at its end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np

from slipstream.errors import StoreError
from slipstream.measure import _codec as codec
from slipstream.measure import _rows as rows
from slipstream.measure.records import Claim, Event, Experiment, Series

_APPEND = "INSERT INTO chunk (experiment, sequence, samples, block, at_ms) VALUES (?, ?, ?, ?, ?)"


class Recording:
    """What `Store.begin` and `Store.resume` return.

    Attributes:
        experiment_id: the experiment's name in the store.
    """

    def __init__(self, database: rows.Database, number: int, experiment_id: str) -> None:
        self.experiment_id = experiment_id
        self._database = database
        self._number = number
        latest = database.read(
            "SELECT coalesce(max(sequence), -1) FROM chunk WHERE experiment = ?", number
        )
        self._sequence = int(latest[0][0]) + 1
        self._began = time.monotonic()

    def append(
        self,
        block: int,
        samples: Mapping[rows.Key, float | Sequence[float]],
        events: Sequence[Event] = (),
    ) -> None:
        """Make one block durable against a crash of this process.

        Args:
            block: its number; the same number may come again (several warm-up rounds).
            samples: by (arm, metric, phase), one value or several, in the metric's unit.
            events: of this block; written in the same transaction.

        Raises:
            StoreError: it cannot be written; the blocks before it are kept.
        """
        taken = [
            [arm, metric, phase, _floats(value)] for (arm, metric, phase), value in samples.items()
        ]
        at_ms = round((time.monotonic() - self._began) * 1e3)
        row = (self._number, self._sequence, codec.to_json(taken), block, at_ms)
        if events:
            with self._database.write() as db:
                db.execute(_APPEND, row)
                rows.keep_event(db, self._number, events)
        else:
            self._database.write_one(_APPEND, *row)
        self._sequence += 1

    def event(self, event: Event) -> None:
        """Make one event durable: a gate reading, a warning, a failed arm."""
        with self._database.write() as db:
            rows.keep_event(db, self._number, [event])

    def finish(self, experiment: Experiment, claims: Sequence[Claim]) -> None:
        """Pack what was recorded, and store the claims; one transaction.

        Args:
            experiment: as it ended. Series and events that it holds beyond those appended are
                stored too; series it leaves out are taken from what was appended.
            claims: those of ``claims.py``.

        Raises:
            StoreError: a series differs from what was appended (nothing measured is ever
                replaced), or it cannot be written.
        """
        recorded = rows.series(self._database, self._number)
        for key, series in recorded.items():
            _check_same(key, series, experiment.series.get(key, series))
        columns = {**recorded, **experiment.series}
        events = rows.events(self._database, self._number)
        known = {codec.to_json(event) for event in events}
        events += [event for event in experiment.events if codec.to_json(event) not in known]
        with self._database.write() as db:
            rows.keep_arms(db, self._number, experiment.arms)
            rows.keep_predictions(db, self._number, tuple(experiment.predictions.items()))
            db.executemany(
                "INSERT INTO sample_blob VALUES (?, ?, ?, ?, ?, ?, ?)",
                [(self._number, *key, *codec.pack_series(one)) for key, one in columns.items()],
            )
            db.execute(
                "INSERT INTO block SELECT experiment, sequence, block, at_ms FROM chunk"
                " WHERE experiment = ?",
                (self._number,),
            )
            db.execute("DELETE FROM chunk WHERE experiment = ?", (self._number,))
            db.execute("DELETE FROM event WHERE experiment = ?", (self._number,))
            rows.keep_event(db, self._number, events)
            db.executemany(
                "INSERT INTO claim VALUES (?, ?, ?, ?, ?, ?)",
                [
                    (self._number, n, claim.arm, claim.metric, claim.verdict, codec.to_json(claim))
                    for n, claim in enumerate(claims)
                ],
            )
            db.execute(
                "UPDATE experiment SET title = ?, settings = ?, finished = ?, writer = NULL"
                " WHERE number = ?",
                (
                    experiment.title,
                    codec.to_json(experiment.settings),
                    time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                    self._number,
                ),
            )
        # Give the space of the chunks back to the file system.
        self._database.give_back_space()


def _floats(value: float | Sequence[float]) -> list[float]:
    if isinstance(value, (int, float)):
        return [float(value)]
    return [float(one) for one in value]


def _check_same(key: rows.Key, appended: Series, final: Series) -> None:
    same = np.array_equal(appended.values, final.values, equal_nan=True)
    if not (same and np.array_equal(appended.blocks, final.blocks)):
        arm, metric, phase = key
        raise StoreError(
            "an experiment ended with other samples than were recorded while it ran",
            where=f"arm {arm}, metric {metric}, phase {phase}",
            remedy="this is a defect of the runner; what was recorded is kept",
        )
