"""Measure the peak memory of a function and of its phases.

Linux records the peak resident size of a process (``VmHWM``) and lets a process reset its own, so
that each phase has a separate peak. A forked process inherits its parent's peak, and an allocator
retains freed memory; work is therefore measured in a fresh process (`peak_memory`), or in this one
after the allocator has returned its free pages (`peak_of_call`).

Without ``/proc`` (macOS), only the peak of the whole process is available.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.child import Child, resolve
from slipstream.errors import MeasurementError

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
# Writing this resets the peak resident size: Documentation/filesystems/proc.rst, clear_refs.
_RESET_PEAK = "5"


@dataclass(frozen=True)
class Peak:
    """Memory of one phase, in bytes.

    Attributes:
        peak: Largest resident size during the phase.
        resting: Resident size at its start.
    """

    peak: int
    resting: int

    @property
    def increase(self) -> int:
        """Peak minus resting size."""
        return max(0, self.peak - self.resting)


@dataclass(frozen=True)
class PeakMemory:
    """Peaks of a call and its phases; `unreadable` is the reason for missing phases, or empty."""

    process: Peak
    phases: Mapping[str, Peak]
    unreadable: str = ""


_phases: dict[str, Peak] = {}
_open: list[str] = []
_max_peak = 0


@contextlib.contextmanager
def memory_phase(name: str) -> Iterator[None]:
    """Measure the peak of the body as the phase `name`; phases do not nest.

    A repeated name records the larger peak. Does nothing if peaks cannot be reset.

    Raises:
        MeasurementError: The phase begins inside another.
    """
    global _max_peak
    if _open:
        raise MeasurementError(
            f"memory phase '{name}' begins inside '{_open[-1]}'",
            remedy="end one before the next: a process has only one peak counter",
        )
    if not resettable():
        yield
        return
    _max_peak = max(_max_peak, read_status_bytes("VmHWM"))
    _open.append(name)
    reset_peak()
    resting = read_status_bytes("VmRSS")
    try:
        yield
    finally:
        peak = read_status_bytes("VmHWM")
        _open.pop()
        before = _phases.get(name)
        if before is None or before.peak < peak:
            _phases[name] = Peak(peak, resting)
        _max_peak = max(_max_peak, peak)


def peak_memory(
    function: str,
    arguments: Mapping[str, Any] | None = None,
    *,
    prepare: str | None = None,
    prepare_arguments: Mapping[str, Any] | None = None,
    timeout_s: float | None = 600.0,
    directory: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> PeakMemory:
    """Measure the peak memory of ``module:function(**arguments)`` in a fresh process.

    Args:
        prepare: ``module:function`` to run first in the same process, not counted, such as
            imports or building a model.
        timeout_s: Time after which a process that has not returned is killed.

    Raises:
        SlipstreamError: The function raised, or its process died.
    """
    with Child("the memory worker", environment=environment, directory=directory) as child:
        if prepare is not None:
            child.call(
                "slipstream.measure.memory:_prepare",
                timeout_s=timeout_s,
                called=prepare,
                arguments=dict(prepare_arguments or {}),
            )
        answer = child.call(
            "slipstream.measure.memory:_measured",
            timeout_s=timeout_s,
            called=function,
            arguments=dict(arguments or {}),
        )
    return PeakMemory(
        Peak(*answer["whole"]),
        {name: Peak(*values) for name, values in answer["phases"].items()},
        answer["unreadable"],
    )


def peak_of_call(function: Callable[[], object]) -> Peak:
    """Measure the peak of one call in this process, after returning freed memory to the system.

    Raises:
        MeasurementError: The peak cannot be reset on this system.
    """
    if not resettable():
        raise MeasurementError(
            "peak memory of a function in this process cannot be read on this system",
            remedy="run it in a separate process: a WorkerArm or a command",
        )
    _return_free_memory()
    reset_peak()
    resting = read_status_bytes("VmRSS")
    function()
    return Peak(read_status_bytes("VmHWM"), resting)


def resettable() -> bool:
    """Whether this process can reset and read its own peak resident size."""
    if not _STATUS.exists():
        return False
    try:
        reset_peak()
    except OSError:
        return False
    return True


def _prepare(called: str, arguments: dict[str, Any]) -> None:
    resolve(called)(**arguments)


def _measured(called: str, arguments: dict[str, Any]) -> dict[str, Any]:
    # Runs in the child process.
    global _max_peak
    call = resolve(called)
    _phases.clear()
    if not resettable():
        import resource

        call(**arguments)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        unit = 1 if sys.platform == "darwin" else 1024
        why = "this system cannot reset the peak; only the peak of the whole process is known"
        return {"whole": [peak * unit, 0], "phases": {}, "unreadable": why}
    _return_free_memory()
    _max_peak = 0
    reset_peak()
    resting = read_status_bytes("VmRSS")
    call(**arguments)
    peak = max(_max_peak, read_status_bytes("VmHWM"))
    phases = {name: [phase.peak, phase.resting] for name, phase in _phases.items()}
    return {"whole": [peak, resting], "phases": phases, "unreadable": ""}


def reset_peak() -> None:
    """Reset this process's peak resident size (``VmHWM``) to the current size.

    Raises:
        OSError: The system does not support this; see `resettable`.
    """
    _CLEAR.write_text(_RESET_PEAK)


def read_status_bytes(field: str) -> int:
    """Return ``VmRSS``, ``VmHWM`` or another size of this process, in bytes.

    Raises:
        MeasurementError: There is no such field.
    """
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise MeasurementError(f"{field} is missing from /proc/self/status")


def _return_free_memory() -> None:
    """Collect garbage and return free pages, since reusing them would not raise the peak."""
    gc.collect()
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
