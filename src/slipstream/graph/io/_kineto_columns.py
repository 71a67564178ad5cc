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
    """Type of an event."""

    OP = 0
    RUNTIME = 1
    KERNEL = 2
    MEMCPY = 3
    MEMSET = 4
    SYNC = 5
    ANNOTATION = 6
    PYTHON = 7
    COLLECTION = 8


# Kineto's categories in lower case, of current and earlier versions.
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
        correlation: int64 [n], links a runtime call to the device or synchronisation event.
        device, stream: int64 [n], of device and synchronisation events.
        record_stream, record: int64 [n], of synchronisation events: the stream of the awaited
            event, and the correlation of the call that recorded it.
        sequence: int64 [n], autograd's sequence number of operators, counted per thread.
        forward_thread: int64 [n], the thread of the forward operator of a backward one, index
            into `threads`; -1 for others, and if all forward operators ran on one thread.
        launch: int64 [n, 4], of kernels: blocks, threads per block, registers per thread, bytes
            of shared memory per block; 0 if the trace lacks them.
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
        """Return the name of an event."""
        return self.texts[int(self.name[row])]

    def named(self, *names: str) -> NDArray[np.bool_]:
        """Return whether each event has one of `names`, bool [n]."""
        codes = [code for code, text in enumerate(self.texts) if text in names]
        return np.isin(self.name, codes)

    def named_like(self, accept: Callable[[str], bool]) -> NDArray[np.bool_]:
        """Return whether `accept` is true for each event's name, bool [n]."""
        accepted = np.fromiter((accept(text) for text in self.texts), np.bool_, len(self.texts))
        return accepted[self.name]

    @cached_property
    def is_task(self) -> NDArray[np.bool_]:
        """Whether the event is work of a host or a device, bool [n]."""
        return self.is_host | self.is_device

    @cached_property
    def is_host(self) -> NDArray[np.bool_]:
        """Whether the event is an operator, runtime call or garbage collection, bool [n]."""
        return np.isin(self.category, HOST)

    @cached_property
    def is_device(self) -> NDArray[np.bool_]:
        """Whether the event is a kernel or copy, bool [n]."""
        return np.isin(self.category, DEVICE)

    @cached_property
    def saved_key(self) -> Ints:
        """A key that a forward operator and its backward one share, int64 [n]; -1 for others."""
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
        """Return the row of the runtime call of each correlation; -1 for none."""
        correlations, rows = self.runtime_by_correlation
        if not correlations.size:
            return np.full(len(correlation), -1, np.int64)
        at = np.minimum(np.searchsorted(correlations, correlation), correlations.size - 1)
        return np.where((correlations[at] == correlation) & (correlation >= 0), rows[at], -1)

    def with_times(self, start: Floats, end: Floats) -> Columns:
        """Return the events with other times."""
        return replace(self, start=start, end=end)


# Older traces round start and length to microseconds, separately.
ROUNDING_NS = 2000.0
# Default latency of a launch on an idle stream; typical of CUDA on PCIe cards.
_LATENCY_NS = 5000.0
# Fewer unfinished launches do not fill a queue; CUDA's holds 1,024 entries.
_MIN_QUEUE = 512
_THROTTLED = 3.0


@dataclass
class Device:
    """The g device events, by lane and start.

    Attributes:
        row: int64 [g], row of the trace.
        lane: int32 [g], index into `lanes`.
        lanes: names; a stream with overlapping kernels (of a CUDA graph) has several.
        stream: (device, stream) of each lane.
        start, end: float64 [g], ns; never before the launch, never overlapping in a lane.
        launch: int64 [g], row of the runtime call that launched it; -1 if the trace lacks it.
        issued: float64 [g], begin of that call; -inf without one.
        first: int64 [lanes + 1], first event of each lane.
        latency_ns: time from begin of the call to begin of the kernel on an idle stream.
        queue: capacity of each lane's launch queue, beyond which the host waits; 0 if unknown.
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
        """The time when the lane became free for each event, float64 [g]; -inf for the first."""
        free = np.full(len(self), -np.inf)
        same = self.lane[1:] == self.lane[:-1]
        free[1:][same] = self.end[:-1][same]
        return free

    def lanes_of(self, device: int, stream: int) -> list[int]:
        """Return the lanes of a stream; of all the device's streams if `stream` is negative."""
        return [
            lane
            for lane, (its_device, its_stream) in enumerate(self.stream)
            if (device in (-1, its_device)) and (stream < 0 or stream == its_stream)
        ]

    def last_issued(self, lane: int, before_ns: float) -> int:
        """Return the last event of `lane` whose launch began before `before_ns`; -1 for none."""
        low, high = int(self.first[lane]), int(self.first[lane + 1])
        at = low + int(np.searchsorted(self._issued_so_far[low:high], before_ns)) - 1
        return at if at >= low else -1

    def next_issued(self, lane: int, after_ns: float) -> int:
        """Return the first event of `lane` launched at `after_ns` or later; -1 for none."""
        at = self.last_issued(lane, after_ns) + 1 or int(self.first[lane])
        return at if at < int(self.first[lane + 1]) else -1

    def last_ended(self, lane: int, until_ns: float) -> int:
        """Return the last event of `lane` that ended by `until_ns`; -1 for none."""
        low, high = int(self.first[lane]), int(self.first[lane + 1])
        at = low + int(np.searchsorted(self.end[low:high], until_ns, side="right")) - 1
        return at if at >= low else -1

    def __post_init__(self) -> None:
        # Streams run launches in order, so this only corrects rounding.
        so_far = self.issued.copy()
        for low, high in zip(self.first[:-1].tolist(), self.first[1:].tolist(), strict=True):
            np.maximum.accumulate(so_far[low:high], out=so_far[low:high])
        self._issued_so_far = so_far

    @classmethod
    def of(cls, columns: Columns) -> Device:
        """Return the device events of a trace."""
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
            # The lower quartile, because some starts may have waited for another stream.
            latencies = start[idle] - issued[idle]
            device.latency_ns = float(np.percentile(latencies, 25, method="lower"))
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
    """Assign lanes to events: one per stream, more if its events overlap beyond rounding.

    The events are sorted by stream and start.
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
            idle = [i for i, until in enumerate(free) if until <= start[event] + ROUNDING_NS]
            side = idle[0] if idle else len(free)
            if not idle:
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
    """Return the number of launches that fill the lane's queue; 0 if it was never full.

    With a full queue, launches take several times as long as others, and the number of unfinished
    ones is constant at its maximum.
    """
    low, high = int(device.first[lane]), int(device.first[lane + 1])
    calls, which, times = np.unique(
        device.launch[low:high], return_inverse=True, return_counts=True
    )
    # Launches of CUDA graphs take longer because of their many kernels.
    linked = np.flatnonzero((calls[which] >= 0) & (times[which] == 1))
    if len(linked) < _MIN_QUEUE:
        return 0
    launch = device.launch[low:high][linked]
    finished = np.searchsorted(device.end[low:high], columns.start[launch], side="right")
    waiting = linked - finished
    deepest = int(waiting.max())
    if deepest < _MIN_QUEUE:
        return 0
    length = columns.end[launch] - columns.start[launch]
    full = waiting >= deepest - 2
    throttled = np.mean(length[full]) > _THROTTLED * np.median(length[~full])
    return deepest if throttled and full.sum() > 2 else 0


def is_communication(name: str) -> bool:
    """Whether a task of this name moves data between ranks."""
    lower = name.lower()
    return "nccl" in lower or "rccl" in lower or lower.startswith(("gloo:", "mpi:"))
