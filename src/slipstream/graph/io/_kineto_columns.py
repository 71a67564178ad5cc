"""The events of a Kineto trace as columns, and its device streams with their launches in order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Category(IntEnum):
    """What an event is."""

    OP = 0
    RUNTIME = 1
    KERNEL = 2
    MEMCPY = 3
    MEMSET = 4
    SYNC = 5
    ANNOTATION = 6
    PYTHON = 7
    COLLECTION = 8


# Kineto's words, lower case, of now and of earlier versions.
CATEGORIES = {
    "cpu_op": Category.OP, "operator": Category.OP,
    "cuda_runtime": Category.RUNTIME, "cuda_driver": Category.RUNTIME,
    "runtime": Category.RUNTIME, "privateuse1_runtime": Category.RUNTIME,
    "kernel": Category.KERNEL,
    "gpu_memcpy": Category.MEMCPY, "memcpy": Category.MEMCPY,
    "gpu_memset": Category.MEMSET, "memset": Category.MEMSET,
    "cuda_sync": Category.SYNC,
    "user_annotation": Category.ANNOTATION,
    "python_function": Category.PYTHON,
    "python_gc": Category.COLLECTION,
}  # fmt: skip
DEVICE = (Category.KERNEL, Category.MEMCPY, Category.MEMSET)
HOST = (Category.OP, Category.RUNTIME, Category.COLLECTION)


@dataclass(frozen=True)
class Columns:
    """The n complete events of a trace, in the file's order.

    Attributes:
        texts: the distinct names.
        name: int32 [n], index into `texts`.
        category: int8 [n], `Category`.
        start, end: float64 [n], ns from the first event, integers.
        thread: int32 [n], index into `threads`.
        threads: (process, thread) as the trace names them.
        correlation: int64 [n], ties a runtime call to what it launched or how it waited.
        device, stream: int64 [n], of device and synchronisation events.
        record_stream, record: int64 [n], of synchronisation events: the stream of the event that
            is waited for, and the correlation of the call that recorded it.
        sequence: int64 [n], of operators: autograd's sequence number. Each thread counts its own.
        forward_thread: int64 [n], of backward operators: the thread that the forward one ran on,
            index into `threads`; -1 in forward, and where all forward operators ran on one.
        launch: int64 [n, 4], of kernels: blocks, threads of each, registers of each thread, bytes
            of shared memory of each block; 0 where the trace does not tell.
    """

    texts: tuple[str, ...]
    name: NDArray[np.int32]
    category: NDArray[np.int8]
    start: Floats
    end: Floats
    thread: NDArray[np.int32]
    threads: tuple[tuple[str, str], ...]
    correlation: Ints
    device: Ints
    stream: Ints
    record_stream: Ints
    record: Ints
    sequence: Ints
    forward_thread: Ints
    launch: Ints

    def text(self, row: int) -> str:
        """The name of an event."""
        return self.texts[int(self.name[row])]

    def named(self, *names: str) -> NDArray[np.bool_]:
        """bool [n]; events that have one of `names`."""
        codes = [code for code, text in enumerate(self.texts) if text in names]
        return np.isin(self.name, codes)

    def named_like(self, accept: Callable[[str], bool]) -> NDArray[np.bool_]:
        """bool [n]; events whose name `accept`s."""
        accepted = np.fromiter((accept(text) for text in self.texts), np.bool_, len(self.texts))
        return accepted[self.name]

    @cached_property
    def is_task(self) -> NDArray[np.bool_]:
        """bool [n]; whether the event is work of a host or a device."""
        return self.is_host | self.is_device

    @cached_property
    def is_host(self) -> NDArray[np.bool_]:
        """bool [n]; operators and runtime calls."""
        return np.isin(self.category, HOST)

    @cached_property
    def is_device(self) -> NDArray[np.bool_]:
        """bool [n]; kernels and copies."""
        return np.isin(self.category, DEVICE)

    @cached_property
    def saved_key(self) -> Ints:
        """int64 [n]; equal for a forward operator and its backward one; -1 for others."""
        several = bool((self.forward_thread >= 0).any())
        thread = np.where(self.forward_thread >= 0, self.forward_thread, self.thread)
        key = self.sequence * (len(self.threads) if several else 1) + (thread if several else 0)
        return np.where(self.sequence >= 0, key, -1)

    @cached_property
    def runtime_by_correlation(self) -> tuple[Ints, Ints]:
        """Correlations of runtime calls, ascending, and their rows."""
        rows = np.flatnonzero((self.category == Category.RUNTIME) & (self.correlation >= 0))
        rows = rows[np.argsort(self.correlation[rows], kind="stable")]
        return self.correlation[rows], rows

    def runtime_row(self, correlation: Ints) -> Ints:
        """int64, as `correlation`: the row of the runtime call of that correlation, -1: none."""
        known, rows = self.runtime_by_correlation
        if not known.size:
            return np.full(len(correlation), -1, np.int64)
        at = np.minimum(np.searchsorted(known, correlation), known.size - 1)
        return np.where((known[at] == correlation) & (correlation >= 0), rows[at], -1)

    def with_times(self, start: Floats, end: Floats) -> Columns:
        """The same events at other times."""
        return replace(self, start=start, end=end)


# Older traces round start and length to microseconds, each on its own.
ROUNDING_NS = 2000.0
# Of a launch on an idle stream, where the trace has none; typical of CUDA on PCIe cards.
_LATENCY_NS = 5000.0
# A queue shallower than this never stopped anybody; CUDA's holds 1,024 entries.
_SHALLOWEST_QUEUE = 512
_THROTTLED = 3.0


@dataclass
class Device:
    """The g device events, by lane and start.

    Attributes:
        row: int64 [g], of the trace.
        lane: int32 [g], index into `lanes`.
        lanes: names; a stream whose kernels overlap (a CUDA graph's) has several.
        stream: per lane, (device, stream).
        start, end: float64 [g], ns; never before the launch, never overlapping in a lane.
        launch: int64 [g], row of the runtime call that launched it, -1 when it is not in the trace.
        issued: float64 [g], when that call began; -inf without one.
        first: int64 [lanes + 1], where each lane begins.
        latency_ns: from begin of the call to begin of the kernel on an idle stream.
        queue: per lane, how many launches it holds before it makes the host wait; 0 if unknown.
    """

    row: Ints
    lane: NDArray[np.int32]
    lanes: tuple[str, ...]
    stream: tuple[tuple[int, int], ...]
    start: Floats
    end: Floats
    launch: Ints
    issued: Floats
    first: Ints
    latency_ns: float
    queue: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.row)

    @property
    def idle_before(self) -> Floats:
        """float64 [g]; when the lane became free for each event, -inf for the lane's first."""
        free = np.full(len(self), -np.inf)
        same = self.lane[1:] == self.lane[:-1]
        free[1:][same] = self.end[:-1][same]
        return free

    def lanes_of(self, device: int, stream: int) -> list[int]:
        """Lanes of a stream; of all streams of the device when `stream` is negative."""
        return [
            lane
            for lane, (its_device, its_stream) in enumerate(self.stream)
            if (device in (-1, its_device)) and (stream < 0 or stream == its_stream)
        ]

    def last_issued(self, lane: int, before_ns: float) -> int:
        """The last event of `lane` whose launch began before `before_ns`; -1: none."""
        low, high = int(self.first[lane]), int(self.first[lane + 1])
        at = low + int(np.searchsorted(self._issued_so_far[low:high], before_ns)) - 1
        return at if at >= low else -1

    def next_issued(self, lane: int, after_ns: float) -> int:
        """The first event of `lane` whose launch began at `after_ns` or later; -1: none."""
        at = self.last_issued(lane, after_ns) + 1 or int(self.first[lane])
        return at if at < int(self.first[lane + 1]) else -1

    def last_ended(self, lane: int, until_ns: float) -> int:
        """The last event of `lane` that ended by `until_ns`; -1: none."""
        low, high = int(self.first[lane]), int(self.first[lane + 1])
        at = low + int(np.searchsorted(self.end[low:high], until_ns, side="right")) - 1
        return at if at >= low else -1

    def __post_init__(self) -> None:
        # Streams run what they are given in order, so this only mends rounding.
        so_far = self.issued.copy()
        for low, high in zip(self.first[:-1].tolist(), self.first[1:].tolist(), strict=True):
            np.maximum.accumulate(so_far[low:high], out=so_far[low:high])
        self._issued_so_far = so_far

    @classmethod
    def of(cls, columns: Columns) -> Device:
        """The device events of a trace."""
        row = np.flatnonzero(columns.is_device)
        launch = columns.runtime_row(columns.correlation[row])
        issued = np.where(launch >= 0, columns.start[launch], -np.inf)
        start = np.maximum(columns.start[row], issued)
        end = np.maximum(columns.end[row], start)
        streams, stream = _streams(columns, row)
        order = np.lexsort((end, start, stream))
        row, launch, issued = row[order], launch[order], issued[order]
        start, end, stream = start[order], end[order], stream[order]
        lane, of_stream, names = _split_overlaps(start, end, stream, streams)
        order = np.lexsort((start, lane))
        row, launch, issued = row[order], launch[order], issued[order]
        start, end, lane = start[order], end[order], lane[order]
        same = lane[1:] == lane[:-1]
        end[:-1][same] = np.minimum(end[:-1][same], start[1:][same])
        first = np.searchsorted(lane, np.arange(len(names) + 1)).astype(np.int64)
        device = cls(
            row, lane.astype(np.int32), names, of_stream, start, end, launch, issued, first,
            _LATENCY_NS, (0,) * len(names),
        )  # fmt: skip
        idle = (launch >= 0) & (device.idle_before <= issued)
        if idle.any():
            # The lower quartile: what starts later may have waited for another stream.
            seen = start[idle] - issued[idle]
            device.latency_ns = float(np.percentile(seen, 25, method="lower"))
        device.queue = tuple(_queue(columns, device, lane) for lane in range(len(names)))
        return device


def _streams(columns: Columns, row: Ints) -> tuple[list[tuple[int, int]], Ints]:
    keys = list(zip(columns.device[row].tolist(), columns.stream[row].tolist(), strict=True))
    distinct = sorted(set(keys))
    number = {key: at for at, key in enumerate(distinct)}
    return distinct, np.array([number[key] for key in keys], np.int64)


def _split_overlaps(
    start: Floats, end: Floats, stream: Ints, streams: Sequence[tuple[int, int]]
) -> tuple[Ints, tuple[tuple[int, int], ...], tuple[str, ...]]:
    """A lane for every event; one per stream, more where its events run side by side.

    The events come sorted by stream and start. Overlaps within rounding are none.
    """
    lane = stream.copy()
    of_stream = list(streams)
    names = [f"gpu {device} stream {number}" for device, number in streams]
    for at, (low, high) in enumerate(_runs(stream, len(streams))):
        busy_until = np.maximum.accumulate(end[low:high])
        if not (start[low + 1 : high] + ROUNDING_NS < busy_until[:-1]).any():
            continue
        free = [-np.inf]
        lanes = [at]
        for event in range(low, high):
            fits = [i for i, until in enumerate(free) if until <= start[event] + ROUNDING_NS]
            side = fits[0] if fits else len(free)
            if not fits:
                free.append(-np.inf)
                lanes.append(len(names))
                names.append(f"{names[at]} ({side + 1})")
                of_stream.append(streams[at])
            free[side] = end[event]
            lane[event] = lanes[side]
    return lane, tuple(of_stream), tuple(names)


def _runs(values: Ints, count: int) -> list[tuple[int, int]]:
    cuts = np.searchsorted(values, np.arange(count + 1)).tolist()
    return list(itertools.pairwise(cuts))


def _queue(columns: Columns, device: Device, lane: int) -> int:
    """How many launches the lane's stream holds before a launch blocks; 0 if it never did.

    A full queue shows in the trace as launches that take several times as long as others while
    the number of unfinished ones stands still at its maximum.
    """
    low, high = int(device.first[lane]), int(device.first[lane + 1])
    calls, which, times = np.unique(
        device.launch[low:high], return_inverse=True, return_counts=True
    )
    # A CUDA graph's launch takes long for the many kernels it launches.
    linked = np.flatnonzero((calls[which] >= 0) & (times[which] == 1))
    if len(linked) < _SHALLOWEST_QUEUE:
        return 0
    launch = device.launch[low:high][linked]
    finished = np.searchsorted(device.end[low:high], columns.start[launch], side="right")
    waiting = linked - finished
    deepest = int(waiting.max())
    if deepest < _SHALLOWEST_QUEUE:
        return 0
    length = columns.end[launch] - columns.start[launch]
    full = waiting >= deepest - 2
    throttled = np.mean(length[full]) > _THROTTLED * np.median(length[~full])
    return deepest if throttled and full.sum() > 2 else 0


def is_communication(name: str) -> bool:
    """Whether a task of this name moves data between ranks."""
    lower = name.lower()
    return "nccl" in lower or "rccl" in lower or lower.startswith(("gloo:", "mpi:"))
