"""Memory: by how much this process grows while something runs, and whether more would fit."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from pathlib import Path

import psutil


def fits(nbytes: int) -> bool:
    """Whether so much memory, and half as much again, is free."""
    return bool(psutil.virtual_memory().available > 1.5 * nbytes)


def growth_mib(run: Callable[[], object]) -> float | None:
    """MiB over what the process had before; None where the system does not tell."""
    with contextlib.suppress(AttributeError, OSError):
        # What the heap keeps free goes back to the system: used again, it counts.
        ctypes.CDLL(None).malloc_trim(0)
    before = _peak_bytes(start_anew=True)
    run()
    after = _peak_bytes()
    return None if before is None or after is None else (after - before) / 2**20


def _peak_bytes(start_anew: bool = False) -> int | None:
    """This process's largest resident size, since it was started anew."""
    with contextlib.suppress(OSError, StopIteration):
        if start_anew:
            Path("/proc/self/clear_refs").write_text("5")
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
    return None
