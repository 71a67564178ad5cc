"""Detection of files that the user's code is about to overwrite, which are backed up first."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from slipstream.workload.backup import announce_writer, back_up

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_TRUNC | os.O_CREAT
_PSEUDO = ("/dev/", "/proc/", "/sys/")
# Functions that open files in native code, without audit events: module, name, and position and
# keyword of the path argument.
_NATIVE_WRITERS = (
    ("torch", "save", 1, "f"),
    ("torch.serialization", "save", 1, "f"),
    ("torch.jit", "save", 1, "f"),
    ("safetensors.torch", "serialize_file", 1, "filename"),
    ("safetensors.numpy", "serialize_file", 1, "filename"),
)
# Suffixes of SQLite's files of a database.
_DATABASE_SUFFIXES = ("", "-wal", "-journal", "-shm")


class FileGuard:
    """Context in which files are backed up before Python code overwrites, renames or removes them.

    `slipstream.workload.backup.restore_files` restores the files and removes new ones, since a
    later run might resume from the checkpoint of a profiled one. The guard covers the script's
    folder, the current one, and the rest of the disk except temporary files, installed packages
    and caches (hidden folders in the home folder).

    It observes Python's audit events. Native code raises none, so `torch.save` and some other
    functions are patched. Other writes of native code and of other programs are not detected, but
    folders that the code makes are removed with all that was written to them since.
    """

    def __init__(self, folder: Path, keep_in: Path) -> None:
        self._folders = tuple({str(folder.resolve()) + os.sep, os.getcwd() + os.sep})
        temporary = os.path.realpath(tempfile.gettempdir())
        self._ours = os.path.join(temporary, "slipstream-")
        installed = {os.path.realpath(prefix) for prefix in (sys.prefix, sys.base_prefix)}
        self._foreign = tuple(
            place + os.sep for place in (temporary, "/run", "/var", *sorted(installed - {"/usr"}))
        )
        # Path.home() fails for users without a home folder.
        self._home = os.path.realpath(os.path.expanduser("~")) + os.sep
        self._keep_in = keep_in
        self._seen: set[str] = set()
        self._active = False
        self._thread = threading.local()
        self._patched: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> FileGuard:
        announce_writer(self._keep_in)
        self._active = True
        sys.addaudithook(self._audit)
        for module_name, function, position, keyword in _NATIVE_WRITERS:
            if importlib.util.find_spec(module_name.partition(".")[0]) is None:
                continue
            module = importlib.import_module(module_name)
            original = getattr(module, function, None)
            if original is not None:
                self._patched.append((module, function, original))
                setattr(module, function, self._guarded(original, position, keyword))
        return self

    def __exit__(self, *error: object) -> None:
        # An audit hook cannot be removed, only disabled.
        self._active = False
        for module, function, original in self._patched:
            setattr(module, function, original)

    def _guarded(
        self, original: Callable[..., Any], position: int, keyword: str
    ) -> Callable[..., Any]:
        @functools.wraps(original)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            path = args[position] if len(args) > position else kwargs.get(keyword)
            if self._active and isinstance(path, (str, os.PathLike)):
                self._keep(os.path.realpath(os.fspath(path)))
            return original(*args, **kwargs)

        return guarded

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        read = _EVENTS.get(event)
        if read is None or not self._active or getattr(self._thread, "busy", False):
            return
        # Reading paths and copying raise audit events too.
        self._thread.busy = True
        try:
            for path in read(*arguments):
                self._keep(path)
        finally:
            self._thread.busy = False

    def _keep(self, path: str) -> None:
        if path in self._seen or not self._is_covered(path):
            return
        busy = getattr(self._thread, "busy", False)
        self._thread.busy = True
        try:
            back_up(self._keep_in, path)
        finally:
            self._thread.busy = busy
        self._seen.add(path)

    def _is_covered(self, path: str) -> bool:
        if path.startswith((*_PSEUDO, self._ours)):
            return False
        if path.startswith(self._home + "."):
            hidden = self._home + path[len(self._home) :].split(os.sep)[0] + os.sep
            return any(folder.startswith(hidden) for folder in self._folders)
        return path.startswith(self._folders) or not path.startswith(self._foreign)


# The absolute paths that each audit event is about to change. `open` and `truncate` follow links;
# the others change the link.


def _opened(path: Any, mode: Any, flags: Any) -> Iterator[str]:
    if isinstance(flags, int) and flags & _WRITING and isinstance(path, (str, bytes, os.PathLike)):
        yield os.path.realpath(os.fsdecode(path))


def _truncated(path: Any, length: Any) -> Iterator[str]:
    if isinstance(path, (str, bytes)):
        yield os.path.realpath(os.fsdecode(path))


def _entry(path: Any, folder_fd: int = -1) -> Iterator[str]:
    if isinstance(path, (str, bytes)):
        text = os.fsdecode(path)
        if folder_fd >= 0 and not os.path.isabs(text):
            text = os.path.join(os.readlink(f"/proc/self/fd/{folder_fd}"), text)
        folder, name = os.path.split(os.path.abspath(text))
        yield os.path.join(os.path.realpath(folder), name)


def _renamed(old: Any, new: Any, old_fd: int = -1, new_fd: int = -1) -> Iterator[str]:
    for source in _entry(old, old_fd):
        for target in _entry(new, new_fd):
            yield from (source, target)
            if os.path.isdir(source) and not os.path.islink(source):
                for folder, folders, files in os.walk(source):
                    for name in (*folders, *files):
                        inner = os.path.join(folder, name)
                        yield from (inner, target + inner[len(source) :])


def _linked(source: Any, path: Any, *folders: int) -> Iterator[str]:
    yield from _entry(path, folders[-1] if folders else -1)


def _connected(database: Any) -> Iterator[str]:
    if isinstance(database, (str, bytes, os.PathLike)):
        text = os.fsdecode(database)
        if text and text != ":memory:" and not text.startswith("file:"):
            for suffix in _DATABASE_SUFFIXES:
                yield os.path.realpath(text) + suffix


_EVENTS: dict[str, Callable[..., Iterator[str]]] = {
    "open": _opened,
    "os.truncate": _truncated,
    "os.remove": _entry,
    "os.rmdir": _entry,
    "os.mkdir": lambda path, mode, folder_fd=-1: _entry(path, folder_fd),
    "os.rename": _renamed,
    "os.symlink": _linked,
    "os.link": _linked,
    "sqlite3.connect": _connected,
}
