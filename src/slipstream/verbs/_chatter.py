"""What torch's native recorders print of themselves is kept off the user's screen."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator

# The last of them: builds with CUDA look for a device where there is none.
_RECORDERS = (
    b"USDT:", b"execution_trace_observer.cpp", b"CPUAllocator.cpp", b"DeviceProperties.cpp",
)  # fmt: skip


@contextlib.contextmanager
def without_chatter() -> Iterator[None]:
    """Within it, what this process writes to file descriptor 2 waits; then it is passed on.

    All but the recorders' own lines. In a child nobody sees them; a notebook would show them.
    """
    try:
        kept = os.dup(2)
    except OSError:
        # Nobody listens.
        yield
        return
    with tempfile.TemporaryFile(prefix="slipstream-said-") as chatter:
        sys.stderr.flush()
        os.dup2(chatter.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            chatter.seek(0)
            for line in chatter:
                if not any(word in line for word in _RECORDERS):
                    os.write(2, line)
