"""SQLite files of this package: versioned, crash-safe, with readable errors."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from slipstream.errors import StoreError

_BUSY_TIMEOUT_S = 30.0
# "Slip" marks our files, so that another program's database is never upgraded.
_APPLICATION_ID = 0x536C6970


def open_database(
    path: Path, migrations: Sequence[str], *, read_only: bool = False
) -> sqlite3.Connection:
    """Open `path`, creating or upgrading it; ``PRAGMA user_version`` counts applied migrations.

    Args:
        path: the database file; its folder is created if absent.
        migrations: SQL scripts; script k takes a database from version k to k + 1.
        read_only: open for reading only; the file must exist and be current enough to read.

    Raises:
        StoreError: the file is not a database, belongs to another program or a newer slipstream,
            or cannot be written.
    """
    with errors_in_words(path):
        if read_only:
            if not path.is_file():
                raise StoreError("no such database", where=str(path))
            connection = _connect_for_reading(path)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, isolation_level=None)
        try:
            if read_only:
                _check_version(connection, path, len(migrations))
            else:
                _migrate(connection, path, migrations)
        except BaseException:
            connection.close()
            raise
    return connection


def _connect_for_reading(path: Path) -> sqlite3.Connection:
    # A URI quotes "?", "#" and "%" in the path.
    address = path.resolve().as_uri() + "?mode=ro"
    connection = sqlite3.connect(address, uri=True, timeout=_BUSY_TIMEOUT_S, isolation_level=None)
    try:
        connection.execute("PRAGMA schema_version")
    except sqlite3.OperationalError:
        # Reading in WAL mode creates a file next to the database. Without write access to the
        # folder no other process can be writing either, unless a log exists.
        connection.close()
        if path.with_name(path.name + "-wal").exists():
            raise
        return sqlite3.connect(address + "&immutable=1", uri=True, isolation_level=None)
    return connection


def _version(connection: sqlite3.Connection, path: Path, latest: int) -> int:
    # In this order: if another process creates the file meanwhile, a database with tables already
    # has an owner and a version.
    empty = connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is None
    owner = int(connection.execute("PRAGMA application_id").fetchone()[0])
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if not empty and owner != _APPLICATION_ID:
        raise StoreError(
            "the file is a database of another program",
            where=str(path),
            remedy="name another file with --store",
        )
    if version > latest:
        raise StoreError(
            f"the file has schema version {version}; this slipstream reads up to {latest}",
            where=str(path),
            remedy="upgrade slipstream, or name another file with --store",
        )
    return version


def _check_version(connection: sqlite3.Connection, path: Path, latest: int) -> None:
    version = _version(connection, path, latest)
    if version < latest:
        raise StoreError(
            f"the file has the old schema version {version} and cannot be upgraded here",
            where=str(path),
            remedy="open it once with write access",
        )


def _migrate(connection: sqlite3.Connection, path: Path, migrations: Sequence[str]) -> None:
    version = _version(connection, path, len(migrations))
    # Only effective on a new file: incremental_vacuum can then return the space of deleted rows.
    connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
    _write_ahead(connection)
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.execute("PRAGMA foreign_keys=ON")
    if version == len(migrations):
        return
    with transaction(connection):
        # Read again under the lock: another process may have upgraded the file meanwhile.
        for number in range(_version(connection, path, len(migrations)), len(migrations)):
            for statement in _statements(migrations[number]):
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version={len(migrations)}")
        connection.execute(f"PRAGMA application_id={_APPLICATION_ID}")


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Turn on WAL: readers never block the writer; kill -9 loses at most the open transaction."""
    deadline = time.monotonic() + _BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            # SQLite does not wait here while another process switches the same new file.
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _statements(script: str) -> Iterator[str]:
    # sqlite3's executescript would commit the transaction we are in.
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
    if statement.strip():
        yield statement


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """Run the block's statements in one transaction."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
        connection.execute("COMMIT")
    except BaseException:
        # A full disk may have rolled back already.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


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
    # A quota or a file system's size limit is reported as an I/O error.
    if "full" in message or "disk I/O" in message:
        return "free some disk space, or name another file with --store"
    if "not a database" in message or "malformed" in message:
        return "move the file away; a new one is created at the next run"
    if "locked" in message:
        return "another slipstream is writing; wait for it, or name another file with --store"
    return "name another file with --store"
