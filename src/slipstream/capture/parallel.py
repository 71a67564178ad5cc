"""The capture of a step that runs on a device, or on several threads, as lanes.

The same program as in `program.py` beside this file, for steps that are more than one sequence of
operators: plain and profiled steps take turns, and one more step is watched for its modules and
its memory. What the profiler has written is read by `slipstream.graph.read_trace`; everything
behind that (`read_steps`) needs no device. Steps are synchronised at their ends, and nowhere else:
otherwise each would carry what is left of the one before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.capture.describe import describe_capture
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
_LONGEST_CAPTURE_S = 60.0


@dataclass(frozen=True)
class Recording:
    """What was recorded of a step on several lanes.

    Attributes:
        traces: what the profiler wrote, its steps annotated.
        issued_ns: until the host had issued each of these steps.
        plain: the same steps without a profiler.
        watched: one more step, with its modules and memory; None where there is none.
        sources: by module: the user's line that called it.
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
        GraphError: the steps differ too much from one another to be aligned.
    """
    with temporary_folder("trace") as folder:
        names = ModuleNames(built.model, built.lines)
        recording = yield from _record(built, place, steps, names, folder, report)
    report("putting the recordings together")
    with no_collection():
        graph = read_steps(recording, place)
        return replace(graph, samples=built.samples, meta=_meta(graph, built, names, recording))


def read_steps(recording: Recording, place: Place) -> Graph:
    """The graph of what was recorded; it needs neither the workload nor the device.

    Raises:
        GraphError: no step was seen, or the steps have too little in common.
    """
    graph = graph_of_steps(recording.traces, recording.plain, recording.issued_ns)
    if recording.watched is not None:
        graph = with_modules(graph, recording.watched.trace, recording.sources)
        graph = with_memory(graph, recording.watched, place.device)
    header = recording.traces[0].header
    devices = header.get("deviceProperties") or []
    named = [one.get("name") for one in devices if isinstance(one, dict)]
    meta = {**graph.meta, "lanes_of": place.device}
    if place.device == "cuda" and place.index < len(named):
        meta["device_name"] = str(named[place.index])
    graph = replace(graph, meta=meta, lanes=_lane_names(graph, recording.traces[0]))
    graph.check()
    return graph


def _lane_names(graph: Graph, trace: KinetoTrace) -> tuple[str, ...]:
    """Threads by number, the step's own without one: the system's numbers change every time."""
    _, main = trace.columns.threads[trace.steps[0].thread]
    hosts = [lane for lane in graph.lanes if not lane.startswith("gpu")]
    others = [lane for lane in hosts if lane != f"thread {main}"]
    names = {lane: f"cpu thread {number}" for number, lane in enumerate(others, start=2)}
    return tuple(lane if lane.startswith("gpu") else names.get(lane, "cpu") for lane in graph.lanes)


def with_modules(graph: Graph, watched: KinetoTrace, sources: dict[str, str]) -> Graph:
    """`graph` with the modules, phases and lines of a step that ran with the names of modules."""
    there = watched.graph(watched.steps[-1].number)
    partner = partners(graph, there)
    known = np.flatnonzero(partner >= 0)
    strings = StringTable(graph.strings)
    of_module = np.array([strings.add(text) for text in there.strings], np.int32)
    line = np.array([strings.add(sources.get(text, "")) for text in there.strings], np.int32)
    module, source, phase = (
        column.copy() for column in (graph.tasks.module, graph.tasks.source, graph.tasks.phase)
    )
    module[known] = of_module[there.tasks.module[partner[known]]]
    source[known] = line[there.tasks.module[partner[known]]]
    phase[known] = there.tasks.phase[partner[known]]
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
    while len(issued) < steps and not (
        issued and time.perf_counter() - started > _LONGEST_CAPTURE_S
    ):
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
                    took_ns = yield from _annotated(place, number)
                    issued.append(took_ns)
            traces.append(_written(profiler, folder / f"steps-{len(traces)}.json"))
    report("recording modules and memory")
    with no_collection(), names:
        with place.profiler(memory=True) as profiler:
            for number in range(_SETTLING):
                # What the second one frees, the first one has allocated where we see it.
                before = held(built, place.device)
                yield from _annotated(place, number)
            after = gradients(built, place.device)
        watched = WatchedStep(_written(profiler, folder / "watched.json"), before, after)
    plain = PlainSteps(tuple(walls), tuple(hosts), tuple(cpus), min(pace))
    return Recording(tuple(traces), tuple(issued), plain, watched, names.sources)


def _annotated(place: Place, number: int) -> Generator[None, Any, int]:
    """One step under the annotation that traces are cut at; until the host had issued it, ns."""
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
    annotations = [Node(text, -1, -1, None, ()) for one in seen for text in one.columns.texts]
    described = describe_capture(
        built, names, annotations, (), plain.wall_ns, plain.cpu_ns, spread_by_wall=True
    )
    step_ns = described["step_ns"]
    return {
        **graph.meta,
        **described,
        "threads": torch.get_num_threads(),
        "step_ns": {**step_ns, "unsynchronised": float(plain.unsynchronised_ns)},
        "contended": step_ns["wall_median"] > _CONTENDED * step_ns["wall_minimum"],
    }
