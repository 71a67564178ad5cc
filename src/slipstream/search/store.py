"""Storage of studies in SQLite: written by one process, readable by others.

Trials store the sequence numbers of their begin and end, from which a study can be replayed.
Committed trials survive ``kill -9``; a power failure loses at most the last batch.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import IO, Any

from slipstream.errors import StoreError, UnknownNameError
from slipstream.provenance import Provenance
from slipstream.search.checking import check_scored, check_types, undamaged
from slipstream.search.metrics import State, Trial, Value, parse_objectives
from slipstream.search.space import Space
from slipstream.sqlite import errors_in_words, open_database, transaction

MIGRATIONS = (
    """
    CREATE TABLE study (
        id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, space_id BLOB NOT NULL,
        space TEXT NOT NULL, definition TEXT NOT NULL, target TEXT, created REAL NOT NULL
    );
    CREATE TABLE metric (
        id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, unit TEXT NOT NULL
    );
    CREATE TABLE trial (
        study INTEGER NOT NULL REFERENCES study, number INTEGER NOT NULL, candidate BLOB NOT NULL,
        config TEXT NOT NULL, state TEXT NOT NULL, fidelity REAL NOT NULL, bracket INTEGER,
        rung INTEGER, parent INTEGER, asked INTEGER NOT NULL, told INTEGER NOT NULL,
        attempts INTEGER NOT NULL, started REAL, ended REAL, device_s REAL, violation REAL,
        reason TEXT, PRIMARY KEY (study, number)
    ) WITHOUT ROWID;
    CREATE TABLE measurement (
        study INTEGER NOT NULL, trial INTEGER NOT NULL, metric INTEGER NOT NULL REFERENCES metric,
        provenance TEXT NOT NULL, value REAL NOT NULL, stddev REAL, counts INTEGER NOT NULL,
        PRIMARY KEY (study, trial, metric, provenance)
    ) WITHOUT ROWID;
    """,
)
# A batch is committed at this age or size.
_MAX_BATCH_S, _MAX_BATCH = 0.005, 256
_TRIAL = (
    "INSERT INTO trial VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?) ON CONFLICT DO UPDATE SET "
    "state=excluded.state, told=excluded.told, attempts=excluded.attempts, "
    "started=excluded.started, ended=excluded.ended, device_s=excluded.device_s, "
    "violation=excluded.violation, reason=excluded.reason"
)
# Created with the first report, so that files without reports keep their schema.
_REPORTS = (
    "CREATE TABLE IF NOT EXISTS report (study INTEGER NOT NULL, trial INTEGER NOT NULL, "
    "step INTEGER NOT NULL, value REAL NOT NULL, PRIMARY KEY (study, trial, step)) WITHOUT ROWID"
)
_MEASUREMENT = "INSERT OR REPLACE INTO measurement VALUES (?,?,?,?,?,?,?)"


class Store:
    """File of a study, opened for writing and locked against other writers.

    Args:
        path: path of the file; None for no file, in which case nothing is stored.

    Raises:
        StoreError: the file cannot be written, or another process runs a study in it.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._waiting: dict[int, Trial] = {}
        self._metrics: dict[str, int] = {}
        self._since = 0.0
        self._study = 0
        self._lock: IO[str] | None = None
        if path is None:
            return
        self._connection = open_database(path, MIGRATIONS)
        with errors_in_words(path):
            self._connection.execute("PRAGMA wal_autocheckpoint=4000")
            self._lock = path.with_name(path.name + ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._connection.close()
            raise StoreError(
                "another process runs a study in this file", where=str(path),
                remedy="wait for it to end, or pass another file with --store",
            ) from None  # fmt: skip

    def open_study(
        self, name: str, space: Space, definition: Mapping[str, Any], target: str | None
    ) -> None:
        """Begin the study, or resume it.

        Raises:
            StoreError: the file has a study with this name but another space or definition.
        """
        if self.path is None:
            return
        with undamaged(self.path):
            check_types(self._connection, self.path)
            self._objectives = parse_objectives(definition["objectives"])
            self._open_study(self.path, name, space, definition, target)

    def _open_study(
        self, path: Path, name: str, space: Space, definition: Mapping[str, Any],
        target: str | None,
    ) -> None:  # fmt: skip
        text = json.dumps(definition, sort_keys=True)
        row = self._connection.execute(
            "SELECT id, space_id, definition, space FROM study WHERE name=?", (name,)
        ).fetchone()
        if row is None:
            values = (name, space.id, json.dumps(space.to_json()), text, target, time.time())
            row = self._connection.execute(
                "INSERT INTO study (name, space_id, space, definition, target, created) "
                "VALUES (?,?,?,?,?,?) RETURNING id", values,
            ).fetchone()  # fmt: skip
            self._study = int(row[0])
            return
        self._study = int(row[0])
        where = f"study '{name}' in {path}"
        remedy = "use another name or another --store, with warm_start= to learn from its trials"
        if row[1] != space.id:
            old, new = json.loads(row[3])["parameters"], space.to_json()["parameters"]
            changed = sorted(path for path in {*old, *new} if old.get(path) != new.get(path))
            what = ", ".join(changed) or "its rules"
            raise StoreError(f"its space has changed: {what}", where=where, remedy=remedy)
        stored = json.loads(row[2])
        changed = sorted(k for k in {*stored, *definition} if stored.get(k) != definition.get(k))
        if changed:
            what = ", ".join(
                f"{key} was {stored.get(key)!r} and is {definition.get(key)!r}" for key in changed
            )
            raise StoreError(f"the study has changed: {what}", where=where, remedy=remedy)

    def put(self, trial: Trial, units: Mapping[str, str]) -> None:
        """Add a trial that begins or ends to the current batch; commit the batch if it is due."""
        if self.path is None:
            return
        for metric, _ in trial.measurements:
            if metric not in self._metrics:
                self._metrics[metric] = self._metric(metric, units.get(metric, ""))
        if not self._waiting:
            self._since = time.monotonic()
        self._waiting[trial.number] = trial
        if len(self._waiting) >= _MAX_BATCH or time.monotonic() - self._since > _MAX_BATCH_S:
            self.flush()

    def _metric(self, name: str, unit: str) -> int:
        row = self._connection.execute(
            "INSERT INTO metric (name, unit) VALUES (?,?) ON CONFLICT DO UPDATE SET "
            "unit=excluded.unit RETURNING id", (name, unit),
        ).fetchone()  # fmt: skip
        return int(row[0])

    def flush(self) -> None:
        """Commit the current batch.

        Raises:
            StoreError: the file cannot be written, for example because the disk is full.
        """
        if self.path is None or not self._waiting:
            return
        trials = self._waiting.values()
        study = self._study
        rows = [
            (study, t.number, t.candidate.id, t.candidate.json, t.state, t.fidelity, t.bracket,
             t.rung, t.parent, t.ask_event, t.tell_event, t.attempts, t.started, t.ended,
             t.device_s, t.violation, t.reason)
            for t in trials
        ]  # fmt: skip
        measured = [
            (study, t.number, self._metrics[metric], provenance, value.value, value.stddev,
             int(t.values.get(metric) == value.value))
            for t in trials
            for (metric, provenance), value in t.measurements.items()
        ]  # fmt: skip
        reports = [
            (study, t.number, step, value) for t in trials for step, value in t.reports.items()
        ]
        with errors_in_words(self.path), transaction(self._connection):
            self._connection.executemany(_TRIAL, rows)
            self._connection.executemany(_MEASUREMENT, measured)
            if reports:
                self._connection.execute(_REPORTS)
                self._connection.executemany(
                    "INSERT OR REPLACE INTO report VALUES (?,?,?,?)", reports
                )
        self._waiting = {}

    def trials(self, space: Space) -> list[Trial]:
        """Return all trials of the study, sorted by number."""
        if self.path is None:
            return []
        with undamaged(self.path):
            trials = list(_trials(self._connection, self._study, space))
            check_scored(trials, self._objectives, self.path)
            return trials

    def close(self) -> None:
        """Commit the current batch and release the lock."""
        if self.path is None or self._lock is None:
            return
        try:
            self.flush()
        finally:
            self._connection.close()
            self._lock.close()
            self._lock = None


def _trials(connection: Any, study: int, space: Space) -> Iterator[Trial]:
    measured: dict[int, list[Any]] = {}
    names = dict(connection.execute("SELECT id, name FROM metric"))
    for row in connection.execute(
        "SELECT trial, metric, provenance, value, stddev, counts FROM measurement WHERE study=?",
        (study,),
    ):
        measured.setdefault(row[0], []).append(row)
    reports: dict[int, dict[int, float]] = {}
    if connection.execute("SELECT 1 FROM sqlite_master WHERE name='report'").fetchone():
        for trial, step, value in connection.execute(
            "SELECT trial, step, value FROM report WHERE study=? ORDER BY trial, step", (study,)
        ):
            reports.setdefault(trial, {})[step] = value
    provenances = {str(provenance): provenance for provenance in Provenance}
    states = {str(state): state for state in State}
    for row in connection.execute("SELECT * FROM trial WHERE study=? ORDER BY number", (study,)):
        (_, number, candidate, config, state, fidelity, bracket, rung, parent, begin, end,
         attempts, started, ended, device_s, violation, reason) = row  # fmt: skip
        values, measurements = {}, {}
        for _, metric, kind, value, stddev, counts in measured.get(number, ()):
            provenance = provenances[kind]
            measurements[names[metric], provenance] = Value(value, provenance, stddev)
            if counts:
                values[names[metric]] = value
        yield Trial(
            number, space.load(config, candidate), fidelity, bracket, rung, parent, states[state],
            values, measurements, violation, begin, end, attempts, started, ended, device_s,
            reason, reports.get(number, {}),
        )  # fmt: skip


class StoredStudy:
    """Contents of a stored study, which another process may be writing.

    Args:
        path: file of the study.
        name: name of the study; optional if the file has only one.

    Raises:
        StoreError: the file does not exist, is damaged, or has no study.
        UnknownNameError: the file has no study with this name, or has several and `name` is None.
    """

    def __init__(self, path: Path, name: str | None = None) -> None:
        with closing(open_database(path, MIGRATIONS, read_only=True)) as connection:
            with undamaged(path):
                check_types(connection, path)
                studies = dict(connection.execute("SELECT name, id FROM study ORDER BY created"))
            if not studies:
                raise StoreError("the file contains no study", where=str(path))
            if name is None and len(studies) > 1:
                raise UnknownNameError("study", "(none given)", studies, where=str(path))
            self.name = name or next(iter(studies))
            if self.name not in studies:
                raise UnknownNameError("study", self.name, studies, where=str(path))
            with undamaged(path):
                space, definition, self.target = connection.execute(
                    "SELECT space, definition, target FROM study WHERE id=?", (studies[self.name],)
                ).fetchone()
                self.space = Space.from_json(json.loads(space))
                self.definition: dict[str, Any] = json.loads(definition)
                self.objectives = parse_objectives(self.definition["objectives"])
                self.units: dict[str, str] = dict(
                    connection.execute("SELECT name, unit FROM metric")
                )
                self.trials = list(_trials(connection, studies[self.name], self.space))
                check_scored(self.trials, self.objectives, path)
