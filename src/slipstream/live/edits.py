"""Edits of the user's file: of its text as an editor holds it, or of the file itself.

The page's are shown first, written when confirmed, undone; each is tied to the digest of the file
as it was looked at, so that what changed since is not edited. They run in a worker process, like
all that loads techniques.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream import technique
from slipstream.errors import InvalidArgumentError, WorkloadError
from slipstream.live.texts import sha256
from slipstream.source import (
    BatchSize,
    NotPlacedError,
    Source,
    find_batch_size,
    locate,
    undo,
    write,
)
from slipstream.workload import Workload

_LARGEST = 10_000_000


@dataclass(frozen=True)
class Edited:
    """A text before and after an edit.

    Attributes:
        label: what was done, in the grammar's words.
        note: what the edit does not say.
    """

    before: str
    after: str
    label: str
    note: str = ""


# Of a text.


def batch_size_in(text: str, workload: Workload) -> BatchSize:
    """Where `text` says the batch size.

    Raises:
        NotPlacedError: nowhere, or it is not certain where; says why.
        WorkloadError: it is no Python.
    """
    return _batch_size(_source(text, workload), workload)


def with_batch_size(text: str, workload: Workload, samples: int) -> Edited:
    """`text` with another batch size: one token differs.

    Raises:
        InvalidArgumentError: no number of samples.
        NotPlacedError, WorkloadError: as `batch_size_in`.
    """
    if not 1 <= samples <= _LARGEST:
        raise InvalidArgumentError("batch_size", f"{samples} is not between 1 and {_LARGEST}")
    size = batch_size_in(text, workload)
    return Edited(text, size.set(samples).text, f"batch size {size.value} to {samples}")


def with_technique(text: str, workload: Workload, name: str) -> Edited:
    """`text` with what does the same as a technique, or a combination.

    Raises:
        UsageError: it is not in the grammar.
        NotPlacedError, AlreadyThereError: it has no certain place in the text, or is there.
        WorkloadError: it has no edit at all, or the text is no Python.
    """
    source, note = _with_techniques(_source(text, workload), workload, name, saved=False)
    return Edited(text, source.text, name, note)


# Of the file.


def look(target: str) -> dict[str, Any]:
    """The file's ``digest``, and the ``value`` and ``line`` of the batch size; or ``why_not``.

    Cheap enough for the server itself.

    Raises:
        SlipstreamError: the file does not parse.
    """
    workload = Workload(target)
    source = Source.read(workload.path)
    digest = sha256(source.original)
    try:
        size = _batch_size(source, workload)
    except NotPlacedError as error:
        where = Path(error.where).name if error.where else ""
        return {"digest": digest, "reason": error.what + (f" ({where})" if where else "")}
    return {"digest": digest, "value": size.value, "line": size.line}


def preview(target: str, change: dict[str, Any], digest: str | None = None) -> dict[str, Any]:
    """The diff of `change`, and the digest of the file it is of.

    Raises:
        SlipstreamError: it has no certain place, or the file has another digest.
    """
    edited, note = _edited(target, change, digest)
    return {"diff": edited.diff(), "digest": sha256(edited.original), "note": note}


def save(target: str, change: dict[str, Any], digest: str) -> dict[str, Any]:
    """Write the file with `change`; returns the digests before and after.

    Raises:
        SlipstreamError: as `preview`; then the file is as it was.
    """
    edited, _ = _edited(target, change, digest)
    write(edited)
    return {"before": sha256(edited.original), "after": sha256(edited.content)}


def take_back(target: str, digest: str) -> dict[str, Any]:
    """Put the file back as it was before the edit that gave it this `digest`.

    Raises:
        WorkloadError: it has changed since.
    """
    path = Workload(target).path
    _need(path.read_bytes(), digest, path)
    undo(path)
    return {"after": sha256(path.read_bytes())}


def _edited(target: str, change: dict[str, Any], digest: str | None) -> tuple[Source, str]:
    workload = Workload(target)
    source = Source.read(workload.path)
    if digest is not None:
        _need(source.original, digest, workload.path)
    if "batch" in change:
        return _batch_size(source, workload).set(int(change["batch"])), ""
    return _with_techniques(source, workload, str(change["technique"]), saved=True)


def _with_techniques(
    source: Source, workload: Workload, name: str, *, saved: bool
) -> tuple[Source, str]:
    """`source` with what does the same as a technique, or a combination; and what to know of it.

    Args:
        source: the workload's file, or its text as an editor holds it.
        saved: it is the file as saved: what has no place there is refused with the lines to write
            by hand.
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


def _batch_size(source: Source, workload: Workload) -> BatchSize:
    return find_batch_size(locate(source, workload.function))


def _source(text: str, workload: Workload) -> Source:
    return Source.of_text(text, Path(workload.path))


def _need(content: bytes, digest: str, path: Path) -> None:
    if sha256(content) != digest:
        raise WorkloadError(
            f"'{path.name}' was changed by somebody else meanwhile",
            where=str(path),
            remedy="nothing was written; the new text is being analysed, drag again",
        )
