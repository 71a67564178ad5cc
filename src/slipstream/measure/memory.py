"""Peak memory of one piece of work, phases apart.

Linux keeps the largest resident size a process ever had (``VmHWM``) and lets a process reset its
own mark, so that each phase has its own peak. Two traps are avoided: a forked process inherits
its parent's mark, and an allocator keeps what was freed; so work is measured in a fresh process
(`peak_memory`), or in this one after the allocator has given back what it can (`peak_of_call`).

Where ``/proc`` is absent (macOS) there is one peak for a whole process and none for phases.
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
        peak: the largest resident size during it.
        resting: the resident size when it began.
    """

    peak: int
    resting: int

    @property
    def increase(self) -> int:
        """What the phase needed on top of what was there."""
        return max(0, self.peak - self.resting)


@dataclass(frozen=True)
class PeakMemory:
    """Peak of a whole call and of its phases; `unreadable` says why phases are missing."""

    whole: Peak
    phases: Mapping[str, Peak]
    unreadable: str = ""


_phases: dict[str, Peak] = {}
_open: list[str] = []
_highest = 0


@contextlib.contextmanager
def memory_phase(name: str) -> Iterator[None]:
    """Measure the peak of the body as the phase `name`; phases do not nest.

    A name used again keeps the larger peak. Does nothing where peaks cannot be reset.

    Raises:
        MeasurementError: a phase inside a phase.
    """
    global _highest
    if _open:
        raise MeasurementError(
            f"memory phase '{name}' begins inside '{_open[-1]}'",
            remedy="end one before the next: there is one peak mark a process",
        )
    if not resettable():
        yield
        return
    _highest = max(_highest, read_status_bytes("VmHWM"))
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
        _highest = max(_highest, peak)


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
    """Peak memory of ``module:function(**arguments)`` in a fresh process.

    Args:
        prepare: ``module:function`` run before in the same process and not counted: imports,
            building a model.
        timeout_s: the process is killed when it has not answered for this long.

    Raises:
        SlipstreamError: what the function raised, or how its process died.
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
    """Peak of one call in this process, after freed memory was given back to the system.

    Raises:
        MeasurementError: the peak cannot be reset here.
    """
    if not resettable():
        raise MeasurementError(
            "peak memory of a function in this process cannot be read on this system",
            remedy="give it a process of its own: a WorkerArm or a command",
        )
    _give_back()
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
    """Runs in the fresh child."""
    global _highest
    call = resolve(called)
    _phases.clear()
    if not resettable():
        import resource

        call(**arguments)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        unit = 1 if sys.platform == "darwin" else 1024
        why = "this system has no resettable peak mark; only the process's own peak is known"
        return {"whole": [peak * unit, 0], "phases": {}, "unreadable": why}
    _give_back()
    _highest = 0
    reset_peak()
    resting = read_status_bytes("VmRSS")
    call(**arguments)
    peak = max(_highest, read_status_bytes("VmHWM"))
    phases = {name: [phase.peak, phase.resting] for name, phase in _phases.items()}
    return {"whole": [peak, resting], "phases": phases, "unreadable": ""}


def reset_peak() -> None:
    """Set this process's peak resident size (``VmHWM``) to its present size.

    Raises:
        OSError: this system cannot; see `resettable`.
    """
    _CLEAR.write_text(_RESET_PEAK)


def read_status_bytes(field: str) -> int:
    """``VmRSS``, ``VmHWM`` or another size of this process, in bytes.

    Raises:
        MeasurementError: there is no such field.
    """
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise MeasurementError(f"{field} is missing from /proc/self/status")


def _give_back() -> None:
    """Collect garbage and let the C allocator return free pages, so that reuse is not hidden."""
    gc.collect()
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
