"""Rows of the results store, written and read: the open file, and functions over it."""

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
        StoreError: here and from every method: see `slipstream.sqlite`.
    """

    def __init__(self, path: Path, *, read_only: bool) -> None:
        self.path = path
        self._connection = open_database(path, MIGRATIONS, read_only=read_only)

    def read(self, query: str, *parameters: object) -> Sequence[sqlite3.Row]:
        """All rows of `query`."""
        with errors_in_words(self.path):
            cursor = self._connection.cursor()
            cursor.row_factory = sqlite3.Row
            rows: Sequence[sqlite3.Row] = cursor.execute(query, parameters).fetchall()
            return rows

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """A transaction: all of the block's statements, or none."""
        with errors_in_words(self.path), transaction(self._connection) as connection:
            yield connection

    def write_one(self, statement: str, *parameters: object) -> None:
        """One statement, a transaction by itself."""
        with errors_in_words(self.path):
            self._connection.execute(statement, parameters)

    def give_back_space(self) -> None:
        """Shrink the file by what deleted rows left free."""
        with errors_in_words(self.path):
            # As a script: `execute` would free a single page, this statement's first step.
            self._connection.executescript("PRAGMA incremental_vacuum")

    def close(self) -> None:
        """Close the file."""
        self._connection.close()


def keep_environment(db: sqlite3.Connection, environment: Environment) -> None:
    """Its hashed facts, once for all experiments made there."""
    db.execute(
        "INSERT OR IGNORE INTO environment VALUES (?, ?)",
        (environment.env_id, codec.to_json(stable_facts(environment.facts))),
    )


def keep_arms(db: sqlite3.Connection, number: int, arms: Sequence[ArmRecord]) -> None:
    """The arms of experiment `number`, in place of those it had."""
    db.execute("DELETE FROM arm WHERE experiment = ?", (number,))
    db.executemany(
        "INSERT INTO arm VALUES (?, ?, ?, ?)",
        [(number, position, arm.name, codec.to_json(arm)) for position, arm in enumerate(arms)],
    )


def keep_predictions(
    db: sqlite3.Connection, number: int, by_arm: Sequence[tuple[str, PredictionRecord]]
) -> None:
    """What was predicted for the arms of experiment `number`."""
    db.executemany(
        "INSERT OR REPLACE INTO experiment_prediction VALUES (?, ?, ?)",
        [(number, arm, keep_prediction(db, prediction)) for arm, prediction in by_arm],
    )


def keep_prediction(db: sqlite3.Connection, prediction: PredictionRecord) -> int:
    """The row of `prediction`, made if it is new."""
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
    """One more row of events of experiment `number`."""
    if events:
        db.execute(
            "INSERT INTO event (experiment, events) VALUES (?, ?)",
            (number, codec.pack_events(events)),
        )


def series(database: Database, number: int) -> dict[Key, Series]:
    """Samples of experiment `number`, packed or still as they were appended."""
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
        for arm, metric, phase, taken in json.loads(samples):
            values, blocks = columns.setdefault((arm, metric, Phase(phase)), ([], []))
            values += taken
            blocks += [block] * len(taken)
    return {
        key: Series(np.array(values, np.float64), np.array(blocks, np.int32))
        for key, (values, blocks) in columns.items()
    }


def events(database: Database, number: int) -> list[Event]:
    """Events of experiment `number`, in the order they were recorded."""
    rows = database.read("SELECT events FROM event WHERE experiment = ? ORDER BY number", number)
    return [event for (packed,) in rows for event in codec.unpack_events(packed)]


def software() -> str:
    """The version of slipstream that writes."""
    return metadata.version("slipstream")


def writer() -> str:
    """This process, so that another one can see whether it still runs."""
    import psutil

    return f"{os.getpid()} {psutil.Process().create_time():.0f}"


def status(database: Database, row: sqlite3.Row) -> str:
    """`Experiment.status` of a row of table experiment."""
    if row["finished"] is not None:
        return final_status(events(database, row["number"]))
    import psutil

    pid, started = (row["writer"] or "0 0").split()
    try:
        # Process ids are used again; the time a process began tells it from a later namesake.
        # Two seconds: the kernel's clock behind it is adjusted now and then.
        if abs(psutil.Process(int(pid)).create_time() - float(started)) <= 2:
            return "running"
    except psutil.Error:
        pass
    return "interrupted"
