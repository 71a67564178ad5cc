"""Run, plan and trace a program that a function of a file builds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.engines.controller.controller import Controller
from slipstream.engines.controller.launches import LaunchFuture
from slipstream.engines.controller.simulating import ControlPrediction, predict_launch
from slipstream.engines.controller.timeline import launch_graph
from slipstream.engines.controller.tracing import TracedProgram
from slipstream.errors import SlipstreamError, UsageError, WorkloadError
from slipstream.graph import Graph
from slipstream.search.estimators import load_target
from slipstream.tables import Field, Table
from slipstream.units import format_bytes, format_duration, with_article


@dataclass(frozen=True)
class ControlRun:
    """Launches of a program, one after the other.

    Attributes:
        outputs: name, shape, layout and mean of each output of the last launch; the mean is None on
            an engine without values.
        launch_ns: elapsed time per launch.
        messages: messages per launch, sent and received.
    """

    program: str
    engine: str
    hosts: int
    launches: int
    launch_ns: float
    messages: float
    outputs: tuple[tuple[str, tuple[int, ...], str, float | None], ...]

    def to_json(self) -> Mapping[str, Any]:
        """Return the fields for ``--json``."""
        return vars(self)

    def table(self) -> Table:
        """Return the outputs, with time and messages per launch below."""
        fields: tuple[Field[Any], ...] = (
            Field.of("output", lambda row: row[0]),
            Field.of("shape", lambda row: list(row[1])),
            Field.of("layout", lambda row: row[2]),
            Field.number("mean", lambda row: "-" if row[3] is None else f"{row[3]:.6g}"),
        )
        note = (
            f"{self.launches} launches on {self.hosts} hosts of engine {self.engine}: "
            f"{format_duration(self.launch_ns)} and {self.messages:g} messages per launch"
        )
        return Table.of(self.outputs, fields, f"'{self.program}'", [note])


@dataclass(frozen=True)
class ControlPlan:
    """Nodes of a program with their devices, and the predicted cost of control.

    Attributes:
        nodes: name, slice, hosts, shape of the first output, and bytes that arrive per device.
        prediction: with the compute time that was passed.
    """

    program: str
    hosts: int
    nodes: tuple[tuple[str, str, str, tuple[int, ...], int], ...]
    messages: int
    prediction: ControlPrediction

    def to_json(self) -> Mapping[str, Any]:
        """Return the fields for ``--json``."""
        return {**vars(self), "prediction": vars(self.prediction)}

    def table(self) -> Table:
        """Return the nodes in order, with the prediction below."""
        fields: tuple[Field[Any], ...] = (
            Field.of("node", lambda row: row[0]),
            Field.of("slice", lambda row: row[1]),
            Field.of("hosts", lambda row: row[2]),
            Field.of("output", lambda row: list(row[3])),
            Field.of("arrives per device", lambda row: format_bytes(row[4]) if row[4] else "-"),
        )
        found = self.prediction
        notes = [
            f"{self.messages} messages per launch: one to each host and one back",
            f"simulated: {format_duration(found.launch_ns)} for one launch, "
            f"{format_duration(found.period_ns)} between launches that are sent ahead",
            f"computations of {format_duration(found.hides_ns)} per launch hide the control; its "
            "costs are assumed",
        ]
        return Table.of(self.nodes, fields, f"'{self.program}' on {self.hosts} hosts", notes)


def build_program(target: str, pool: Controller) -> TracedProgram:
    """Return the program that ``file.py:function`` builds from the controller.

    Raises:
        UsageError: `target` does not name a function.
        WorkloadError: the function fails, or returns something else.
    """
    if ":" not in target:
        raise UsageError(
            f"'{target}' does not name a function", remedy=f"for example {target}:make_program"
        )
    function = load_target(target)
    try:
        program = function(pool)
    except SlipstreamError:
        raise
    except Exception as error:
        raise WorkloadError(f"{type(error).__name__}: {error}", where=target) from error
    if not isinstance(program, TracedProgram):
        raise WorkloadError(
            f"it returned {with_article(type(program).__name__)}", where=target,
            remedy="return the program of `with pool.program(name) as program:`",
        )  # fmt: skip
    return program


def run_program(
    target: str, engine: str, hosts: int, devices: int, launches: int,
    progress: Callable[[str], None],
) -> ControlRun:  # fmt: skip
    """Launch a program repeatedly, each time with the values that it carries over.

    Raises:
        SlipstreamError: as for `build_program`, `Controller` and `LaunchFuture.wait`.
    """
    progress(f"starting {hosts} hosts")
    with Controller(hosts, devices, engine) as pool:
        program = build_program(target, pool)
        pool.launch(program).wait()
        before, began = pool.messages.copy(), time.perf_counter_ns()
        future: LaunchFuture | None = None
        for number in range(launches):
            progress(f"sending launch {number + 1} of {launches}")
            future = pool.launch(program, future.carried() if future else None)
        assert future is not None
        progress(f"waiting for {launches} launches")
        future.wait()
        elapsed_ns = time.perf_counter_ns() - began
        sent, received = (
            pool.messages[kind] - before[kind] for kind in ("launch sent", "done received")
        )
        outputs = tuple(
            (name, value.shape, str(value.sharding),
             None if engine == "sim" else float(future.result(name).double().mean()))
            for name, value in program.outputs.items()
        )  # fmt: skip
    return ControlRun(
        program.name, engine, hosts, launches, elapsed_ns / launches,
        (sent + received) / launches, outputs,
    )  # fmt: skip


def plan_program(target: str, hosts: int, devices: int, compute_ns: float) -> ControlPlan:
    """Place a program on hosts without starting them, and predict its launches.

    Args:
        compute_ns: time of a device per computation.

    Raises:
        SlipstreamError: as for `build_program`.
    """
    with Controller(hosts, devices, "sim") as pool:
        program = build_program(target, pool)
        pool.bind(program)
        rows = []
        for node in program.nodes:
            value = node.outputs[0]
            moved = value.shard_bytes if node.kind != "compute" else 0
            used = sorted(set(value.on.hosts))
            whole = len(used) > 2 and used[-1] - used[0] == len(used) - 1
            span = f"{used[0]}-{used[-1]}" if whole else ", ".join(map(str, used))
            rows.append((node.name, value.on.name, span, value.shape, moved))
        return ControlPlan(
            program.name, hosts, tuple(rows), 2 * len(program.hosts),
            predict_launch(program, compute_ns),
        )  # fmt: skip


def trace_program(target: str, engine: str, hosts: int, devices: int) -> Graph:
    """Launch a program twice, and return when the second launch ran each node.

    Raises:
        SlipstreamError: as for `run_program`; the engine ``sim`` records no times.
    """
    with Controller(hosts, devices, engine) as pool:
        program = build_program(target, pool)
        first = pool.launch(program)
        first.wait()
        return launch_graph(pool.launch(program, first.carried(), traced=True))
