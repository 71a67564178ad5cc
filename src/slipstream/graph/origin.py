"""The source file of a recorded workload, and whether it has changed since."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.graph.graph import Graph
from slipstream.units import format_percent


def describe_source(path: Path) -> dict[str, str] | None:
    """Return a fingerprint of the file, without its imports; None if it cannot be read.

    The location is hashed because paths contain user names.
    """
    try:
        content = path.read_bytes()
    except (OSError, UnicodeEncodeError):
        # UnicodeEncodeError: the name comes from a system with another file name encoding.
        return None
    place = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()
    return {"file": str(path), "place": place, "sha256": hashlib.sha256(content).hexdigest()}


def has_changed(graph: Graph) -> str | None:
    """Return the name of the workload's file if it has changed since `graph` was recorded.

    None also if the file is missing or the recording has no fingerprint.
    """
    recorded = graph.meta.get("source")
    if not isinstance(recorded, Mapping):
        return None
    path = Path(str(recorded.get("file")))
    current = describe_source(path)
    same_place = current is not None and current["place"] == recorded.get("place")
    return path.name if same_place and current != recorded else None


def long_steps_note(graph: Graph) -> str:
    """Describe steps much longer than the recorded one, if the script has them; else empty."""
    steps: Any = graph.meta.get("long_steps")
    if not steps:
        return ""
    number, of, share = steps["number"], steps["of"], steps["share"]
    return (
        f"{number} of {of} steps took more than twice as long as most, {format_percent(share)} of "
        "the time of all: what such steps do in addition is not in the recorded step"
    )


def evaluation_note(graph: Graph) -> str:
    """State that a step is an evaluation of the optimizer's closure, if so; else empty."""
    return "a step is one evaluation of LBFGS's closure" if graph.meta.get("evaluations") else ""


def loop_note(graph: Graph) -> str:
    """Name the loop of a script that was recorded, if the script has others; else empty."""
    here, others = graph.meta.get("stepped_at"), graph.meta.get("other_loops")
    if not here or not others:
        return ""
    return (
        f"the step is that of the loop around {here}; pass "
        f"{' or '.join(others)} instead of the script for the other loop{'s' * (len(others) > 1)}"
    )
