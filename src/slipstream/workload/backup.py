"""Back up files before the user's code overwrites them, and restore them after it ends.

A folder of backups has a JSON file for every changed path that describes its original state. Only
the first process to change a path writes it, so several processes may share a folder. The parent
restores files however the child ended (`file_backups`). If the parent is killed, a watcher process
restores them (`watch`); if that is killed too, the next process that makes backups does
(`restore_leftovers`).
"""

from __future__ import annotations

import atexit
import contextlib
import filecmp
import functools
import hashlib
import json
import math
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamWarning, WorkloadError
from slipstream.files import leftovers, make_folder_in_use, mark_in_use, temporary_path

# Minimum free space on the disk of the copies.
_SPARE_BYTES = 256 << 20
_KIND = "backup"
_WRITER = "writer-"
_MAX_WAIT_S = 5.0
_HEARTBEAT_S = 0.5
# Maximum delay of the watcher on a busy machine.
_MAX_STALL_S = 10.0
# Maximum number of paths in a warning.
_SHOWN = 5


class Was(StrEnum):
    """Type of a path before the user's code changed it."""

    FILE = "file"
    LINK = "link"
    FOLDER = "folder"
    NOTHING = "nothing"


def back_up(keep_in: Path, path: str) -> None:
    """Back up the absolute `path` unless that was done before.

    Raises:
        WorkloadError: the copy cannot be made, so the file must not be overwritten.
    """
    name = hashlib.sha256(os.fsencode(path)).hexdigest()[:32]
    record = keep_in / f"{name}.json"
    if record.exists():
        return
    was = _what_is_at(path)
    if was is None:
        return
    copy = f"{name}.{os.getpid()}"
    entry: dict[str, Any] = {"path": path, "was": str(was)}
    if was is Was.LINK:
        entry["target"] = os.readlink(path)
    if was is Was.FILE:
        entry["copy"] = copy
        _copy(path, keep_in / copy)
    temporary = keep_in / f"{copy}.tmp"
    temporary.write_text(json.dumps(entry), encoding="ascii")
    try:
        # Linking is atomic, and fails if another process was first.
        os.link(temporary, record)
    except FileExistsError:
        (keep_in / copy).unlink(missing_ok=True)
    finally:
        temporary.unlink()


def _what_is_at(path: str) -> Was | None:
    """Return the type of a path; None for devices, pipes and others without content."""
    if os.path.islink(path):
        return Was.LINK
    if os.path.isdir(path):
        return Was.FOLDER
    if os.path.isfile(path):
        return Was.FILE
    return None if os.path.lexists(path) else Was.NOTHING


def _copy(path: str, copy: Path) -> None:
    try:
        if os.path.getsize(path) > shutil.disk_usage(copy.parent).free - _SPARE_BYTES:
            raise OSError(f"not enough space for a copy in {copy.parent}")
        shutil.copy2(path, copy)
    except OSError as error:
        copy.unlink(missing_ok=True)
        raise WorkloadError(
            f"the code would overwrite '{path}', which cannot be backed up: "
            f"{error.strerror or error}",
            remedy="write to another path while you profile, or free disk space "
            "(copies are made in TMPDIR)",
        ) from error


def restore_files(
    keep_in: Path, *, leave_folders: bool = False, until_s: float = math.inf
) -> tuple[list[Path], list[tuple[Path, str]]]:
    """Restore every path in `keep_in`.

    Args:
        leave_folders: whether to retain new folders, because a process still writes to them.
        until_s: do not restore paths that changed after this time, in seconds since the epoch.

    Returns:
        The restored paths, and those that changed later, each with the name of its copy.

    Raises:
        WorkloadError: a path could not be restored; the error names its copy.
    """
    entries: list[dict[str, Any]] = []
    later: list[dict[str, Any]] = []
    for record in keep_in.glob("*.json"):
        entry = json.loads(record.read_text("ascii")) | {"since_s": record.stat().st_mtime}
        (later if _changed_s(entry["path"]) > until_s else entries).append(entry)
    entries.sort(key=lambda entry: str(entry["path"]))
    failures, restored = [], []
    # Deepest first, so that new folders are empty when they are removed.
    for entry in reversed(entries):
        if entry["was"] == Was.NOTHING:
            if leave_folders and _what_is_at(entry["path"]) is Was.FOLDER:
                continue
            with contextlib.suppress(OSError):
                if until_s == math.inf:
                    _empty(entry["path"], entry["since_s"])
                _remove(entry["path"])
    for entry in entries:
        if entry["was"] == Was.NOTHING:
            continue
        try:
            if _restore(keep_in, entry):
                restored.append(Path(entry["path"]))
        except OSError as error:
            copy = f", its copy is {keep_in / entry['copy']}" if "copy" in entry else ""
            failures.append(f"'{entry['path']}': {error.strerror or error}{copy}")
    if failures:
        raise WorkloadError(
            "files that the code overwrote could not be restored: " + "; ".join(failures),
            remedy="restore them from their copies",
        )
    return restored, [
        (Path(entry["path"]), entry["copy"])
        for entry in later
        if "copy" in entry and _differs(keep_in / entry["copy"], entry["path"])
    ]


def _changed_s(path: str) -> float:
    """Return the time of the last change of `path`, in s since the epoch; 0 if it is missing."""
    try:
        return os.lstat(path).st_ctime
    except OSError:
        return 0.0


def _differs(copy: Path, path: str) -> bool:
    return _what_is_at(path) is not Was.FILE or not filecmp.cmp(copy, path, shallow=False)


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        os.rmdir(path)
    else:
        os.unlink(path)


def _empty(path: str, since_s: float) -> None:
    """Remove what was written to a new folder unseen, such as by a native library.

    Args:
        since_s: time before the folder was made, in s since the epoch. Files whose content is
            older stay: another program may have moved them there.
    """
    if os.path.islink(path):
        return
    for folder, folders, files in os.walk(path, topdown=False):
        for name in (*files, *folders):
            inner = os.path.join(folder, name)
            with contextlib.suppress(OSError):
                if os.path.isdir(inner) and not os.path.islink(inner):
                    os.rmdir(inner)
                elif os.lstat(inner).st_mtime >= since_s:
                    os.unlink(inner)


def _restore(keep_in: Path, entry: dict[str, Any]) -> bool:
    """Restore the path of `entry`; return whether its content had changed."""
    path, was = entry["path"], Was(entry["was"])
    now = _what_is_at(path)
    if was is Was.FOLDER:
        os.makedirs(path, exist_ok=True)
        return now is not was
    if now is was is Was.LINK and os.readlink(path) == entry["target"]:
        return False
    if now is not Was.NOTHING and now is not was:
        _remove(path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if was is Was.LINK:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        os.symlink(entry["target"], path)
        return True
    copy = keep_in / entry["copy"]
    # Into the existing file, which may have another owner and hard links; not if its content is
    # unchanged, because a process may have it open.
    if differs := _differs(copy, path):
        try:
            shutil.copyfile(copy, path)
        except PermissionError:
            os.unlink(path)
            shutil.copyfile(copy, path)
    shutil.copystat(copy, path)
    return differs


@contextlib.contextmanager
def file_backups() -> Iterator[Path]:
    """Create a folder for the backups of a child, and restore them at the end in any case.

    The child must end within this context, so that it cannot write later. If this process is
    killed, `watch` restores the files, or else the next process that enters this context.
    """
    restore_leftovers()
    # Named before it is created, so that it is removed after a Ctrl-C at any time.
    folder, fd = temporary_path(_KIND, f"-{_start_watcher(os.getpid())}"), -1
    try:
        fd = make_folder_in_use(folder)
        yield folder
    finally:
        with _uninterrupted():
            try:
                # Their process ids may be reused by the time this process ends.
                for writer in folder.glob(_WRITER + "*"):
                    writer.unlink()
                restore_files(folder)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                if fd >= 0:
                    os.close(fd)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Block Ctrl-C and similar signals in this context."""
    signals = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def restore_leftovers() -> None:
    """Restore files that killed processes overwrote, and remove their backups.

    Warns:
        SlipstreamWarning: files were restored, or a file that changed after that process's end was
            not restored; the warning names its backup.
    """
    for folder in leftovers(_KIND):
        _restore_leftover(folder)


def _restore_leftover(folder: Path) -> None:
    # The watcher updated the time of the folder until it was killed.
    ended_s = folder.stat().st_mtime
    saved = temporary_path("saved")
    try:
        restored, changed = restore_files(folder, until_s=ended_s + _MAX_STALL_S)
    except WorkloadError as error:
        _warn(str(error))
    except (ValueError, KeyError):
        # A power failure may lose unwritten data.
        folder.rename(saved)
        _warn(f"the backups of a killed run are damaged; the remaining files are in {saved}")
    else:
        if restored:
            more = f" and {len(restored) - _SHOWN} more" * (len(restored) > _SHOWN)
            shown = ", ".join(f"'{path}'" for path in restored[:_SHOWN])
            _warn(f"restored files that a killed run had overwritten: {shown}{more}")
        if not changed:
            shutil.rmtree(folder, ignore_errors=True)
            return
        folder.rename(saved)
        for path, copy in changed:
            _warn(
                f"'{path}' changed after a killed run had overwritten it and was not restored; "
                f"its content before that run: {saved / copy}"
            )


def _warn(text: str) -> None:
    warnings.warn(text, SlipstreamWarning, stacklevel=2)


@functools.cache
def _start_watcher(owner: int) -> str:
    """Start, once, the process that restores files if `owner`, this process, is killed.

    Returns:
        The suffix of the names of the folders that it watches.
    """
    mark = secrets.token_hex(4)
    try:
        watcher = subprocess.Popen(
            # As a file, because importing its package is slower.
            [sys.executable, "-P", __file__, str(owner), tempfile.gettempdir(), mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        return mark

    def release() -> None:
        assert watcher.stdin is not None
        # Forked processes inherit this function.
        if os.getpid() == owner:
            watcher.stdin.close()
            if not _marked(mark):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    watcher.wait(_MAX_WAIT_S)

    atexit.register(release)
    return mark


def _marked(mark: str) -> list[Path]:
    """Return this user's folders of backups with the suffix `mark`."""
    folders = []
    for path in Path(tempfile.gettempdir()).glob(f"slipstream-{_KIND}-*-{mark}"):
        with contextlib.suppress(FileNotFoundError):
            if path.lstat().st_uid == os.geteuid():
                folders.append(path)
    return folders


def watch(owner: int, mark: str) -> None:
    """Wait until the process `owner` ends; then kill its writing children, and restore.

    Args:
        mark: the suffix of the names of the folders with its backups.
    """
    while os.getppid() == owner and not select.select([0], [], [], _HEARTBEAT_S)[0]:
        for folder in _marked(mark):
            with contextlib.suppress(OSError):
                os.utime(folder)
    deadline = time.monotonic() + _MAX_WAIT_S
    while (folders := _marked(mark)) and time.monotonic() < deadline:
        for folder in folders:
            for writer in folder.glob(_WRITER + "*"):
                _kill(int(writer.name.removeprefix(_WRITER)))
            with contextlib.suppress(OSError):
                os.utime(folder)
        restore_leftovers()
        time.sleep(0.02)
    # A process that a writer started and that left its group may still mark them as in use.
    for folder in folders:
        _restore_leftover(folder)


def announce_writer(keep_in: Path) -> None:
    """Record that this process may overwrite files, so that `watch` kills it if necessary."""
    # Open until this process ends, so that no other process restores and removes the backups.
    mark_in_use(os.open(keep_in, os.O_RDONLY))
    (keep_in / f"{_WRITER}{os.getpid()}").touch()


def _kill(pid: int) -> None:
    """Kill the process and, if it leads one, its group."""
    for kill in (os.kill, os.killpg):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    tempfile.tempdir = sys.argv[2]
    watch(int(sys.argv[1]), sys.argv[3])
