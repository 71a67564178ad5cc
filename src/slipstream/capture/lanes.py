"""Combine several steps of a Kineto trace, with lanes for threads and streams, into one graph.

A step on a device, or on several threads of the host, is not a sequence;
`slipstream.graph.read_kineto` provides its dependencies. This module combines several steps: tasks
are aligned lane by lane. Host tasks get their minimum, since other load only prolongs them; device
tasks get their median, since a device runs no other work and varies by itself (clocks, caches). The
profiler's cost is subtracted from every host event, such that the simulated step is as long as one
without the profiler.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.capture.events import positions
from slipstream.errors import GraphError
from slipstream.graph import Edges, Graph, Kind, KinetoTrace, replace_tasks, replay

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# Host tasks that are an event of the trace, which costs the profiler time to record.
_EVENTS = (Kind.OP, Kind.LAUNCH, Kind.WAIT, Kind.COLLECTION)
_ON_DEVICE = (Kind.KERNEL, Kind.COPY, Kind.COMMUNICATION)
# Maximum cost per event, on a slow machine: an operator's record, or CUPTI's of call and kernel.
_MAX_EVENT_COST_NS = {"cpu": 1500.0, "cuda": 5000.0}
_BISECTIONS = 24
# Minimum share of common tasks of steps.
_MIN_COMMON = 0.5


@dataclass(frozen=True)
class PlainSteps:
    """Times of steps without a profiler, in ns.

    Attributes:
        wall_ns: Time until all work of the step was done, including the device's.
        host_ns: Time until the host had issued it.
        cpu_ns: CPU time of the thread that runs the step.
        unsynchronised_ns: Mean time of consecutive steps without synchronization.
    """

    wall_ns: tuple[int, ...]
    host_ns: tuple[int, ...]
    cpu_ns: tuple[int, ...]
    unsynchronised_ns: float


def graph_of_steps(
    traces: Sequence[KinetoTrace], plain: PlainSteps | None, profiled_host_ns: Sequence[int] = ()
) -> Graph:
    """Return the graph of the step of median length in `traces`, with durations of all steps.

    Args:
        plain: Steps without a profiler; if None, the profiler's cost is not subtracted.
        profiled_host_ns: Time until the host had issued each profiled step.

    Raises:
        GraphError: There are no steps, or they have too little in common.
    """
    steps = [trace.graph(step.number) for trace in traces for step in trace.steps]
    if not steps:
        raise GraphError("the profiler recorded no step", where=traces[0].name if traces else None)
    graph = with_durations(_median(steps), steps)
    if plain is None:
        return graph
    return without_profiler(graph, plain, profiled_host_ns)


def _median(steps: Sequence[Graph]) -> Graph:
    """Return the step of median length among those with the most common number of lanes.

    A pool may run on one thread what runs on two in other steps.
    """
    lanes, _ = Counter(len(graph.lanes) for graph in steps).most_common(1)[0]
    usual = [graph for graph in steps if len(graph.lanes) == lanes]
    return sorted(usual, key=lambda graph: float(graph.meta["recorded_ns"]))[(len(usual) - 1) // 2]


def with_durations(reference: Graph, steps: Sequence[Graph]) -> Graph:
    """Return `reference` with durations, gaps and edge delays combined from all `steps`.

    Raises:
        GraphError: The steps have less than half of their tasks in common.
    """
    n = len(reference)
    pairs = [partners(reference, step) for step in steps]
    common = float(np.mean([(partner >= 0).mean() for partner in pairs]))
    if common < _MIN_COMMON:
        raise GraphError(
            f"the steps have only {100 * common:.0f} % of their tasks in common",
            remedy="make the step do the same work every time: fixed shapes, no random branch",
        )
    duration, gap = np.full((len(steps), n), np.nan), np.full((len(steps), n), np.nan)
    delays = np.full((len(steps), len(reference.edges)), np.nan)
    for row, (step, partner) in enumerate(zip(steps, pairs, strict=True)):
        present = partner >= 0
        duration[row, present] = step.tasks.duration_ns[partner[present]]
        # Gaps are comparable only between the same two tasks.
        same = present & _has_same_successor(reference, step, partner)
        gap[row, same] = step.tasks.gap_ns[partner[same]]
        delays[row] = _delays(reference.edges, step.edges, partner)
    device = np.isin(reference.tasks.kind, _ON_DEVICE)
    lower, middle, upper = np.nanpercentile(duration, [25, 50, 75], axis=0)
    graph = replace_tasks(
        reference,
        duration_ns=np.where(device, middle, np.nanmin(duration, axis=0)),
        gap_ns=np.where(device, _nan_median(gap, reference.tasks.gap_ns), _nan_minimum(gap)),
        spread=(upper - lower) / 2 / np.maximum(middle, 1.0),
    )
    edges = replace(graph.edges, delay_ns=np.nanmin(delays, axis=0))
    whole = sum(
        bool((partner >= 0).all()) and len(step) == n
        for partner, step in zip(pairs, steps, strict=True)
    )
    meta = {
        "steps": len(steps),
        "aligned_steps": len(steps),
        "steps_alike": int(whole),
        "unaligned_share": _unaligned(reference, steps, pairs),
    }
    return replace(graph, edges=edges, meta={**graph.meta, **meta})


def partners(reference: Graph, other: Graph) -> Ints:
    """Return the task of `other` that matches each task of `reference`, int64 [n]; -1 if none.

    Lanes are matched by their tasks, since threads of a pool change names and roles between steps.
    """
    partner = np.full(len(reference), -1, np.int64)
    lanes, other_lanes = _by_lane(reference), _by_lane(other)
    unmatched = dict(other_lanes)
    common = {
        (a, b): sum((_names(reference, lanes[a]) & _names(other, other_lanes[b])).values())
        for a in lanes
        for b in other_lanes
        if reference.lanes[a].startswith("gpu") == other.lanes[b].startswith("gpu")
    }
    pairs = sorted(
        common,
        key=lambda pair: (common[pair], reference.lanes[pair[0]] == other.lanes[pair[1]], -pair[1]),
        reverse=True,
    )
    matched: set[int] = set()
    for a, b in pairs:
        if a in matched or b not in unmatched or not common[a, b]:
            continue
        matched.add(a)
        tasks, other_tasks = lanes[a], unmatched.pop(b)
        places = positions(_keys(reference, tasks), _keys(other, other_tasks))
        present = places >= 0
        partner[tasks[present]] = other_tasks[places[present]]
    return partner


def _by_lane(graph: Graph) -> dict[int, Ints]:
    lanes = np.unique(graph.tasks.lane)
    return {int(lane): np.flatnonzero(graph.tasks.lane == lane) for lane in lanes}


def _names(graph: Graph, tasks: Ints) -> Counter[str]:
    return Counter(_keys(graph, tasks))


def _keys(graph: Graph, tasks: Ints) -> list[str]:
    """Return the keys that identify tasks: the name, and whether it is the rest of an event."""
    names = graph.texts("name", tasks)
    rest = (graph.tasks.kind[tasks] == Kind.HOST).tolist()
    return [
        f"{name} (rest)" if is_rest else name for name, is_rest in zip(names, rest, strict=True)
    ]


def _has_same_successor(reference: Graph, step: Graph, partner: Ints) -> NDArray[np.bool_]:
    """Return whether the next task on the lane is the same in `step`, bool [n]."""
    following, other_following = _next_on_lane(reference), _next_on_lane(step)
    after = np.where(partner >= 0, other_following[partner], -1)
    expected = np.where(following >= 0, partner[following], -1)
    same: NDArray[np.bool_] = (after == expected) & ((following < 0) | (expected >= 0))
    return same


def _next_on_lane(graph: Graph) -> Ints:
    following = np.full(len(graph), -1, np.int64)
    for tasks in _by_lane(graph).values():
        following[tasks[:-1]] = tasks[1:]
    return following


def _delays(edges: Edges, other: Edges, partner: Ints) -> Floats:
    """Return the delay of each edge in the other step, float64 [edges]; NaN without the edge."""
    pairs = zip(other.source.tolist(), other.target.tolist(), other.kind.tolist(), strict=True)
    delays = dict(zip(pairs, other.delay_ns.tolist(), strict=True))
    matches = zip(
        partner[edges.source].tolist(), partner[edges.target].tolist(), edges.kind.tolist(),
        strict=True,
    )  # fmt: skip
    return np.array([delays.get(pair, np.nan) for pair in matches], np.float64)


def _nan_minimum(values: Floats) -> Floats:
    minimum: Floats = np.nanmin(np.where(np.isnan(values), np.inf, values), axis=0)
    return minimum


def _nan_median(values: Floats, default: Floats) -> Floats:
    present = ~np.isnan(values).all(axis=0)
    medians = default.copy()
    medians[present] = np.nanmedian(values[:, present], axis=0)
    return medians


def _unaligned(reference: Graph, steps: Sequence[Graph], found: Sequence[Ints]) -> float:
    """Return the share of events without a partner, in either direction.

    Excludes the rest of an operator around its callees, whose presence depends on a nanosecond.
    """
    events = np.isin(reference.tasks.kind, (*_EVENTS, *_ON_DEVICE))
    shared = total = 0.0
    for step, partner in zip(steps, found, strict=True):
        count = int(np.isin(step.tasks.kind, (*_EVENTS, *_ON_DEVICE)).sum())
        shared += float((partner[events] >= 0).sum())
        total += (float(events.sum()) + count) / 2
    share = 1.0 - shared / max(total, 1.0)
    return share if share > 1e-9 else 0.0


# The profiler's cost


def without_profiler(graph: Graph, plain: PlainSteps, profiled_host_ns: Sequence[int]) -> Graph:
    """Subtract the host's cost of recording, fitted to the plain steps.

    Args:
        profiled_host_ns: Time until the host had issued each profiled step.
    """
    quiet = float(min(plain.wall_ns))
    most = _MAX_EVENT_COST_NS[str(graph.meta["device"])]
    events = max(int(_events(graph).sum()), 1)
    if replay(graph).step_ns <= quiet:
        cost = 0.0
    elif replay(less_per_event(graph, most)).step_ns >= quiet:
        # The device or other load determines the length of the step.
        extra = min(profiled_host_ns, default=0) - min(plain.host_ns)
        cost = float(np.clip(extra / events, 0.0, most))
    else:
        low, high = 0.0, most
        for _ in range(_BISECTIONS):
            cost = (low + high) / 2
            if replay(less_per_event(graph, cost)).step_ns > quiet:
                low = cost
            else:
                high = cost
        cost = (low + high) / 2
    corrected = less_per_event(graph, cost)
    scale = quiet / max(replay(corrected).step_ns, 1.0)
    if graph.meta["device"] == "cpu":
        # Contention between threads affects all tasks; device tasks are not affected.
        corrected = _scaled(corrected, scale)
    meta: dict[str, Any] = {
        "events_per_step": events,
        "profiler_ns_per_event": cost,
        "residual_scale": scale,
    }
    return replace(corrected, meta={**corrected.meta, **meta})


def _scaled(graph: Graph, factor: float) -> Graph:
    tasks = graph.tasks
    edges = replace(graph.edges, delay_ns=graph.edges.delay_ns * factor)
    graph = replace(graph, edges=edges)
    return replace_tasks(
        graph, duration_ns=tasks.duration_ns * factor, gap_ns=tasks.gap_ns * factor
    )


def _events(graph: Graph) -> NDArray[np.bool_]:
    host = np.array([not lane.startswith("gpu") for lane in graph.lanes], np.bool_)
    events: NDArray[np.bool_] = np.isin(graph.tasks.kind, _EVENTS) & host[graph.tasks.lane]
    return events


def less_per_event(graph: Graph, cost_ns: float) -> Graph:
    """Subtract `cost_ns` for every event of the host.

    The cost is subtracted from the event and, if that is too short, from what follows on its
    thread; no time becomes negative.
    """
    duration, gap = graph.tasks.duration_ns.copy(), graph.tasks.gap_ns.copy()
    events = _events(graph)
    for lane, tasks in _by_lane(graph).items():
        if graph.lanes[lane].startswith("gpu"):
            continue
        owed = 0.0
        for task in tasks.tolist():
            owed += cost_ns if events[task] else 0.0
            paid = min(owed, duration[task])
            duration[task] -= paid
            from_gap = min(owed - paid, gap[task])
            gap[task] -= from_gap
            owed -= paid + from_gap
    return replace_tasks(graph, duration_ns=duration, gap_ns=gap)
