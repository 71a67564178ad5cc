"""The results store: all measurements, in one SQLite file.

An experiment is written while it runs, one transaction per block, so that a crash loses at most
one block; when it finishes its samples are packed into columns. Finished experiments never change.
Claims are stored with the samples that they can be recomputed from.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError, StoreError, UnknownNameError
from slipstream.measure import _codec as codec
from slipstream.measure import _rows as rows
from slipstream.measure._recording import Recording
from slipstream.measure.environment import stable_facts
from slipstream.measure.records import (
    ArmRecord,
    BlockRows,
    Claim,
    Environment,
    Experiment,
    ExperimentSettings,
    PredictionRecord,
)

_LAST = "last"


def default_path() -> Path:
    """Return ``$SLIPSTREAM_STORE``, or ``.slipstream/results.db`` in the current directory."""
    named = os.environ.get("SLIPSTREAM_STORE")
    return Path(named) if named else Path(".slipstream/results.db")


@dataclass(frozen=True)
class Summary:
    """Summary of a stored experiment.

    Attributes:
        blocks: Number of recorded blocks, including warm-up rounds.
        status: See `Experiment.status`.
    """

    experiment_id: str
    title: str
    created: str
    env_id: str
    arms: tuple[str, ...]
    blocks: int
    status: str


_FOREIGN_VALUE_ERRORS = (
    ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError,
)  # fmt: skip


class Store:
    """A results store, open until `close`; also a context manager.

    Args:
        path: Database file, created with its directory if absent; default `default_path`.
        read_only: Whether to open it without write access; the file must then exist.

    Raises:
        StoreError: From the constructor and every method: the file is not a results store, was
            written by a newer slipstream or is not writable, or the disk is full.
    """

    def __init__(self, path: Path | str | None = None, *, read_only: bool = False) -> None:
        self.path = default_path() if path is None else Path(path)
        if read_only and not self.path.exists():
            raise StoreError(
                "there is no results store",
                where=str(self.path),
                remedy="measure something first (slipstream demo), or name a store with --store",
            )
        self._database = rows.Database(self.path, read_only=read_only)

    def begin(self, experiment: Experiment) -> Recording:
        """Start recording: store `experiment` without its samples, events and claims."""
        identity = secrets.token_hex(4)
        facts = experiment.environment.facts
        momentary = {name: facts[name] for name in facts.keys() - stable_facts(facts).keys()}
        with self._database.write() as db:
            rows.keep_environment(db, experiment.environment)
            cursor = db.execute(
                "INSERT INTO experiment (id, title, created, env_id, momentary, settings, software,"
                " writer) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    identity,
                    experiment.title,
                    experiment.created,
                    experiment.environment.env_id,
                    codec.to_json(momentary),
                    codec.to_json(experiment.settings),
                    rows.software(),
                    rows.writer(),
                ),
            )
            number = int(cursor.lastrowid or 0)
            rows.keep_arms(db, number, experiment.arms)
            rows.keep_predictions(db, number, tuple(experiment.predictions.items()))
        return Recording(self._database, number, identity)

    def sink(self) -> StoreSink:
        """Return a `records.Sink` that stores one running experiment and its claims."""
        return StoreSink(self)

    def resume(self, experiment_id: str) -> Recording:
        """Continue recording an interrupted experiment; `load` returns its record so far.

        Raises:
            StoreError: The experiment is complete, or its process is still running.
        """
        row = self._row(experiment_id)
        status = rows.status(self._database, row)
        if status != "interrupted" or row["finished"] is not None:
            raise StoreError(
                f"experiment {row['id']} is {status} and cannot be resumed",
                where=str(self.path),
                remedy="start a new experiment; the store keeps both",
            )
        with self._database.write() as db:
            db.execute(
                "UPDATE experiment SET writer = ? WHERE number = ?", (rows.writer(), row["number"])
            )
        return Recording(self._database, row["number"], row["id"])

    def save(self, experiment: Experiment, claims: Sequence[Claim]) -> str:
        """Store a finished experiment and return its id."""
        recording = self.begin(experiment)
        recording.finish(experiment, claims)
        return recording.experiment_id

    def load(self, experiment_id: str) -> Experiment:
        """Return the experiment as recorded; `Experiment.status` is set if it was interrupted.

        Args:
            experiment_id: Full id, an unambiguous prefix, or ``"last"``.

        Raises:
            UnknownNameError: There is no experiment with this id.
        """
        with self._checked():
            number = self._row(experiment_id)["number"]
            return replace(self.outline(experiment_id), series=rows.series(self._database, number))

    def outline(self, experiment_id: str) -> Experiment:
        """Return the experiment without its samples, which is much faster; see `load`."""
        with self._checked():
            row = self._row(experiment_id)
            number = row["number"]
            environment = self.environment(row["env_id"])
            momentary = json.loads(row["momentary"])
            return Experiment(
                title=row["title"],
                created=row["created"],
                environment=replace(environment, facts={**environment.facts, **momentary}),
                settings=codec.from_json(ExperimentSettings, row["settings"]),
                arms=tuple(
                    codec.from_json(ArmRecord, record)
                    for (record,) in self._database.read(
                        "SELECT record FROM arm WHERE experiment = ? ORDER BY position", number
                    )
                ),
                series={},
                events=tuple(rows.events(self._database, number)),
                predictions={
                    arm: codec.from_json(PredictionRecord, record)
                    for arm, record in self._database.read(
                        "SELECT arm, record FROM experiment_prediction JOIN prediction"
                        " ON prediction = number WHERE experiment = ?",
                        number,
                    )
                },
                experiment_id=row["id"],
                status=rows.status(self._database, row),
            )

    def list(self) -> tuple[Summary, ...]:
        """Return all experiments, oldest first."""
        with self._checked():
            blocks: dict[int, int] = {
                row[0]: row[1]
                for row in self._database.read(
                    "SELECT experiment, count(*) FROM (SELECT experiment FROM block"
                    " UNION ALL SELECT experiment FROM chunk) GROUP BY experiment"
                )
            }
            arms: dict[int, tuple[str, ...]] = {}
            for number, name in self._database.read(
                "SELECT experiment, name FROM arm ORDER BY position"
            ):
                arms[number] = (*arms.get(number, ()), name)
            return tuple(
                Summary(
                    row["id"],
                    row["title"],
                    row["created"],
                    row["env_id"],
                    arms.get(row["number"], ()),
                    blocks.get(row["number"], 0),
                    rows.status(self._database, row),
                )
                for row in self._database.read("SELECT * FROM experiment ORDER BY number")
            )

    def claims(self, experiment_id: str) -> tuple[Claim, ...]:
        """Return the claims of an experiment; empty if it was killed or is running."""
        with self._checked():
            number = self._row(experiment_id)["number"]
            records = self._database.read(
                "SELECT record FROM claim WHERE experiment = ? ORDER BY position", number
            )
            return tuple(codec.from_json(Claim, record) for (record,) in records)

    def recompute(self, experiment_id: str) -> tuple[Claim, ...]:
        """Recompute the claims from the samples, and compare them with the stored ones.

        Raises:
            StoreError: A claim differs in any digit; names the claim and the field.
        """
        from slipstream.measure.claims import claims

        row = self._row(experiment_id)
        recomputed = claims(self.load(row["id"]))
        difference = _first_difference(self.claims(row["id"]), recomputed)
        if difference is not None:
            raise StoreError(
                f"the recomputed claims of experiment {row['id']} differ from the stored ones: "
                + difference,
                where=str(self.path),
                remedy=f"stored by slipstream {row['software']}, recomputed by {rows.software()};"
                " if that is the same version, the file is damaged",
            )
        return recomputed

    def environment(self, env_id: str) -> Environment:
        """Return the environment with this id, with its hashed facts only.

        Raises:
            UnknownNameError: The store has no such environment.
        """
        by_id = {environment.env_id: environment for environment in self.environments()}
        if env_id not in by_id:
            raise UnknownNameError("environment", env_id, by_id, where=str(self.path))
        return by_id[env_id]

    def environments(self) -> tuple[Environment, ...]:
        """Return all environments of experiments and predictions."""
        with self._checked():
            stored = self._database.read("SELECT env_id, facts FROM environment")
            # `items` fails, as it should, for anything but a JSON object.
            return tuple(
                Environment(dict(json.loads(facts).items()), env_id) for env_id, facts in stored
            )

    def record_prediction(
        self, prediction: PredictionRecord, environment: Environment | None = None
    ) -> None:
        """Store a prediction and its environment; has no effect if it is already stored."""
        with self._database.write() as db:
            if environment is not None:
                rows.keep_environment(db, environment)
            rows.keep_prediction(db, prediction)

    def predictions(self) -> tuple[PredictionRecord, ...]:
        """Return all recorded predictions, oldest first."""
        with self._checked():
            records = self._database.read("SELECT record FROM prediction ORDER BY number")
            return tuple(codec.from_json(PredictionRecord, record) for (record,) in records)

    def close(self) -> None:
        """Close the database."""
        self._database.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _checked(self) -> Iterator[None]:
        """Convert errors from foreign values to an error that names the file."""
        try:
            yield
        except SlipstreamError:
            raise
        except _FOREIGN_VALUE_ERRORS as error:
            raise StoreError(
                f"the store has values that slipstream did not write: {error!r}",
                where=str(self.path),
                remedy="move the file away; the next run creates a new one",
            ) from error

    def _row(self, experiment_id: str) -> Any:
        if experiment_id == _LAST:
            matching = self._database.read("SELECT * FROM experiment ORDER BY number DESC LIMIT 1")
        else:
            beginning = "SELECT * FROM experiment WHERE substr(id, 1, ?) = ?"
            matching = self._database.read(beginning, len(experiment_id), experiment_id)
        if len(matching) != 1 or not experiment_id:
            names = [name for (name,) in self._database.read("SELECT id FROM experiment")]
            raise UnknownNameError("experiment", experiment_id, names, where=str(self.path))
        return matching[0]


class StoreSink:
    """Sink of the runner that writes to a store; see `records.Sink`.

    Attributes:
        recording: The experiment being recorded; None until `begin`.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.recording: Recording | None = None

    def begin(self, experiment: Experiment) -> None:
        """Start recording `experiment`."""
        self.recording = self._store.begin(experiment)

    def block(self, rows: BlockRows) -> None:
        """Store one round."""
        samples = {(arm, metric, rows.phase): v for (arm, metric), v in rows.values.items()}
        self._started_recording().append(rows.block, samples, rows.events)

    def finish(self, experiment: Experiment) -> None:
        """Pack `experiment` and store its claims."""
        from slipstream.measure.claims import claims

        self._started_recording().finish(experiment, claims(experiment))

    def _started_recording(self) -> Recording:
        if self.recording is None:
            raise StoreError("no recording was started", remedy="call begin first")
        return self.recording


def _first_difference(stored: Sequence[Claim], found: Sequence[Claim]) -> str | None:
    """Describe the first difference of two lists of claims; floats must be bitwise equal."""
    if len(stored) != len(found):
        return f"{len(stored)} claims are stored, {len(found)} recomputed"
    for old, new in zip(stored, found, strict=True):
        for field in fields(Claim):
            before, after = getattr(old, field.name), getattr(new, field.name)
            # Compare representations, in which NaN equals itself and floats have all digits.
            if repr(before) != repr(after):
                claim = f"{old.metric} of {old.arm}"
                return f"{field.name} of the claim on {claim} was {before!r}, is {after!r}"
    return None
