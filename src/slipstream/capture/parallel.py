"""Capture a step that runs on a device or on several threads, as lanes.

The procedure is that of `program.py`: plain and profiled steps alternate, and one more step is
recorded with modules and memory. `slipstream.graph.read_trace` reads the profiler's output; further
processing (`read_steps`) requires no device. Steps are synchronized at their ends, so that no step
includes work of the previous one, and nowhere else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.capture.describe import describe_capture, describe_long_steps
from slipstream.capture.lanes import PlainSteps, graph_of_steps, partners
from slipstream.capture.lanes_memory import WatchedStep, with_memory
from slipstream.capture.memory import gradients, held
from slipstream.capture.modules import ModuleNames
from slipstream.capture.place import Place
from slipstream.capture.trace import Node
from slipstream.files import temporary_folder
from slipstream.graph import Graph, KinetoTrace, StringTable, read_trace, replace_tasks
from slipstream.graph.collection import no_collection

if TYPE_CHECKING:
    from slipstream.workload import BuiltWorkload

_STEPS_PER_WINDOW = 6
# The first steps under a new profiler grow its buffers.
_SETTLING = 2
_STEP = "ProfilerStep#"
_CONTENDED = 1.15
_MAX_CAPTURE_S = 60.0


@dataclass(frozen=True)
class Recording:
    """Recording of a step on several lanes.

    Attributes:
        traces: Traces of the profiler, with annotated steps.
        issued_ns: Time until the host had issued each of these steps.
        plain: Times of steps without a profiler.
        watched: One more step, with modules and memory; None if not recorded.
        sources: The user's line that called each module, by module.
    """

    traces: tuple[KinetoTrace, ...]
    issued_ns: tuple[int, ...]
    plain: PlainSteps
    watched: WatchedStep | None
    sources: dict[str, str]


def capture_lanes(
    built: BuiltWorkload, place: Place, steps: int, report: Callable[[str], None]
) -> Generator[None, Any, Graph]:
    """Record `steps` steps of `built`, which runs at `place`, as one graph.

    Raises (when run):
        GraphError: The steps differ too much to be aligned.
    """
    with temporary_folder("trace") as folder:
        names = ModuleNames(built.model, built.lines)
        recording = yield from _record(built, place, steps, names, folder, report)
    report("assembling the recordings")
    with no_collection():
        graph = read_steps(recording, place)
        return replace(graph, samples=built.samples, meta=_meta(graph, built, names, recording))


def read_steps(recording: Recording, place: Place) -> Graph:
    """Build the graph of a recording, without the workload or the device.

    Raises:
        GraphError: No step was recorded, or the steps have too little in common.
    """
    graph = graph_of_steps(recording.traces, recording.plain, recording.issued_ns)
    if recording.watched is not None:
        graph = with_modules(graph, recording.watched.trace, recording.sources)
        graph = with_memory(graph, recording.watched, place.device)
    header = recording.traces[0].header
    devices = header.get("deviceProperties") or []
    named = [device.get("name") for device in devices if isinstance(device, dict)]
    meta = {**graph.meta, "lanes_of": place.device}
    if place.device == "cuda" and place.index < len(named):
        meta["device_name"] = str(named[place.index])
    graph = replace(graph, meta=meta, lanes=_lane_names(graph, recording.traces[0]))
    graph.check()
    return graph


def _lane_names(graph: Graph, trace: KinetoTrace) -> tuple[str, ...]:
    """Return lane names with consecutive thread numbers, since system numbers always change."""
    _, main = trace.columns.threads[trace.steps[0].thread]
    hosts = [lane for lane in graph.lanes if not lane.startswith("gpu")]
    others = [lane for lane in hosts if lane != f"thread {main}"]
    names = {lane: f"cpu thread {number}" for number, lane in enumerate(others, start=2)}
    return tuple(lane if lane.startswith("gpu") else names.get(lane, "cpu") for lane in graph.lanes)


def with_modules(graph: Graph, watched: KinetoTrace, sources: dict[str, str]) -> Graph:
    """Add the modules, phases and lines of a step that was recorded with module names."""
    named = watched.graph(watched.steps[-1].number)
    partner = partners(graph, named)
    matched = np.flatnonzero(partner >= 0)
    strings = StringTable(graph.strings)
    of_module = np.array([strings.add(text) for text in named.strings], np.int32)
    line = np.array([strings.add(sources.get(text, "")) for text in named.strings], np.int32)
    module, source, phase = (
        column.copy() for column in (graph.tasks.module, graph.tasks.source, graph.tasks.phase)
    )
    module[matched] = of_module[named.tasks.module[partner[matched]]]
    source[matched] = line[named.tasks.module[partner[matched]]]
    phase[matched] = named.tasks.phase[partner[matched]]
    graph = replace(graph, strings=strings.freeze())
    return replace_tasks(graph, module=module, source=source, phase=phase)


def _record(
    built: BuiltWorkload,
    place: Place,
    steps: int,
    names: ModuleNames,
    folder: Path,
    report: Callable[[str], None],
) -> Generator[None, Any, Recording]:
    walls: list[int] = []
    hosts: list[int] = []
    cpus: list[int] = []
    pace: list[float] = []
    issued: list[int] = []
    traces: list[KinetoTrace] = []
    started = time.perf_counter()
    while len(issued) < steps and not (issued and time.perf_counter() - started > _MAX_CAPTURE_S):
        window = min(_STEPS_PER_WINDOW, steps - len(issued))
        report(f"step {len(issued) + 1} of {steps}")
        place.synchronise()
        for _ in range(window):
            wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
            yield
            hosts.append(time.perf_counter_ns() - wall)
            place.synchronise()
            walls.append(time.perf_counter_ns() - wall)
            cpus.append(time.thread_time_ns() - cpu)
        wall = time.perf_counter_ns()
        for _ in range(window):
            yield
        place.synchronise()
        pace.append((time.perf_counter_ns() - wall) / window)
        with no_collection():
            with place.profiler() as profiler:
                for _ in range(_SETTLING):
                    yield
                place.synchronise()
                for number in range(window):
                    issued_ns = yield from _annotated(place, number)
                    issued.append(issued_ns)
            traces.append(_written(profiler, folder / f"steps-{len(traces)}.json"))
    report("recording modules and memory")
    with no_collection(), names:
        with place.profiler(memory=True) as profiler:
            for number in range(_SETTLING):
                # Thus the profiler sees the allocation of what the second step frees.
                before = held(built, place.device)
                yield from _annotated(place, number)
            after = gradients(built, place.device)
        watched = WatchedStep(_written(profiler, folder / "watched.json"), before, after)
    plain = PlainSteps(tuple(walls), tuple(hosts), tuple(cpus), min(pace))
    return Recording(tuple(traces), tuple(issued), plain, watched, names.sources)


def _annotated(place: Place, number: int) -> Generator[None, Any, int]:
    """Run one annotated step; return the time until the host had issued it, in ns."""
    import torch

    annotation: Any = torch.profiler.record_function(f"{_STEP}{number}")
    annotation.__enter__()
    try:
        began = time.perf_counter_ns()
        yield
        issued = time.perf_counter_ns() - began
        place.synchronise()
    finally:
        annotation.__exit__(None, None, None)
    return issued


def _written(profiler: Any, path: Path) -> KinetoTrace:
    profiler.export_chrome_trace(str(path))
    try:
        return read_trace(path)
    finally:
        path.unlink(missing_ok=True)


def _meta(
    graph: Graph, built: BuiltWorkload, names: ModuleNames, recording: Recording
) -> dict[str, Any]:
    import torch

    plain = recording.plain
    seen = [*recording.traces, *([recording.watched.trace] if recording.watched else [])]
    annotations = [Node(text, -1, -1, None, ()) for trace in seen for text in trace.columns.texts]
    described = describe_capture(
        built, names, annotations, (), plain.wall_ns, plain.cpu_ns, spread_by_wall=True
    )
    step_ns = described["step_ns"]
    contended = step_ns["wall_median"] > _CONTENDED * step_ns["wall_minimum"]
    return {
        **graph.meta,
        **described,
        **({} if contended else describe_long_steps(plain.wall_ns)),
        "threads": torch.get_num_threads(),
        "step_ns": {**step_ns, "unsynchronised": float(plain.unsynchronised_ns)},
        "contended": contended,
    }
