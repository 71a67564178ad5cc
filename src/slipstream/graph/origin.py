"""The file a graph was recorded of, and whether it has changed since."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from slipstream.graph.graph import Graph


def describe_source(path: Path) -> dict[str, str] | None:
    """What tells later whether the file has changed; its place as a hash, for it names people.

    Only the file itself: what it imports is not followed. None where it cannot be read.
    """
    try:
        content = path.read_bytes()
    except (OSError, UnicodeEncodeError):
        # The latter: the name was recorded where names of files have another encoding.
        return None
    place = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()
    return {"file": str(path), "place": place, "sha256": hashlib.sha256(content).hexdigest()}


def has_changed(graph: Graph) -> str | None:
    """The name of the workload's file if it is another than when `graph` was recorded.

    None also where that cannot be told: the file is not there, or the recording is older.
    """
    recorded = graph.meta.get("source")
    if not isinstance(recorded, Mapping):
        return None
    path = Path(str(recorded.get("file")))
    now = describe_source(path)
    same_place = now is not None and now["place"] == recorded.get("place")
    return path.name if same_place and now != recorded else None
