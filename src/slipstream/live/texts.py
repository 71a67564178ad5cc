"""The user's files: which belong to a workload, what they said, and whether they are unchanged."""

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
"""When a file was written, how long it is, and which file it is."""


class Texts:
    """The files of one workload, and their texts when they were last looked at.

    Args:
        path: the workload's file; the others become known when they have run.

    Attributes:
        files: absolute paths, in order.
        seen: SHA-256 of each text by path; empty for one that could not be read.
        read: each text by path; those that could not be read are left out.
    """

    def __init__(self, path: Path) -> None:
        self._own = str(path.resolve())
        self.files: tuple[str, ...] = (self._own,)
        self.seen: dict[str, str] = {}
        self.read: dict[str, str] = {}

    @property
    def digest(self) -> str:
        """Of all texts together."""
        lines = "\n".join(f"{path}\0{digest}" for path, digest in sorted(self.seen.items()))
        return sha256(lines.encode())

    def look(self) -> None:
        """See what they say now."""
        self.seen, self.read = _digests(self.files), _read(self.files)

    def add(self, files: Iterable[str]) -> None:
        """These ran. Of those that were not known before, what they say now is taken."""
        self.files = tuple(sorted({*files, self._own}))
        new = [path for path in self.files if path not in self.seen]
        self.seen = {path: self.seen.get(path, "") for path in self.files} | _digests(new)
        self.read |= _read(new)

    def stamps(self) -> dict[str, Stamp]:
        """Of each file, what becomes another when it is written; cheap."""
        stamps = {}
        for path in self.files:
            # An editor may take a moment between removing and writing it.
            with contextlib.suppress(OSError):
                status = Path(path).stat()
                stamps[path] = status.st_mtime_ns, status.st_size, status.st_ino
        return stamps


def unchanged(seen: Mapping[str, str]) -> bool:
    """Whether these files, by path with the SHA-256 of their texts, are as they were."""
    return bool(seen) and _digests(seen) == dict(seen)


def sha256(content: bytes) -> str:
    """The digest of a text, in hexadecimal digits."""
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
    """As `Workload.parse`; but a file that does not parse now may do so when it is saved next.

    Raises:
        SlipstreamError: as `Workload.parse`, for anything else that is wrong.
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
