"""Keep Python's garbage collector from running where it would be in the way."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """No garbage is collected within.

    While steps are recorded a collection would land in an arbitrary task; while records are read
    they are a million small objects, none of them garbage, and looking for some takes most of the
    time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
