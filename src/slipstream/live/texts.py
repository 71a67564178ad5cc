"""The user's files of a workload, their texts, and whether they have changed."""

from __future__ import annotations

import ast
import contextlib
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.workload import Workload

Stamp = tuple[int, int, int]
"""Modification time in ns, size in bytes and inode of a file."""


class Texts:
    """The files of one workload, and their texts when last read.

    Args:
        path: the workload's file; `add` adds the others once they have run.

    Attributes:
        files: absolute paths, sorted.
        seen: SHA-256 of each file by path; empty for an unreadable file.
        read: text of each readable file by path.
    """

    def __init__(self, path: Path) -> None:
        self._own = str(path.resolve())
        self.files: tuple[str, ...] = (self._own,)
        self.seen: dict[str, str] = {}
        self.read: dict[str, str] = {}

    @property
    def digest(self) -> str:
        """SHA-256 of all texts."""
        lines = "\n".join(f"{path}\0{digest}" for path, digest in sorted(self.seen.items()))
        return sha256(lines.encode())

    def read_all(self) -> None:
        """Read all files."""
        self.seen, self.read = _digests(self.files), _read(self.files)

    def add(self, files: Iterable[str]) -> None:
        """Add files that have run, and read the new ones."""
        self.files = tuple(sorted({*files, self._own}))
        new = [path for path in self.files if path not in self.seen]
        self.seen = {path: self.seen.get(path, "") for path in self.files} | _digests(new)
        self.read |= _read(new)

    def stamps(self) -> dict[str, Stamp]:
        """Return a stamp of each file that changes when it is written; cheap."""
        stamps = {}
        for path in self.files:
            # Some editors delete a file before they write it.
            with contextlib.suppress(OSError):
                status = Path(path).stat()
                stamps[path] = status.st_mtime_ns, status.st_size, status.st_ino
        return stamps


def unchanged(seen: Mapping[str, str]) -> bool:
    """Return whether all files still have these SHA-256 digests; False for no files."""
    return bool(seen) and _digests(seen) == dict(seen)


def sha256(content: bytes) -> str:
    """Return the SHA-256 digest of `content` in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def _digests(paths: Iterable[str]) -> dict[str, str]:
    digests = {}
    for path in paths:
        digests[path] = ""
        with contextlib.suppress(OSError):
            digests[path] = sha256(Path(path).read_bytes())
    return digests


def _read(paths: Iterable[str]) -> dict[str, str]:
    texts = {}
    for path in paths:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            texts[path] = Path(path).read_text(encoding="utf-8")
    return texts


def parse_workload(target: str, *script_arguments: str, **arguments: Any) -> Workload:
    """Call `Workload.parse`, but accept a file with a syntax error, which a save may fix.

    Raises:
        SlipstreamError: see `Workload.parse`.
    """
    try:
        return Workload.parse(target, *script_arguments, **arguments)
    except SlipstreamError:
        path = Path(target.rpartition(":")[0] if ".py:" in target else target)
        if path.suffix == ".py" and path.is_file() and _is_broken(path):
            return Workload(target, arguments, script_arguments)
        raise


def _is_broken(path: Path) -> bool:
    try:
        ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return True
    return False
