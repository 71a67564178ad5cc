"""Edits of the user's file that the page asks for: shown first, written when confirmed, undone.

Everything is tied to the digest of the file as it was looked at: what changed since is not edited.
Runs in a child, like all that loads techniques.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from slipstream import technique
from slipstream.errors import WorkloadError
from slipstream.source import Source, find_batch_size, locate, undo, write
from slipstream.workload import Workload


def preview(target: str, change: dict[str, Any], digest: str | None = None) -> dict[str, Any]:
    """The diff of `change`, and the digest of the file it is of.

    Raises:
        SlipstreamError: it has no certain place, or the file has another digest.
    """
    source, edited, note = _edited(target, change, digest)
    return {"diff": edited.diff(), "digest": _digest(source.original), "note": note}


def save(target: str, change: dict[str, Any], digest: str) -> dict[str, Any]:
    """Write the file with `change`; returns the digests before and after.

    Raises:
        SlipstreamError: as `preview`; then the file is as it was.
    """
    source, edited, _ = _edited(target, change, digest)
    write(edited)
    return {"before": _digest(source.original), "after": _digest(edited.content)}


def take_back(target: str, digest: str) -> dict[str, Any]:
    """Put the file back as it was before the edit that gave it this `digest`.

    Raises:
        WorkloadError: it has changed since.
    """
    path = Workload(target).path
    _need(path.read_bytes(), digest, path)
    undo(path)
    return {"after": _digest(path.read_bytes())}


def _edited(target: str, change: dict[str, Any], digest: str | None) -> tuple[Source, Source, str]:
    workload = Workload(target)
    source = Source.read(workload.path)
    if digest is not None:
        _need(source.original, digest, workload.path)
    where = locate(source, workload.function)
    if "batch" in change:
        return source, find_batch_size(where).set(int(change["batch"])), ""
    edited, note = with_techniques(source, workload, str(change["technique"]), saved=True)
    return source, edited, note


def with_techniques(
    source: Source, workload: Workload, name: str, *, saved: bool
) -> tuple[Source, str]:
    """`source` with what does the same as a technique, or a combination; and what to know of it.

    Args:
        source: the workload's file, or its text as an editor holds it.
        saved: it is the file as saved: what has no place there is refused with the lines to write
            by hand.

    Raises:
        UsageError: it is not in the grammar.
        NotPlacedError, AlreadyThereError: it has no certain place in the text, or is there.
        WorkloadError: it has no edit.
    """
    notes = []
    for one in technique.parse(name):
        code = one.code(workload)
        if code is None or code.edit is None or (saved and not code.diff):
            reason = code.note if code is not None and code.note else "it has no edit of a file"
            raise WorkloadError(f"{one}: {reason}", where=str(workload.path))
        source = code.edit(locate(source, workload.function)).settled()
        notes.append(code.note)
    return source, "\n".join(filter(None, notes))


def _need(content: bytes, digest: str, path: Path) -> None:
    if _digest(content) != digest:
        raise WorkloadError(
            f"'{path.name}' was changed by somebody else meanwhile",
            where=str(path),
            remedy="nothing was written; the new text is being analysed, drag again",
        )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
