"""Where the user's file says the batch size; cheap enough for the server itself."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from slipstream.source import NotPlacedError, Source, find_batch_size, locate
from slipstream.workload import Workload


def look(target: str) -> dict[str, Any]:
    """The file's ``digest``, and the ``value`` and ``line`` of the batch size; or ``why_not``.

    Raises:
        SlipstreamError: the file does not parse.
    """
    workload = Workload(target)
    source = Source.read(workload.path)
    found: dict[str, Any] = {"digest": hashlib.sha256(source.original).hexdigest()}
    try:
        size = find_batch_size(locate(source, workload.function))
    except NotPlacedError as error:
        where = Path(error.where).name if error.where else ""
        return {**found, "why_not": error.what + (f" ({where})" if where else "")}
    return {**found, "value": size.value, "line": size.line}
