"""Launches on simulated hosts: the cost of control at any size, without processes."""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream import native
from slipstream.engines.controller.tracing import TracedNode, TracedProgram
from slipstream.errors import ChildError, UsageError
from slipstream.ranks.members import Frame

_LAUNCHES = 4


@dataclass(frozen=True)
class ControlCosts:
    """Times of control, assumed unless measured.

    Attributes:
        message_ns: time of the controller for a message to one host.
        latency_ns: from a host or controller to another one.
        prepare_ns: time of a host to prepare one node.
        bytes_per_ns: bandwidth between hosts.
    """

    message_ns: float = 60e3
    latency_ns: float = 100e3
    prepare_ns: float = 20e3
    bytes_per_ns: float = 1.25


@dataclass(frozen=True)
class ControlPrediction:
    """Predicted time of launches.

    Attributes:
        launch_ns: of a single launch, from the call to its last end.
        period_ns: between ends of consecutive launches that are sent ahead.
        device_ns: of the busiest device per launch.
        hides_ns: smallest computation per launch and device that hides the control.
    """

    launch_ns: float
    period_ns: float
    device_ns: float
    hides_ns: float


def predict_launch(
    program: TracedProgram,
    compute_ns: float | Mapping[str, float] = 0.0,
    costs: ControlCosts | None = None,
) -> ControlPrediction:
    """Simulate consecutive launches of a program whose slices are bound.

    Args:
        compute_ns: time of a device per node, or by function name.
        costs: of control; defaults are assumed.

    Raises:
        UsageError: the slices are not bound.
    """
    if not program.hosts:
        raise UsageError(f"the slices of '{program.name}' are unbound", remedy="bind(program)")
    costs = costs or ControlCosts()
    times = compute_ns if isinstance(compute_ns, Mapping) else None
    tasks = _Tasks()
    hosts = program.hosts
    index = {host: at for at, host in enumerate(hosts)}
    # Lanes: the controller, the network, and a preparing thread and a device per host.
    sends = [tasks.add(0, costs.message_ns) for _ in hosts]
    done: dict[int, dict[int, int]] = {}
    for node in program.nodes:
        members = _hosts_of(node)
        computes = 0.0
        if node.kind == "compute":
            computes = times.get(node.name, 0.0) if times is not None else float(compute_ns)  # type: ignore[arg-type]
        ran: dict[int, int] = {}
        for host in members:
            prepared = tasks.add(2 + 2 * index[host], costs.prepare_ns)
            tasks.edge(sends[index[host]], prepared, costs.latency_ns)
            ran[host] = tasks.add(3 + 2 * index[host], computes)
            tasks.edge(prepared, ran[host])
        _depend(tasks, node, ran, done, costs)
    schedule = tasks.simulate(2 + 2 * len(hosts), _LAUNCHES)
    ends, busy = schedule.step_end_ns, schedule.lane_busy_ns / _LAUNCHES
    return ControlPrediction(
        float(ends[0]), float(ends[-1] - ends[-2]), float(busy[3::2].max()),
        float(max(busy[0], busy[2::2].max())),
    )  # fmt: skip


def _hosts_of(node: TracedNode) -> list[int]:
    return sorted({*node.on.hosts, *(host for value in node.outputs for host in value.on.hosts)})


def _depend(
    tasks: _Tasks, node: TracedNode, ran: Mapping[int, int], done: dict[int, dict[int, int]],
    costs: ControlCosts,
) -> None:  # fmt: skip
    """Add the edges from the producers of a node's inputs."""
    crosses = node.kind == "sum" or node.kind == "move"
    for value in node.inputs:
        producers = done.get(value.number, {})
        delay = costs.latency_ns + value.shard_bytes / costs.bytes_per_ns
        if crosses and len({*producers, *ran}) > 1:
            # Where hosts meet: linear in hosts, unlike edges between all pairs.
            meet = tasks.add(1, 0.0)
            for task in producers.values():
                tasks.edge(task, meet)
            for task in ran.values():
                tasks.edge(meet, task, delay)
        else:
            for host, task in ran.items():
                if host in producers:
                    tasks.edge(producers[host], task)
    for value in node.outputs:
        done[value.number] = {host: ran[host] for host in set(value.on.hosts)}


class _Tasks:
    def __init__(self) -> None:
        self._lane: list[int] = []
        self._duration: list[float] = []
        self._edges: list[tuple[int, int, float]] = []

    def add(self, lane: int, duration_ns: float) -> int:
        self._lane.append(lane)
        self._duration.append(duration_ns)
        return len(self._lane) - 1

    def edge(self, source: int, target: int, delay_ns: float = 0.0) -> None:
        self._edges.append((source, target, delay_ns))

    def simulate(self, lanes: int, steps: int) -> native.Schedule:
        policies = np.full(lanes, native.Policy.FIXED, np.uint8)
        policies[1] = native.Policy.CONCURRENT
        edges = np.array(self._edges, np.float64).reshape(-1, 3)
        return native.simulate(
            native.Program(
                lane=np.array(self._lane, np.int32), duration_ns=np.array(self._duration),
                policies=policies, steps=steps,
                edges=native.Edges(
                    edges[:, 0].astype(np.int32), edges[:, 1].astype(np.int32), edges[:, 2]
                ),
            )
        )  # fmt: skip


class SimEngine:
    """Hosts without processes: launches end at once, and outputs have no values."""

    name = "sim"

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[tuple[int, Frame | ChildError]] = queue.SimpleQueue()

    def start(self, hosts: Sequence[int]) -> None:
        pass

    def send(self, host: int, message: Mapping[str, Any], payload: bytes = b"") -> None:
        answer: dict[str, Any]
        if message["do"] == "launch":
            answer = {"event": "done", "launch": message["launch"], "busy_ns": 0,
                      "peak_bytes": 0, "spans": []}  # fmt: skip
        elif message["do"] == "fetch":
            answer = {"event": "fetched", "fetch": message["fetch"], "parts": 0}
        else:
            return
        self._events.put((host, (answer, b"")))

    def gather(self, timeout_s: float) -> list[tuple[int, Frame | ChildError]]:
        try:
            found = [self._events.get(timeout=timeout_s)]
        except queue.Empty:
            return []
        while not self._events.empty():
            found.append(self._events.get())
        return found

    def stop(self, hosts: Sequence[int] | None = None) -> None:
        pass
