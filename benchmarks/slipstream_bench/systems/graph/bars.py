"""``slipstream bench graph``: import, build, simulate and edit graphs; capture and its cost.

Speeds are ratios of CPU times, ours and a peer's (traceinsight, in a separate environment).
Recorded GPU traces come from the data set ``gpu_traces``; without it their rows are not judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slipstream import data
from slipstream.errors import SlipstreamError
from slipstream.graph import (
    Dependency,
    Graph,
    Kind,
    KinetoTrace,
    find_critical_path,
    lower,
    read_trace,
    replace_tasks,
    replay,
    virtual_speedups,
)
from slipstream_bench.harness import paired, times_s
from slipstream_bench.programs import large_program
from slipstream_bench.rows import Bar, BenchOptions, at_least, not_judged
from slipstream_bench.systems.graph import capture, exact
from slipstream_bench.systems.graph.exact import graph_of
from slipstream_bench.systems.graph.peer import VERSION, Peer, PeerArm, why_no_peer

_DATA = "gpu_traces"
_LARGEST = "ns_resolution_trace_rank-0.Apr_03_18_51_38.1102.pt.trace"
# A step in the middle of the five, by its number and by its index.
_STEP, _INSTANCE = 103, 2
_DEVICE = (Kind.KERNEL, Kind.COPY, Kind.COMMUNICATION)


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows.

    Quick takes less than three minutes: fewer repetitions, 100 random graphs per exact property
    instead of 1,000, memory of two models instead of all.
    """
    yield from _peer_rows(options)
    yield from _scale_rows(options)
    yield from exact.rows(options)
    yield from _fixture_rows(options)
    yield from capture.rows(options)


def _traces() -> dict[str, Path]:
    """Return the paths of the recorded GPU traces by name.

    Raises:
        SlipstreamError: they are not on this machine.
    """
    found = data.get(_DATA)
    assert isinstance(found, data.Traces)
    return dict(found.paths)


def _cpu_s(run: Callable[[], object]) -> float:
    """Return CPU seconds of one call on this thread."""
    return float(times_s(run, settle=0)[0])


# ---- compared with the peer -------------------------------------------------------------------


def _peer_rows(options: BenchOptions) -> Iterator[Bar]:
    """Compare import, and the critical path of one step, with the peer on the same file."""
    importing, path = "import of a trace against the peer's parse", "critical path against the peer"
    if not (options.wants(importing) or options.wants(path)):
        return
    targets = {importing: ">= 2", path: ">= 8"}
    try:
        file = _traces()[_LARGEST]
        reason = why_no_peer(options.progress)
    except SlipstreamError as error:
        reason = error.what
    if reason is not None:
        yield from (
            not_judged(bar, "x", targets[bar], reason) for bar in targets if options.wants(bar)
        )
        return
    options.progress(importing)
    blocks = 15 if options.full else 8
    setting = f"{VERSION}, {file.name}, CPU time"
    trace = read_trace(file)
    with Peer(file, _INSTANCE) as peer:
        whole_s = peer.cpu_s("whole")
        if options.wants(importing):
            taken = paired(
                {"ours": lambda: read_trace(file), "peer": PeerArm("peer", peer, "parse")},
                blocks=blocks, budget_s=60.0,
            )  # fmt: skip
            detail = (
                f"{taken.median_s('ours'):.3f} s, of which json.loads takes {_json_s(file):.3f} s; "
                f"peer's table of events alone {taken.median_s('peer'):.3f} s, its whole "
                f"TraceAnalysis(...) {whole_s:.3f} s; {setting}"
            )
            yield taken.ratio("peer", "ours").at_least(importing, 2.0, detail=detail)
        if options.wants(path):
            taken = paired(
                {
                    "ours": lambda: find_critical_path(replay(trace.graph(_STEP))),
                    "peer": PeerArm("peer", peer, "path"),
                },
                blocks=blocks, budget_s=60.0,
            )  # fmt: skip
            detail = (
                f"build, simulate and critical path of one step "
                f"{1e3 * taken.median_s('ours'):.1f} ms; peer's critical_path_analysis "
                f"{1e3 * taken.median_s('peer'):.0f} ms; {setting}"
            )
            yield taken.ratio("peer", "ours").at_least(path, 8.0, detail=detail)


def _json_s(file: Path) -> float:
    """Return the time of the standard library for the same bytes, without garbage collection."""
    import gc
    import gzip
    import json

    content = gzip.decompress(file.read_bytes())
    gc.disable()
    try:
        return float(times_s(lambda: json.loads(content), 3, settle=0).min())
    finally:
        gc.enable()


# ---- large graphs -----------------------------------------------------------------------------


def _scale_rows(options: BenchOptions) -> Iterator[Bar]:
    replaying, sweep = "replay of a graph of 10^6 tasks", "virtual speed-ups of 10^6 tasks"
    if not (options.wants(replaying) or options.wants(sweep)):
        return
    options.progress(replaying)
    tasks, repeats = 10**6, 7 if options.full else 3
    graph = graph_of(large_program(tasks), names=50)
    program = lower(graph)
    program.compile().simulate()
    if options.wants(replaying):
        lowering = _minimum_s(lambda: lower(graph), repeats)
        compiling = _minimum_s(lambda: lower(graph).compile(), repeats) - lowering
        again = _minimum_s(program.compile().simulate, repeats)
        whole = lowering + compiling + again
        detail = (
            f"two steps of 10^6 tasks on 32 lanes, 10^6 edges: {lowering:.3f} s to lower, "
            f"{compiling:.3f} s to compile, {again:.3f} s to simulate; minimum of {repeats}"
        )
        yield Bar(
            replaying, 2 * tasks / whole / 1e6, "M tasks/s", "reported", None, repeats,
            f"no bar; {detail}",
        )  # fmt: skip
    if options.wants(sweep):
        options.progress(sweep)
        once = _minimum_s(program.compile().simulate, repeats)
        points = (0.25, 0.5, 1.0)
        curves = virtual_speedups(graph, faster=points[:1], most=1)
        few = _cpu_s(lambda: virtual_speedups(graph, faster=points[:1], most=1))
        many = _cpu_s(lambda: virtual_speedups(graph, faster=points, most=5))
        each = (many - few) / (5 * len(points) - 1)
        share = curves[0].tasks / tasks
        yield Bar(
            sweep, each / once, "passes a point", "reported", None, 5 * len(points) - 1,
            f"no bar; every point changes {share:.0%} of the tasks, everywhere: a full pass "
            f"({1e3 * once:.1f} ms) and the exchange of durations; once {few:.2f} s to group them",
        )  # fmt: skip


def _minimum_s(run: Callable[[], object], repeats: int) -> float:
    return float(times_s(run, repeats).min())


# ---- recorded GPU traces ----------------------------------------------------------------------


@dataclass(frozen=True)
class _Golden:
    """A recorded step with known predictions: unchanged, and with all kernels halved."""

    trace: str
    step: int
    bound_by: str
    step_ns: float
    halved_ns: float


_GOLDENS = (
    _Golden(_LARGEST, 104, "device", 95_664_200.0, 48_811_575.5),
    _Golden("timeline_analysis_sampled_rank-0", 551, "host", 607_361_000.0, 607_361_000.0),
)


def _fixture_rows(options: BenchOptions) -> Iterator[Bar]:
    names = ["GPU traces: kernels that dangle", "GPU traces: kernels linked to their launches"]
    names += [f"GPU traces: kernels halved, {golden.bound_by}-bound" for golden in _GOLDENS]
    selected = [name for name in names if options.wants(name)]
    if not selected:
        return
    try:
        files = _traces()
    except SlipstreamError as error:
        yield from (not_judged(name, "", "", error.what) for name in selected)
        return
    options.progress(names[0])
    if options.wants(names[0]) or options.wants(names[1]):
        yield from _linked(names, {name: read_trace(path) for name, path in files.items()}, options)
    for name, golden in zip(names[2:], _GOLDENS, strict=True):
        if options.wants(name):
            yield _halved(name, golden, read_trace(files[golden.trace]).graph(golden.step))


def _linked(
    names: list[str], traces: dict[str, KinetoTrace], options: BenchOptions
) -> Iterator[Bar]:
    dangling = kernels = linked = early = 0
    for trace in traces.values():
        graph = trace.graph("all")
        launched = graph.edges.target[graph.edges.kind == Dependency.LAUNCH]
        device = np.flatnonzero(np.isin(graph.tasks.kind, _DEVICE))
        on_stream = device[np.isin(graph.tasks.lane[device], _streams(graph))]
        dangling += int((~np.isin(on_stream, launched)).sum())
        kernels += graph.meta["kernels"]
        linked += graph.meta["kernels_linked"]
        early += graph.meta["kernels_launched_before"]
    detail = f"{kernels} kernels and copies of {len(traces)} traces, one of 5 and one of 6 steps"
    if options.wants(names[0]):
        yield Bar(names[0], dangling, f"of {kernels}", "= 0", dangling == 0, len(traces), detail)
    if options.wants(names[1]):
        share = 100 * linked / max(kernels - early, 1)
        detail += f"; {early} were launched before the recording began"
        yield at_least(names[1], share, 99.5, "%", n=kernels - early, detail=detail)


def _streams(graph: Graph) -> list[int]:
    return [number for number, name in enumerate(graph.lanes) if name.startswith("gpu ")]


def _halved(name: str, golden: _Golden, graph: Graph) -> Bar:
    """Halve device times: the step shrinks if the device binds, and stays if the host does."""
    kernel = graph.tasks.kind == Kind.KERNEL
    halved = replace_tasks(
        graph, duration_ns=np.where(kernel, graph.tasks.duration_ns / 2, graph.tasks.duration_ns)
    )
    before, after = replay(graph).step_ns, replay(halved).step_ns
    as_recorded = before == golden.step_ns and after == golden.halved_ns
    sign = after < before if golden.bound_by == "device" else after == before
    target = "< 1" if golden.bound_by == "device" else "= 1"
    detail = (
        f"{before / 1e6:.3f} ms to {after / 1e6:.3f} ms of ProfilerStep#{golden.step}; "
        f"{'equal to' if as_recorded else 'differs from'} the golden values "
        f"({golden.step_ns:.1f} ns, {golden.halved_ns:.1f} ns)"
    )
    return Bar(name, after / before, "x", target, sign and as_recorded, 1, detail)
