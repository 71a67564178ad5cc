"""Hand-written Kineto traces: a few events, in microseconds, as torch.profiler writes them."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.graph import Dependency, Graph, Kind, read_trace, replace_tasks, replay
from slipstream.graph.io.kineto import KinetoTrace

Event = dict[str, Any]
MAIN, ENGINE = 1, 2
_KERNELS = (Kind.KERNEL, Kind.COMMUNICATION)
DEVICE_KINDS = (Kind.KERNEL, Kind.COPY, Kind.COMMUNICATION)


def op(name: str, ts: float, dur: float, tid: int = MAIN, **args: Any) -> Event:
    """Return an operator of the host."""
    return _event("cpu_op", name, ts, dur, 100, tid, args)


def call(name: str, ts: float, dur: float, correlation: int, tid: int = MAIN) -> Event:
    """Return a call of the CUDA runtime."""
    return _event("cuda_runtime", name, ts, dur, 100, tid, {"correlation": correlation})


def launch(ts: float, dur: float, correlation: int, tid: int = MAIN) -> Event:
    """Return a launch of a kernel."""
    return call("cudaLaunchKernel", ts, dur, correlation, tid)


def kernel(
    name: str, ts: float, dur: float, correlation: int, stream: int = 7, cat: str = "kernel"
) -> Event:
    """Return a kernel or copy of the device."""
    args = {"device": 0, "stream": stream, "correlation": correlation}
    return _event(cat, name, ts, dur, 0, stream, args)


def sync(kind: str, ts: float, dur: float, correlation: int, stream: int, **args: int) -> Event:
    """Return the profiler's record of a wait, as with enable_cuda_sync_events."""
    arguments = {"device": 0, "stream": stream, "correlation": correlation, **args}
    return _event("cuda_sync", kind, ts, dur, 0, stream, arguments)


def step(number: int, ts: float, dur: float) -> Event:
    """Return the annotation of a step."""
    return _event("user_annotation", f"ProfilerStep#{number}", ts, dur, 100, MAIN, {})


def _event(
    cat: str, name: str, ts: float, dur: float, pid: int, tid: int, args: dict[str, Any]
) -> Event:
    return {
        "ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur,
        "args": args,
    }  # fmt: skip


def text(events: Sequence[Event]) -> bytes:
    """Return a trace as a file."""
    return json.dumps({"schemaVersion": 1, "traceEvents": list(events)}).encode()


def parse_trace(data: bytes, name: str = "trace.json") -> KinetoTrace:
    """Read `data` from a file called `name`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_bytes(data)
        return read_trace(path)


def trace(*events: Event) -> KinetoTrace:
    """Return the trace of these events."""
    return parse_trace(text(events), "made.json")


def graph(*events: Event) -> Graph:
    """Return the graph of the whole trace of these events."""
    return trace(*events).graph("all")


def timeline_us(graph: Graph) -> dict[str, list[tuple[float, float]]]:
    """Return the start and end of tasks in microseconds, by task name."""
    line = replay(graph)
    found: dict[str, list[tuple[float, float]]] = {}
    for i, name in enumerate(graph.tasks.name.tolist()):
        times = (float(line.start_ns[i]) / 1e3, float(line.end_ns[i]) / 1e3)
        found.setdefault(graph.strings[name], []).append(times)
    return found


def edges(graph: Graph) -> Counter[tuple[str, str, Dependency]]:
    """Return edges as (name of source, name of target, kind)."""
    name = [graph.strings[i] for i in graph.tasks.name.tolist()]
    columns = (graph.edges.source, graph.edges.target, graph.edges.kind)
    return Counter(
        (name[s], name[t], Dependency(k))
        for s, t, k in zip(*(column.tolist() for column in columns), strict=True)
    )


def scaled(graph: Graph, factor: float, *names: str) -> Graph:
    """Return the graph with tasks of these names, or all kernels, `factor` times as long."""
    name = np.array([graph.strings[i] for i in graph.tasks.name.tolist()])
    chosen = np.isin(name, names) if names else np.isin(graph.tasks.kind, _KERNELS)
    duration = graph.tasks.duration_ns
    return replace_tasks(graph, duration_ns=np.where(chosen, duration * factor, duration))
