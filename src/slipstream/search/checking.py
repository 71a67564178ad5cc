"""Validation of study files: column types, and errors that name the damaged file."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream.errors import StoreError, UsageError
from slipstream.search.metrics import SCORED, Objective, Trial
from slipstream.sqlite import errors_in_words

# SQLite accepts values of any type in any column.
_TYPES = {
    "study": {
        "integer": ("id",), "text": ("name", "space", "definition"), "blob": ("space_id",),
        "text, null": ("target",),
    },
    "metric": {"integer": ("id",), "text": ("name", "unit")},
    "trial": {
        "integer": ("number", "bracket", "rung", "asked", "told", "attempts"),
        "integer, null": ("parent",), "blob": ("candidate",), "text": ("config", "state"),
        "real": ("fidelity", "started", "ended", "device_s", "violation"),
        "text, null": ("reason",),
    },
    "measurement": {
        "integer": ("trial", "metric", "counts"), "text": ("provenance",), "real": ("value",),
        "real, null": ("stddev",),
    },
    "report": {"integer": ("trial", "step"), "real": ("value",)},
}  # fmt: skip


@contextmanager
def undamaged(path: Path) -> Iterator[None]:
    """Convert exceptions from reading a damaged study to a `StoreError` that names its file."""
    with errors_in_words(path):
        try:
            yield
        except (
            UsageError, KeyError, ValueError, TypeError, AttributeError, OverflowError,
            RecursionError,
        ) as error:  # fmt: skip
            what = error.what if isinstance(error, UsageError) else repr(error)
            raise damaged(what, path) from error


def damaged(what: str, path: Path | None = None) -> StoreError:
    """Return the error for invalid content in a study file."""
    return StoreError(
        f"the study is damaged: {what}", where=None if path is None else str(path),
        remedy="restore the file from a backup, or start the study again in another file",
    )  # fmt: skip


def check_types(connection: sqlite3.Connection, path: Path) -> None:
    """Check that every column holds values of its type.

    Raises:
        StoreError: a column holds a value of another type.
    """
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    for table in _TYPES.keys() & tables:
        for types, columns in _TYPES[table].items():
            allowed = ", ".join(f"'{name}'" for name in types.split(", "))
            for column in columns:
                wrong = connection.execute(
                    f"SELECT typeof({column}) FROM {table} "
                    f"WHERE typeof({column}) NOT IN ({allowed}) LIMIT 1"
                ).fetchone()
                if wrong is not None:
                    raise damaged(f"{table}.{column} has a value of type {wrong[0]}", path)


def check_scored(
    trials: Iterable[Trial], objectives: Iterable[Objective], path: Path | None
) -> None:
    """Check that every scored trial has a value of every objective.

    Raises:
        StoreError: a trial has no value of an objective, or ended before it began.
    """
    metrics = {objective.metric for objective in objectives}
    for trial in trials:
        if trial.state in SCORED and not metrics <= trial.values.keys():
            missing = ", ".join(sorted(metrics - trial.values.keys()))
            raise damaged(f"trial {trial.number} has no value of {missing}", path)
        if trial.ask_event < 0 or -1 < trial.tell_event <= trial.ask_event:
            raise damaged(f"trial {trial.number} ended before it began", path)
