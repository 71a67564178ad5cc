"""Suspend Python's garbage collector during recordings and while reading files."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Disable garbage collection in this context.

    During a recording, a collection would add its time to an arbitrary task. While a file is read,
    scanning a million small live objects would take most of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
