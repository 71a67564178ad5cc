"""Edits of the user's workload, as text in an editor or as the file on disk.

The page previews an edit, writes it after confirmation, and can undo it. Each edit carries the
digest of the file it was made for, so that a file changed since is not edited. Edits run in a
worker process, like everything that loads techniques.
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
    EditLocationError,
    Source,
    find_batch_size,
    locate,
    undo,
    write,
)
from slipstream.workload import Workload

_MAX_BATCH_SIZE = 10_000_000


@dataclass(frozen=True)
class Edited:
    """A text before and after an edit.

    Attributes:
        label: short description of the edit.
        note: remark on what the edit does not cover; may be empty.
    """

    before: str
    after: str
    label: str
    note: str = ""


def batch_size_in(text: str, workload: Workload) -> BatchSize:
    """Find the batch size in `text`.

    Raises:
        EditLocationError: there is no batch size, or its place is ambiguous.
        WorkloadError: `text` is not valid Python.
    """
    return _batch_size(_source(text, workload), workload)


def with_batch_size(text: str, workload: Workload, samples: int) -> Edited:
    """Change the batch size in `text`, which replaces one token.

    Raises:
        InvalidArgumentError: `samples` is out of range.
        EditLocationError, WorkloadError: see `batch_size_in`.
    """
    if not 1 <= samples <= _MAX_BATCH_SIZE:
        raise InvalidArgumentError(
            "batch_size", f"{samples} is not between 1 and {_MAX_BATCH_SIZE}"
        )
    size = batch_size_in(text, workload)
    return Edited(text, size.set(samples).text, f"batch size {size.value} to {samples}")


def with_technique(text: str, workload: Workload, name: str) -> Edited:
    """Edit `text` to apply a technique or a combination.

    Raises:
        UsageError: `name` is not a valid technique spec.
        EditLocationError: the place of the edit is ambiguous.
        AlreadyAppliedError: the text already applies the technique.
        WorkloadError: the technique has no source edit, or the text is not valid Python.
    """
    source, note = _with_techniques(_source(text, workload), workload, name, saved=False)
    return Edited(text, source.text, name, note)


def inspect_target(target: str) -> dict[str, Any]:
    """Return the file's ``digest``, and ``value`` and ``line`` of the batch size or ``reason``.

    Fast enough to run in the server process.

    Raises:
        SlipstreamError: the file does not parse.
    """
    workload = Workload(target)
    source = Source.read(workload.path)
    digest = sha256(source.original)
    try:
        size = _batch_size(source, workload)
    except EditLocationError as error:
        where = Path(error.where).name if error.where else ""
        return {"digest": digest, "reason": error.what + (f" ({where})" if where else "")}
    return {"digest": digest, "value": size.value, "line": size.line}


def preview(target: str, change: dict[str, Any], digest: str | None = None) -> dict[str, Any]:
    """Return the diff of `change`, the digest of the file, and a note.

    Raises:
        SlipstreamError: the place of the edit is ambiguous, or the file has another digest.
    """
    edited, note = _edited(target, change, digest)
    return {"diff": edited.diff(), "digest": sha256(edited.original), "note": note}


def save(target: str, change: dict[str, Any], digest: str) -> dict[str, Any]:
    """Write the file with `change`, and return the digests before and after.

    Raises:
        SlipstreamError: see `preview`; the file is then unchanged.
    """
    edited, _ = _edited(target, change, digest)
    write(edited)
    return {"before": sha256(edited.original), "after": sha256(edited.content)}


def take_back(target: str, digest: str) -> dict[str, Any]:
    """Undo the edit that gave the file this `digest`.

    Raises:
        WorkloadError: the file has changed since.
    """
    path = Workload(target).path
    _need_digest(path.read_bytes(), digest, path)
    undo(path)
    return {"after": sha256(path.read_bytes())}


def _edited(target: str, change: dict[str, Any], digest: str | None) -> tuple[Source, str]:
    workload = Workload(target)
    source = Source.read(workload.path)
    if digest is not None:
        _need_digest(source.original, digest, workload.path)
    if "batch" in change:
        return _batch_size(source, workload).set(int(change["batch"])), ""
    return _with_techniques(source, workload, str(change["technique"]), saved=True)


def _with_techniques(
    source: Source, workload: Workload, name: str, *, saved: bool
) -> tuple[Source, str]:
    """Return `source` edited to apply a technique or combination, and notes on the edit.

    Args:
        source: the workload's file, or its text in an editor.
        saved: whether `source` is the saved file; an edit without a place in it is then refused
            with the lines to write by hand.
    """
    notes = []
    for part in technique.parse(name):
        code = part.code(workload)
        if code is None or code.edit is None or (saved and not code.diff):
            reason = code.note if code is not None and code.note else "it has no source edit"
            raise WorkloadError(f"{part}: {reason}", where=str(workload.path))
        source = code.edit(locate(source, workload.function, workload.lines)).reparse()
        notes.append(code.note)
    return source, "\n".join(filter(None, notes))


def _batch_size(source: Source, workload: Workload) -> BatchSize:
    return find_batch_size(locate(source, workload.function))


def _source(text: str, workload: Workload) -> Source:
    return Source.of_text(text, Path(workload.path))


def _need_digest(content: bytes, digest: str, path: Path) -> None:
    if sha256(content) != digest:
        raise WorkloadError(
            f"'{path.name}' has changed since the edit was requested",
            where=str(path),
            remedy="nothing was written; repeat the edit when the new text has been analysed",
        )
