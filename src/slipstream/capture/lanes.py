"""Several steps of a Kineto trace, with lanes for every thread and stream, as one graph.

A step that runs on a device, or on several threads of the host, is more than a sequence: what waits
for what comes from `slipstream.graph.read_kineto`. What is added here is what many steps tell that
one does not: tasks are aligned lane by lane; the host's keep their minimum, since whatever else the
machine did made them longer; a device's keep their median, since it has nobody else to serve and
what varies there (clocks, caches) is its own. The profiler's cost is taken off every event of the
host, so much that the simulated step is as long as one without the profiler.
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

# Tasks of the host that are an event of the trace, and cost the profiler something to write down.
_EVENTS = (Kind.OP, Kind.LAUNCH, Kind.WAIT, Kind.COLLECTION)
_ON_DEVICE = (Kind.KERNEL, Kind.COPY, Kind.COMMUNICATION)
# Of one event on a slow machine: an operator's record, or CUPTI's of a call and its kernel.
_LARGEST_EVENT_COST_NS = {"cpu": 1500.0, "cuda": 5000.0}
_BISECTIONS = 24
# Steps that have less in common than this do not describe one another.
_LEAST_COMMON = 0.5


@dataclass(frozen=True)
class PlainSteps:
    """Steps without a profiler, in ns of each.

    Attributes:
        wall_ns: until everything the step began was done, also on the device.
        host_ns: until the host had issued it.
        cpu_ns: CPU time of the thread that runs the step.
        unsynchronised_ns: a step's share of several that nobody waited between.
    """

    wall_ns: tuple[int, ...]
    host_ns: tuple[int, ...]
    cpu_ns: tuple[int, ...]
    unsynchronised_ns: float


def graph_of_steps(
    traces: Sequence[KinetoTrace], plain: PlainSteps | None, profiled_host_ns: Sequence[int] = ()
) -> Graph:
    """One graph of all the steps in `traces`: that of median length, with every step's durations.

    Args:
        plain: the same steps without a profiler; None where there are none, and nothing is taken
            off for the profiler.
        profiled_host_ns: until the host had issued each profiled step.

    Raises:
        GraphError: there are no steps, or they have too little in common.
    """
    steps = [trace.graph(step.number) for trace in traces for step in trace.steps]
    if not steps:
        raise GraphError(
            "no step was seen by the profiler", where=traces[0].name if traces else None
        )
    graph = with_durations(_median(steps), steps)
    if plain is None:
        return graph
    return without_profiler(graph, plain, profiled_host_ns)


def _median(steps: Sequence[Graph]) -> Graph:
    """The step of median length among those with as many lanes as most have.

    A pool may give one of its threads what two do in other steps.
    """
    usual, _ = Counter(len(graph.lanes) for graph in steps).most_common(1)[0]
    alike = [graph for graph in steps if len(graph.lanes) == usual]
    return sorted(alike, key=lambda graph: float(graph.meta["recorded_ns"]))[(len(alike) - 1) // 2]


def with_durations(reference: Graph, steps: Sequence[Graph]) -> Graph:
    """`reference` with what all `steps` say of its tasks' durations, gaps and edges' delays.

    Raises:
        GraphError: the steps have less than half of their tasks in common.
    """
    n = len(reference)
    pairs = [partners(reference, step) for step in steps]
    common = float(np.mean([(one >= 0).mean() for one in pairs]))
    if common < _LEAST_COMMON:
        raise GraphError(
            f"the steps have only {100 * common:.0f} % of their tasks in common",
            remedy="let the step do the same work every time: fixed shapes, no random branch",
        )
    duration, gap = np.full((len(steps), n), np.nan), np.full((len(steps), n), np.nan)
    delays = np.full((len(steps), len(reference.edges)), np.nan)
    for row, (step, one) in enumerate(zip(steps, pairs, strict=True)):
        there = one >= 0
        duration[row, there] = step.tasks.duration_ns[one[there]]
        # A gap is the same one only between the same two tasks.
        same = there & _followed_alike(reference, step, one)
        gap[row, same] = step.tasks.gap_ns[one[same]]
        delays[row] = _delays(reference.edges, step.edges, one)
    device = np.isin(reference.tasks.kind, _ON_DEVICE)
    lower, middle, upper = np.nanpercentile(duration, [25, 50, 75], axis=0)
    graph = replace_tasks(
        reference,
        duration_ns=np.where(device, middle, np.nanmin(duration, axis=0)),
        gap_ns=np.where(device, _nan_median(gap, reference.tasks.gap_ns), _nan_minimum(gap)),
        spread=(upper - lower) / 2 / np.maximum(middle, 1.0),
    )
    edges = replace(graph.edges, delay_ns=np.nanmin(delays, axis=0))
    whole = sum(bool((one >= 0).all()) and len(s) == n for one, s in zip(pairs, steps, strict=True))
    meta = {
        "steps": len(steps),
        "aligned_steps": len(steps),
        "steps_alike": int(whole),
        "unaligned_share": _unaligned(reference, steps, pairs),
    }
    return replace(graph, edges=edges, meta={**graph.meta, **meta})


def partners(reference: Graph, other: Graph) -> Ints:
    """int64 [n]: the task of `other` that each task of `reference` is; -1: none.

    Lanes are matched by what runs on them: a pool's threads have other names in every step, and
    do each other's work.
    """
    partner = np.full(len(reference), -1, np.int64)
    ours, theirs = _by_lane(reference), _by_lane(other)
    left = dict(theirs)
    alike = {
        (a, b): sum((_names(reference, ours[a]) & _names(other, theirs[b])).values())
        for a in ours
        for b in theirs
        if reference.lanes[a].startswith("gpu") == other.lanes[b].startswith("gpu")
    }
    pairs = sorted(
        alike,
        key=lambda pair: (alike[pair], reference.lanes[pair[0]] == other.lanes[pair[1]], -pair[1]),
        reverse=True,
    )
    taken: set[int] = set()
    for a, b in pairs:
        if a in taken or b not in left or not alike[a, b]:
            continue
        taken.add(a)
        mine, its = ours[a], left.pop(b)
        one = positions(_keys(reference, mine), _keys(other, its))
        there = one >= 0
        partner[mine[there]] = its[one[there]]
    return partner


def _by_lane(graph: Graph) -> dict[int, Ints]:
    lanes = np.unique(graph.tasks.lane)
    return {int(lane): np.flatnonzero(graph.tasks.lane == lane) for lane in lanes}


def _names(graph: Graph, tasks: Ints) -> Counter[str]:
    return Counter(_keys(graph, tasks))


def _keys(graph: Graph, tasks: Ints) -> list[str]:
    """What makes two tasks the same: the name, and whether it is an event or the rest of one."""
    names = graph.texts("name", tasks)
    rest = (graph.tasks.kind[tasks] == Kind.HOST).tolist()
    return [f"{name} (rest)" if of_one else name for name, of_one in zip(names, rest, strict=True)]


def _followed_alike(reference: Graph, step: Graph, partner: Ints) -> NDArray[np.bool_]:
    """bool [n]; whether the next task on the lane is the same in `step`, too."""
    ours, theirs = _next_on_lane(reference), _next_on_lane(step)
    after = np.where(partner >= 0, theirs[partner], -1)
    expected = np.where(ours >= 0, partner[ours], -1)
    same: NDArray[np.bool_] = (after == expected) & ((ours < 0) | (expected >= 0))
    return same


def _next_on_lane(graph: Graph) -> Ints:
    following = np.full(len(graph), -1, np.int64)
    for tasks in _by_lane(graph).values():
        following[tasks[:-1]] = tasks[1:]
    return following


def _delays(edges: Edges, theirs: Edges, partner: Ints) -> Floats:
    """float64 [edges]; the delay of each in the other step, NaN where it has no such edge."""
    pairs = zip(theirs.source.tolist(), theirs.target.tolist(), theirs.kind.tolist(), strict=True)
    known = dict(zip(pairs, theirs.delay_ns.tolist(), strict=True))
    wanted = zip(
        partner[edges.source].tolist(), partner[edges.target].tolist(), edges.kind.tolist(),
        strict=True,
    )  # fmt: skip
    return np.array([known.get(pair, np.nan) for pair in wanted], np.float64)


def _nan_minimum(values: Floats) -> Floats:
    minimum: Floats = np.nanmin(np.where(np.isnan(values), np.inf, values), axis=0)
    return minimum


def _nan_median(values: Floats, default: Floats) -> Floats:
    known = ~np.isnan(values).all(axis=0)
    medians = default.copy()
    medians[known] = np.nanmedian(values[:, known], axis=0)
    return medians


def _unaligned(reference: Graph, steps: Sequence[Graph], found: Sequence[Ints]) -> float:
    """Share of the events without a partner, both ways.

    What is left of an operator around what it called is there or not by a nanosecond.
    """
    ours = np.isin(reference.tasks.kind, (*_EVENTS, *_ON_DEVICE))
    shared = total = 0.0
    for step, one in zip(steps, found, strict=True):
        theirs = int(np.isin(step.tasks.kind, (*_EVENTS, *_ON_DEVICE)).sum())
        shared += float((one[ours] >= 0).sum())
        total += (float(ours.sum()) + theirs) / 2
    share = 1.0 - shared / max(total, 1.0)
    return share if share > 1e-9 else 0.0


# The profiler's cost


def without_profiler(graph: Graph, plain: PlainSteps, profiled_host_ns: Sequence[int]) -> Graph:
    """`graph` without what recording cost the host, fitted to the plain steps.

    Args:
        profiled_host_ns: until the host had issued each profiled step.
    """
    quiet = float(min(plain.wall_ns))
    most = _LARGEST_EVENT_COST_NS[str(graph.meta["device"])]
    events = max(int(_events(graph).sum()), 1)
    if replay(graph).step_ns <= quiet:
        cost = 0.0
    elif replay(less_per_event(graph, most)).step_ns >= quiet:
        # The device, or a busy machine, takes that long whatever the host does.
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
        # Threads that hold each other up do so everywhere; a device's work is as long as it is.
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
    """`graph` with `cost_ns` less for every event of the host.

    It is taken off the event itself and, what that is too short for, off what follows on its
    thread; nothing becomes negative.
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
            rest = min(owed - paid, gap[task])
            gap[task] -= rest
            owed -= paid + rest
    return replace_tasks(graph, duration_ns=duration, gap_ns=gap)
