"""Keep the messages of torch's native recorders off the user's screen."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator

# The last entry: CUDA builds look for a device on machines without one.
_RECORDERS = (
    b"USDT:", b"execution_trace_observer.cpp", b"CPUAllocator.cpp", b"DeviceProperties.cpp",
)  # fmt: skip


@contextlib.contextmanager
def without_chatter() -> Iterator[None]:
    """Hold back what this process writes to file descriptor 2, then pass on all but recorder lines.

    Outputs of a child process are captured anyway; a notebook would show them.
    """
    try:
        stderr = os.dup(2)
    except OSError:
        # Descriptor 2 is closed.
        yield
        return
    with tempfile.TemporaryFile(prefix="slipstream-said-") as chatter:
        sys.stderr.flush()
        os.dup2(chatter.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            chatter.seek(0)
            for line in chatter:
                if not any(word in line for word in _RECORDERS):
                    os.write(2, line)
