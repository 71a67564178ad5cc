"""Build the graph of one step from the columns of a Kineto trace; for edges see `_kineto_links`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import GraphError
from slipstream.graph.graph import Graph
from slipstream.graph.io._kineto_columns import (
    Category,
    Columns,
    Device,
    Floats,
    Ints,
    is_communication,
)
from slipstream.graph.io._kineto_links import LinkFinder, Window
from slipstream.graph.values import PROVENANCES, Dependency, Edges, Kind, StepPhase, Tasks
from slipstream.provenance import Provenance


def build(
    columns: Columns, device: Device, window: Window, name: str, header: Mapping[str, Any]
) -> tuple[Graph, Floats]:
    """Build the graph of `window`; return it with the begin of each task, float64 [n], in ns.

    Raises:
        GraphError: the window is empty, or device events have no correlation ids.
    """
    if len(device) and not (device.launch >= 0).any():
        raise GraphError(
            f"none of the {len(device)} kernels and copies can be linked to its launch: "
            "they have no correlation ids in common with runtime calls",
            where=f"{name}: {columns.text(int(device.row[0]))[:60]}",
            remedy="profile with activities=[CPU, CUDA], and do not strip 'args' from the trace",
        )
    finder = LinkFinder(columns, device, window, name)
    finder.find()
    return _Assembly(finder, name, header).graph()


class _Assembly:
    """Assembles a graph from segments, device events and links."""

    def __init__(self, found: LinkFinder, name: str, header: Mapping[str, Any]) -> None:
        self.found = found
        self.name, self.header = name, header
        self.recorded_ns = 0.0

    def graph(self) -> tuple[Graph, Floats]:
        """Return the graph in the order of recorded starts, with the edges that agree with it."""
        segments, device = self.found.segments, self.found.device
        halves, tail_start, tail_ready, tail_end, _ = self.found.tails
        d, h = len(device), self.found.hosts
        taken = np.flatnonzero(self.found.taken)
        host_lanes = np.unique(segments.lane)
        used = np.unique(device.lane[taken])
        # Ids so far: segments, device events, tails of cut segments, one begin per host lane.
        k = len(halves)
        total = h + d + k + len(host_lanes)
        begin = np.full(len(host_lanes), self.found.window.begin_ns)
        before = np.full(len(host_lanes), -np.inf)
        start = np.concatenate([segments.start, device.start, tail_start, before])
        ready = np.concatenate([self.found.ready, device.start, tail_ready, begin])
        end = np.concatenate([segments.end, device.end, tail_end, begin])
        of_host = np.searchsorted(host_lanes, segments.lane).astype(np.int32)
        of_device = np.full(len(device.lanes), -1, np.int32)
        of_device[used] = len(host_lanes) + np.arange(len(used))
        begun = np.arange(len(host_lanes), dtype=np.int32)
        lane = np.concatenate([of_host, of_device[device.lane], of_host[halves], begun])
        exists = np.ones(total, np.bool_)
        exists[h : h + d] = self.found.taken
        # Program order within a lane for equal times: segments in order, tails after their segment.
        begins = np.full(len(host_lanes), -1.0)
        rank = np.concatenate([np.arange(h, dtype=float), np.arange(d) + h, halves + 0.5, begins])
        on_device = np.zeros(total, np.bool_)
        on_device[h : h + d] = True
        order = np.lexsort((rank, on_device, start))
        order = order[exists[order]]
        place = np.full(total, -1, np.int64)
        place[order] = np.arange(len(order))
        self._begin_unlinked(taken, h + d + k)
        edges = self._edges(place)
        duration = np.maximum(end - start, 0.0)
        duration[h + d + k :] = 0.0
        gap = np.zeros(total)
        gap[h : h + d] = self.found.gap_after
        self._host_gaps(gap, ready, end, lane, order, place, edges)
        graph = self._tasks(order, lane, duration, gap, edges, host_lanes, used)
        return graph, np.maximum(start[order], self.found.window.begin_ns)

    def _begin_unlinked(self, taken: Ints, begin: int) -> None:
        """Let events that were launched before the recording wait for its begin."""
        device = self.found.device
        for event in taken[device.launch[taken] < 0].tolist():
            before = event - 1
            follows = before >= 0 and device.lane[before] == device.lane[event]
            alone = not (follows and self.found.taken[before])
            delay = device.start[event] - self.found.window.begin_ns if alone else 0.0
            if not alone:
                self.found.gap_after[before] = device.start[event] - device.end[before]
            if self.found.hosts:
                self.found.links.add(
                    begin, self.found.task(event), Dependency.LAUNCH, max(float(delay), 0.0)
                )

    def _edges(self, place: Ints) -> Edges:
        links = self.found.links
        source = place[np.array(links.source, np.int64)]
        target = place[np.array(links.target, np.int64)]
        lag = np.array(links.lag, np.uint8)
        keep = (source >= 0) & (target >= 0) & ((lag == 1) | (source < target))
        self.found.dropped += int((~keep).sum())
        edges = Edges.of(source, target, links.kind, links.delay, lag)
        return edges.take(np.flatnonzero(keep))

    def _host_gaps(
        self,
        gap: Floats,
        ready: Floats,
        end: Floats,
        lane: NDArray[np.int32],
        order: Ints,
        place: Ints,
        edges: Edges,
    ) -> None:
        """Untracked time between the segments of each thread, up to the step's end."""
        threads = edges.kind == Dependency.THREAD_TO_THREAD
        resumed = np.unique(edges.target[threads])
        yielding = set(edges.source[threads].tolist())
        works = self.found.works()
        hosts = len(works)
        on_device = (order >= self.found.hosts) & (
            order < self.found.hosts + len(self.found.device)
        )
        of_host = order[np.append(works, False)[np.minimum(lane[order], hosts)]]
        step_end = self.found.window.next_ns
        whole_end = step_end
        if math.isinf(step_end):
            # The device may finish later, and the next step need not wait for it.
            step_end = float(end[of_host].max(initial=self.found.window.begin_ns))
            whole_end = float(end[order[on_device]].max(initial=step_end))
        self.recorded_ns = whole_end - self.found.window.begin_ns
        for number in range(hosts):
            tasks = order[lane[order] == number]
            if not len(tasks) or not works[number]:
                continue
            between = np.maximum(ready[tasks[1:]] - end[tasks[:-1]], 0.0)
            between[np.isin(place[tasks[1:]], resumed)] = 0.0
            gap[tasks[:-1]] = between
            if int(place[tasks[-1]]) not in yielding:
                gap[tasks[-1]] = max(step_end - end[tasks[-1]], 0.0)

    def _tasks(
        self,
        order: Ints,
        lane: NDArray[np.int32],
        duration: Floats,
        gap: Floats,
        edges: Edges,
        host_lanes: NDArray[np.int32],
        used: NDArray[np.int32],
    ) -> Graph:
        segments, columns, device = self.found.segments, self.found.columns, self.found.device
        halves = self.found.tails[0]
        launch = np.where(device.launch >= 0, self.found.first_segment[device.launch], -1)
        # Per id, the segment it belongs to; -1 for the begin of a thread.
        owner = np.concatenate(
            [np.arange(self.found.hosts), launch, halves, np.full(len(host_lanes), -1)]
        )[order].astype(np.int64)
        row = np.concatenate(
            [segments.event, device.row, segments.event[halves], np.full(len(host_lanes), -1)]
        )[order].astype(np.int64)
        codes = np.where(row >= 0, columns.name[row], -1)
        string = np.zeros(len(columns.texts) + 1, np.int32)
        for code in np.unique(codes).tolist():
            string[code] = self.found.strings.add(columns.texts[code] if code >= 0 else "step")

        def inherited(column: NDArray[Any]) -> NDArray[Any]:
            values = np.zeros(len(order), column.dtype)
            values[owner >= 0] = column[owner[owner >= 0]]
            return values

        sequence = np.full(len(order), -1, np.int64)
        sequence[row >= 0] = columns.sequence[row[row >= 0]]
        n = len(order)
        tasks = Tasks(
            name=string[codes],
            scope=inherited(segments.scope),
            module=inherited(segments.module),
            source=inherited(segments.source),
            kind=self._kinds(order, row),
            phase=inherited(self._phases()),
            lane=lane[order],
            rank=np.full(n, self._rank(), np.int32),
            call=np.full(n, -1, np.int32),
            sequence=sequence,
            duration_ns=duration[order],
            gap_ns=gap[order],
            spread=np.zeros(n),
            provenance=np.full(n, PROVENANCES.index(Provenance.MEASURED), np.uint8),
        )
        threads = [columns.threads[int(thread)] for thread in host_lanes]
        several = len({process for process, _ in threads}) > 1
        lanes = [f"thread {f'{p}:' if several else ''}{thread}" for p, thread in threads]
        return Graph(
            tasks=tasks,
            edges=edges,
            strings=self.found.strings.freeze(),
            calls=(),
            operand_start=np.zeros(n + 1, np.int64),
            operands=np.empty(0, np.int32),
            parameters=np.empty(0, np.int32),
            lanes=(*lanes, *(device.lanes[int(lane)] for lane in used)),
            samples=0,
            meta=self._meta(),
        )

    def _kinds(self, order: Ints, row: Ints) -> NDArray[np.uint8]:
        h, d = self.found.hosts, len(self.found.device)
        of_category = np.full(len(Category), Kind.HOST, np.uint8)
        of_category[Category.OP] = Kind.OP
        of_category[Category.RUNTIME] = Kind.LAUNCH
        of_category[Category.KERNEL] = Kind.KERNEL
        of_category[[Category.MEMCPY, Category.MEMSET]] = Kind.COPY
        of_category[Category.COLLECTION] = Kind.COLLECTION
        kind: NDArray[np.uint8] = np.where(
            row >= 0, of_category[self.found.columns.category[row]], Kind.HOST
        ).astype(np.uint8)
        of_segment = np.full(h, 255, np.uint8)
        # The remainder of an operator after a nested event is not another call.
        of_segment[~self.found.segments.first] = Kind.HOST
        of_segment[self.found.waits] = Kind.WAIT
        of_tail = np.where(self.found.tails[4] >= 0, Kind.WAIT, Kind.HOST).astype(np.uint8)
        special = np.full(int(order.max(initial=-1)) + 1, 255, np.uint8)
        special[:h] = of_segment[: len(special)]
        special[h + d : h + d + len(of_tail)] = of_tail
        kind = np.where(special[order] != 255, special[order], kind)
        communicates = self.found.columns.named_like(is_communication)[row] & (row >= 0)
        kind[communicates & np.isin(kind, (Kind.KERNEL, Kind.COPY, Kind.OP))] = Kind.COMMUNICATION
        return kind

    def _phases(self) -> NDArray[np.uint8]:
        """Mark tasks before the first backward task as forward, except the optimizer's."""
        phase = self.found.segments.phase.copy()
        backward = self.found.segments.start[phase == StepPhase.BACKWARD]
        until = backward.min() if len(backward) else np.inf
        phase[(phase == StepPhase.OTHER) & (self.found.segments.start < until)] = StepPhase.FORWARD
        return phase

    def _rank(self) -> int:
        info = self.header.get("distributedInfo")
        rank = info.get("rank") if isinstance(info, dict) else None
        return rank if isinstance(rank, int) and 0 <= rank < 2**31 else 0

    def _meta(self) -> dict[str, Any]:
        columns, device, taken = self.found.columns, self.found.device, self.found.taken
        kernels = int(taken.sum())
        alone = taken & (device.launch < 0)
        # Correlations are ascending: smaller ones than any call's are of earlier launches.
        correlations = columns.runtime_by_correlation[0]
        before = alone & (columns.correlation[device.row] < correlations[:1].sum())
        return {
            "workload": self.name,
            "origin": "kineto",
            "step": self.found.window.label,
            "device": "cuda" if kernels else "cpu",
            "recorded_ns": float(self.recorded_ns),
            "kernels": kernels,
            "kernels_linked": kernels - int(alone.sum()),
            "kernels_launched_before": int(before.sum()),
            "launch_latency_ns": device.latency_ns,
            "launch_queue": max(device.queue, default=0),
            "edges_dropped": self.found.dropped,
            "waits_unresolved": self.found.unresolved,
            **self._device_name(),
            "launches": self._launches(),
        }

    def _launches(self) -> dict[str, list[list[int]]]:
        """Return `Columns.launch` of the kernels by name, in order of time.

        By name, so that they remain valid after an edit inserts tasks.
        """
        columns, device = self.found.columns, self.found.device
        chosen = np.flatnonzero(self.found.taken)
        chosen = chosen[np.argsort(device.start[chosen], kind="stable")]
        launches: dict[str, list[list[int]]] = {}
        for row in device.row[chosen].tolist():
            if columns.launch[row, 0]:
                launches.setdefault(columns.text(row), []).append(columns.launch[row].tolist())
        return launches

    def _device_name(self) -> dict[str, str]:
        """Return the driver's name of the devices if all have the same."""
        devices = self.header.get("deviceProperties")
        names = {
            entry["name"]
            for entry in (devices if isinstance(devices, list) else [])
            if isinstance(entry, dict) and isinstance(entry.get("name"), str)
        }
        return {"device_name": names.pop()} if len(names) == 1 else {}
