"""What the user's code is about to overwrite is set aside, and put back when the code is gone.

A folder of backups has one small JSON file for every path that was touched: what was there before.
The first process to touch a path decides, so that several may share one folder. Putting back
happens in the parent (`file_backups`), however the child ended. Should the parent itself be killed,
a second process that waits for nothing else does it (`watch`); should that be killed with it, the
next process that makes backups does (`restore_leftovers`).
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

# What must stay free on the disk that holds the copies.
_SPARE_BYTES = 256 << 20
_KIND = "backup"
_WRITER = "writer-"
_LONGEST_WAIT_S = 5.0
_HEARTBEAT_S = 0.5
# How late the watcher of a busy machine may be.
_MAX_STALL_S = 10.0
# Paths that a warning names.
_SHOWN = 5


class Was(StrEnum):
    """What was at a path before the user's code touched it."""

    FILE = "file"
    LINK = "link"
    FOLDER = "folder"
    NOTHING = "nothing"


def back_up(keep_in: Path, path: str) -> None:
    """Set aside what is at the absolute `path` now, unless that was done before.

    Raises:
        WorkloadError: the copy cannot be made, so that the file must not be overwritten.
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
        # A link appears whole or not at all, and only once: who comes second keeps nothing.
        os.link(temporary, record)
    except FileExistsError:
        (keep_in / copy).unlink(missing_ok=True)
    finally:
        temporary.unlink()


def _what_is_at(path: str) -> Was | None:
    """None for devices, pipes and the like: they have no content to lose."""
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
            raise OSError(f"no room for a copy in {copy.parent}")
        shutil.copy2(path, copy)
    except OSError as error:
        copy.unlink(missing_ok=True)
        raise WorkloadError(
            f"the code is about to overwrite '{path}', which cannot be set aside first: "
            f"{error.strerror or error}",
            remedy="let it write elsewhere while you profile, or free disk space "
            "(TMPDIR says where copies go)",
        ) from error


def restore_files(
    keep_in: Path, *, leave_folders: bool = False, until_s: float = math.inf
) -> tuple[list[Path], list[tuple[Path, str]]]:
    """Make every path in `keep_in` what it was.

    Args:
        leave_folders: do not remove new folders, since somebody still writes to them.
        until_s: leave paths alone that changed after this time, in seconds since the epoch.

    Returns:
        paths that were put back, and those that changed later, each with the name of its copy.

    Raises:
        WorkloadError: something could not be put back; says where its copy is.
    """
    entries: list[dict[str, Any]] = []
    later: list[dict[str, Any]] = []
    for record in keep_in.glob("*.json"):
        entry = json.loads(record.read_text("ascii"))
        (later if _changed_s(entry["path"]) > until_s else entries).append(entry)
    entries.sort(key=lambda entry: str(entry["path"]))
    failures, restored = [], []
    # Deepest first, so that new folders are empty when their turn comes.
    for entry in reversed(entries):
        if entry["was"] == Was.NOTHING:
            if leave_folders and _what_is_at(entry["path"]) is Was.FOLDER:
                continue
            with contextlib.suppress(OSError):
                _remove(entry["path"])
    for entry in entries:
        if entry["was"] == Was.NOTHING:
            continue
        try:
            if _put_back(keep_in, entry):
                restored.append(Path(entry["path"]))
        except OSError as error:
            copy = f", its copy is {keep_in / entry['copy']}" if "copy" in entry else ""
            failures.append(f"'{entry['path']}': {error.strerror or error}{copy}")
    if failures:
        raise WorkloadError(
            "what the code overwrote could not be put back: " + "; ".join(failures),
            remedy="copy it back by hand",
        )
    return restored, [
        (Path(entry["path"]), entry["copy"])
        for entry in later
        if "copy" in entry and _differs(keep_in / entry["copy"], entry["path"])
    ]


def _changed_s(path: str) -> float:
    """When the entry at `path` was last changed, in seconds since the epoch; 0 if there is none."""
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


def _put_back(keep_in: Path, entry: dict[str, Any]) -> bool:
    """Make the path of `entry` what it was; return whether its content was another one."""
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
    # Into the file that is there, which may have an owner and other names; not at all where
    # nothing changed, since somebody may have it open.
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
    """An empty folder for what a child sets aside; at the end it is put back, whatever happened.

    Inside must be the child's whole life: it may not write any more when this ends. Should this
    process be killed, `watch` restores the files, or the next process that enters this.
    """
    restore_leftovers()
    # Named before it is made: a Ctrl-C right after that must find somebody who removes it.
    folder, fd = temporary_path(_KIND, f"-{_start_watcher(os.getpid())}"), -1
    try:
        fd = make_folder_in_use(folder)
        yield folder
    finally:
        with _uninterrupted():
            try:
                # Their numbers may be those of other processes by the time this one ends.
                for writer in folder.glob(_WRITER + "*"):
                    writer.unlink()
                restore_files(folder)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                if fd >= 0:
                    os.close(fd)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C and its like wait until the body is done."""
    signals = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def restore_leftovers() -> None:
    """Restore what killed processes left overwritten, and remove their backups.

    Warns:
        SlipstreamWarning: what was restored; a file that changed after that process's end stays,
            and its backup is named.
    """
    for folder in leftovers(_KIND):
        _restore_leftover(folder)


def _restore_leftover(folder: Path) -> None:
    # Its watcher renewed the time of the folder until it was killed, too.
    ended_s = folder.stat().st_mtime
    saved = temporary_path("saved")
    try:
        restored, changed = restore_files(folder, until_s=ended_s + _MAX_STALL_S)
    except WorkloadError as error:
        _warn(str(error))
    except (ValueError, KeyError):
        # A power cut takes what was not on the disk yet.
        folder.rename(saved)
        _warn(f"the backups of a killed run are damaged; their remains are in {saved}")
    else:
        if restored:
            more = f" and {len(restored) - _SHOWN} more" * (len(restored) > _SHOWN)
            shown = ", ".join(f"'{path}'" for path in restored[:_SHOWN])
            _warn(f"restored what a killed run had overwritten: {shown}{more}")
        if not changed:
            shutil.rmtree(folder, ignore_errors=True)
            return
        folder.rename(saved)
        for path, copy in changed:
            _warn(
                f"'{path}' changed after a killed run had overwritten it and was left alone; "
                f"its content before that run: {saved / copy}"
            )


def _warn(text: str) -> None:
    warnings.warn(text, SlipstreamWarning, stacklevel=2)


@functools.cache
def _start_watcher(owner: int) -> str:
    """Start, once, the process that restores files when `owner`, this process, was killed.

    Returns:
        the end of the names of the folders that it watches.
    """
    mark = secrets.token_hex(4)
    try:
        watcher = subprocess.Popen(
            # Not by its module's name: the package around it takes longer to import.
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
        # Forks inherit this.
        if os.getpid() == owner:
            watcher.stdin.close()
            if not _marked(mark):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    watcher.wait(_LONGEST_WAIT_S)

    atexit.register(release)
    return mark


def _marked(mark: str) -> list[Path]:
    """This user's backups whose name ends so."""
    folders = []
    for path in Path(tempfile.gettempdir()).glob(f"slipstream-{_KIND}-*-{mark}"):
        with contextlib.suppress(FileNotFoundError):
            if path.lstat().st_uid == os.geteuid():
                folders.append(path)
    return folders


def watch(owner: int, mark: str) -> None:
    """Wait until the process `owner` ends; then end its children that write, and restore.

    Args:
        mark: the end of the names of the folders with its backups.
    """
    while os.getppid() == owner and not select.select([0], [], [], _HEARTBEAT_S)[0]:
        for folder in _marked(mark):
            with contextlib.suppress(OSError):
                os.utime(folder)
    deadline = time.monotonic() + _LONGEST_WAIT_S
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
    """Record that this process may overwrite what `keep_in` backs up; `watch` then ends it."""
    # Open until this process ends: until then no other one may restore and remove the backups.
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
