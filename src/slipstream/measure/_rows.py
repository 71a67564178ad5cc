"""Read and write rows of the results store."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import numpy as np

from slipstream.measure import _codec as codec
from slipstream.measure._schema import MIGRATIONS
from slipstream.measure.environment import stable_facts
from slipstream.measure.records import (
    ArmRecord,
    Environment,
    Event,
    Metric,
    Phase,
    PredictionRecord,
    Series,
    final_status,
)
from slipstream.sqlite import errors_in_words, open_database, transaction

Key = tuple[str, Metric, Phase]
"""Arm, metric, phase."""


class Database:
    """A connection to the results store at `path`.

    Raises:
        StoreError: From the constructor and every method; see `slipstream.sqlite`.
    """

    def __init__(self, path: Path, *, read_only: bool) -> None:
        self.path = path
        self._connection = open_database(path, MIGRATIONS, read_only=read_only)

    def read(self, query: str, *parameters: object) -> Sequence[sqlite3.Row]:
        """Return all rows of `query`."""
        with errors_in_words(self.path):
            cursor = self._connection.cursor()
            cursor.row_factory = sqlite3.Row
            rows: Sequence[sqlite3.Row] = cursor.execute(query, parameters).fetchall()
            return rows

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """Run the statements of the ``with`` block in one transaction."""
        with errors_in_words(self.path), transaction(self._connection) as connection:
            yield connection

    def write_one(self, statement: str, *parameters: object) -> None:
        """Run one statement in its own transaction."""
        with errors_in_words(self.path):
            self._connection.execute(statement, parameters)

    def give_back_space(self) -> None:
        """Shrink the file by the space of deleted rows."""
        with errors_in_words(self.path):
            # `execute` would free only one page: it runs only the statement's first step.
            self._connection.executescript("PRAGMA incremental_vacuum")

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def keep_environment(db: sqlite3.Connection, environment: Environment) -> None:
    """Store the hashed facts of `environment`, once for all its experiments."""
    db.execute(
        "INSERT OR IGNORE INTO environment VALUES (?, ?)",
        (environment.env_id, codec.to_json(stable_facts(environment.facts))),
    )


def keep_arms(db: sqlite3.Connection, number: int, arms: Sequence[ArmRecord]) -> None:
    """Replace the stored arms of experiment `number`."""
    db.execute("DELETE FROM arm WHERE experiment = ?", (number,))
    db.executemany(
        "INSERT INTO arm VALUES (?, ?, ?, ?)",
        [(number, position, arm.name, codec.to_json(arm)) for position, arm in enumerate(arms)],
    )


def keep_predictions(
    db: sqlite3.Connection, number: int, by_arm: Sequence[tuple[str, PredictionRecord]]
) -> None:
    """Store the predictions for the arms of experiment `number`."""
    db.executemany(
        "INSERT OR REPLACE INTO experiment_prediction VALUES (?, ?, ?)",
        [(number, arm, keep_prediction(db, prediction)) for arm, prediction in by_arm],
    )


def keep_prediction(db: sqlite3.Connection, prediction: PredictionRecord) -> int:
    """Store `prediction` if it is new, and return its row number."""
    record = codec.to_json(prediction)
    db.execute(
        "INSERT OR IGNORE INTO prediction"
        " (workload, technique, metric, env_id, created, record) VALUES (?, ?, ?, ?, ?, ?)",
        (
            prediction.workload,
            prediction.technique,
            prediction.metric,
            prediction.env_id,
            prediction.created,
            record,
        ),
    )
    row = db.execute("SELECT number FROM prediction WHERE record = ?", (record,)).fetchone()
    return int(row[0])


def keep_event(db: sqlite3.Connection, number: int, events: Sequence[Event]) -> None:
    """Add `events` to experiment `number` as one row."""
    if events:
        db.execute(
            "INSERT INTO event (experiment, events) VALUES (?, ?)",
            (number, codec.pack_events(events)),
        )


def series(database: Database, number: int) -> dict[Key, Series]:
    """Return the samples of experiment `number`, from packed columns or appended chunks."""
    packed = database.read("SELECT * FROM sample_blob WHERE experiment = ?", number)
    if packed:
        return {
            (row["arm"], row["metric"], Phase(row["phase"])): codec.unpack_series(
                row["n"], row["values"], row["blocks"]
            )
            for row in packed
        }
    columns: dict[Key, tuple[list[float], list[int]]] = {}
    for block, samples in database.read(
        "SELECT block, samples FROM chunk WHERE experiment = ? ORDER BY sequence",
        number,
    ):
        for arm, metric, phase, sampled in json.loads(samples):
            values, blocks = columns.setdefault((arm, metric, Phase(phase)), ([], []))
            values += sampled
            blocks += [block] * len(sampled)
    return {
        key: Series(np.array(values, np.float64), np.array(blocks, np.int32))
        for key, (values, blocks) in columns.items()
    }


def events(database: Database, number: int) -> list[Event]:
    """Return the events of experiment `number` in recording order."""
    rows = database.read("SELECT events FROM event WHERE experiment = ? ORDER BY number", number)
    return [event for (packed,) in rows for event in codec.unpack_events(packed)]


def software() -> str:
    """Return the version of slipstream."""
    return metadata.version("slipstream")


def writer() -> str:
    """Return the id and start time of this process, by which others check if it still runs."""
    import psutil

    return f"{os.getpid()} {psutil.Process().create_time():.0f}"


def status(database: Database, row: sqlite3.Row) -> str:
    """Return `Experiment.status` of a row of table experiment."""
    if row["finished"] is not None:
        return final_status(events(database, row["number"]))
    import psutil

    pid, started = (row["writer"] or "0 0").split()
    try:
        # Process ids are reused; the start time identifies the process. The tolerance of two
        # seconds covers adjustments of the kernel's clock.
        if abs(psutil.Process(int(pid)).create_time() - float(started)) <= 2:
            return "running"
    except psutil.Error:
        pass
    return "interrupted"
