"""Assemble a graph from the parts of a capture: aligned times, units, arguments, modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from slipstream.capture.clocks import collection_ns, collection_spread
from slipstream.capture.describe import describe_capture, describe_long_steps
from slipstream.capture.events import Aligned, StepEvents, align
from slipstream.capture.lines import Seen, find_chains, line_of_units, makers
from slipstream.capture.memory import MemoryRecord, allocations
from slipstream.capture.modules import ModuleNames
from slipstream.capture.other_size import OtherSize
from slipstream.capture.overhead import (
    Calibration,
    StepTimes,
    calibrate_apart,
    count_events,
    find_update,
    lay_out,
    share_out,
)
from slipstream.capture.paging import Faulting
from slipstream.capture.trace import Node
from slipstream.capture.units import Units, find_units
from slipstream.errors import GraphError
from slipstream.graph import (
    PROVENANCES,
    Call,
    Edges,
    Graph,
    Kind,
    StepPhase,
    StringTable,
    Tasks,
)
from slipstream.graph.edit import append_task
from slipstream.graph.page_faults import PAGE_FAULTS
from slipstream.provenance import Provenance

if TYPE_CHECKING:
    from slipstream.workload import BuiltWorkload

COLLECTION_TASK = "garbage collection"
"""Name of the task that represents Python's garbage collector."""
LOADING_TASK = "data loading"
"""Name of the task that represents loading a batch; its scope names the kind of ``DataLoader``."""


def assemble(
    built: BuiltWorkload,
    trace: Sequence[Node],
    parameters: Sequence[int],
    names: ModuleNames,
    profiled: Sequence[StepEvents],
    times: StepTimes,
    threads: int,
    other: OtherSize,
    memory: MemoryRecord | None = None,
    faulting: Faulting | None = None,
    seen: Seen | None = None,
) -> Graph:
    """Build the graph of one step.

    Args:
        parameters: Storages of the model's parameters; empty without a model.
        faulting: Steps before the process kept its pages; None if it kept them all along.
        seen: Operators of a step with the user's lines behind them; None if not recorded.

    Raises:
        GraphError: No operator ran, or the steps have too little in common.
    """
    units = find_units(trace)
    if not len(units.nodes):
        raise GraphError(
            "no operator of PyTorch ran in the step",
            remedy="return the step itself, or (model, batch, loss, optimizer), from the function",
        )
    aligned = align(units.events, profiled, units.parents)
    durations, gaps = _unit_times(units, aligned)
    provenance = _fill_missing(units, durations, gaps)
    inner, between = count_events(units)
    outside, within = times.quiet_ns(threads)
    if aligned.unaligned:
        # The fastest plain step was among the shortest; the graph's may be a longer one.
        outside *= len(units.events) / min(len(step.names) for step in profiled)
    # Torch annotates custom iterators too, but the clock does not time them.
    loads = (units.loading >= 0) & (within > 0)
    update, update_ns = find_update(units, aligned), times.quiet_update_ns(threads)
    apart = None
    if update is not None and update_ns > update.around_ns:
        apart = update.units[~loads], update.gaps, update_ns - update.around_ns
    calibration = calibrate_apart(
        durations[:, ~loads], gaps, inner[~loads], between, outside, apart
    )
    corrected = np.zeros(len(loads))
    corrected[~loads] = calibration.duration_ns
    corrected[loads] = share_out(durations[:, loads], within)
    calibration = replace(calibration, duration_ns=corrected)
    storages = np.array(parameters or _parameters(trace, units), np.int32)
    graph = _graph(
        built, trace, units, storages, names, calibration, durations, provenance, times, threads,
        aligned, other, seen,
    )  # fmt: skip
    held, reason = allocations(memory, trace, units, storages.tolist())
    meta = {**graph.meta, "memory_reason": reason} if reason else graph.meta
    graph = replace(graph, memory=held, meta=meta)
    graph.memory.check(len(graph))
    if collected := collection_ns(times.collecting, outside + within):
        spread = collection_spread(times.collecting)
        graph = append_task(graph, COLLECTION_TASK, collected, spread, Kind.COLLECTION)
    if faulting is not None:
        extra_ns = faulting.extra_ns(times, threads)
        graph = append_task(graph, PAGE_FAULTS, extra_ns, faulting.spread, Kind.HOST)
        # Medians of the unmodified step, which include page faults.
        medians = {
            "wall_median": float(np.median(faulting.wall_ns)),
            "cpu_median": float(np.median(faulting.cpu_ns)),
        }
        graph = replace(graph, meta={**graph.meta, "step_ns": {**graph.meta["step_ns"], **medians}})
    return graph


def _unit_times(units: Units, aligned: Aligned) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return durations [steps, u] and gaps [steps, u + 1] in ns, NaN if unknown.

    The gaps are before the first unit and after each. A gap is known in a step that has both of its
    ends and no foreign event in between.
    """
    start, end = lay_out(units, aligned.start_ns[:, units.first], aligned.end_ns[:, units.first])
    steps = len(start)
    gaps = np.column_stack([start, aligned.length_ns]) - np.column_stack([np.zeros(steps), end])
    if aligned.unaligned:
        # Number of foreign stretches before each unit's event.
        foreign = np.cumsum(aligned.others, axis=1)
        until = np.column_stack([foreign[:, units.first], foreign[:, -1]])
        since = np.column_stack([np.zeros(steps, np.int64), foreign[:, units.last]])
        gaps[until != since] = np.nan
    return end - start, gaps


def _fill_missing(
    units: Units, durations: NDArray[np.float64], gaps: NDArray[np.float64]
) -> NDArray[np.uint8]:
    """Fill in missing times in place, from units of the same name; return the provenance."""
    provenance = np.full(len(units.first), PROVENANCES.index(Provenance.MEASURED), np.uint8)
    missing = np.flatnonzero(np.isnan(durations).all(axis=0))
    if len(missing):
        names = np.array([units.events[event] for event in units.first])
        minima = np.nanmin(np.delete(durations, missing, axis=1), axis=0)
        measured_names = np.delete(names, missing)
        for unit in missing:
            similar = minima[measured_names == names[unit]]
            source = Provenance.FITTED if len(similar) else Provenance.ASSUMED
            provenance[unit] = PROVENANCES.index(source)
            durations[:, unit] = np.median(similar if len(similar) else minima)
    missing = np.flatnonzero(np.isnan(gaps).all(axis=0))
    if len(missing):
        gaps[:, missing] = np.median(np.nanmin(np.delete(gaps, missing, axis=1), axis=0))
    return provenance


def _graph(
    built: BuiltWorkload,
    trace: Sequence[Node],
    units: Units,
    parameters: NDArray[np.int32],
    names: ModuleNames,
    calibration: Calibration,
    durations: NDArray[np.float64],
    provenance: NDArray[np.uint8],
    times: StepTimes,
    threads: int,
    aligned: Aligned,
    other: OtherSize,
    seen: Seen | None,
) -> Graph:
    import torch

    strings = StringTable()
    chains = None
    if seen is not None:
        chains = find_chains(trace, units, seen, makers(built), built.lines.returned)
    line = line_of_units(names, units, chains)
    # Equal calls may differ with another number of samples.
    calls: dict[tuple[str, str], int] = {}
    call_list: list[Call] = []
    others: list[Call] = []
    n = len(units.nodes) + 1
    call_of = np.full(n, -1, np.int32)
    operands: list[tuple[int, ...]] = [()]
    for t, i in enumerate(units.nodes, start=1):
        node = trace[i]
        if node.call is None:
            operands.append(())
            continue
        other_call = other.calls[t - 1] if other.calls else None
        key = (node.call.key, other_call.key if other_call else "")
        if key not in calls:
            calls[key] = len(call_list)
            call_list.append(node.call)
            others += [other_call] if other_call else []
        call_of[t] = calls[key]
        operands.append(node.storages)
    # nanpercentile is slow: it loops over columns in Python.
    percentile = np.nanpercentile if np.isnan(durations).any() else np.percentile
    lower, middle, upper = percentile(durations, [25, 50, 75], axis=0)
    spread = np.concatenate([[0.0], (upper - lower) / 2 / np.maximum(middle, 1.0)])
    # Task 0 is the start of the step: no work, then the first gap.
    tasks = Tasks(
        name=_column(strings, ["step", *(_name(trace[i]) for i in units.nodes)]),
        scope=_column(strings, ["", *units.scope]),
        module=_column(strings, ["", *units.module]),
        source=_column(strings, ["", *map(line, range(len(units.nodes)))]),
        kind=np.array([Kind.HOST, *(_kind(trace[i]) for i in units.nodes)], np.uint8),
        phase=np.concatenate([[StepPhase.OTHER], units.phase]).astype(np.uint8),
        lane=np.zeros(n, np.int32),
        rank=np.zeros(n, np.int32),
        call=call_of,
        sequence=np.concatenate([[-1], units.sequence]).astype(np.int64),
        duration_ns=np.concatenate([[0.0], calibration.duration_ns]),
        gap_ns=calibration.gap_ns,
        spread=spread,
        provenance=np.concatenate([[PROVENANCES.index(Provenance.MEASURED)], provenance]).astype(
            np.uint8
        ),
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
        meta={
            **describe_capture(built, names, trace, chains or (), times.wall_ns, times.cpu_ns),
            "device": "cpu",
            "threads": threads,
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "contended": (contended := times.contended(threads)),
            **({} if contended and threads > 1 else describe_long_steps(times.outside_cpu_ns)),
            "loading_cpu_ns": min((step.cpu_ns for step in times.loading), default=0),
            "steps": len(times.wall_ns),
            "aligned_steps": len(aligned.length_ns),
            "unaligned_share": aligned.unaligned,
            "events_per_step": len(units.events),
            "profiler_ns_per_event": calibration.per_event_ns,
            "residual_scale": calibration.scale,
            "shrunk": other.meta,
        },
        shrunk=tuple(others),
    )
    graph.check()
    return graph


def _name(node: Node) -> str:
    return node.name if node.call is not None else LOADING_TASK


def _kind(node: Node) -> Kind:
    return Kind.OP if node.call is not None else Kind.WAIT


def _column(strings: StringTable, texts: Sequence[str]) -> NDArray[np.int32]:
    return np.array([strings.add(text) for text in texts], np.int32)


def _parameters(trace: Sequence[Node], units: Units) -> list[int]:
    """Return the storages that existed before the step and that its optimizer updates."""
    produced: set[int] = set()
    outside: set[int] = set()
    optimized: set[int] = set()
    for i, phase in zip(units.nodes, units.phase, strict=True):
        node = trace[i]
        if node.call is None:
            continue
        inputs = node.storages[: len(node.call.inputs)]
        if phase == StepPhase.FORWARD:
            outside.update(storage for storage in inputs if storage not in produced)
        elif phase == StepPhase.OPTIMIZER:
            optimized.update(inputs)
        produced.update(node.storages[len(inputs) :])
    both: list[int] = np.intersect1d(list(outside), list(optimized)).astype(int).tolist()
    return both
