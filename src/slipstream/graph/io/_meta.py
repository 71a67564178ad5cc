"""The types of the entries of ``Graph.meta``, checked when a file is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NewType, NotRequired, TypedDict

import numpy as np

from slipstream.errors import InvalidArgumentError
from slipstream.schema import Readers, read

_MAX_COUNT, _MAX_THREADS = 1 << 53, 1 << 16
_DEVICES = ("cpu", "cuda")

_Name = NewType("_Name", str)  # encodable as UTF-8
_Device = NewType("_Device", str)
_Threads = NewType("_Threads", int)
_Positive = NewType("_Positive", int)
_Share = NewType("_Share", float)
_Launches = NewType("_Launches", dict[str, Any])  # too many rows to be read one by one
_Tensor = tuple[str, tuple[int, ...], tuple[int, ...], str]

_Optimizer = TypedDict(
    "_Optimizer",
    {
        "class": str, "tensors": Sequence[_Tensor], "settings": NotRequired[Mapping[str, Any]],
        "zeros": NotRequired[Sequence[float]],
    },
)  # fmt: skip
_Machine = TypedDict(
    "_Machine", {"cpu.physical": float, "cpu.logical": float, "memory.total_mib": float},
    total=False,
)  # fmt: skip


class _Distributed(TypedDict):
    wrapper: str
    ranks: int


class _Baseline(TypedDict, total=False):
    amp: str
    compiled: bool
    distributed: _Distributed | None


class _Lines(TypedDict):
    functions: Mapping[str, str]
    callers: Mapping[str, Sequence[Sequence[str]]]
    made: Mapping[str, str]
    files: Mapping[str, str]


class _Shrunk(TypedDict):
    samples: int
    of: int


class _Recipe(TypedDict):
    target: str
    arguments: Mapping[str, Any]
    script_arguments: Sequence[str]
    threads: _Threads | None


class _Source(TypedDict):
    file: str
    place: str
    sha256: str


class _Elsewhere(TypedDict):
    operators: int
    share: _Share


class _Region(TypedDict):
    phase: str
    saved_bytes: int
    ns: float
    spread: float


class _Covered(TypedDict):
    forward: float
    backward: float


class _Regions(TypedDict):
    mode: str
    samples: int
    regions: Sequence[_Region]
    overhead_ns: float
    covered_ns: _Covered
    repeats: _Positive
    stays: Sequence[tuple[str, str]]
    breaks: Sequence[Any]
    compile_s: float
    eager_ns: float
    compiled_ns: float


class _Meta(TypedDict, total=False):
    workload: _Name
    device: _Device
    device_name: _Name
    lanes_of: _Device
    created: str
    cpu_capability: str
    torch: str
    memory_reason: str
    training: bool
    inference_mode: bool
    contended: bool
    machine: _Machine
    modules: Mapping[str, str]
    optimizer: _Optimizer | None
    baseline: _Baseline
    lines: _Lines
    evaluations: bool
    stepped_at: str
    other_loops: Sequence[str]
    shrunk: _Shrunk
    recipe: _Recipe | None
    source: _Source | None
    elsewhere: _Elsewhere
    launches: _Launches
    step_ns: Mapping[str, float]
    threads: _Threads
    parameters: int
    steps: int
    aligned_steps: int
    events_per_step: int
    kernels: int
    kernels_linked: int
    kernels_launched_before: int
    untimed_tasks: int
    waits_unresolved: int
    unaligned_share: _Share
    profiler_ns_per_event: float
    residual_scale: float
    recorded_ns: float
    page_fault_launches_ns: Sequence[float]


def check_meta(meta: Mapping[str, Any]) -> None:
    """Check the known entries of `meta`.

    Raises:
        InvalidArgumentError: an entry is missing in a part or has another type; the error names it.
    """
    read(_Meta, meta, "meta", _READERS)
    regions = meta.get("regions")
    # If nothing could be compiled, the entry has a reason instead.
    if regions is not None and not (isinstance(regions, Mapping) and regions.get("reason")):
        read(_Regions, regions, "meta.regions", _READERS)


def _refusal(value: Any, place: str, words: str) -> InvalidArgumentError:
    return InvalidArgumentError(place, f"{value!r:.80} is not {words}")


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise _refusal(value, place, "a string")
    return value


def _name(value: Any, place: str) -> str:
    try:
        _text(value, place).encode()
    except UnicodeEncodeError:
        raise _refusal(value, place, "valid Unicode") from None
    return str(value)


def _device(value: Any, place: str) -> str:
    if value not in _DEVICES:
        raise _refusal(value, place, " or ".join(_DEVICES))
    return str(value)


def _count(value: Any, place: str, least: int = 0, most: int = _MAX_COUNT) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise _refusal(value, place, f"an integer from {least} to {most}")
    return value


def _share(value: Any, place: str) -> float:
    share: float = read(float, value, place, {})
    if not 0 <= share <= 1:
        raise _refusal(value, place, "a share from 0 to 1")
    return share


def _launches(value: Any, place: str) -> Any:
    try:
        rows = [np.asarray(launches) for launches in value.values()]
        plain = all(row.dtype.kind == "i" and row.shape[1:] == (4,) for row in rows)
    except (AttributeError, ValueError, OverflowError):
        plain = False
    if not plain:
        raise _refusal(value, place, "rows of four integers by name")
    return value


_READERS: Readers = {
    str: _text,
    int: _count,
    _Name: _name,
    _Device: _device,
    _Threads: partial(_count, most=_MAX_THREADS),
    _Positive: partial(_count, least=1),
    _Share: _share,
    _Launches: _launches,
}
