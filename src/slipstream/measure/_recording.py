"""Recording of a running experiment, block by block; packed into columns when it finishes."""

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
    """A running experiment, as returned by `Store.begin` and `Store.resume`.

    Attributes:
        experiment_id: The experiment's name in the store.
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
        """Store one block, so that it survives a crash of this process.

        Args:
            block: Block number; may repeat, as in several warm-up rounds.
            samples: One or several values by (arm, metric, phase), in the metric's unit.
            events: Events of this block, written in the same transaction.

        Raises:
            StoreError: The block cannot be written; earlier blocks remain stored.
        """
        values = [
            [arm, metric, phase, _floats(value)] for (arm, metric, phase), value in samples.items()
        ]
        at_ms = round((time.monotonic() - self._began) * 1e3)
        row = (self._number, self._sequence, codec.to_json(values), block, at_ms)
        if events:
            with self._database.write() as db:
                db.execute(_APPEND, row)
                rows.keep_event(db, self._number, events)
        else:
            self._database.write_one(_APPEND, *row)
        self._sequence += 1

    def event(self, event: Event) -> None:
        """Store one event: a gate reading, a warning, a failed arm."""
        with self._database.write() as db:
            rows.keep_event(db, self._number, [event])

    def finish(self, experiment: Experiment, claims: Sequence[Claim]) -> None:
        """Pack the recorded samples and store the claims, in one transaction.

        Args:
            experiment: The finished experiment. Its series and events that were not appended are
                stored too; series that it lacks are taken from the appended ones.
            claims: Its claims, see ``claims.py``.

        Raises:
            StoreError: A series differs from the appended samples, which are never replaced, or
                the store cannot be written.
        """
        recorded = rows.series(self._database, self._number)
        for key, series in recorded.items():
            _check_same(key, series, experiment.series.get(key, series))
        columns = {**recorded, **experiment.series}
        events = rows.events(self._database, self._number)
        stored = {codec.to_json(event) for event in events}
        events += [event for event in experiment.events if codec.to_json(event) not in stored]
        with self._database.write() as db:
            rows.keep_arms(db, self._number, experiment.arms)
            rows.keep_predictions(db, self._number, tuple(experiment.predictions.items()))
            db.executemany(
                "INSERT INTO sample_blob VALUES (?, ?, ?, ?, ?, ?, ?)",
                [
                    (self._number, *key, *codec.pack_series(column))
                    for key, column in columns.items()
                ],
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
        self._database.give_back_space()


def _floats(value: float | Sequence[float]) -> list[float]:
    if isinstance(value, (int, float)):
        return [float(value)]
    return [float(number) for number in value]


def _check_same(key: rows.Key, appended: Series, final: Series) -> None:
    same = np.array_equal(appended.values, final.values, equal_nan=True)
    if not (same and np.array_equal(appended.blocks, final.blocks)):
        arm, metric, phase = key
        raise StoreError(
            "an experiment finished with samples other than those recorded while it ran",
            where=f"arm {arm}, metric {metric}, phase {phase}",
            remedy="this is a defect of slipstream; the recorded samples remain stored",
        )
