"""Damaged study files: what a column may hold, and errors that say which file is broken."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream.errors import StoreError, UsageError
from slipstream.search.metrics import SCORED, Objective, Trial
from slipstream.sqlite import errors_in_words

# SQLite keeps a value of any type in a column of any type.
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
    """Turn what reading a damaged study raises into a `StoreError` with its file."""
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
    """The error for a study file that holds what no study writes."""
    return StoreError(
        f"the study is damaged: {what}", where=None if path is None else str(path),
        remedy="restore the file from a copy, or begin the study again in another file",
    )  # fmt: skip


def check_types(connection: sqlite3.Connection, path: Path) -> None:
    """Check that every column holds values of its type.

    Raises:
        StoreError: one does not.
    """
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    for table in _TYPES.keys() & tables:
        for types, columns in _TYPES[table].items():
            allowed = ", ".join(f"'{one}'" for one in types.split(", "))
            for column in columns:
                odd = connection.execute(
                    f"SELECT typeof({column}) FROM {table} "
                    f"WHERE typeof({column}) NOT IN ({allowed}) LIMIT 1"
                ).fetchone()
                if odd is not None:
                    raise damaged(f"a {column} of a {table} is of type {odd[0]}", path)


def check_scored(
    trials: Iterable[Trial], objectives: Iterable[Objective], path: Path | None
) -> None:
    """Check that every trial with a score has a value of every objective.

    Raises:
        StoreError: one has not, or ended before it was asked.
    """
    metrics = {one.metric for one in objectives}
    for trial in trials:
        if trial.state in SCORED and not metrics <= trial.values.keys():
            missing = ", ".join(sorted(metrics - trial.values.keys()))
            raise damaged(f"trial {trial.number} has no {missing}", path)
        if trial.asked < 0 or -1 < trial.told <= trial.asked:
            raise damaged(f"trial {trial.number} was told before it was asked", path)
