"""Databases of the package open, upgrade, survive failures, or explain what is wrong."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import StoreError
from slipstream.sqlite import errors_in_words, open_database, transaction

_FIRST = """
CREATE TABLE number (n INTEGER);  -- a comment; with a semicolon
CREATE TRIGGER no_negative BEFORE INSERT ON number WHEN new.n < 0
BEGIN
    SELECT raise(ABORT, 'negative');
END;
"""
_SECOND = "ALTER TABLE number ADD COLUMN name TEXT"


def _numbers(path: Path) -> list[int]:
    connection = open_database(path, [_FIRST], read_only=True)
    found = [n for (n,) in connection.execute("SELECT n FROM number ORDER BY n")]
    connection.close()
    return found


def _python(program: str, *arguments: object, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,  # type: ignore[call-overload]
    )


def test_a_new_database_is_created_with_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "r.db"
    connection = open_database(path, [_FIRST, _SECOND])
    with transaction(connection):
        connection.execute("INSERT INTO number VALUES (1, 'one')")
    with pytest.raises(sqlite3.IntegrityError, match="negative"), transaction(connection):
        connection.execute("INSERT INTO number VALUES (-1, 'minus one')")
    assert connection.execute("PRAGMA user_version").fetchone() == (2,)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()


def test_an_old_database_is_upgraded_and_keeps_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "r.db"
    old = open_database(path, [_FIRST])
    old.execute("INSERT INTO number VALUES (7)")
    old.close()
    new = open_database(path, [_FIRST, _SECOND])
    assert new.execute("SELECT n, name FROM number").fetchall() == [(7, None)]
    new.close()


def test_a_failing_migration_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "r.db"
    open_database(path, [_FIRST]).close()
    with pytest.raises(StoreError, match="no such table"):
        open_database(path, [_FIRST, "CREATE TABLE half (n);\nINSERT INTO absent VALUES (1);"])
    again = open_database(path, [_FIRST])
    assert again.execute("SELECT name FROM sqlite_master WHERE name = 'half'").fetchall() == []
    again.close()


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.db"
    open_database(path, [_FIRST, _SECOND]).close()
    with pytest.raises(StoreError, match=r"\bversion 2\b.*\bup to 1\b") as e:
        open_database(path, [_FIRST])
    assert re.search(r"\bupgrade\b.*--store\b", e.value.remedy or "")
    with pytest.raises(StoreError, match="schema version 2"):
        open_database(path, [_FIRST], read_only=True)


def test_an_old_schema_cannot_be_upgraded_read_only(tmp_path: Path) -> None:
    path = tmp_path / "r.db"
    open_database(path, [_FIRST]).close()
    with pytest.raises(StoreError, match="old schema version 1"):
        open_database(path, [_FIRST, _SECOND], read_only=True)


def test_a_foreign_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "theirs.db"
    theirs = sqlite3.connect(path)
    theirs.execute("CREATE TABLE number (precious)")
    theirs.commit()
    theirs.close()
    before = path.read_bytes()
    for read_only in (False, True):
        with pytest.raises(StoreError, match="another program"):
            open_database(path, [_FIRST], read_only=read_only)
    assert path.read_bytes() == before


def test_an_invalid_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("these are my notes, " * 100)
    with pytest.raises(StoreError, match="not a database") as caught:
        open_database(path, [_FIRST])
    assert str(path) in str(caught.value)
    assert re.search(r"\bmove\b.*\bfile\b", caught.value.remedy or "")


def test_a_missing_file_is_not_created_by_reading(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no such database"):
        open_database(tmp_path / "r.db", [_FIRST], read_only=True)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError) as caught:
        open_database(tmp_path / "file" / "r.db", [_FIRST])
    assert "--store" in (caught.value.remedy or "")


def test_unusual_names_work(tmp_path: Path) -> None:
    path = tmp_path / "50% of? #1 ünï.db"
    open_database(path, [_FIRST]).close()
    assert _numbers(path) == []


def test_a_full_disk_is_reported_and_the_database_stays_intact(tmp_path: Path) -> None:
    path = tmp_path / "r.db"
    connection = open_database(path, [_FIRST])
    connection.execute("INSERT INTO number VALUES (1)")
    connection.execute("PRAGMA max_page_count = 8")
    rows = [(n,) for n in range(100_000)]
    with (
        pytest.raises(StoreError, match="full") as caught,
        errors_in_words(path),
        transaction(connection),
    ):
        connection.executemany("INSERT INTO number VALUES (?)", rows)
    assert "disk space" in (caught.value.remedy or "")
    assert not connection.in_transaction
    connection.close()
    assert _numbers(path) == [1]


def test_a_file_size_limit_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "r.db"
    open_database(path, [_FIRST]).close()
    writer = _python(
        """
        import resource, sys
        from pathlib import Path
        from slipstream.errors import StoreError
        from slipstream.sqlite import errors_in_words, open_database, transaction
        path = Path(sys.argv[1])
        connection = open_database(path, [sys.argv[2]])
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        try:
            with errors_in_words(path), transaction(connection):
                connection.executemany(
                    "INSERT INTO number VALUES (?)", [(n,) for n in range(1_000_000)]
                )
        except StoreError as error:
            print(error.remedy)
        """,
        path,
        _FIRST,
    )
    out, err = writer.communicate(timeout=600)
    assert re.search(r"\bdisk space\b.*--store\b", out), err
    assert _numbers(path) == []


def test_kill_minus_9_loses_only_the_open_transaction(tmp_path: Path) -> None:
    path = tmp_path / "r.db"
    open_database(path, [_FIRST]).close()
    writer = _python(
        """
        import sys
        from pathlib import Path
        from slipstream.sqlite import open_database, transaction
        connection = open_database(Path(sys.argv[1]), [sys.argv[2]])
        for n in range(1_000_000):
            with transaction(connection):
                connection.execute("INSERT INTO number VALUES (?)", (n,))
                if n < 50 or n % 50 == 0:
                    print(n, flush=True)
        """,
        path,
        _FIRST,
    )
    assert writer.stdout is not None
    for line in writer.stdout:
        if int(line) >= 200:
            break
    writer.send_signal(signal.SIGKILL)
    rest = [int(line) for line in writer.communicate()[0].splitlines()]
    found = _numbers(path)
    assert found == list(range(len(found)))
    # A printed row was inserted before its commit: at most that one is missing.
    assert len(found) >= max([200, *rest])


@pytest.mark.parametrize("moment", [1, 2, 3])
def test_a_file_created_by_another_process_during_opening_is_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """Runs between any two queries about a new file."""
    path = tmp_path / "r.db"
    connect = sqlite3.connect
    statements: list[str] = []

    class Watched(sqlite3.Connection):
        def execute(self, *arguments: Any) -> sqlite3.Cursor:
            statements.append(arguments[0])
            if len(statements) == moment:
                with monkeypatch.context() as plain:
                    plain.setattr(sqlite3, "connect", connect)
                    open_database(path, [_FIRST]).close()
            return super().execute(*arguments)

    monkeypatch.setattr(
        sqlite3, "connect", lambda *a, **named: connect(*a, factory=Watched, **named)
    )
    with contextlib.closing(open_database(path, [_FIRST])) as connection:
        assert connection.execute("SELECT count(*) FROM number").fetchone() == (0,)
    assert len(statements) > moment


def test_processes_that_open_a_new_file_concurrently_agree(tmp_path: Path) -> None:
    path = tmp_path / "r.db"
    program = """
        import sys
        from pathlib import Path
        from slipstream.sqlite import open_database, transaction
        sys.stdin.readline()
        connection = open_database(Path(sys.argv[1]), [sys.argv[2]])
        for _ in range(50):
            with transaction(connection):
                connection.execute("INSERT INTO number VALUES (1)")
        """
    writers = [_python(program, path, _FIRST, stdin=subprocess.PIPE) for _ in range(4)]
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    errors = [writer.communicate(timeout=600)[1] for writer in writers]
    assert errors == [""] * 4
    assert [writer.returncode for writer in writers] == [0] * 4
    assert len(_numbers(path)) == 200


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that others can read: every pytest run closes those of `tmp_path` again."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.skipif(os.getuid() != 0, reason="must be root to become nobody")
def test_without_write_access_it_can_still_be_read(open_folder: Path) -> None:
    path = open_folder / "r.db"
    connection = open_database(path, [_FIRST])
    connection.execute("INSERT INTO number VALUES (3)")
    connection.close()
    pid = os.fork()
    if pid == 0:
        nobody = 65534
        os.setuid(nobody)
        code = 9
        try:
            code = 0 if _numbers(path) == [3] else 1
            open_database(path, [_FIRST, _SECOND])
        except StoreError as error:
            code = code or (0 if "permissions" in (error.remedy or "") else 2)
        except BaseException:
            code = 3
        else:
            code = 4
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
