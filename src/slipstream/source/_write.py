"""Put an edit on disk whole or not at all, with the way back beside it."""

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
class Undone:
    """A file that is as it was before its last edit.

    Attributes:
        backup: the copy of what was there; None where an earlier copy holds all of it.
        earlier: how many edits before that one can still be taken back.
    """

    path: Path
    backup: Path | None
    earlier: int


@dataclass(frozen=True)
class Written:
    """A file that was replaced, and the copy of what it was before."""

    path: Path
    backup: Path


def write(source: Source) -> Written:
    """Put the edited text in the place of the file, in one move; keep ``FILE.orig`` beside it.

    An interruption leaves the old or the new file, never a part of one. The mode is kept, and a
    link goes on pointing at the file.

    Raises:
        WorkloadError: the file changed since it was read, is not the user's, or cannot be written.
        NotPlacedError: the edited text would be no Python.
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
            # Where nothing was replaced there is nothing to go back to.
            if isinstance(error, WorkloadError) or path.read_bytes() == source.original:
                backup.unlink()
            raise
    return Written(source.path, backup)


def undo(path: Path) -> Undone:
    """Put the newest backup of `path` back; what was there is kept as ``FILE.undone``.

    One such copy is enough while nobody edits the file between one undo and the next: it holds all
    the edits that are taken back after it.

    Raises:
        WorkloadError: there is no backup, or it cannot be written.
    """
    real = path.resolve()
    _refuse_foreign(real)
    with _reported(real):
        backups = _numbered(real, _BACKUP)
        if not backups:
            raise WorkloadError(
                f"there is no '{real.name}{_BACKUP}' to put back",
                where=str(path),
                remedy="apply --write makes one; nothing was changed",
            )
        undone = None if _is_kept(real) else _copy(real, _UNDONE)
        os.replace(backups[max(backups)], real)
    return Undone(path, undone, len(backups) - 1)


def _is_kept(path: Path) -> bool:
    """Whether what `path` holds is in a ``.undone`` already, or is what the last undo put back.

    A backup has the time of what it is a copy of, so that a file which was put back and left alone
    is older than the edited one.
    """
    copies = _numbered(path, _UNDONE)
    if any(one.read_bytes() == path.read_bytes() for one in copies.values()):
        return True
    last = copies.get(max(copies, default=-1))
    return last is not None and path.stat().st_mtime_ns < last.stat().st_mtime_ns


def _refuse_foreign(path: Path) -> None:
    stdlibs = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
    installed = not _INSTALLED.isdisjoint(path.parts)
    if installed or any(path.is_relative_to(Path(one).resolve()) for one in stdlibs if one):
        raise WorkloadError(
            f"'{path}' belongs to an installed package, not to you",
            remedy="copy it to a folder of yours, and apply the edit there",
        )


def _refuse_changed(source: Source) -> None:
    if source.path.read_bytes() != source.original:
        raise WorkloadError(
            f"'{source.path}' changed while it was looked at",
            remedy="nothing was written; run the command again",
        )


def _numbered(path: Path, suffix: str) -> dict[int, Path]:
    """The copies beside `path`: ``FILE.orig`` is number 0, ``FILE.orig.1`` number 1."""
    copies = {}
    for one in path.parent.iterdir():
        rest = one.name.removeprefix(path.name + suffix)
        if rest != one.name and (not rest or (rest[1:].isdecimal() and rest[0] == ".")):
            copies[int(rest[1:] or 0)] = one
    return copies


def _copy(path: Path, suffix: str) -> Path:
    """A copy of `path` under a new name; it appears whole or not at all."""
    number = max(_numbered(path, suffix), default=-1) + 1
    copy = path.with_name(path.name + suffix + (f".{number}" if number else ""))
    with _filled(path, path.read_bytes()) as temporary:
        shutil.copystat(path, temporary)
        try:
            # Unlike a move, this fails rather than overwrite what somebody counts on.
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
        # Now, so that what Python compiled of the old file is not taken for it.
        os.utime(temporary)
        # Once more, as late as can be: an editor may save at any time.
        _refuse_changed(source)
        os.replace(temporary, path)


@contextlib.contextmanager
def _filled(path: Path, content: bytes) -> Iterator[Path]:
    """A temporary file beside `path`, on disk with this content; gone at the end, come what may."""
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
    """Failures of the file system as an error that names the file."""
    try:
        yield
    except OSError as error:
        raise WorkloadError(
            f"'{path}' cannot be written: {error.strerror or error}",
            remedy="the file is as it was; check permissions and free space",
        ) from error
