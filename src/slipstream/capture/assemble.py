"""Put the parts of a capture together: aligned step times, units, arguments, modules."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from slipstream.capture.events import Step
from slipstream.capture.modules import ModuleNames
from slipstream.capture.optimizer import describe_optimizer
from slipstream.capture.overhead import Calibration, StepTimes, calibrate
from slipstream.capture.trace import Node
from slipstream.capture.units import Units, find_units
from slipstream.errors import GraphError
from slipstream.graph import PROVENANCES, Call, Edges, Graph, Kind, StepPhase, StringTable, Tasks
from slipstream.provenance import Provenance

if TYPE_CHECKING:
    from slipstream.workload import Built

_CONTENDED = 1.15
_FEWEST_ALIGNED = 0.5


def assemble(
    built: Built,
    trace: Sequence[Node],
    parameters: Sequence[int],
    names: ModuleNames,
    profiled: Sequence[Step],
    times: StepTimes,
    threads: int,
) -> Graph:
    """The graph of one step.

    Args:
        parameters: storages of the model's parameters; empty when there is no model to ask.

    Raises:
        GraphError: no operators ran, or fewer than half of the steps ran the same operators.
    """
    units = find_units(trace)
    if not len(units.nodes):
        raise GraphError(
            "no operator of PyTorch ran in the step",
            remedy="does the function return the step itself, or (model, batch, loss, optimizer)?",
        )
    aligned = [step for step in profiled if step.names == units.events]
    if len(aligned) < _FEWEST_ALIGNED * len(profiled):
        raise GraphError(_difference(units, profiled, len(aligned)))
    start = np.stack([step.start_ns for step in aligned])
    end = np.stack([step.end_ns for step in aligned])
    length = np.array([step.length_ns for step in aligned], np.int64)
    # Per step: u durations, and u + 1 gaps (before the first unit, and after each).
    unit_start, unit_end = start[:, units.first], end[:, units.first]
    durations = unit_end - unit_start
    gaps = np.column_stack([unit_start, length]) - np.column_stack(
        [np.zeros(len(aligned), np.int64), unit_end]
    )
    inner = units.last - units.first
    events = len(units.events)
    between = np.diff(np.concatenate([[-1], units.last, [events]]))
    # The unit's own record is written outside of it: that cost belongs to the gap before it.
    between[-1] -= 1
    quiet_ns = float(np.min(times.cpu_ns if threads == 1 else times.wall_ns))
    calibration = calibrate(durations, gaps, inner, between, quiet_ns)
    found = np.array(parameters or _parameters(trace, units), np.int32)
    return _graph(
        built, trace, units, found, names, calibration, durations, times, threads, aligned
    )


def _graph(
    built: Built,
    trace: Sequence[Node],
    units: Units,
    parameters: NDArray[np.int32],
    names: ModuleNames,
    calibration: Calibration,
    durations: NDArray[np.int64],
    times: StepTimes,
    threads: int,
    aligned: Sequence[Step],
) -> Graph:
    strings = StringTable()
    calls: dict[str, int] = {}
    call_list: list[Call] = []
    n = len(units.nodes) + 1
    call_of = np.full(n, -1, np.int32)
    operands: list[tuple[int, ...]] = [()]
    for t, i in enumerate(units.nodes, start=1):
        node = trace[i]
        assert node.call is not None
        if node.call.key not in calls:
            calls[node.call.key] = len(call_list)
            call_list.append(node.call)
        call_of[t] = calls[node.call.key]
        operands.append(node.storages)
    lower, middle, upper = np.percentile(durations, [25, 50, 75], axis=0)
    spread = np.concatenate([[0.0], (upper - lower) / 2 / np.maximum(middle, 1.0)])
    # Task 0 stands for the begin of the step: no work, then the first gap.
    tasks = Tasks(
        name=_column(strings, ["step", *(trace[i].name for i in units.nodes)]),
        scope=_column(strings, ["", *units.scope]),
        module=_column(strings, ["", *units.module]),
        source=_column(strings, ["", *(names.sources.get(module, "") for module in units.module)]),
        kind=np.array([Kind.HOST] + [Kind.OP] * (n - 1), np.uint8),
        phase=np.concatenate([[StepPhase.OTHER], units.phase]).astype(np.uint8),
        lane=np.zeros(n, np.int32),
        rank=np.zeros(n, np.int32),
        call=call_of,
        sequence=np.concatenate([[-1], units.sequence]).astype(np.int64),
        duration_ns=np.concatenate([[0.0], calibration.duration_ns]),
        gap_ns=calibration.gap_ns,
        spread=spread,
        provenance=np.full(n, PROVENANCES.index(Provenance.MEASURED), np.uint8),
    )
    counts = [len(storages) for storages in operands]
    flat = [storage for storages in operands for storage in storages]
    graph = Graph(
        tasks=tasks,
        edges=Edges.none(),
        strings=strings.freeze(),
        calls=tuple(call_list),
        operand_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        operands=np.array(flat, np.int32),
        parameters=parameters,
        lanes=("cpu",),
        samples=built.samples,
        meta=_meta(built, calibration, times, threads, aligned),
    )
    graph.check()
    return graph


def _column(strings: StringTable, texts: Sequence[str]) -> NDArray[np.int32]:
    return np.array([strings.add(text) for text in texts], np.int32)


def _parameters(trace: Sequence[Node], units: Units) -> list[int]:
    """Of a step that hides its model: storages from before the step that its optimizer updates."""
    made: set[int] = set()
    outside: set[int] = set()
    optimized: set[int] = set()
    for i, phase in zip(units.nodes, units.phase, strict=True):
        node = trace[i]
        assert node.call is not None
        inputs = node.storages[: len(node.call.inputs)]
        if phase == StepPhase.FORWARD:
            outside.update(storage for storage in inputs if storage not in made)
        elif phase == StepPhase.OPTIMIZER:
            optimized.update(inputs)
        made.update(node.storages[len(inputs) :])
    return sorted(outside & optimized)


def _meta(
    built: Built,
    calibration: Calibration,
    times: StepTimes,
    threads: int,
    aligned: Sequence[Step],
) -> dict[str, Any]:
    import torch

    wall, cpu = np.array(times.wall_ns, float), np.array(times.cpu_ns, float)
    ratio = float(np.median(wall) / max(float(np.median(cpu)), 1.0))
    return {
        "workload": built.name,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "training": built.training,
        "device": "cpu",
        "threads": threads,
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "optimizer": describe_optimizer(built.optimizer),
        "parameters": sum(p.numel() for p in built.model.parameters()) if built.model else 0,
        "step_ns": {
            "wall_median": float(np.median(wall)),
            "wall_minimum": float(wall.min()),
            "cpu_median": float(np.median(cpu)),
            "cpu_minimum": float(cpu.min()),
            "relative_spread": float(
                (np.percentile(cpu, 75) - np.percentile(cpu, 25)) / 2 / np.median(cpu)
            ),
        },
        "contended": threads == 1 and ratio > _CONTENDED,
        "steps": len(times.wall_ns),
        "aligned_steps": len(aligned),
        "events_per_step": len(aligned[0].names),
        "profiler_ns_per_event": calibration.per_event_ns,
        "residual_scale": calibration.scale,
    }


def _difference(units: Units, profiled: Sequence[Step], aligned: int) -> str:
    """Where the steps part, in words."""
    for step in profiled:
        if step.names == units.events:
            continue
        for position, (ours, theirs) in enumerate(zip(units.events, step.names, strict=False)):
            if ours != theirs:
                return (
                    f"the steps do not run the same operators ({aligned} of "
                    f"{len(profiled)} agree); "
                    f"operator {position} is {ours} in one and {theirs} in another"
                )
    lengths = Counter(len(step.names) for step in profiled)
    return f"the steps do not run the same operators: their numbers are {dict(lengths)}"
