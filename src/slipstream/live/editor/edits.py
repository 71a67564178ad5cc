"""Edits of a file as the editor holds it: the same as the page's, of its text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slipstream.errors import InvalidArgumentError
from slipstream.live._edits import with_techniques
from slipstream.source import BatchSize, Source, find_batch_size, locate
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


def batch_size_in(text: str, workload: Workload) -> BatchSize:
    """Where `text` says the batch size.

    Raises:
        NotPlacedError: nowhere, or it is not certain where; says why.
        WorkloadError: it is no Python.
    """
    return find_batch_size(locate(_source(text, workload), workload.function))


def with_batch_size(text: str, workload: Workload, samples: int) -> Edited:
    """`text` with another batch size: one token differs.

    Raises:
        InvalidArgumentError: no number of samples.
        NotPlacedError, WorkloadError: as `batch_size_in`.
    """
    if not 1 <= samples <= _LARGEST:
        raise InvalidArgumentError("batch_size", f"{samples} is not between 1 and {_LARGEST}")
    found = batch_size_in(text, workload)
    return Edited(text, found.set(samples).text, f"batch size {found.value} to {samples}")


def with_technique(text: str, workload: Workload, name: str) -> Edited:
    """`text` with what does the same as a technique, or a combination.

    Raises:
        UsageError: it is not in the grammar.
        NotPlacedError, AlreadyThereError: it has no certain place in the text, or is there.
        WorkloadError: it has no edit at all, or the text is no Python.
    """
    source, note = with_techniques(_source(text, workload), workload, name, saved=False)
    return Edited(text, source.text, name, note)


def _source(text: str, workload: Workload) -> Source:
    return Source.of_text(text, Path(workload.path))
