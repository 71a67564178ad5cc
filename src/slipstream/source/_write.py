"""Write an edited file completely or not at all, with a backup next to it."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slipstream.errors import WorkloadError
from slipstream.source._source import Source

_BACKUP, _UNDONE = ".orig", ".undone"
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_WRITABLE = 0o222


@dataclass(frozen=True)
class UndoResult:
    """A file restored to its state before its last edit.

    Attributes:
        backup: the copy of the replaced content; None if an earlier copy holds it.
        earlier: number of earlier edits that can still be undone.
    """

    path: Path
    backup: Path | None
    earlier: int


@dataclass(frozen=True)
class WriteResult:
    """A file that was replaced, and the copy of its old content."""

    path: Path
    backup: Path


def write(source: Source) -> WriteResult:
    """Replace the file by the edited text, atomically; keep ``FILE.orig`` next to it.

    An interruption leaves the old or the new file, never a part of one. The mode is kept, and a
    link continues to point at the file.

    Raises:
        WorkloadError: the file changed since it was read, is not the user's, or cannot be written.
        EditLocationError: the edited text would not be valid Python.
    """
    content = source.content
    path = source.path.resolve()
    _refuse_foreign(path)
    with _reported(path):
        if not path.stat().st_mode & _WRITABLE:
            raise WorkloadError(
                f"'{source.path}' is read-only",
                remedy=f"chmod u+w {source.path}, or edit it by hand",
            )
        _refuse_changed(source)
        backup = _copy(path, _BACKUP)
        try:
            _replace(path, content, source)
        except BaseException as error:
            # If nothing was replaced there is nothing to undo.
            if isinstance(error, WorkloadError) or path.read_bytes() == source.original:
                backup.unlink()
            raise
    return WriteResult(source.path, backup)


def undo(path: Path) -> UndoResult:
    """Restore the newest backup of `path`; the replaced content is kept as ``FILE.undone``.

    One such copy suffices while the file is not edited between consecutive undos: it holds all the
    edits that are undone after it.

    Raises:
        WorkloadError: there is no backup, or it cannot be written.
    """
    real = path.resolve()
    _refuse_foreign(real)
    with _reported(real):
        backups = _numbered(real, _BACKUP)
        if not backups:
            raise WorkloadError(
                f"there is no '{real.name}{_BACKUP}' to restore",
                where=str(path),
                remedy="apply --write creates it; nothing was changed",
            )
        undone = None if _is_saved(real) else _copy(real, _UNDONE)
        os.replace(backups[max(backups)], real)
    return UndoResult(path, undone, len(backups) - 1)


def _is_saved(path: Path) -> bool:
    """Whether the content of `path` is in a ``.undone`` already, or was restored by the last undo.

    A backup has the time of its original, so that a file which was restored and left alone is
    older than the edited one.
    """
    copies = _numbered(path, _UNDONE)
    if any(copy.read_bytes() == path.read_bytes() for copy in copies.values()):
        return True
    last = copies.get(max(copies, default=-1))
    return last is not None and path.stat().st_mtime_ns < last.stat().st_mtime_ns


def _refuse_foreign(path: Path) -> None:
    stdlibs = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
    installed = not _INSTALLED.isdisjoint(path.parts)
    if installed or any(
        path.is_relative_to(Path(stdlib).resolve()) for stdlib in stdlibs if stdlib
    ):
        raise WorkloadError(
            f"'{path}' belongs to an installed package",
            remedy="copy it to your own folder, and apply the edit there",
        )


def _refuse_changed(source: Source) -> None:
    if source.path.read_bytes() != source.original:
        raise WorkloadError(
            f"'{source.path}' changed while it was read",
            remedy="nothing was written; run the command again",
        )


def _numbered(path: Path, suffix: str) -> dict[int, Path]:
    """Return the copies of `path`: ``FILE.orig`` is number 0, ``FILE.orig.1`` number 1."""
    copies = {}
    for file in path.parent.iterdir():
        number = file.name.removeprefix(path.name + suffix)
        if number != file.name and (not number or (number[1:].isdecimal() and number[0] == ".")):
            copies[int(number[1:] or 0)] = file
    return copies


def _copy(path: Path, suffix: str) -> Path:
    """Copy `path` to a new name; the copy appears completely or not at all."""
    number = max(_numbered(path, suffix), default=-1) + 1
    copy = path.with_name(path.name + suffix + (f".{number}" if number else ""))
    with _filled(path, path.read_bytes()) as temporary:
        shutil.copystat(path, temporary)
        try:
            # Unlike a move, this fails rather than overwrite an existing file.
            os.link(temporary, copy)
        except FileExistsError:
            raise
        except OSError:
            # A file system without hard links.
            os.replace(temporary, copy)
    return copy


def _replace(path: Path, content: bytes, source: Source) -> None:
    with _filled(path, content) as temporary:
        shutil.copystat(path, temporary)
        with contextlib.suppress(PermissionError):
            status = path.stat()
            os.chown(temporary, status.st_uid, status.st_gid)
        # Now, so that bytecode of the old file is not mistaken for that of the new one.
        os.utime(temporary)
        # Again, as late as possible: an editor may save at any time.
        _refuse_changed(source)
        os.replace(temporary, path)


@contextlib.contextmanager
def _filled(path: Path, content: bytes) -> Iterator[Path]:
    """Yield a temporary file next to `path` with this content, removed at the end."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _reported(path: Path) -> Iterator[None]:
    """Report file system errors as an error that names the file."""
    try:
        yield
    except OSError as error:
        raise WorkloadError(
            f"'{path}' cannot be written: {error.strerror or error}",
            remedy="the file is unchanged; check permissions and free space",
        ) from error
