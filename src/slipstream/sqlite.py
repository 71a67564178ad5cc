"""The one way this package opens SQLite files: versioned, crash-safe, with errors in words."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from slipstream.errors import StoreError

_BUSY_TIMEOUT_S = 30.0


def open_database(
    path: Path, migrations: Sequence[str], *, read_only: bool = False
) -> sqlite3.Connection:
    """Open `path`, creating or upgrading it; ``PRAGMA user_version`` counts applied migrations.

    Args:
        path: the database file; its folder is made if absent.
        migrations: SQL scripts; script k takes a database from version k to k + 1.
        read_only: open for reading only; the file must exist and be current enough to read.

    Raises:
        StoreError: not a database, written by a newer slipstream, read-only, or a full disk.
    """
    with errors_in_words(path):
        if read_only:
            if not path.is_file():
                raise StoreError("no such database", where=str(path))
            connection = sqlite3.connect(
                f"file:{path}?mode=ro", uri=True, timeout=_BUSY_TIMEOUT_S, isolation_level=None
            )
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, isolation_level=None)
        try:
            _migrate(connection, path, migrations, read_only)
        except BaseException:
            connection.close()
            raise
    return connection


def _migrate(
    connection: sqlite3.Connection, path: Path, migrations: Sequence[str], read_only: bool
) -> None:
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if version > len(migrations):
        raise StoreError(
            f"the file has schema version {version}; this slipstream reads up to {len(migrations)}",
            where=str(path),
            remedy="upgrade slipstream, or name another file with --store",
        )
    if read_only:
        if version < len(migrations):
            raise StoreError(
                f"the file has the old schema version {version} and cannot be upgraded here",
                where=str(path),
                remedy="open it once with write access",
            )
        return
    # WAL: a reader never blocks the writer, and kill -9 loses at most the open transaction.
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.execute("PRAGMA foreign_keys=ON")
    for number in range(version, len(migrations)):
        connection.executescript(
            f"BEGIN IMMEDIATE;\n{migrations[number]}\nPRAGMA user_version={number + 1};\nCOMMIT;"
        )


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """All of the block's statements, or none."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
    except BaseException:
        # A full disk may have rolled back already.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


@contextmanager
def errors_in_words(path: Path) -> Iterator[None]:
    """Turn SQLite's and the file system's errors into a `StoreError` with a remedy."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        raise StoreError(
            f"the database cannot be used: {error}", where=str(path), remedy=_remedy(str(error))
        ) from error
    except OSError as error:
        raise StoreError(
            f"the database cannot be opened: {error.strerror or error}",
            where=str(path),
            remedy="name a file you can write with --store",
        ) from error


def _remedy(message: str) -> str:
    if "readonly" in message or "unable to open" in message:
        return "check the permissions, or name another file with --store"
    if "full" in message:
        return "free some disk space, or name another file with --store"
    if "not a database" in message or "malformed" in message:
        return "move the file away; a new one is made at the next run"
    if "locked" in message:
        return "another slipstream is writing; wait for it, or name another file with --store"
    return "name another file with --store"
