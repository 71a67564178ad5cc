"""What has to be in place before the user's code runs, because it cannot be put in later."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from slipstream.workload.built import Applicable, in_order


def edited(script: Path, techniques: Iterable[Applicable]) -> bytes | None:
    """A plain script as those of `techniques` that edit it would have it, in stage order.

    Returns:
        The file's bytes; None where none of them edits.

    Raises:
        SlipstreamError: there is no place for an edit.
    """
    editing = [one for one in techniques if one.traits.edits_script]
    if not editing:
        return None
    content = script.read_bytes()
    for technique in in_order(editing):
        content = technique.edited(script, content)
    return content


def prepare(techniques: Iterable[Applicable]) -> None:
    """Let `techniques` prepare this process, in their order."""
    for technique in in_order(techniques):
        technique.prepare()
