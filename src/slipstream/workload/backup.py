"""What the user's code is about to overwrite is set aside, and put back when the code is gone.

A folder of backups has one small JSON file for every path that was touched: what was there before.
The first process to touch a path decides, so that several may share one folder. Putting back
happens in the parent (`file_backups`), however the child ended; should the parent itself be killed,
a second process that waits for nothing else does it (`watch`).
"""

from __future__ import annotations

import contextlib
import filecmp
import hashlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

from slipstream.errors import WorkloadError

# What must stay free on the disk that holds the copies.
_SPARE_BYTES = 256 << 20
_WRITER = "writer-"
_LONGEST_WAIT_S = 5.0


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


def restore_files(keep_in: Path, *, leave_folders: bool = False) -> list[Path]:
    """Make every path in `keep_in` what it was; returns those that were there before.

    Args:
        leave_folders: do not remove new folders, since somebody still writes to them.

    Raises:
        WorkloadError: something could not be put back; says where its copy is.
    """
    entries = [json.loads(record.read_text("ascii")) for record in keep_in.glob("*.json")]
    entries.sort(key=lambda entry: str(entry["path"]))
    failures = []
    # Deepest first, so that new folders are empty when their turn comes.
    for entry in reversed(entries):
        if entry["was"] == Was.NOTHING:
            if leave_folders and _what_is_at(entry["path"]) is Was.FOLDER:
                continue
            with contextlib.suppress(OSError):
                _remove(entry["path"])
    there_before = [entry for entry in entries if entry["was"] != Was.NOTHING]
    for entry in there_before:
        try:
            _put_back(keep_in, entry)
        except OSError as error:
            copy = f", its copy is {keep_in / entry['copy']}" if "copy" in entry else ""
            failures.append(f"'{entry['path']}': {error.strerror or error}{copy}")
    if failures:
        raise WorkloadError(
            "what the code overwrote could not be put back: " + "; ".join(failures),
            remedy="copy it back by hand",
        )
    return [Path(entry["path"]) for entry in there_before]


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        os.rmdir(path)
    else:
        os.unlink(path)


def _put_back(keep_in: Path, entry: dict[str, Any]) -> None:
    path, was = entry["path"], Was(entry["was"])
    if was is Was.FOLDER:
        os.makedirs(path, exist_ok=True)
        return
    now = _what_is_at(path)
    if now is was is Was.LINK and os.readlink(path) == entry["target"]:
        return
    if now is not Was.NOTHING and now is not was:
        _remove(path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if was is Was.LINK:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        os.symlink(entry["target"], path)
        return
    copy = keep_in / entry["copy"]
    # Into the file that is there, which may have an owner and other names; not at all where
    # nothing changed, since somebody may have it open.
    if now is not Was.FILE or not filecmp.cmp(copy, path, shallow=False):
        try:
            shutil.copyfile(copy, path)
        except PermissionError:
            os.unlink(path)
            shutil.copyfile(copy, path)
    shutil.copystat(copy, path)


@contextlib.contextmanager
def file_backups(*, watched: bool = True) -> Iterator[Path]:
    """An empty folder for what a child sets aside; at the end it is put back, whatever happened.

    Inside must be the child's whole life: it may not write any more when this ends.

    Args:
        watched: also put back when this very process is killed; for code that is likely to write.
    """
    # Named before it is made: a Ctrl-C right after that must find somebody who removes it.
    folder = Path(tempfile.gettempdir(), f"slipstream-backup-{secrets.token_hex(8)}")
    watcher: _Watcher | None = None
    try:
        os.mkdir(folder, 0o700)
        watcher = _Watcher(folder) if watched else None
        yield folder
    finally:
        with _uninterrupted():
            try:
                restore_files(folder)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                if watcher is not None:
                    watcher.stop()


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C and its like wait until the body is done."""
    signals = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Watcher:
    """A process that waits for ours to vanish, and then does what it can no longer do."""

    def __init__(self, folder: Path) -> None:
        read_fd, self._write_fd = os.pipe()
        code = f"from slipstream.workload.backup import watch; watch({read_fd}, {str(folder)!r})"
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(read_fd,),
                start_new_session=True,
            )
        except BaseException:
            os.close(self._write_fd)
            raise
        finally:
            os.close(read_fd)

    def stop(self) -> None:
        """Tell it that all is well."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._write_fd, b"done")
        os.close(self._write_fd)
        try:
            self._process.wait(_LONGEST_WAIT_S)
        except subprocess.TimeoutExpired:
            # On a busy machine it may not have begun yet; there is nothing left for it to do.
            self._process.kill()
            self._process.wait(_LONGEST_WAIT_S)


def watch(read_fd: int, folder: str) -> None:
    """Wait for the owner of `folder`; if it ends without a word, end its children and restore."""
    if os.read(read_fd, 1):
        return
    keep_in = Path(folder)
    for writer in keep_in.glob(_WRITER + "*"):
        _end_group(int(writer.name.removeprefix(_WRITER)))
    restore_files(keep_in)
    shutil.rmtree(keep_in, ignore_errors=True)


def announce_writer(keep_in: Path) -> None:
    """Say that this process may write to what `keep_in` keeps, so that `watch` can end it."""
    (keep_in / f"{_WRITER}{os.getpid()}").touch()


def _end_group(group: int) -> None:
    deadline = time.monotonic() + _LONGEST_WAIT_S
    with contextlib.suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < deadline:
            os.killpg(group, signal.SIGKILL)
            time.sleep(0.02)
