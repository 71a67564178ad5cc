"""The results store: every measurement ever made, in one SQLite file.

An experiment is written while it runs, one transaction a block, so that a crash loses at most the
block that was running; when it ends its samples are packed into columns. Nothing stored is changed
afterwards. Claims are stored beside the samples they rest on and can be recomputed from them.
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
    """``$SLIPSTREAM_STORE``, or ``.slipstream/results.db`` under the current directory."""
    named = os.environ.get("SLIPSTREAM_STORE")
    return Path(named) if named else Path(".slipstream/results.db")


@dataclass(frozen=True)
class Summary:
    """One line about a stored experiment.

    Attributes:
        blocks: how many blocks were recorded, warm-up rounds included.
        status: as in `Experiment.status`.
    """

    experiment_id: str
    title: str
    created: str
    env_id: str
    arms: tuple[str, ...]
    blocks: int
    status: str


_NOT_OURS = (
    ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError,
)  # fmt: skip


class Store:
    """A results store, open until `close`; also a context manager.

    Args:
        path: the database file, made with its folder if absent; see `default_path`.
        read_only: for looking only; the file must exist.

    Raises:
        StoreError: here and from every method: not a database of ours, written by a newer
            slipstream, not writable, a full disk.
    """

    def __init__(self, path: Path | str | None = None, *, read_only: bool = False) -> None:
        self.path = default_path() if path is None else Path(path)
        if read_only and not self.path.exists():
            raise StoreError(
                "there is no results store yet",
                where=str(self.path),
                remedy="measure something first (slipstream demo), or name a store with --store",
            )
        self._database = rows.Database(self.path, read_only=read_only)

    def begin(self, experiment: Experiment) -> Recording:
        """Start recording: everything of `experiment` but its samples, events and claims."""
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
        """A `records.Sink` that keeps one running experiment here, and its claims at the end."""
        return StoreSink(self)

    def resume(self, experiment_id: str) -> Recording:
        """Go on with an interrupted experiment; `load` says what it has.

        Raises:
            StoreError: it is complete, or its process is still running.
        """
        row = self._row(experiment_id)
        status = rows.status(self._database, row)
        if status != "interrupted" or row["finished"] is not None:
            raise StoreError(
                f"experiment {row['id']} is {status} and cannot be resumed",
                where=str(self.path),
                remedy="start a new one; old and new stay side by side",
            )
        with self._database.write() as db:
            db.execute(
                "UPDATE experiment SET writer = ? WHERE number = ?", (rows.writer(), row["number"])
            )
        return Recording(self._database, row["number"], row["id"])

    def save(self, experiment: Experiment, claims: Sequence[Claim]) -> str:
        """Store a finished experiment at once; returns its id."""
        recording = self.begin(experiment)
        recording.finish(experiment, claims)
        return recording.experiment_id

    def load(self, experiment_id: str) -> Experiment:
        """The experiment as it was recorded; if it was cut off, `Experiment.status` says so.

        Args:
            experiment_id: the whole id, an unambiguous beginning of it, or ``"last"``.

        Raises:
            UnknownNameError: there is none of that id.
        """
        with self._checked():
            number = self._row(experiment_id)["number"]
            return replace(self.outline(experiment_id), series=rows.series(self._database, number))

    def outline(self, experiment_id: str) -> Experiment:
        """The experiment without its samples, which are most of it; see `load`."""
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
        """All experiments, the oldest first."""
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
        """The claims stored with an experiment; none if it was killed or is running."""
        with self._checked():
            number = self._row(experiment_id)["number"]
            records = self._database.read(
                "SELECT record FROM claim WHERE experiment = ? ORDER BY position", number
            )
            return tuple(codec.from_json(Claim, record) for (record,) in records)

    def recompute(self, experiment_id: str) -> tuple[Claim, ...]:
        """Compute the claims again from the samples, and check them against the stored ones.

        Raises:
            StoreError: any digit differs; names the claim and the field.
        """
        from slipstream.measure.claims import claims

        row = self._row(experiment_id)
        recomputed = claims(self.load(row["id"]))
        difference = _first_difference(self.claims(row["id"]), recomputed)
        if difference is not None:
            raise StoreError(
                f"recomputing the claims of experiment {row['id']} gives something else: "
                + difference,
                where=str(self.path),
                remedy=f"stored by slipstream {row['software']}, recomputed by {rows.software()};"
                " if that is the same version, the file is damaged",
            )
        return recomputed

    def environment(self, env_id: str) -> Environment:
        """The hashed facts behind `env_id`.

        Raises:
            UnknownNameError: no experiment was made there.
        """
        by_id = {one.env_id: one for one in self.environments()}
        if env_id not in by_id:
            raise UnknownNameError("environment", env_id, by_id, where=str(self.path))
        return by_id[env_id]

    def environments(self) -> tuple[Environment, ...]:
        """All environments anything was measured or predicted in."""
        with self._checked():
            stored = self._database.read("SELECT env_id, facts FROM environment")
            # By its items: what is no JSON object has none.
            return tuple(
                Environment(dict(json.loads(facts).items()), env_id) for env_id, facts in stored
            )

    def record_prediction(
        self, prediction: PredictionRecord, environment: Environment | None = None
    ) -> None:
        """Keep a prediction (once, however often it is recorded) and where it was made."""
        with self._database.write() as db:
            if environment is not None:
                rows.keep_environment(db, environment)
            rows.keep_prediction(db, prediction)

    def predictions(self) -> tuple[PredictionRecord, ...]:
        """All predictions ever recorded, the oldest first."""
        with self._checked():
            records = self._database.read("SELECT record FROM prediction ORDER BY number")
            return tuple(codec.from_json(PredictionRecord, record) for (record,) in records)

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _checked(self) -> Iterator[None]:
        """Values that we did not write are an error that names the file."""
        try:
            yield
        except SlipstreamError:
            raise
        except _NOT_OURS as error:
            raise StoreError(
                f"the store holds what slipstream did not write: {error!r}",
                where=str(self.path),
                remedy="move the file away; a new one is made at the next run",
            ) from error

    def _row(self, experiment_id: str) -> Any:
        if experiment_id == _LAST:
            matching = self._database.read("SELECT * FROM experiment ORDER BY number DESC LIMIT 1")
        else:
            beginning = "SELECT * FROM experiment WHERE substr(id, 1, ?) = ?"
            matching = self._database.read(beginning, len(experiment_id), experiment_id)
        if len(matching) != 1 or not experiment_id:
            known = [name for (name,) in self._database.read("SELECT id FROM experiment")]
            raise UnknownNameError("experiment", experiment_id, known, where=str(self.path))
        return matching[0]


class StoreSink:
    """The runner's way into a store; see `records.Sink`.

    Attributes:
        recording: the experiment being recorded; None until `begin`.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.recording: Recording | None = None

    def begin(self, experiment: Experiment) -> None:
        """Start recording `experiment`."""
        self.recording = self._store.begin(experiment)

    def block(self, rows: BlockRows) -> None:
        """Make one round durable."""
        samples = {(arm, metric, rows.phase): v for (arm, metric), v in rows.values.items()}
        self._begun().append(rows.block, samples, rows.events)

    def finish(self, experiment: Experiment) -> None:
        """Pack `experiment` and store its claims."""
        from slipstream.measure.claims import claims

        self._begun().finish(experiment, claims(experiment))

    def _begun(self) -> Recording:
        if self.recording is None:
            raise StoreError("nothing was begun", remedy="call begin first; a defect of the runner")
        return self.recording


def _first_difference(stored: Sequence[Claim], found: Sequence[Claim]) -> str | None:
    """Where two lists of claims differ, in words; floats must be the same to the last bit."""
    if len(stored) != len(found):
        return f"{len(stored)} claims are stored, {len(found)} found"
    for old, new in zip(stored, found, strict=True):
        for field in fields(Claim):
            before, after = getattr(old, field.name), getattr(new, field.name)
            # As text: not-a-number equals itself there, and floats show all their digits.
            if repr(before) != repr(after):
                claim = f"{old.metric} of {old.arm}"
                return f"{field.name} of the claim on {claim} was {before!r}, is {after!r}"
    return None
