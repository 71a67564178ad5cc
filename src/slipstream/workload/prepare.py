"""What has to be in place before the user's code runs, because it cannot be put in later."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, runtime_checkable

from slipstream.workload.built import Applicable


@runtime_checkable
class Preparing(Protocol):
    """A technique that has to see the user's code make something."""

    def prepare(self) -> None:
        """Change what the user's code is about to call. Only ever runs in a child process."""


@runtime_checkable
class Editing(Protocol):
    """A technique that changes the loop of a plain script, which nobody but the script runs."""

    def edited(self, script: Path, content: bytes) -> bytes:
        """The script with the change; a `SlipstreamError` where there is no place for it."""


def edited(script: Path, techniques: Iterable[Applicable]) -> bytes | None:
    """A plain script as those of `techniques` that edit it would have it, in stage order.

    Returns:
        The file's bytes; None where none of them edits.

    Raises:
        SlipstreamError: there is no place for an edit, see `Editing`.
    """
    editing = [one for one in techniques if isinstance(one, Editing)]
    if not editing:
        return None
    content = script.read_bytes()
    for technique in sorted(editing, key=lambda technique: technique.stage):
        content = technique.edited(script, content)
    return content


def prepare(techniques: Iterable[Applicable]) -> None:
    """Let those of `techniques` that ask for it prepare this process, in stage order."""
    for technique in sorted(techniques, key=lambda technique: technique.stage):
        if isinstance(technique, Preparing):
            technique.prepare()
