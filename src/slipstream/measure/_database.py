"""The open file behind a store: queries and transactions whose errors are words."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from slipstream.measure._schema import MIGRATIONS
from slipstream.sqlite import errors_in_words, open_database, transaction


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
            found: Sequence[sqlite3.Row] = cursor.execute(query, parameters).fetchall()
            return found

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
