"""Memory growth of this process during a call, and whether more memory is free."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from pathlib import Path

import psutil


def fits(nbytes: int) -> bool:
    """Return whether one and a half times this much memory is free."""
    return bool(psutil.virtual_memory().available > 1.5 * nbytes)


def growth_mib(run: Callable[[], object]) -> float | None:
    """Return the MiB added to the process's memory; None if the system does not report it."""
    with contextlib.suppress(AttributeError, OSError):
        # Return free heap memory to the system, so that its reuse counts.
        ctypes.CDLL(None).malloc_trim(0)
    before = _peak_bytes(reset=True)
    run()
    after = _peak_bytes()
    return None if before is None or after is None else (after - before) / 2**20


def _peak_bytes(reset: bool = False) -> int | None:
    """Return this process's peak resident size, since the call if `reset`."""
    with contextlib.suppress(OSError, StopIteration):
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
    return None
