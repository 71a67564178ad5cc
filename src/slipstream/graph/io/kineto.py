"""Import of Kineto traces, which torch.profiler exports (plain or gzip).

    graph = read_kineto(Path("rank0.pt.trace.json.gz"))

The trace's host threads and device streams become lanes. Dependencies follow from ids (correlation
of launches, streams and records of synchronisation events, autograd's sequence numbers), or from
the order of events if a trace lacks them; see `_kineto_links`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import GraphError
from slipstream.files import opened
from slipstream.graph.collection import no_collection
from slipstream.graph.graph import Graph
from slipstream.graph.io._kineto_build import build
from slipstream.graph.io._kineto_columns import CATEGORIES, Category, Columns, Device
from slipstream.graph.io._kineto_links import Window
from slipstream.graph.io._trace_events import NoTraceError, read_events

# 52 days. Longer traces mix times of different clocks.
_MAX_NS = 2.0**52
_STEP = "ProfilerStep#"
_MEMORY = "[memory]"
_ARROW = "fwdbwd"
# c10::DeviceType.
_ALLOCATORS = {0: "cpu", 1: "cuda"}
_EXPORT = "export it again: prof.export_chrome_trace('trace.json.gz')"
_CORRELATED = (Category.RUNTIME, Category.KERNEL, Category.MEMCPY, Category.MEMSET, Category.SYNC)


@dataclass(frozen=True)
class KinetoStep:
    """One ``ProfilerStep#N`` of a trace.

    Attributes:
        number: N.
        begin_ns, end_ns: times from the trace's first event.
        thread: the thread that ran it, as in `Columns.thread`.
    """

    number: int
    begin_ns: float
    end_ns: float
    thread: int = -1


@dataclass(frozen=True)
class MemoryChange:
    """One allocation or free by a device's allocator.

    Attributes:
        time_ns: time from the trace's first event.
        thread: the name of the requesting thread in `Graph.lanes`.
        address: address on the device.
        nbytes: size; negative if freed.
        device: "cpu" or "cuda".
        total_bytes: allocated bytes after the change, from the trace.
    """

    time_ns: float
    thread: str
    address: int
    nbytes: int
    device: str
    total_bytes: int


@dataclass(frozen=True)
class KinetoTrace:
    """A trace as columns, from which graphs of its steps are built.

    Attributes:
        name: file name for messages.
        columns: the events.
        steps: the steps in order; empty if the profiler was used without a schedule.
        header: metadata of the trace: devices, ranks, versions.
        memory: allocations and frees in order; empty unless the profiler recorded memory.
    """

    name: str
    columns: Columns
    steps: tuple[KinetoStep, ...]
    header: Mapping[str, Any]
    memory: tuple[MemoryChange, ...] = ()

    @cached_property
    def _device(self) -> Device:
        return Device.of(self.columns)

    def graph(self, step: int | Literal["all"] | None = None) -> Graph:
        """Return the graph of one step.

        Args:
            step: the N of ``ProfilerStep#N``; "all" for the whole trace as one step; by default
                the step of median length, or the whole trace if it has no steps.

        Raises:
            GraphError: the step does not exist or is empty, or its kernels cannot be linked to
                launches.
        """
        return self.timed_graph(step)[0]

    def timed_graph(
        self, step: int | Literal["all"] | None = None
    ) -> tuple[Graph, NDArray[np.float64]]:
        """Return the graph of one step and the begin of each of its tasks; see `graph`.

        Returns:
            The graph, and float64 [n], ns from the trace's first event.
        """
        window = self._window(step)
        graph, start = build(self.columns, self._device, window, self.name, self.header)
        graph.check()
        return graph, start

    def _window(self, step: int | Literal["all"] | None) -> Window:
        columns = self.columns
        if step == "all" or (step is None and not self.steps):
            busy = columns.is_task
            return Window("all", float(columns.start[busy].min()), math.inf, math.inf)
        if step is None:
            # The first includes warm-up, and the end of the recording often truncates the last.
            inner = self.steps[1:-1] if len(self.steps) > 2 else self.steps
            chosen = sorted(inner, key=lambda s: s.end_ns - s.begin_ns)[(len(inner) - 1) // 2]
        else:
            matches = [s for s in self.steps if s.number == step]
            if not matches:
                numbers = ", ".join(str(s.number) for s in self.steps)
                raise GraphError(
                    f"the trace has no step {step}",
                    where=self.name,
                    remedy=f"its steps are {numbers}" if numbers else "it has no steps: use 'all'",
                )
            chosen = matches[0]
        # Time between two annotations belongs to the step before.
        later = [s.begin_ns for s in self.steps if s.begin_ns >= chosen.end_ns]
        end = min(later, default=chosen.end_ns)
        return Window(f"{_STEP}{chosen.number}", chosen.begin_ns, end, end, chosen.thread)


def read_kineto(path: Path, step: int | Literal["all"] | None = None) -> Graph:
    """Read the graph of one step of the trace in `path`; see `KinetoTrace.graph` for `step`.

    Raises:
        GraphError: the file is missing, truncated or not a trace; or as in `KinetoTrace.graph`.
    """
    return read_trace(path).graph(step)


def read_trace(path: Path) -> KinetoTrace:
    """Read a Chrome JSON trace of the PyTorch profiler, plain or gzip.

    Raises:
        GraphError: the file is missing, truncated or not such a trace; the error names the event.
    """
    with opened(path, GraphError, remedy=_EXPORT) as file:
        return _parsed(file, path.name)


def _parsed(file: BinaryIO, name: str) -> KinetoTrace:
    with no_collection():
        try:
            events, header = read_events(file, _is_used)
        except NoTraceError:
            raise GraphError(
                "this JSON is not a trace: it has no list 'traceEvents'",
                where=name,
                remedy="pass a file written by prof.export_chrome_trace",
            ) from None
        except (ValueError, RecursionError) as error:
            raise GraphError(
                f"the JSON is invalid or truncated: {error}", where=name, remedy=_EXPORT
            ) from error
        columns, steps, origin_us = _columns(events, name)
        memory = _memory(events, origin_us, name) if header.get("profile_memory") else ()
        # Freed before the garbage collector runs again, since it would visit every event.
        del events
    return KinetoTrace(name, columns, steps, header, memory)


def _is_used(event: Mapping[str, Any]) -> bool:
    """Whether the event is used."""
    category = event.get("cat")
    if event.get("ph") == "X" and category is not None:
        return not isinstance(category, str) or category.lower() in CATEGORIES
    return category == _ARROW or event.get("name") == _MEMORY


def _memory(events: Sequence[Any], origin_us: float, name: str) -> tuple[MemoryChange, ...]:
    """Return allocations and frees in order of time."""
    changes = []
    rows = [event for event in events if event.get("name") == _MEMORY]
    try:
        for event, time_us in zip(rows, _numbers(rows, "ts", name).tolist(), strict=True):
            args = event["args"]
            device = _ALLOCATORS.get(int(args["Device Type"]))
            if device is not None:
                time_ns, thread = round((time_us - origin_us) * 1e3), _text(event["tid"])
                address, nbytes = int(args["Addr"]), int(args["Bytes"])
                total = int(args.get("Total Allocated", 0))
                changes.append(
                    MemoryChange(time_ns, f"thread {thread}", address, nbytes, device, total)
                )
    except (AttributeError, TypeError, KeyError, ValueError, OverflowError) as error:
        raise GraphError(
            f"an event is malformed: {error!r}", where=f"{name}: {_MEMORY}", remedy=_EXPORT
        ) from error
    return tuple(sorted(changes, key=lambda change: change.time_ns))


def _columns(events: Sequence[Any], name: str) -> tuple[Columns, tuple[KinetoStep, ...], float]:
    try:
        rows = [event for event in events if event.get("ph") == "X"]
        words = {event.get("cat") for event in rows}
        codes = {word: CATEGORIES.get(str(word).lower(), -1) for word in words}
        rows = [event for event in rows if codes[event.get("cat")] >= 0]
        category = np.array([codes[event["cat"]] for event in rows], np.int8)
        start_us = _numbers(rows, "ts", name)
        length_us = _numbers(rows, "dur", name)
        texts: dict[str, int] = {}
        names = [texts.setdefault(str(event["name"]), len(texts)) for event in rows]
        args = [event.get("args") or {} for event in rows]
        thread, threads = _threads(rows)
        ids = _ids(category, args)
        ids["forward_thread"] = _forward_threads(events, rows, ids["forward_thread"], thread)
        columns = Columns(
            texts=tuple(map(_text, texts)),
            name=np.array(names, np.int32),
            category=category,
            start=np.zeros(0),
            end=np.zeros(0),
            thread=thread,
            threads=threads,
            **ids,
        )
    except (AttributeError, TypeError, KeyError, ValueError, OverflowError) as error:
        raise GraphError(
            f"an event is malformed: {error!r}", where=f"{name}: {_culprit(events)}", remedy=_EXPORT
        ) from error
    if not len(rows) or not columns.is_task.any():
        raise GraphError(
            "the trace has no operators and no kernels",
            where=name,
            remedy="profile at least one step with activities=[CPU, CUDA] and export again",
        )
    origin = start_us.min()
    # A double resolves microseconds since 1970 to a quarter; differences are exact.
    start = np.rint((start_us - origin) * 1e3)
    end = start + np.rint(length_us * 1e3)
    if end.max() > _MAX_NS:
        last = int(np.argmax(end))
        raise _odd(rows[last], "ts" if start[last] > _MAX_NS else "dur", name)
    columns = columns.with_times(start, end)
    return columns, _steps(columns), float(origin)


def _threads(
    rows: Sequence[Mapping[str, Any]],
) -> tuple[NDArray[np.int32], tuple[tuple[str, str], ...]]:
    """Return the thread index of each event, and the names of threads."""
    seen: dict[Any, int] = {}
    # Each name is converted to text once, and 7 and "7" are the same thread.
    indices = [seen.setdefault((row.get("pid"), row.get("tid")), len(seen)) for row in rows]
    threads: dict[tuple[str, str], int] = {}
    number = [threads.setdefault((_text(pid), _text(tid)), len(threads)) for pid, tid in seen]
    return np.array(number, np.int32)[indices], tuple(threads)


def _forward_threads(
    events: Sequence[Any],
    rows: Sequence[Mapping[str, Any]],
    number: NDArray[np.int64],
    thread: NDArray[np.int32],
) -> NDArray[np.int64]:
    """Return the index of the forward thread of each backward operator; see `Columns`.

    Args:
        number: int64 [n], PyTorch's number of that thread. The trace does not map it to threads,
            but its arrows from forward to backward operators begin there.
        thread: int32 [n], the thread of each event.
    """
    unknown = np.full(len(number), -1, np.int64)
    if len(np.unique(number[number > 0])) < 2:
        return unknown
    places = {
        (row["pid"], row["tid"], row["ts"]): at
        for at, row in enumerate(rows)
        if row.get("cat") == "cpu_op"
    }
    begins: dict[Any, int] = {}
    threads: dict[int, int] = {}
    arrows = [event for event in events if event.get("cat") == _ARROW]
    for arrow in sorted(arrows, key=lambda event: event["ph"] != "s"):
        place = places.get((arrow["pid"], arrow["tid"], arrow["ts"]))
        if place is None:
            continue
        if arrow["ph"] == "s":
            begins[arrow["id"]] = int(thread[place])
        elif arrow["id"] in begins and number[place] > 0:
            threads[int(number[place])] = begins[arrow["id"]]
    for name, index in threads.items():
        unknown[number == name] = index
    return unknown


def _text(value: object) -> str:
    """Convert `value` to encodable text, because JSON may contain lone surrogates."""
    return str(value).encode("utf-8", "replace").decode()


def _numbers(rows: Sequence[Mapping[str, Any]], key: str, name: str) -> NDArray[np.float64]:
    """Return a column of finite numbers, which are not negative if they are lengths."""
    values = [row[key] for row in rows]
    if not set(map(type, values)) <= {int, float}:
        values = [_number(row, key) for row in rows]
    numbers = np.array(values, np.float64)
    bad = ~np.isfinite(numbers) if key == "ts" else ~((numbers >= 0) & np.isfinite(numbers))
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        raise _odd(rows[row], key, name)
    return numbers


def _odd(row: Mapping[str, Any], key: str, name: str) -> GraphError:
    return GraphError(
        f"'{key}' is {row[key]!r}", where=f"{name}: the event '{row.get('name')}'", remedy=_EXPORT
    )


def _number(row: Mapping[str, Any], key: str) -> float:
    value = row[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"'{key}' of '{row.get('name')}' is {value!r}, not a number")
    return float(value)


def _ids(
    category: NDArray[np.int8], args: Sequence[Mapping[str, Any]]
) -> dict[str, NDArray[np.int64]]:
    """Return columns of ids from the events' arguments; -1 for events without one."""
    n = len(args)

    def column(rows: NDArray[np.int64], key: str) -> NDArray[np.int64]:
        values = np.full(n, -1, np.int64)
        ids = [args[row].get(key, -1) for row in rows.tolist()]
        values[rows] = ids if set(map(type, ids)) <= {int} else [int(value) for value in ids]
        return values

    correlated = np.flatnonzero(np.isin(category, _CORRELATED))
    device = np.flatnonzero(np.isin(category, _CORRELATED[1:]))
    sync = np.flatnonzero(category == Category.SYNC)
    ops = np.flatnonzero(category == Category.OP)
    return {
        "correlation": column(correlated, "correlation"),
        "device": column(device, "device"),
        "stream": column(device, "stream"),
        "record_stream": column(sync, "wait_on_stream"),
        "record": column(sync, "wait_on_cuda_event_record_corr_id"),
        "sequence": column(ops, "Sequence number"),
        "forward_thread": column(ops, "Fwd thread id"),
        "launch": _launches(category, args),
    }


def _launches(category: NDArray[np.int8], args: Sequence[Mapping[str, Any]]) -> NDArray[np.int64]:
    """Return `Columns.launch`."""
    values = np.zeros((len(args), 4), np.int64)
    for row in np.flatnonzero(category == Category.KERNEL).tolist():
        details = args[row]
        grid, block = details.get("grid"), details.get("block")
        resources = [details.get("registers per thread"), details.get("shared memory")]
        if isinstance(grid, list) and isinstance(block, list):
            numbers = [*grid, *block]
            if all(type(size) is int and 0 < size < 2**31 for size in numbers):
                values[row, :2] = math.prod(grid), math.prod(block)
                values[row, 2:] = [value if type(value) is int else 0 for value in resources]
    return values


def _culprit(events: Sequence[Any]) -> str:
    """Return the first malformed event, shortened."""
    for number, event in enumerate(events):
        try:
            if event.get("ph") != "X" or event["cat"].lower() not in CATEGORIES:
                continue
            _number(event, "ts"), _number(event, "dur"), event["name"]
            for value in (event.get("args") or {}).get("correlation", 0), event.get("pid"):
                if isinstance(value, (list, dict)):
                    raise TypeError
        except (AttributeError, TypeError, KeyError, ValueError):
            return f"event {number}: {str(event)[:80]}"
    return f"one of {len(events)} events"


def _steps(columns: Columns) -> tuple[KinetoStep, ...]:
    named = columns.named_like(lambda text: text.startswith(_STEP))
    steps = []
    for row in np.flatnonzero(named & (columns.category == Category.ANNOTATION)).tolist():
        number = columns.text(row).removeprefix(_STEP)
        if number.isdecimal():
            begin, end = float(columns.start[row]), float(columns.end[row])
            steps.append(KinetoStep(int(number), begin, end, int(columns.thread[row])))
    steps.sort(key=lambda step: step.begin_ns)
    # Every participating thread may repeat the annotation.
    return tuple(next(same) for _, same in itertools.groupby(steps, key=lambda step: step.number))
