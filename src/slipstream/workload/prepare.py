"""What has to be in place before the user's code runs, because it cannot be put in later."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from slipstream.workload.built import Applicable


@runtime_checkable
class Preparing(Protocol):
    """A technique that has to see the user's code make something."""

    def prepare(self) -> None:
        """Change what the user's code is about to call. Only ever runs in a child process."""


def prepare(techniques: Iterable[Applicable]) -> None:
    """Let those of `techniques` that ask for it prepare this process, in stage order."""
    for technique in sorted(techniques, key=lambda technique: technique.stage):
        if isinstance(technique, Preparing):
            technique.prepare()
