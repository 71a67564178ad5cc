"""Graphs of several recorded steps of real GPU traces; no GPU is needed."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.capture.lanes import (
    PlainSteps,
    graph_of_steps,
    less_per_event,
    partners,
    with_durations,
    without_profiler,
)
from slipstream.capture.lanes_memory import WatchedStep
from slipstream.capture.parallel import Recording, read_steps
from slipstream.capture.place import Place
from slipstream.errors import GraphError
from slipstream.graph import (
    Dependency,
    Graph,
    Kind,
    KinetoTrace,
    Role,
    StepPhase,
    load,
    read_trace,
    replace_tasks,
    replay,
    save,
)
from slipstream.technique import refusal, registry

# Five steps that keep a V100 busy, and two of 128 ranks that wait for their launches.
_V100 = "ns_resolution_trace_rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz"
_LAUNCH_BOUND = "timeline_analysis_sampled_rank-0.json.gz"
_ON_DEVICE = (Kind.KERNEL, Kind.COPY, Kind.COMMUNICATION)


@pytest.fixture
def trace(shared_data: Path) -> Callable[[str], KinetoTrace]:
    return lambda name: _read(shared_data / "gpu_traces" / name)


@cache
def _read(path: Path) -> KinetoTrace:
    found = read_trace(path)
    # Three steps are as good as five, and faster to build.
    return replace(found, steps=found.steps[-3:])


@cache
def _merged(path: Path) -> Graph:
    return graph_of_steps([_read(path)], None)


@pytest.fixture
def merged(shared_data: Path) -> Callable[[str], Graph]:
    return lambda name: _merged(shared_data / "gpu_traces" / name)


def plain(wall_ns: float, host_ns: float = 1.0) -> PlainSteps:
    return PlainSteps((int(wall_ns),), (int(host_ns),), (int(host_ns),), wall_ns)


def scaled_kernels(graph: Graph, factor: float) -> Graph:
    kernels = np.isin(graph.tasks.kind, _ON_DEVICE)
    duration = graph.tasks.duration_ns
    return replace_tasks(graph, duration_ns=np.where(kernels, duration * factor, duration))


def test_merged_steps_are_as_long_as_their_mean(
    trace: Callable[[str], KinetoTrace], merged: Callable[[str], Graph]
) -> None:
    v100 = trace(_V100)
    steps = [v100.graph(step.number) for step in v100.steps]
    found = merged(_V100)
    found.check()
    lengths = [replay(step).step_ns for step in steps]
    assert min(lengths) * 0.99 < replay(found).step_ns < max(lengths)
    assert found.meta["aligned_steps"] == 3
    assert found.meta["unaligned_share"] < 0.01
    assert found.meta["kernels_linked"] == found.meta["kernels"] == 1219


def test_a_device_has_its_medians_and_the_host_its_minima(
    trace: Callable[[str], KinetoTrace], merged: Callable[[str], Graph]
) -> None:
    v100 = trace(_V100)
    steps = [v100.graph(step.number) for step in v100.steps]
    found = merged(_V100)
    seen = np.full((len(steps), len(found)), np.nan)
    for row, step in enumerate(steps):
        partner = partners(found, step)
        seen[row, partner >= 0] = step.tasks.duration_ns[partner[partner >= 0]]
    device = np.isin(found.tasks.kind, _ON_DEVICE)
    np.testing.assert_allclose(
        found.tasks.duration_ns[device], np.nanmedian(seen[:, device], axis=0)
    )
    np.testing.assert_allclose(
        found.tasks.duration_ns[~device], np.nanmin(seen[:, ~device], axis=0)
    )
    # Kernels hardly vary between steps; Python does.
    assert np.median(found.tasks.spread[device]) < np.median(found.tasks.spread[~device])


def test_a_single_step_is_unchanged(trace: Callable[[str], KinetoTrace]) -> None:
    step = trace(_V100).graph(103)
    assert (partners(step, step) == np.arange(len(step))).all()
    alone = with_durations(step, [step])
    np.testing.assert_array_equal(alone.tasks.duration_ns, step.tasks.duration_ns)
    np.testing.assert_array_equal(alone.tasks.gap_ns, step.tasks.gap_ns)
    np.testing.assert_array_equal(alone.edges.delay_ns, step.edges.delay_ns)
    assert alone.meta["unaligned_share"] == 0.0


def test_faster_kernels_matter_only_if_the_device_is_busy(
    merged: Callable[[str], Graph],
) -> None:
    busy = merged(_V100)
    assert replay(scaled_kernels(busy, 0.5)).step_ns < 0.6 * replay(busy).step_ns
    idle = replace_tasks(
        busy, duration_ns=np.where(busy.tasks.kind == Kind.KERNEL, 0.02, 1) * busy.tasks.duration_ns
    )
    assert replay(scaled_kernels(idle, 0.5)).step_ns > 0.95 * replay(idle).step_ns


def test_traces_of_different_programs_are_distinguished(
    trace: Callable[[str], KinetoTrace],
) -> None:
    first, other = trace(_V100), trace(_LAUNCH_BOUND)
    with pytest.raises(GraphError, match=r"\b\d+ % of their tasks\b"):
        with_durations(first.graph(103), [other.graph(551)])


def test_a_trace_without_a_step_is_an_error(trace: Callable[[str], KinetoTrace]) -> None:
    with pytest.raises(GraphError, match=r"\bno step\b"):
        graph_of_steps([replace(trace(_V100), steps=())], None)


# The profiler's cost


def test_the_cost_of_an_event_is_subtracted_on_the_host_only(
    trace: Callable[[str], KinetoTrace],
) -> None:
    graph = trace(_V100).graph(103)
    less = less_per_event(graph, 700.0)
    less.check()
    device = np.isin(graph.tasks.kind, _ON_DEVICE)
    np.testing.assert_array_equal(less.tasks.duration_ns[device], graph.tasks.duration_ns[device])
    before = graph.tasks.duration_ns.sum() + graph.tasks.gap_ns.sum()
    after = less.tasks.duration_ns.sum() + less.tasks.gap_ns.sum()
    host = ~np.array([graph.lanes[lane].startswith("gpu") for lane in graph.tasks.lane])
    events = host & np.isin(graph.tasks.kind, (Kind.OP, Kind.LAUNCH, Kind.WAIT, Kind.COLLECTION))
    assert 0.8 * 700 * events.sum() < before - after <= 700 * events.sum() + 1
    assert less_per_event(graph, 0.0).tasks.duration_ns.tolist() == (
        graph.tasks.duration_ns.tolist()
    )


def test_the_cost_is_fitted_to_plain_steps_if_the_host_is_the_bottleneck(
    merged: Callable[[str], Graph],
) -> None:
    bound = merged(_LAUNCH_BOUND)
    recorded = replay(bound).step_ns
    events = without_profiler(bound, plain(recorded), ()).meta["events_per_step"]
    quiet = recorded - 1000.0 * events / 4
    found = without_profiler(bound, plain(quiet), ())
    assert 0 < found.meta["profiler_ns_per_event"] < 5000
    assert replay(found).step_ns == pytest.approx(quiet, rel=1e-3)
    assert found.meta["residual_scale"] == pytest.approx(1.0, abs=1e-3)


def test_the_cost_follows_from_issuing_if_the_device_is_the_bottleneck(
    merged: Callable[[str], Graph],
) -> None:
    whole = merged(_V100)
    events = without_profiler(whole, plain(1e12), ()).meta["events_per_step"]
    # The host alone became faster by a microsecond per event, which the device hides.
    issued = [50_000_000 + 1000 * events]
    found = without_profiler(whole, plain(1e6, host_ns=50e6), issued)
    assert found.meta["profiler_ns_per_event"] == pytest.approx(1000, rel=1e-3)
    assert replay(found).step_ns > 0.95 * replay(whole).step_ns


def test_a_step_no_shorter_without_the_profiler_is_not_corrected(
    merged: Callable[[str], Graph],
) -> None:
    found = without_profiler(merged(_V100), plain(1e9), ())
    assert found.meta["profiler_ns_per_event"] == 0.0
    assert found.meta["residual_scale"] > 1


# Modules, lines and memory of a step that was watched

_MIB = 1 << 20


@pytest.fixture
def watched(shared_data: Path, tmp_path: Path) -> WatchedStep:
    """Return the V100's last step as if convolutions were modules that allocate on the device."""
    document = json.loads(gzip.decompress((shared_data / "gpu_traces" / _V100).read_bytes()))
    events: list[dict[str, Any]] = document["traceEvents"]
    steps = [e for e in events if str(e.get("name")) == "ProfilerStep#105"]
    begin = steps[0]["ts"]
    chosen = [e for e in events if e.get("name") == "aten::conv2d" and e["ts"] >= begin]
    made = []
    for number, conv in enumerate(chosen):
        made.append(
            {**conv, "cat": "user_annotation", "name": f"module::model.conv{number}", "args": {}}
        )
        made.append(_change(conv, conv["ts"] + conv["dur"] / 2, number, 2 * _MIB, number))
        # A workspace that is freed before the operator ends.
        made.append(_change(conv, conv["ts"] + conv["dur"] / 2 + 1, 1000 + number, 64 * _MIB, 0))
        made.append(_change(conv, conv["ts"] + conv["dur"] / 2 + 2, 1000 + number, -64 * _MIB, 0))
    engine = [
        e
        for e in events
        if str(e.get("name")).startswith("autograd::engine::evaluate_function: ConvolutionBackward")
        and e["ts"] >= begin
    ]
    for number, node in zip(range(len(chosen) - 1, -1, -1), engine, strict=True):
        made.append(_change(node, node["ts"] + node["dur"], number, -2 * _MIB, 0))
    document = {**document, "profile_memory": 1, "traceEvents": events + made}
    path = tmp_path / "watched.json"
    path.write_text(json.dumps(document))
    weights = {7: (100 * _MIB, Role.PARAMETER), 8: (100 * _MIB, Role.GRADIENT)}
    return WatchedStep(read_trace(path), weights, frozenset())


def _change(
    event: dict[str, Any], ts: float, address: int, nbytes: int, already: int
) -> dict[str, Any]:
    total = 300 * _MIB + 2 * _MIB * (already + 1)
    args = {"Device Type": 1, "Addr": 1 << 20 | address, "Bytes": nbytes, "Total Allocated": total}
    return {
        "ph": "i", "name": "[memory]", "pid": event["pid"], "tid": event["tid"], "ts": ts,
        "args": args,
    }  # fmt: skip


def test_kernels_belong_to_modules_and_lines_forward_and_backward(
    trace: Callable[[str], KinetoTrace], watched: WatchedStep
) -> None:
    found = _recorded(trace(_V100), watched)
    kernels = np.flatnonzero(found.tasks.kind == Kind.KERNEL)
    scopes = [found.string(int(found.tasks.scope[k])) for k in kernels]
    modules = [found.string(int(found.tasks.module[k])) for k in kernels]
    sources = [found.string(int(found.tasks.source[k])) for k in kernels]
    phases = found.tasks.phase[kernels]
    forward = [m for m, s in zip(modules, scopes, strict=True) if "aten::conv2d" in s]
    backward = [m for m, s in zip(modules, scopes, strict=True) if "ConvolutionBackward" in s]
    assert len(forward) > 50
    assert set(forward) == {f"model.conv{n}" for n in range(53)}
    assert set(backward) == set(forward)
    assert {p for p, s in zip(phases, scopes, strict=True) if "ConvolutionBackward" in s} == {
        StepPhase.BACKWARD
    }
    lines = {s for m, s in zip(modules, sources, strict=True) if m == "model.conv3"}
    assert lines == {"net.py:12"}


def test_memory_is_that_of_the_device_and_follows_the_step(
    trace: Callable[[str], KinetoTrace], watched: WatchedStep, tmp_path: Path
) -> None:
    found = _recorded(trace(_V100), watched)
    retained = 53 * 2 * _MIB
    # Existing storages, also those that no walk found; all outputs; one operator's workspace.
    assert replay(found).peak_bytes == 300 * _MIB + retained + 64 * _MIB
    roles = dict(zip(found.memory.role.tolist(), found.memory.nbytes.tolist(), strict=True))
    assert roles[Role.PARAMETER] == roles[Role.GRADIENT] == roles[Role.OTHER] == 100 * _MIB
    activations = found.memory.role == Role.ACTIVATION
    assert activations.sum() == 53
    producers = found.memory.producer[activations]
    assert {found.string(int(found.tasks.module[p])) for p in producers} == {
        f"model.conv{n}" for n in range(53)
    }
    save(found, tmp_path / "run.slipgraph")
    again = load(tmp_path / "run.slipgraph")
    assert replay(again).step_ns == replay(found).step_ns
    assert again.meta == found.meta


def test_the_device_is_named_and_lanes_have_no_thread_ids(
    trace: Callable[[str], KinetoTrace],
) -> None:
    found = _recorded(trace(_V100), None)
    assert found.meta["device"] == "cuda"
    assert found.meta["device_name"] == "Tesla V100-SXM2-32GB"
    assert found.lanes.count("cpu") == 1
    assert all(lane.startswith(("cpu", "gpu 0 stream ")) for lane in found.lanes)
    assert (found.edges.kind == Dependency.LAUNCH).sum() == found.meta["kernels"]


def _recorded(trace: KinetoTrace, watched: WatchedStep | None) -> Graph:
    # One step is enough to see the inserted tasks.
    single = replace(trace, steps=trace.steps[-1:])
    steps = Recording((single,), (1,), plain(1e9), watched, {"model.conv3": "net.py:12"})
    return read_steps(steps, Place("cuda"))


def test_no_cpu_micro_benchmark_is_requested_for_a_device(
    trace: Callable[[str], KinetoTrace],
) -> None:
    """Every technique predicts from the recorded kernels, or reports why it does not apply."""
    found = _recorded(trace(_V100), None)
    found = replace(found, samples=8, meta={**found.meta, "training": True})
    judged = {name: refusal(kind(), found) for name, kind in registry().items()}
    apply = {name for name, reason in judged.items() if reason is None}
    assert apply == {"cuda_graphs", "cudnn_benchmark"}
    for name in apply:
        assert list(registry()[name]().required_timings(found)) == []
    assert "Ampere" in str(judged.pop("tf32"))
    for name in set(judged) - apply:
        assert "CUDA" in str(judged[name])
        assert name in str(judged[name])
