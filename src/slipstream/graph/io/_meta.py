"""The types of what a recording keeps in ``Graph.meta``, checked when a file is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import numpy as np

from slipstream.errors import InvalidArgumentError
from slipstream.schema import Readers, build, read

_MAX_COUNT, _MAX_THREADS = 1 << 53, 1 << 16
_DEVICES = ("cpu", "cuda")
# The default of an entry that may be absent, but not null.
_ABSENT: Any = None


class _Name(str):
    """A text that can be written into any file."""


class _Device(str):
    """One of `_DEVICES`."""


class _Threads(int):
    """A number of threads that a machine can have."""


class _Positive(int):
    """An integer of 1 or more."""


class _Share(float):
    """From 0 to 1."""


class _Machine(dict[str, Any]):
    """Facts by name, of which some are numbers."""


class _Launches(dict[str, Any]):
    """By name, rows of four integers: too many to be read one by one."""


@dataclass
class _Optimizer:
    tensors: tuple[tuple[str, tuple[int, ...], tuple[int, ...], str], ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    zeros: tuple[float, ...] = ()


@dataclass
class _Distributed:
    wrapper: str
    ranks: int


@dataclass
class _Baseline:
    amp: str = ""
    compiled: bool = False
    distributed: _Distributed | None = None


@dataclass
class _Lines:
    functions: Mapping[str, str]
    callers: Mapping[str, tuple[tuple[str, ...], ...]]
    made: Mapping[str, str]
    files: Mapping[str, str]


@dataclass
class _Shrunk:
    samples: int
    of: int
    reason: str = ""


@dataclass
class _Recipe:
    target: str
    arguments: Mapping[str, Any]
    script_arguments: tuple[str, ...]
    threads: _Threads | None


@dataclass
class _Source:
    file: str
    place: str
    sha256: str


@dataclass
class _Elsewhere:
    operators: int
    share: _Share


@dataclass
class _Region:
    phase: str
    saved_bytes: int
    ns: float
    spread: float


@dataclass
class _Covered:
    forward: float
    backward: float


@dataclass
class _Regions:
    mode: str
    samples: int
    regions: tuple[_Region, ...]
    overhead_ns: float
    covered_ns: _Covered
    repeats: _Positive
    stays: tuple[tuple[str, str], ...]
    breaks: tuple[Any, ...]
    compile_s: float
    eager_ns: float
    compiled_ns: float


@dataclass
class _Meta:
    workload: _Name = _ABSENT
    created: str = _ABSENT
    device: _Device = _ABSENT
    device_name: _Name = _ABSENT
    lanes_of: _Device = _ABSENT
    cpu_capability: str = _ABSENT
    torch: str = _ABSENT
    memory_reason: str = _ABSENT
    training: bool = _ABSENT
    inference_mode: bool = _ABSENT
    contended: bool = _ABSENT
    machine: _Machine = _ABSENT
    modules: Mapping[str, str] = _ABSENT
    optimizer: _Optimizer | None = None
    baseline: _Baseline = _ABSENT
    lines: _Lines = _ABSENT
    shrunk: _Shrunk = _ABSENT
    recipe: _Recipe | None = None
    source: _Source | None = None
    elsewhere: _Elsewhere = _ABSENT
    launches: _Launches = _ABSENT
    step_ns: Mapping[str, float] = _ABSENT
    threads: _Threads = _ABSENT
    parameters: int = _ABSENT
    steps: int = _ABSENT
    aligned_steps: int = _ABSENT
    steps_alike: int = _ABSENT
    events_per_step: int = _ABSENT
    kernels: int = _ABSENT
    kernels_linked: int = _ABSENT
    kernels_launched_before: int = _ABSENT
    untimed_tasks: int = _ABSENT
    waits_unresolved: int = _ABSENT
    unaligned_share: _Share = _ABSENT
    profiler_ns_per_event: float = _ABSENT
    residual_scale: float = _ABSENT
    recorded_ns: float = _ABSENT
    page_fault_launches_ns: tuple[float, ...] = _ABSENT


def check_meta(meta: Mapping[str, Any]) -> None:
    """Check the entries of `meta` that this slipstream knows.

    Raises:
        InvalidArgumentError: an entry is missing in a part, or of another type; it names the place.
    """
    _part(_Meta, meta, "meta")
    regions = meta.get("regions")
    if isinstance(regions, Mapping) and regions.get("reason"):
        return
    if regions is not None:
        _part(_Regions, regions, "meta.regions")


def _part(kind: Any, value: Any, place: str) -> Any:
    """One of `kind`; entries of a newer slipstream are left out."""
    if isinstance(value, Mapping):
        names = {one.name for one in fields(kind)}
        value = {key: entry for key, entry in value.items() if key in names}
    return build(kind, value, place, "a recording", _READERS)


def _refuse(value: Any, place: str, words: str) -> InvalidArgumentError:
    return InvalidArgumentError(place, f"{value!r:.80} is not {words}")


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise _refuse(value, place, "a text")
    return value


def _name(value: Any, place: str) -> str:
    try:
        _text(value, place).encode()
    except UnicodeEncodeError:
        raise _refuse(value, place, "a text in Unicode") from None
    return str(value)


def _count(value: Any, place: str, least: int = 0, most: int = _MAX_COUNT) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise _refuse(value, place, f"an integer from {least} to {most}")
    return value


def _share(value: Any, place: str) -> float:
    share: float = read(float, value, place, {})
    if not 0 <= share <= 1:
        raise _refuse(value, place, "a share from 0 to 1")
    return share


def _optimizer(value: Any, place: str) -> Any:
    optimizer = _part(_Optimizer, value, place)
    _text(value.get("class"), f"{place}.class")
    return optimizer


def _device(value: Any, place: str) -> str:
    if value not in _DEVICES:
        raise _refuse(value, place, " or ".join(_DEVICES))
    return str(value)


def _machine(value: Any, place: str) -> Any:
    facts: Mapping[str, Any] = read(Mapping[str, Any], value, place, {})
    for name in ("cpu.physical", "cpu.logical", "memory.total_mib"):
        read(float, facts.get(name, 0.0), f"{place}.{name}", {})
    return facts


def _launches(value: Any, place: str) -> Any:
    try:
        rows = [np.asarray(one) for one in value.values()]
        plain = all(one.dtype.kind == "i" and one.shape[1:] == (4,) for one in rows)
    except (AttributeError, ValueError, OverflowError):
        plain = False
    if not plain:
        raise _refuse(value, place, "rows of four integers by name")
    return value


_PARTS = (
    _Distributed, _Baseline, _Lines, _Shrunk, _Recipe, _Source, _Elsewhere, _Region, _Covered,
)  # fmt: skip
_READERS: Readers = {
    str: _text,
    int: _count,
    _Positive: partial(_count, least=1),
    _Threads: partial(_count, most=_MAX_THREADS),
    _Optimizer: _optimizer,
    _Share: _share,
    _Name: _name,
    _Device: _device,
    _Machine: _machine,
    _Launches: _launches,
    **{kind: partial(_part, kind) for kind in _PARTS},
}
