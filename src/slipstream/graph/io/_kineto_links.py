"""What waits for what in a Kineto trace.

The kinds of dependency, and what each is taken from:

- thread order, stream order: the lanes.
- launch: the correlation id that a runtime call shares with what it launched.
- synchronisation: a call that waits gets the time after what it waited for as its duration, and
  an edge from there; so its end is max(end of the kernel, its start) + remainder. Which kernel
  that is follows from the ``cuda_sync`` event of its correlation, without one from the stream
  the thread used last. A full launch queue makes the host wait as well.
- stream to stream: ``Stream Wait Event`` names the waiting stream and the call that recorded the
  event; without those, the order of launches around ``cudaStreamWaitEvent``.
- communication: a stream-to-stream edge at whose one end a collective is.
- thread to thread: a thread that is silent just while autograd's thread is busy waited for it;
  so did the step's own thread for the threads of a pool, and they for it.
- data: an operator's backward uses what its forward saved (the sequence number).

An edge that the recorded times contradict is dropped and counted, so what is built has no cycle.

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
# Two threads hand over to each other only across a silence that Python alone does not make.
_HANDOVER_NS = 20_000.0
_AUTOGRAD = "autograd::engine::"
# Between one kernel and the next of a busy stream the device itself takes this long at most;
# beyond it, a late start is the launch's.
_TURNAROUND_NS = 10_000.0
# Beyond this many launch latencies a kernel was not being launched but waiting for something.
_LATE = 10.0


@dataclass(frozen=True)
class Window:
    """What of a trace is taken: host events that begin in [begin, end), and what they launched.

    Attributes:
        next_ns: when the next step begins; inf when nothing is known of one.
        thread: the one that runs the step, as in `Columns.thread`; -1 when that is not known.
    """

    label: str
    begin_ns: float
    end_ns: float
    next_ns: float
    thread: int = -1


@dataclass
class Links:
    """Edges under construction, by ids in which device event d is host segments + d."""

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
        segments: of the host's threads; their starts are moved to where their waiting ends.
        ready: float64, when the thread came to each segment.
        device: with ends mended within rounding.
        taken: bool [device events]; what belongs to the window.
        tails: of calls that were cut in two: their segment, the second part's start, when it was
            ready, its end, and the copy it waits for or -1.
        links: edges, by ids: segments first, then device events, then tails.
        gap_after: float64 [device events], ns.
        waits: bool; segments that wait for the device.
        dropped, unresolved: edges the recorded times contradict, waits of unknown cause.
    """

    def __init__(self, columns: Columns, device: Device, window: Window, name: str) -> None:
        # Ends are mended within rounding below; other steps are made from the same device.
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
                "nothing runs in the step", where=f"{name}: {window.label}", remedy="take another"
            )
        self.taken_in = [
            np.flatnonzero(self.taken[low:high]) + low
            for low, high in zip(device.first[:-1].tolist(), device.first[1:].tolist(), strict=True)
        ]
        self.hosts = len(self.segments)
        # When each segment's thread was ready for it; its start is later where it waited.
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
        """The id of a device event."""
        return self.hosts + event

    def _here(self, event: int) -> tuple[int, int] | None:
        """The event of this step that stands for `event`, and the lag of an edge from it.

        What the step before launched is, seen from the next step, what this one launches: the
        event as far from the end of the lane's share.
        """
        device = self.device
        if self.taken[event]:
            return event, 0
        mine = self.taken_in[int(device.lane[event])]
        if not len(mine) or event >= mine[0]:
            return None
        behind = int(mine[0]) - event
        return (int(mine[-behind]), 1) if behind <= len(mine) else None

    # What streams wait for

    def _stream_waits(self) -> None:
        columns, device = self.columns, self.device
        waits = np.flatnonzero(columns.category == Category.SYNC)
        known = [row for row in waits.tolist() if columns.text(row) == "Stream Wait Event"]
        calls = columns.runtime_row(columns.correlation[known]).tolist() if known else []
        for row, call in zip(known, calls, strict=True):
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
        """Without synchronisation events: what is launched next waits for the other streams.

        Of a ``cudaStreamWaitEvent`` only the thread is known. What that thread launches next is
        taken to wait for the last launch so far on the stream the thread used before, and for
        whatever another stream finished just before it started.
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
        """What starts late on an idle stream, just when another stream is done, waited for that.

        The wait itself may have been issued long before, for something launched in between.
        """
        device = self.device
        asked = np.maximum(device.issued, device.idle_before)
        late = self.taken & (device.start - asked > _LATE * device.latency_ns)
        for target in np.flatnonzero(late & (device.launch >= 0)).tolist():
            start = float(device.start[target])
            for lane in range(len(device.lanes)):
                last = device.last_ended(lane, start)
                if (
                    last >= 0
                    and device.issued[last] < device.issued[target]
                    and asked[target] < start - _TURNAROUND_NS <= device.end[last]
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

    # What the host waits for

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
        """Whether the call that launched this copy returned only when it was done."""
        columns, device = self.columns, self.device
        call = int(device.launch[event])
        copy = self._name(event)
        # To pageable memory even the asynchronous call returns only when the bytes are there.
        blocking = columns.text(call) in _BLOCKING_COPIES or "Device -> Pageable" in copy
        return blocking and bool(device.end[event] <= columns.end[call] + ROUNDING_NS)

    def _awaited(self, call: int, name: str, sync: int) -> list[int]:
        """The device events a synchronising call waited for."""
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
        kept = [event for event in events if device.end[event] <= end + ROUNDING_NS]
        self.dropped += len(events) - len(kept)
        return kept

    def _guess_awaited(self, call: int, name: str) -> list[int]:
        """Without a synchronisation event: what this thread launched last, if that fits."""
        columns, device = self.columns, self.device
        begin, end = float(columns.start[call]), float(columns.end[call]) + ROUNDING_NS
        last = [device.last_issued(lane, begin) for lane in range(len(device.lanes))]
        last = [event for event in last if event >= 0 and device.end[event] <= end]
        mine = [e for e in last if columns.thread[device.launch[e]] == columns.thread[call]]
        if mine and name in _STREAM_SYNC:
            return [max(mine, key=lambda event: float(device.issued[event]))]
        during = [event for event in last if device.end[event] > begin]
        if not during:
            self.unresolved += 1
            return []
        return [max(during, key=lambda event: float(device.end[event]))]

    def _wait(self, at: int, events: list[int]) -> None:
        """Segment `at` waits for `events`; what is left of it is its remainder."""
        segments, device = self.segments, self.device
        for event in events:
            here = self._here(event)
            if here is None:
                continue
            # Within rounding a kernel may seem to end after the call that waited for it.
            limit = max(segments.end[at], device.start[event])
            device.end[event] = min(device.end[event], limit)
            segments.start[at] = max(
                segments.start[at], min(float(device.end[event]), float(segments.end[at]))
            )
            self.waits[at] = True
            self.links.add(self.task(here[0]), at, Dependency.SYNCHRONISATION, 0.0, here[1])

    def _full_queues(self) -> None:
        """A launch into a full queue waits until the device has taken something out of it."""
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
                here = self._here(event - depth)
                if here is None:
                    continue
                at = int(self.first_segment[device.launch[event]])
                self.segments.start[at] = max(self.segments.start[at], device.end[event - depth])
                self.links.add(self.task(here[0]), at, Dependency.SYNCHRONISATION, 0.0, here[1])

    # What launches what

    def _launches(self) -> None:
        """Launch edges, latencies, and the gaps of busy streams.

        A kernel starts `latency` after its launch began. Where the stream was idle, that is
        seen; where it was busy, what is usual is taken, and what then remains between the kernel
        before and this one is a gap of the stream.
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
        seen = np.maximum(start - begun, 0.0)
        earliest = np.maximum(free, other)
        latency = np.where(earliest > begun, np.minimum(seen, device.latency_ns), seen)
        rest = start - np.maximum(begun + latency, earliest)
        late = (rest > 0) & (earliest <= begun + latency)
        latency = np.where(late, seen, latency)
        rest = np.where(late, 0.0, np.maximum(rest, 0.0))
        by_stream = (rest > 0) & (free >= other)
        for i in np.flatnonzero(by_stream).tolist():
            before = int(linked[i]) - 1
            here = self._here(before)
            # Behind the step before, only what the device itself takes is the step's own.
            if here is not None and (here[1] == 0 or rest[i] <= _TURNAROUND_NS):
                self.gap_after[here[0]] = rest[i]
        rest_of = np.where(by_stream, 0.0, rest)
        for target, sources in self.cross.items():
            last = max(sources, key=lambda source: float(device.end[source]))
            for source in sources:
                here = self._here(source)
                if here is None:
                    continue
                names = (self._name(source), self._name(target))
                kind = (
                    Dependency.COMMUNICATION
                    if any(is_communication(name) for name in names)
                    else Dependency.STREAM_TO_STREAM
                )
                extra = float(rest_of[position[target]]) if target in position else 0.0
                self.links.add(
                    self.task(here[0]), self.task(target), kind,
                    extra if source == last else 0.0, here[1],
                )  # fmt: skip
        self._split(linked, at, latency)

    def _name(self, event: int) -> str:
        return self.columns.text(int(self.device.row[event]))

    def _split(self, linked: Ints, at: Ints, latency: Floats) -> None:
        """Cut calls where their kernel may start, for the rest of the call delays nobody."""
        segments, device = self.segments, self.device
        soonest = np.full(self.hosts, np.inf)
        np.minimum.at(soonest, at, segments.start[at] + latency)
        cut = np.minimum(soonest, segments.end)
        # A copy that the call waits for: what follows the copy is the wait's remainder.
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

    # What threads wait for

    def _hand_overs(self) -> None:
        """Edges between a thread that works for another and the one that is silent meanwhile.

        Whoever begins after a silence, while the other has just fallen silent, was waiting for
        it: autograd's thread for the caller of ``backward()``, and the caller for its return; a
        pool's thread for who gave it something to do, and that one for the result.
        """
        segments, columns = self.segments, self.columns
        starts, ends = self.ready, segments.end.copy()
        ends[self.tails[0]] = self.tails[3]
        self.autograd = columns.named_like(lambda text: text.startswith(_AUTOGRAD))[segments.event]
        backward = segments.phase == StepPhase.BACKWARD
        lanes = np.unique(segments.lane)
        threads = [np.flatnonzero(segments.lane == lane) for lane in lanes[self.works()].tolist()]
        for engine in threads:
            # The thread that calls backward() runs the part of it that needs no device itself.
            if not self.autograd[engine].any() or (~backward[engine]).mean() > 0.5:
                continue
            for caller in threads:
                if caller is not engine and not backward[caller].all():
                    self._wake_ups(caller, engine, self.autograd, starts, ends)
                    self._wake_ups(engine, caller, np.ones(self.hosts, np.bool_), starts, ends)
        everything = np.ones(self.hosts, np.bool_)
        for thread in threads:
            for pool in threads if segments.lane[thread[0]] == self.window.thread else ():
                # Autograd's threads have their edges.
                if pool is not thread and not self.autograd[pool].any():
                    self._wake_ups(thread, pool, everything, starts, ends)
                    self._wake_ups(pool, thread, everything, starts, ends)
                    self._first_given(thread, pool, starts, ends)
        self._share_wake_ups()

    def works(self) -> NDArray[np.bool_]:
        """bool [threads]; whether each computes or launches.

        One that does neither watches the others (NCCL's watchdog): its pauses gate nothing.
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
        """Edges from the last segment of `waker` to the first of `sleeper` after a silence."""
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
        """Who waits for several threads is woken by the last: that takes as long after any."""
        links = self.links
        least: dict[int, float] = {}
        of_threads = [i for i, k in enumerate(links.kind) if k == Dependency.THREAD_TO_THREAD]
        for i in of_threads:
            least[links.target[i]] = min(least.get(links.target[i], np.inf), links.delay[i])
        for i in of_threads:
            links.delay[i] = least[links.target[i]]

    def _first_given(self, own: Ints, pool: Ints, starts: Floats, ends: Floats) -> None:
        """An edge to a pool's first segment, from what the step's thread had done by then.

        Who gives work away may go on working, so that there is no silence to tell it by.
        """
        first = int(pool[0])
        done = int(np.searchsorted(ends[own], starts[first], side="right")) - 1
        if done >= 0:
            source = int(own[done])
            self._hand_over(source, first, float(starts[first] - ends[source]))

    def _hand_over(self, source: int, target: int, delay_ns: float) -> None:
        # One that runs its own backward pass is found both as autograd's and as a pool's caller.
        if (source, target) not in self.handed_over:
            self.handed_over.add((source, target))
            self.links.add(self._last_part(source), target, Dependency.THREAD_TO_THREAD, delay_ns)

    def _last_part(self, segment: int) -> int:
        """The id of what is left of a segment that was cut, else its own."""
        at = int(np.searchsorted(self.tails[0], segment))
        cut = at < len(self.tails[0]) and self.tails[0][at] == segment
        return self.hosts + len(self.device) + at if cut else segment

    def _saved_tensors(self) -> None:
        """Edges from a forward operator to its backward on another thread."""
        segments = self.segments
        sequence = self.columns.saved_key[segments.event]
        numbered = np.flatnonzero(sequence >= 0)
        forward = numbered[segments.phase[numbered] != StepPhase.BACKWARD]
        backward = numbered[segments.first[numbered] & self.autograd[numbered]]
        if not len(forward) or not len(backward):
            return
        # The last of each number: what an operator does last, it saves its results after.
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
