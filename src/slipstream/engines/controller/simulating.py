"""Launches on simulated hosts: the cost of control at any size, without processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream import native
from slipstream.engines.controller.engine import Engine
from slipstream.engines.controller.host import launch_done
from slipstream.engines.controller.tracing import TracedProgram
from slipstream.errors import UsageError

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
    program: TracedProgram, compute_ns: float = 0.0, costs: ControlCosts | None = None
) -> ControlPrediction:
    """Simulate consecutive launches of a program whose slices are bound.

    Args:
        compute_ns: time of a device per computation.
        costs: of control; defaults are assumed.

    Raises:
        UsageError: the program is empty, or its slices are not bound.
    """
    program.need_nodes()
    if not program.hosts:
        raise UsageError(f"the slices of '{program.name}' are unbound", remedy="bind(program)")
    costs, hosts = costs or ControlCosts(), program.hosts
    index = {host: at for at, host in enumerate(hosts)}
    # (lane, duration), and (source, target, delay). Lanes: the controller, the network, and a
    # preparing thread and a device per host.
    tasks = [(0, costs.message_ns) for _ in hosts]
    edges: list[tuple[int, int, float]] = []
    done: dict[int, dict[int, int]] = {}

    def add(lane: int, duration_ns: float) -> int:
        tasks.append((lane, duration_ns))
        return len(tasks) - 1

    for node in program.nodes:
        ran: dict[int, int] = {}
        for host in {*node.on.hosts, *(host for value in node.outputs for host in value.on.hosts)}:
            prepared = add(2 + 2 * index[host], costs.prepare_ns)
            ran[host] = add(3 + 2 * index[host], compute_ns if node.kind == "compute" else 0.0)
            edges += [(index[host], prepared, costs.latency_ns), (prepared, ran[host], 0.0)]
        for value in node.inputs:
            before = done.get(value.number, {})
            if node.kind == "compute" or len({*before, *ran}) == 1:
                edges += [(before[host], ran[host], 0.0) for host in ran if host in before]
                continue
            # Hosts meet in a task, so that edges are linear in hosts.
            meet = add(1, 0.0)
            delay = costs.latency_ns + value.shard_bytes / costs.bytes_per_ns
            edges += [(task, meet, 0.0) for task in before.values()]
            edges += [(meet, task, delay) for task in ran.values()]
        for value in node.outputs:
            done[value.number] = {host: ran[host] for host in set(value.on.hosts)}
    lane, duration = np.array(tasks).T
    source, target, delay_ns = np.array(edges, np.float64).T
    policies = np.full(2 + 2 * len(hosts), native.Policy.FIXED, np.uint8)
    policies[1] = native.Policy.CONCURRENT
    parts = native.Edges(source.astype(np.int32), target.astype(np.int32), delay_ns)
    schedule = native.simulate(
        native.Program(
            lane.astype(np.int32), duration, policies=policies, edges=parts, steps=_LAUNCHES
        )
    )
    ends, busy = schedule.step_end_ns, schedule.lane_busy_ns / _LAUNCHES
    return ControlPrediction(
        float(ends[0]), float(ends[-1] - ends[-2]), float(busy[3::2].max()),
        float(max(busy[0], busy[2::2].max())),
    )  # fmt: skip


class SimEngine(Engine):
    """Hosts without processes: launches end at once, and outputs have no values."""

    def start(self, hosts: Sequence[int]) -> None:
        """There is nothing to start."""

    def send(self, host: int, message: Mapping[str, Any], payload: bytes = b"") -> None:
        if message["do"] == "launch":
            self._events.put((host, (launch_done(message["launch"]), b"")))
        elif message["do"] == "fetch":
            answer = {"event": "fetched", "fetch": message["fetch"], "parts": 0}
            self._events.put((host, (answer, b"")))
