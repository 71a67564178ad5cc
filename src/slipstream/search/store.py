"""A study's facts in one SQLite file: append-only, written by one process, read by any.

Trials carry their places in the order of asking and telling, which is all that a replay needs. What
was committed survives ``kill -9``; a power cut loses the last batch at most.
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
# A batch is committed when it is that old or that long.
_BATCH_S, _BATCH = 0.005, 256
_TRIAL = (
    "INSERT INTO trial VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?) ON CONFLICT DO UPDATE SET "
    "state=excluded.state, told=excluded.told, attempts=excluded.attempts, "
    "started=excluded.started, ended=excluded.ended, device_s=excluded.device_s, "
    "violation=excluded.violation, reason=excluded.reason"
)
# Made with the first report, so that files without it are read unchanged.
_REPORTS = (
    "CREATE TABLE IF NOT EXISTS report (study INTEGER NOT NULL, trial INTEGER NOT NULL, "
    "step INTEGER NOT NULL, value REAL NOT NULL, PRIMARY KEY (study, trial, step)) WITHOUT ROWID"
)
_MEASUREMENT = "INSERT OR REPLACE INTO measurement VALUES (?,?,?,?,?,?,?)"


class Store:
    """The file of one study, opened for writing; nobody else writes to that study meanwhile.

    Args:
        path: the file; None keeps everything in memory alone.

    Raises:
        StoreError: it cannot be written, or another process runs a study in it.
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
                remedy="wait for it, or name another file with --store",
            ) from None  # fmt: skip

    def open_study(
        self, name: str, space: Space, definition: Mapping[str, Any], target: str | None
    ) -> None:
        """Begin the study, or go on with it.

        Raises:
            StoreError: one of that name is there, and is another one.
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
        remedy = "another name or another --store, and warm_start= to use what it found"
        if row[1] != space.id:
            before, now = json.loads(row[3])["parameters"], space.to_json()["parameters"]
            changed = sorted(p for p in {*before, *now} if before.get(p) != now.get(p))
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
        """Note a trial that was asked, or has ended; it is written with the next batch."""
        if self.path is None:
            return
        for metric, _ in trial.measurements:
            if metric not in self._metrics:
                self._metrics[metric] = self._metric(metric, units.get(metric, ""))
        if not self._waiting:
            self._since = time.monotonic()
        self._waiting[trial.number] = trial
        if len(self._waiting) >= _BATCH or time.monotonic() - self._since > _BATCH_S:
            self.flush()

    def _metric(self, name: str, unit: str) -> int:
        row = self._connection.execute(
            "INSERT INTO metric (name, unit) VALUES (?,?) ON CONFLICT DO UPDATE SET "
            "unit=excluded.unit RETURNING id", (name, unit),
        ).fetchone()  # fmt: skip
        return int(row[0])

    def flush(self) -> None:
        """Commit what waits.

        Raises:
            StoreError: the disk is full, or the file cannot be written any more.
        """
        if self.path is None or not self._waiting:
            return
        trials = self._waiting.values()
        study = self._study
        rows = [
            (study, t.number, t.candidate.id, t.candidate.json, t.state, t.fidelity, t.bracket,
             t.rung, t.parent, t.asked, t.told, t.attempts, t.started, t.ended, t.device_s,
             t.violation, t.reason)
            for t in trials
        ]  # fmt: skip
        measured = [
            (study, t.number, self._metrics[metric], provenance, one.value, one.stddev,
             int(t.values.get(metric) == one.value))
            for t in trials
            for (metric, provenance), one in t.measurements.items()
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
        """All trials of the study, by number."""
        if self.path is None:
            return []
        with undamaged(self.path):
            trials = list(_trials(self._connection, self._study, space))
            check_scored(trials, self._objectives, self.path)
            return trials

    def close(self) -> None:
        """Commit what waits, and let others write."""
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
    provenances = {str(one): one for one in Provenance}
    states = {str(one): one for one in State}
    for row in connection.execute("SELECT * FROM trial WHERE study=? ORDER BY number", (study,)):
        (_, number, candidate, config, state, fidelity, bracket, rung, parent, asked, told,
         attempts, started, ended, device_s, violation, reason) = row  # fmt: skip
        values, measurements = {}, {}
        for _, metric, provenance, value, stddev, counts in measured.get(number, ()):
            known = provenances[provenance]
            measurements[names[metric], known] = Value(value, known, stddev)
            if counts:
                values[names[metric]] = value
        yield Trial(
            number, space.load(config, candidate), fidelity, bracket, rung, parent, states[state],
            values, measurements, violation, asked, told, attempts, started, ended, device_s,
            reason, reports.get(number, {}),
        )  # fmt: skip


class Reading:
    """A study in a file, to look at: also while another process writes it.

    Args:
        name: of the study; it may be left out where there is only one.

    Raises:
        StoreError: no such file, or none of ours.
        UnknownNameError: no study of that name.
    """

    def __init__(self, path: Path, name: str | None = None) -> None:
        with closing(open_database(path, MIGRATIONS, read_only=True)) as connection:
            with undamaged(path):
                check_types(connection, path)
                known = dict(connection.execute("SELECT name, id FROM study ORDER BY created"))
            if not known:
                raise StoreError("there is no study in this file", where=str(path))
            if name is None and len(known) > 1:
                raise UnknownNameError("study", "(none given)", known, where=str(path))
            self.name = name or next(iter(known))
            if self.name not in known:
                raise UnknownNameError("study", self.name, known, where=str(path))
            with undamaged(path):
                space, definition, self.target = connection.execute(
                    "SELECT space, definition, target FROM study WHERE id=?", (known[self.name],)
                ).fetchone()
                self.space = Space.from_json(json.loads(space))
                self.definition: dict[str, Any] = json.loads(definition)
                self.objectives = parse_objectives(self.definition["objectives"])
                self.units: dict[str, str] = dict(
                    connection.execute("SELECT name, unit FROM metric")
                )
                self.trials = list(_trials(connection, known[self.name], self.space))
                check_scored(self.trials, self.objectives, path)
