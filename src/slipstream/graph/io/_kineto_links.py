"""Dependencies in a Kineto trace.

The kinds of dependency and their sources:

- thread order, stream order: the lanes.
- launch: the correlation id that a runtime call shares with the events it launched.
- synchronisation: a waiting call has an edge from the awaited kernel, and the remaining time after
  it as its duration, so its end is max(end of the kernel, its start) + remainder. The ``cuda_sync``
  event of its correlation identifies the kernel; without one, the stream that the thread used
  last. A full launch queue also makes the host wait.
- stream to stream: ``Stream Wait Event`` names the waiting stream and the call that recorded the
  event; without those, the order of launches around ``cudaStreamWaitEvent``.
- communication: a stream-to-stream edge from or to a collective.
- thread to thread: a thread that is idle exactly while autograd's thread is busy waited for it;
  likewise the step's thread and the threads of a pool.
- data: a backward operator uses tensors that its forward saved (same sequence number).

Edges that contradict the recorded times are dropped and counted, so the graph has no cycle.

Source: kinds 1-5 are those of Zhu et al., "Daydream", USENIX ATC 2020, section 4.2; the two
across threads and streams those of Liang et al., "Lumos", MLSys 2025.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import GraphError
from slipstream.graph.io._kineto_columns import (
    ROUNDING_NS,
    Category,
    Columns,
    Device,
    Floats,
    Ints,
    is_communication,
)
from slipstream.graph.io._kineto_host import Segments, flatten, frames
from slipstream.graph.values import Dependency, StepPhase, StringTable

_STREAM_SYNC = ("cudaStreamSynchronize", "cuStreamSynchronize", "hipStreamSynchronize")
_DEVICE_SYNC = (
    "cudaDeviceSynchronize", "cuCtxSynchronize", "hipDeviceSynchronize", "cudaFree", "hipFree",
)  # fmt: skip
_EVENT_SYNC = ("cudaEventSynchronize", "cuEventSynchronize", "hipEventSynchronize")
_SYNCS = frozenset(_STREAM_SYNC + _DEVICE_SYNC + _EVENT_SYNC)
_STREAM_WAITS = frozenset(("cudaStreamWaitEvent", "cuStreamWaitEvent", "hipStreamWaitEvent"))
_BLOCKING_COPIES = frozenset(("cudaMemcpy", "hipMemcpy", "cuMemcpyDtoH_v2", "cuMemcpyHtoD_v2"))
# Threads hand over only across idle times longer than those of Python alone.
_HANDOVER_NS = 20_000.0
_AUTOGRAD = "autograd::engine::"
# Maximum time of the device itself between consecutive kernels of a busy stream; a later start is
# due to the launch.
_TURNAROUND_NS = 10_000.0
# A kernel that starts later than this many launch latencies waited for something else.
_LATE = 10.0


@dataclass(frozen=True)
class Window:
    """The part of a trace to read: host events that begin in [begin, end), and their launches.

    Attributes:
        next_ns: begin of the next step; inf if unknown.
        thread: the thread that runs the step, as in `Columns.thread`; -1 if unknown.
    """

    label: str
    begin_ns: float
    end_ns: float
    next_ns: float
    thread: int = -1


@dataclass
class Links:
    """Edges under construction; the id of device event d is the number of host segments + d."""

    source: list[int] = field(default_factory=list)
    target: list[int] = field(default_factory=list)
    kind: list[int] = field(default_factory=list)
    delay: list[float] = field(default_factory=list)
    lag: list[int] = field(default_factory=list)

    def add(
        self, source: int, target: int, kind: Dependency, delay_ns: float = 0.0, lag: int = 0
    ) -> int:
        self.source.append(source)
        self.target.append(target)
        self.kind.append(int(kind))
        self.delay.append(delay_ns)
        self.lag.append(lag)
        return len(self.source) - 1


class LinkFinder:
    """The segments and device events of one window, and the edges found between them.

    Attributes:
        segments: segments of host threads, whose starts are moved to the end of their waits.
        ready: float64 [segments], when the thread reached each segment.
        device: device events, whose ends are corrected within rounding.
        taken: bool [device events], whether the event belongs to the window.
        tails: second parts of split calls: their segment, start, ready time, end, and the copy
            that they wait for or -1.
        links: edges between ids: segments first, then device events, then tails.
        gap_after: float64 [device events], ns.
        waits: bool [segments], whether the segment waits for the device.
        dropped: number of edges that contradict the recorded times.
        unresolved: number of waits of unknown cause.
    """

    def __init__(self, columns: Columns, device: Device, window: Window, name: str) -> None:
        # A copy, because ends are corrected below and other steps use the same device.
        device = replace(device, start=device.start.copy(), end=device.end.copy())
        self.columns, self.device, self.window = columns, device, window
        self.strings = StringTable()
        begin, end = window.begin_ns, window.end_ns
        inside = (columns.start >= begin) & (columns.start < end)
        chosen = inside & (columns.is_host | frames(columns))
        self.segments: Segments = flatten(columns, np.flatnonzero(chosen), self.strings)
        linked = device.launch >= 0
        self.taken = np.where(linked, inside[device.launch], inside[device.row])
        if not len(self.segments) and not self.taken.any():
            raise GraphError(
                "nothing runs in the step",
                where=f"{name}: {window.label}",
                remedy="choose another step",
            )
        self.taken_in = [
            np.flatnonzero(self.taken[low:high]) + low
            for low, high in zip(device.first[:-1].tolist(), device.first[1:].tolist(), strict=True)
        ]
        self.hosts = len(self.segments)
        # Starts before they are moved to the end of waits.
        self.ready = self.segments.start.copy()
        self.first_segment = np.full(len(columns.name), -1, np.int64)
        first = np.flatnonzero(self.segments.first)
        self.first_segment[self.segments.event[first]] = first
        self.waits = np.zeros(self.hosts, np.bool_)
        self.links = Links()
        self.cross: dict[int, list[int]] = {}
        self.handed_over: set[tuple[int, int]] = set()
        self.gap_after = np.zeros(len(device))
        self.unresolved = 0
        self.dropped = 0

    def find(self) -> None:
        """Find all edges."""
        self._stream_waits()
        self._synchronisation()
        self._full_queues()
        self._launches()
        self._hand_overs()
        self._saved_tensors()

    def task(self, event: int) -> int:
        """Return the id of a device event."""
        return self.hosts + event

    def _present(self, event: int) -> tuple[int, int] | None:
        """Return the event of this step that represents `event`, and the lag of an edge from it.

        An event of the step before is represented by the event of this step at the same distance
        from the end of the lane.
        """
        device = self.device
        if self.taken[event]:
            return event, 0
        events = self.taken_in[int(device.lane[event])]
        if not len(events) or event >= events[0]:
            return None
        distance = int(events[0]) - event
        return (int(events[-distance]), 1) if distance <= len(events) else None

    # Waits of streams

    def _stream_waits(self) -> None:
        columns, device = self.columns, self.device
        waits = np.flatnonzero(columns.category == Category.SYNC)
        rows = [row for row in waits.tolist() if columns.text(row) == "Stream Wait Event"]
        calls = columns.runtime_row(columns.correlation[rows]).tolist() if rows else []
        for row, call in zip(rows, calls, strict=True):
            if call < 0 or self.first_segment[call] < 0:
                continue
            record = columns.runtime_row(columns.record[row : row + 1])[0]
            if columns.record_stream[row] < 0 or columns.record[row] < 0:
                continue
            recorded = columns.start[record] if record >= 0 else columns.start[call]
            for source_lane in device.lanes_of(-1, int(columns.record_stream[row])):
                source = device.last_issued(source_lane, float(recorded))
                for lane in device.lanes_of(int(columns.device[row]), int(columns.stream[row])):
                    self._stream_to_stream(source, device.next_issued(lane, columns.start[call]))
        if not len(waits):
            self._guess_stream_waits()

    def _guess_stream_waits(self) -> None:
        """Infer waits of streams without synchronisation events.

        Of a ``cudaStreamWaitEvent`` only the thread is known. Its next launch is assumed to wait
        for the last launch on the stream that the thread used before, and for events of other
        streams that ended just before it started.
        """
        columns, device = self.columns, self.device
        events = self.segments.event[self.segments.first]
        calls: list[int] = events[columns.named(*_STREAM_WAITS)[events]].tolist()
        if not calls:
            return
        thread = np.where(device.launch >= 0, columns.thread[device.launch], -1)
        order = np.argsort(device.issued, kind="stable")
        by_thread = {at: order[thread[order] == at] for at in set(columns.thread[calls].tolist())}
        for call in calls:
            launches = by_thread[int(columns.thread[call])]
            at = int(np.searchsorted(device.issued[launches], columns.start[call]))
            if at >= len(launches):
                continue
            target = int(launches[at])
            sources = [int(launches[at - 1])] if at else []
            for lane in range(len(device.lanes)):
                last = device.last_issued(lane, float(columns.start[call]))
                if last >= 0 and 0 <= device.start[target] - device.end[last] <= _TURNAROUND_NS:
                    sources.append(last)
            for source in sources:
                self._stream_to_stream(source, target)
        self._guess_late_starts()

    def _guess_late_starts(self) -> None:
        """Infer that an event that starts late, just after one of another stream, waited for it.

        The wait itself may have been issued long before, for an event launched in between.
        """
        device = self.device
        due = np.maximum(device.issued, device.idle_before)
        late = self.taken & (device.start - due > _LATE * device.latency_ns)
        for target in np.flatnonzero(late & (device.launch >= 0)).tolist():
            start = float(device.start[target])
            for lane in range(len(device.lanes)):
                last = device.last_ended(lane, start)
                if (
                    last >= 0
                    and device.issued[last] < device.issued[target]
                    and due[target] < start - _TURNAROUND_NS <= device.end[last]
                ):
                    self._stream_to_stream(last, target)

    def _stream_to_stream(self, source: int, target: int) -> None:
        device = self.device
        if source < 0 or target < 0 or not self.taken[target]:
            return
        if device.lane[source] == device.lane[target] or source in self.cross.get(target, ()):
            return
        if device.end[source] > device.start[target] + ROUNDING_NS:
            self.dropped += 1
            return
        if device.end[source] > device.start[target]:
            device.end[source] = max(device.start[target], device.start[source])
        self.cross.setdefault(target, []).append(source)

    # Waits of the host

    def _synchronisation(self) -> None:
        columns, device = self.columns, self.device
        sync_rows = np.flatnonzero(columns.category == Category.SYNC)
        by_correlation = {int(columns.correlation[row]): int(row) for row in sync_rows}
        copied = columns.category[device.row] == Category.MEMCPY
        self.blocking_copies = {
            int(device.launch[event]): event
            for event in np.flatnonzero(self.taken & (device.launch >= 0) & copied).tolist()
            if self._blocks(event)
        }
        syncs = columns.named(*_SYNCS) & (columns.category == Category.RUNTIME)
        for at in np.flatnonzero(self.segments.first & syncs[self.segments.event]).tolist():
            call = int(self.segments.event[at])
            sync = by_correlation.get(int(columns.correlation[call]), -1)
            self._wait(at, self._awaited(call, columns.text(call), sync))

    def _blocks(self, event: int) -> bool:
        """Whether the call that launched this copy waited for its end."""
        columns, device = self.columns, self.device
        call = int(device.launch[event])
        copy = self._name(event)
        # Copies to pageable memory block even in asynchronous calls.
        blocking = columns.text(call) in _BLOCKING_COPIES or "Device -> Pageable" in copy
        return blocking and bool(device.end[event] <= columns.end[call] + ROUNDING_NS)

    def _awaited(self, call: int, name: str, sync: int) -> list[int]:
        """Return the device events that a synchronising call waited for."""
        columns, device = self.columns, self.device
        begin, end = float(columns.start[call]), float(columns.end[call])
        where, stream = -1, -1
        if sync >= 0:
            where, stream = int(columns.device[sync]), int(columns.stream[sync])
        if name in _DEVICE_SYNC:
            events = [device.last_issued(lane, begin) for lane in device.lanes_of(where, -1)]
        elif name in _EVENT_SYNC and sync >= 0 and columns.record_stream[sync] >= 0:
            record = columns.runtime_row(columns.record[sync : sync + 1])[0]
            recorded = float(columns.start[record]) if record >= 0 else begin
            lanes = device.lanes_of(where, int(columns.record_stream[sync]))
            events = [device.last_issued(lane, recorded) for lane in lanes]
        elif name in _STREAM_SYNC and stream >= 0:
            events = [device.last_issued(lane, begin) for lane in device.lanes_of(where, stream)]
        else:
            return self._guess_awaited(call, name)
        events = [event for event in events if event >= 0]
        consistent = [event for event in events if device.end[event] <= end + ROUNDING_NS]
        self.dropped += len(events) - len(consistent)
        return consistent

    def _guess_awaited(self, call: int, name: str) -> list[int]:
        """Infer the awaited events: the last that the thread launched, if times agree."""
        columns, device = self.columns, self.device
        begin, end = float(columns.start[call]), float(columns.end[call]) + ROUNDING_NS
        last = [device.last_issued(lane, begin) for lane in range(len(device.lanes))]
        last = [event for event in last if event >= 0 and device.end[event] <= end]
        own = [e for e in last if columns.thread[device.launch[e]] == columns.thread[call]]
        if own and name in _STREAM_SYNC:
            return [max(own, key=lambda event: float(device.issued[event]))]
        during = [event for event in last if device.end[event] > begin]
        if not during:
            self.unresolved += 1
            return []
        return [max(during, key=lambda event: float(device.end[event]))]

    def _wait(self, at: int, events: list[int]) -> None:
        """Let segment `at` wait for `events`, and reduce it to its remainder after them."""
        segments, device = self.segments, self.device
        for event in events:
            present = self._present(event)
            if present is None:
                continue
            # Within rounding a kernel may seem to end after the call that waited for it.
            limit = max(segments.end[at], device.start[event])
            device.end[event] = min(device.end[event], limit)
            segments.start[at] = max(
                segments.start[at], min(float(device.end[event]), float(segments.end[at]))
            )
            self.waits[at] = True
            self.links.add(self.task(present[0]), at, Dependency.SYNCHRONISATION, 0.0, present[1])

    def _full_queues(self) -> None:
        """Let launches into a full queue wait until the device has removed an entry."""
        columns, device = self.columns, self.device
        for lane, depth in enumerate(device.queue):
            if not depth:
                continue
            low, high = int(device.first[lane]), int(device.first[lane + 1])
            events = np.arange(low + depth, high)
            call = device.launch[events]
            done = device.end[events - depth]
            held = self.taken[events] & (call >= 0) & (done <= columns.end[call])
            held &= self.first_segment[call] >= 0
            for event in events[held].tolist():
                here = self._present(event - depth)
                if here is None:
                    continue
                at = int(self.first_segment[device.launch[event]])
                self.segments.start[at] = max(self.segments.start[at], device.end[event - depth])
                self.links.add(self.task(here[0]), at, Dependency.SYNCHRONISATION, 0.0, here[1])

    # Launches

    def _launches(self) -> None:
        """Add launch edges, latencies, and the gaps of busy streams.

        A kernel starts `latency` after its launch began. The latency is that observed if the
        stream was idle; else it is typical, and the remaining time after the kernel before is a
        gap of the stream.
        """
        device, segments = self.device, self.segments
        events = np.flatnonzero(self.taken)
        linked = events[device.launch[events] >= 0]
        at = self.first_segment[device.launch[linked]]
        begun = segments.start[at]
        free = device.idle_before[linked]
        other = np.full(len(linked), -np.inf)
        position = {int(event): i for i, event in enumerate(linked.tolist())}
        for target, sources in self.cross.items():
            if target in position:
                other[position[target]] = max(float(device.end[source]) for source in sources)
        start = device.start[linked]
        observed = np.maximum(start - begun, 0.0)
        earliest = np.maximum(free, other)
        latency = np.where(earliest > begun, np.minimum(observed, device.latency_ns), observed)
        remainder = start - np.maximum(begun + latency, earliest)
        late = (remainder > 0) & (earliest <= begun + latency)
        latency = np.where(late, observed, latency)
        remainder = np.where(late, 0.0, np.maximum(remainder, 0.0))
        by_stream = (remainder > 0) & (free >= other)
        for i in np.flatnonzero(by_stream).tolist():
            before = int(linked[i]) - 1
            here = self._present(before)
            # After the step before, only time of the device itself belongs to the step.
            if here is not None and (here[1] == 0 or remainder[i] <= _TURNAROUND_NS):
                self.gap_after[here[0]] = remainder[i]
        remainder_of = np.where(by_stream, 0.0, remainder)
        for target, sources in self.cross.items():
            last = max(sources, key=lambda source: float(device.end[source]))
            for source in sources:
                here = self._present(source)
                if here is None:
                    continue
                names = (self._name(source), self._name(target))
                kind = (
                    Dependency.COMMUNICATION
                    if any(is_communication(name) for name in names)
                    else Dependency.STREAM_TO_STREAM
                )
                extra = float(remainder_of[position[target]]) if target in position else 0.0
                self.links.add(
                    self.task(here[0]), self.task(target), kind,
                    extra if source == last else 0.0, here[1],
                )  # fmt: skip
        self._split(linked, at, latency)

    def _name(self, event: int) -> str:
        return self.columns.text(int(self.device.row[event]))

    def _split(self, linked: Ints, at: Ints, latency: Floats) -> None:
        """Split calls at the start of their kernel, which the rest of the call does not delay."""
        segments, device = self.segments, self.device
        soonest = np.full(self.hosts, np.inf)
        np.minimum.at(soonest, at, segments.start[at] + latency)
        cut = np.minimum(soonest, segments.end)
        # The time after a copy that the call waits for is the remainder of the wait.
        waiting = np.full(self.hosts, -1, np.int64)
        for call, event in self.blocking_copies.items():
            waiting[self.first_segment[call]] = event
        halves = np.flatnonzero((soonest < segments.end) | (waiting >= 0))
        for i, segment in enumerate(at.tolist()):
            delay = float(segments.start[segment] + latency[i] - cut[segment])
            self.links.add(segment, self.task(int(linked[i])), Dependency.LAUNCH, max(delay, 0.0))
        tail_start = cut[halves].copy()
        tail_ready = cut[halves].copy()
        for i, segment in enumerate(halves.tolist()):
            event = int(waiting[segment])
            if event >= 0:
                end = float(segments.end[segment])
                device.end[event] = max(min(device.end[event], end), device.start[event])
                tail_start[i] = min(max(tail_start[i], device.end[event]), end)
                tail = self.hosts + len(device) + i
                self.links.add(self.task(event), tail, Dependency.SYNCHRONISATION)
        tail_end = segments.end[halves]
        self.tails = (halves, tail_start, tail_ready, tail_end, waiting[halves])
        segments.end[halves] = cut[halves]

    # Waits of threads

    def _hand_overs(self) -> None:
        """Add edges between a thread that works for another and the one that is idle meanwhile.

        A thread that begins after an idle time, just when another became idle, was waiting for it:
        autograd's thread for the caller of ``backward()``, and the caller for its return; a pool's
        thread for the submission of work, and the submitting thread for the result.
        """
        segments, columns = self.segments, self.columns
        starts, ends = self.ready, segments.end.copy()
        ends[self.tails[0]] = self.tails[3]
        self.autograd = columns.named_like(lambda text: text.startswith(_AUTOGRAD))[segments.event]
        backward = segments.phase == StepPhase.BACKWARD
        lanes = np.unique(segments.lane)
        threads = [np.flatnonzero(segments.lane == lane) for lane in lanes[self.works()].tolist()]
        for engine in threads:
            # The thread that calls backward() runs the parts without a device.
            if not self.autograd[engine].any() or (~backward[engine]).mean() > 0.5:
                continue
            for caller in threads:
                if caller is not engine and not backward[caller].all():
                    self._wake_ups(caller, engine, self.autograd, starts, ends)
                    self._wake_ups(engine, caller, np.ones(self.hosts, np.bool_), starts, ends)
        eligible = np.ones(self.hosts, np.bool_)
        for thread in threads:
            for pool in threads if segments.lane[thread[0]] == self.window.thread else ():
                # Autograd's threads already have edges.
                if pool is not thread and not self.autograd[pool].any():
                    self._wake_ups(thread, pool, eligible, starts, ends)
                    self._wake_ups(pool, thread, eligible, starts, ends)
                    self._first_submission(thread, pool, starts, ends)
        self._share_wake_ups()

    def works(self) -> NDArray[np.bool_]:
        """Return whether each thread computes or launches, bool [threads].

        Others, such as NCCL's watchdog, do not gate anything.
        """
        events = self.segments.event
        launches = np.isin(events, self.device.launch[self.taken])
        busy = launches | (self.columns.category[events] == Category.OP)
        return np.isin(np.unique(self.segments.lane), self.segments.lane[busy])

    def _wake_ups(
        self,
        waker: Ints,
        sleeper: Ints,
        eligible: NDArray[np.bool_],
        starts: Floats,
        ends: Floats,
    ) -> None:
        """Add edges from the last segment of `waker` to the first of `sleeper` after idle time."""
        slept_from = np.concatenate([[-np.inf], ends[sleeper[:-1]]])
        woke = starts[sleeper]
        last = np.searchsorted(starts[waker], woke) - 1
        silent_from = np.where(last >= 0, ends[waker[last]], np.inf)
        silent_to = np.append(starts[waker], np.inf)[last + 1]
        wakes = (
            eligible[sleeper]
            & (woke - slept_from > _HANDOVER_NS)
            & (silent_from <= woke)
            & (silent_from > slept_from)
            & (silent_to - silent_from > _HANDOVER_NS)
        )
        for at in np.flatnonzero(wakes).tolist():
            delay = float(woke[at] - silent_from[at])
            self._hand_over(int(waker[last[at]]), int(sleeper[at]), delay)

    def _share_wake_ups(self) -> None:
        """Set equal delays of wake-ups by several threads: the time after the last of them."""
        links = self.links
        shortest: dict[int, float] = {}
        of_threads = [i for i, k in enumerate(links.kind) if k == Dependency.THREAD_TO_THREAD]
        for i in of_threads:
            shortest[links.target[i]] = min(shortest.get(links.target[i], np.inf), links.delay[i])
        for i in of_threads:
            links.delay[i] = shortest[links.target[i]]

    def _first_submission(self, own: Ints, pool: Ints, starts: Floats, ends: Floats) -> None:
        """Add an edge to a pool's first segment from the last one of the step's thread before it.

        A thread that submits work may continue, so there may be no idle time to infer this from.
        """
        first = int(pool[0])
        done = int(np.searchsorted(ends[own], starts[first], side="right")) - 1
        if done >= 0:
            source = int(own[done])
            self._hand_over(source, first, float(starts[first] - ends[source]))

    def _hand_over(self, source: int, target: int, delay_ns: float) -> None:
        # A thread that runs its backward pass is a caller of both autograd's threads and a pool.
        if (source, target) not in self.handed_over:
            self.handed_over.add((source, target))
            self.links.add(self._last_part(source), target, Dependency.THREAD_TO_THREAD, delay_ns)

    def _last_part(self, segment: int) -> int:
        """Return the id of the second part of a split segment, else the segment's."""
        at = int(np.searchsorted(self.tails[0], segment))
        cut = at < len(self.tails[0]) and self.tails[0][at] == segment
        return self.hosts + len(self.device) + at if cut else segment

    def _saved_tensors(self) -> None:
        """Add edges from forward operators to their backward ones on other threads."""
        segments = self.segments
        sequence = self.columns.saved_key[segments.event]
        numbered = np.flatnonzero(sequence >= 0)
        forward = numbered[segments.phase[numbered] != StepPhase.BACKWARD]
        backward = numbered[segments.first[numbered] & self.autograd[numbered]]
        if not len(forward) or not len(backward):
            return
        # The last segment of each number, since an operator saves its results at its end.
        numbers, last = np.unique(sequence[forward][::-1], return_index=True)
        at = np.minimum(np.searchsorted(numbers, sequence[backward]), len(numbers) - 1)
        source = forward[::-1][last][at]
        crosses = (numbers[at] == sequence[backward]) & (
            segments.lane[source] != segments.lane[backward]
        )
        source, backward = source[crosses], backward[crosses]
        agrees = segments.end[source] <= self.ready[backward]
        self.dropped += int((~agrees).sum())
        pairs = zip(source[agrees].tolist(), backward[agrees].tolist(), strict=True)
        for before, after in pairs:
            self.links.add(self._last_part(before), after, Dependency.DATA)
