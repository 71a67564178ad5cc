"""Kineto traces as graphs: each kind of dependency by hand, then real traces of A100 and V100."""

from __future__ import annotations

import contextlib
import gzip
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_traces import (
    DEVICE_KINDS,
    ENGINE,
    Event,
    call,
    edges,
    graph,
    kernel,
    launch,
    op,
    parse_trace,
    scaled,
    step,
    sync,
    text,
    timeline_us,
    trace,
)

from slipstream.errors import GraphError
from slipstream.graph import Dependency, Graph, Kind, StepPhase, read_kineto, read_trace, replay

# Order within threads and streams


def test_nested_operators_become_a_sequence_of_segments() -> None:
    found = graph(op("outer", 0, 100), op("inner", 20, 30), op("after", 110, 5))
    assert timeline_us(found)["outer"] == [(0, 20), (50, 100)]
    assert timeline_us(found)["inner"] == [(20, 50)]
    assert timeline_us(found)["after"] == [(110, 115)]
    inner = [i for i, name in enumerate(found.tasks.name) if found.strings[name] == "inner"]
    assert found.strings[found.tasks.scope[inner[0]]] == "outer"


def test_the_remainder_of_an_operator_is_not_a_second_call() -> None:
    found = graph(op("outer", 0, 100), op("inner", 20, 30))
    kinds = [Kind(kind) for kind in found.tasks.kind]
    assert kinds.count(Kind.OP) == 2
    assert kinds.count(Kind.HOST) == 2  # the begin of the thread, the remainder of outer


def test_a_child_that_outlives_its_parent_by_rounding_is_clamped() -> None:
    found = timeline_us(graph(op("outer", 0, 10), op("inner", 5, 6), op("next", 10, 5)))
    assert found["inner"] == [(5, 10)]
    assert found["next"] == [(10, 15)]


def test_a_polling_thread_delays_no_other() -> None:
    found = graph(op("work", 0, 10), call("cudaEventQuery", 900, 1, 5, tid=9))
    assert replay(found).step_ns == 10_000


def test_two_spellings_of_a_thread_id_are_one_thread() -> None:
    other = op("second", 20, 10) | {"pid": "100", "tid": "1"}
    found = graph(op("first", 0, 10), other, op("third", 40, 10, tid=3))
    assert len(found.lanes) == 2
    assert timeline_us(found)["second"] == [(20, 30)]


def test_ids_written_as_text_are_ids() -> None:
    written = launch(0, 5, 1)
    written["args"]["correlation"] = "1"
    found = graph(op("add", 0, 20), written, kernel("k", 12, 50, 1))
    assert edges(found)["cudaLaunchKernel", "k", Dependency.LAUNCH] == 1


# Launch


def test_a_kernel_starts_its_latency_after_its_launch() -> None:
    found = graph(op("add", 0, 20), launch(5, 10, 1), kernel("k", 12, 50, 1))
    assert edges(found)["cudaLaunchKernel", "k", Dependency.LAUNCH] == 1
    assert timeline_us(found)["k"] == [(12, 62)]
    # A launch that takes three times as long does not move a kernel that starts within it.
    later = scaled(found, 3, "add")
    assert timeline_us(later)["k"] == [(22, 72)]


def test_a_kernel_after_another_starts_when_that_ends() -> None:
    found = graph(
        op("add", 0, 40), launch(0, 5, 1), launch(10, 5, 2), kernel("a", 8, 100, 1),
        kernel("b", 110, 20, 2),
    )  # fmt: skip
    assert timeline_us(found)["b"] == [(110, 130)]
    # Two microseconds of the device's own turnaround remain.
    assert timeline_us(scaled(found, 0.5, "a"))["b"] == [(60, 80)]
    # Once the first ends early enough, the launch delays the second.
    assert timeline_us(scaled(found, 0.01, "a"))["b"] == [(18, 38)]


def test_concurrent_kernels_of_one_stream_get_separate_lanes() -> None:
    found = graph(
        op("graph", 0, 20), call("cudaGraphLaunch", 0, 10, 1), kernel("a", 20, 100, 1),
        kernel("b", 30, 100, 1), kernel("c", 120, 10, 1),
    )  # fmt: skip
    assert found.lanes[1:] == ("gpu 0 stream 7", "gpu 0 stream 7 (2)")
    assert found.meta["kernels_linked"] == 3
    assert timeline_us(found)["b"] == [(30, 130)]


# Synchronisation


def _synchronised(kernel_ends: float) -> list[Event]:
    return [
        op("step", 0, 300), launch(0, 10, 1), kernel("k", 10, kernel_ends - 10, 1),
        call("cudaDeviceSynchronize", 20, 250, 2), sync("Context Sync", 20, 250, 2, -1),
    ]  # fmt: skip


def test_a_synchronising_call_ends_after_its_kernel() -> None:
    found = graph(*_synchronised(260))
    assert edges(found)["k", "cudaDeviceSynchronize", Dependency.SYNCHRONISATION] == 1
    # Ten microseconds of the call come after the kernel; the remainder was waiting.
    assert timeline_us(found)["cudaDeviceSynchronize"] == [(260, 270)]
    assert timeline_us(scaled(found, 0.5))["cudaDeviceSynchronize"] == [(135, 145)]
    assert timeline_us(scaled(found, 0.001))["cudaDeviceSynchronize"][0][0] == 20
    assert timeline_us(scaled(found, 2))["cudaDeviceSynchronize"] == [(510, 520)]


def test_a_call_that_found_the_device_idle_did_not_wait() -> None:
    found = graph(*_synchronised(15))
    assert timeline_us(found)["cudaDeviceSynchronize"] == [(20, 270)]


def test_a_stream_synchronisation_does_not_wait_for_the_device() -> None:
    found = graph(
        op("step", 0, 300), launch(0, 4, 1), launch(5, 4, 2),
        kernel("long", 5, 200, 1, stream=7), kernel("short", 10, 20, 2, stream=8),
        call("cudaStreamSynchronize", 12, 20, 3), sync("Stream Sync", 12, 20, 3, 8),
    )  # fmt: skip
    assert edges(found)["short", "cudaStreamSynchronize", Dependency.SYNCHRONISATION] == 1
    assert not edges(found)["long", "cudaStreamSynchronize", Dependency.SYNCHRONISATION]


def test_an_event_synchronisation_waits_up_to_its_record() -> None:
    found = graph(
        op("step", 0, 400), launch(0, 4, 1), call("cudaEventRecord", 5, 1, 2), launch(8, 4, 3),
        kernel("before", 5, 100, 1), kernel("behind", 105, 100, 3),
        call("cudaEventSynchronize", 15, 95, 4),
        sync("Event Sync", 15, 95, 4, -1, wait_on_stream=7, wait_on_cuda_event_record_corr_id=2),
    )  # fmt: skip
    waited = [key for key in edges(found) if key[1] == "cudaEventSynchronize"]
    assert waited == [("before", "cudaEventSynchronize", Dependency.SYNCHRONISATION)]
    assert timeline_us(found)["cudaEventSynchronize"] == [(105, 110)]


def test_without_a_synchronisation_event_the_stream_of_the_thread_counts() -> None:
    found = graph(
        op("step", 0, 300), launch(0, 4, 1), kernel("mine", 5, 95, 1),
        launch(0, 4, 2, tid=5), kernel("theirs", 5, 100, 2, stream=8),
        call("cudaStreamSynchronize", 12, 98, 3),
    )  # fmt: skip
    waited = [key[0] for key in edges(found) if key[1] == "cudaStreamSynchronize"]
    assert waited == ["mine"]


def test_a_copy_to_pageable_memory_blocks_the_host() -> None:
    copy = "Memcpy DtoH (Device -> Pageable)"
    found = graph(
        op("item", 0, 200), launch(0, 5, 1), kernel("k", 6, 94, 1),
        call("cudaMemcpyAsync", 10, 110, 2), kernel(copy, 101, 4, 2, cat="gpu_memcpy"),
    )  # fmt: skip
    assert edges(found)[copy, "cudaMemcpyAsync", Dependency.SYNCHRONISATION] == 1
    assert timeline_us(found)["cudaMemcpyAsync"][-1] == (105, 120)
    # 47 us of kernel, 1 of turnaround and 4 of copy later the host continues.
    assert timeline_us(scaled(found, 0.5, "k"))["cudaMemcpyAsync"][-1] == (58, 73)


def test_a_full_launch_queue_makes_the_host_wait() -> None:
    # 1,200 kernels of 100 us; 600 launches of 2 us fit, then each waits for a kernel to end.
    depth, count = 600, 1200
    events: list[Event] = []
    clock = 0.0
    for i in range(count):
        done = 10 + 100 * (i - depth + 1)
        free = max(clock, done) if i >= depth else clock
        events += [launch(clock, free + 2 - clock, i), kernel("k", 10 + 100 * i, 100, i)]
        clock = free + 2
    found = graph(op("step", 0, clock + 5), *events)
    assert found.meta["launch_queue"] == depth
    assert replay(scaled(found, 0.5)).step_ns == pytest.approx(60_010_000, rel=1e-3)


# Between streams


def test_a_stream_waits_for_the_event_of_another() -> None:
    found = graph(
        op("step", 0, 60), launch(0, 5, 1), call("cudaEventRecord", 6, 1, 2),
        call("cudaStreamWaitEvent", 10, 1, 3), launch(20, 5, 4),
        kernel("first", 8, 100, 1), kernel("second", 110, 50, 4, stream=20),
        sync(
            "Stream Wait Event", 10, 1, 3, 20, wait_on_stream=7,
            wait_on_cuda_event_record_corr_id=2,
        ),
    )  # fmt: skip
    assert edges(found)["first", "second", Dependency.STREAM_TO_STREAM] == 1
    assert timeline_us(found)["second"] == [(110, 160)]
    assert timeline_us(scaled(found, 0.5, "first"))["second"] == [(60, 110)]


def test_without_synchronisation_events_launch_order_decides() -> None:
    reduce = "ncclKernel_AllReduce_RING_LL_Sum_float"
    found = graph(
        op("step", 0, 60), launch(0, 5, 1), call("cudaStreamWaitEvent", 10, 1, 3),
        launch(20, 5, 4), kernel("gradient", 8, 100, 1), kernel(reduce, 110, 50, 4, stream=20),
    )  # fmt: skip
    # With a collective at one end it counts as communication.
    assert edges(found)["gradient", reduce, Dependency.COMMUNICATION] == 1
    assert timeline_us(scaled(found, 0.5, "gradient"))[reduce] == [(60, 110)]
    assert (found.tasks.kind == Kind.COMMUNICATION).sum() == 1


# Between threads, and data


def _backward() -> list[Event]:
    forward = {"Sequence number": 7, "Fwd thread id": 0}
    backward = {"Sequence number": 7, "Fwd thread id": 1}
    return [
        op("aten::mul", 0, 50, **forward),
        op("autograd::engine::evaluate_function: MulBackward0", 100, 200, ENGINE, **backward),
        op("aten::sum", 150, 100, ENGINE),
        op("aten::add_", 340, 60),
    ]


def test_the_caller_of_backward_waits_for_the_autograd_thread() -> None:
    found = graph(*_backward())
    kinds = edges(found)
    backward = "autograd::engine::evaluate_function: MulBackward0"
    assert kinds["aten::mul", backward, Dependency.THREAD_TO_THREAD] == 1
    assert kinds[backward, "aten::add_", Dependency.THREAD_TO_THREAD] == 1
    assert kinds["aten::mul", backward, Dependency.DATA] == 1
    assert replay(found).step_ns == 400_000
    # Half of the sum's 100 us, so the optimizer begins 50 earlier.
    assert timeline_us(scaled(found, 0.5, "aten::sum"))["aten::add_"] == [(290, 350)]
    # A longer forward delays the backward.
    assert timeline_us(scaled(found, 2, "aten::mul"))[backward][0] == (150, 200)


def test_phases_follow_autograd_and_optimizer_annotations() -> None:
    annotation = step(1, 330, 80) | {"name": "Optimizer.step#SGD.step"}
    found = graph(*_backward(), annotation)
    phase = {
        found.strings[name]: StepPhase(value)
        for name, value in zip(found.tasks.name, found.tasks.phase, strict=True)
    }
    assert phase["aten::mul"] == StepPhase.FORWARD
    assert phase["aten::sum"] == StepPhase.BACKWARD
    assert phase["aten::add_"] == StepPhase.OPTIMIZER


def test_modules_and_source_lines_come_from_frames() -> None:
    frame = {"cat": "python_function", "args": {}}
    found = graph(
        op("all", 0, 1, 8), op("aten::mm", 10, 5),
        op("train.py(12): forward", 5, 50) | frame, op("nn.Module: Linear_0", 8, 20) | frame,
        op("torch/nn/functional.py(3): linear", 9, 10) | frame,
    )  # fmt: skip
    mm = next(i for i, n in enumerate(found.tasks.name) if found.strings[n] == "aten::mm")
    assert found.strings[found.tasks.module[mm]] == "Linear_0"
    assert found.strings[found.tasks.source[mm]] == "train.py:12"


# Steps


def _steps() -> list[Event]:
    events: list[Event] = []
    for number in range(4):
        base = 1000 * number
        events += [
            step(number + 5, base, 990), op("aten::mm", base + 10, 20 + number),
            launch(base + 12, 5, 10 + number), kernel("k", base + 20, 30, 10 + number),
        ]  # fmt: skip
    return events


def test_a_step_is_chosen_by_its_number_and_lasts_until_the_next() -> None:
    found = trace(*_steps())
    assert [s.number for s in found.steps] == [5, 6, 7, 8]
    step = found.graph(6)
    assert step.meta["step"] == "ProfilerStep#6"
    assert step.meta["kernels"] == 1
    assert replay(step).step_ns == 1_000_000
    assert found.graph("all").meta["kernels"] == 4


def test_neither_the_first_nor_the_last_step_is_taken_by_default() -> None:
    assert trace(*_steps()).graph().meta["step"] in ("ProfilerStep#6", "ProfilerStep#7")


def test_a_step_does_not_depend_on_earlier_objects() -> None:
    fresh, used = trace(*_steps()), trace(*_steps())
    used.graph("all")
    assert np.array_equal(replay(fresh.graph(7)).end_ns, replay(used.graph(7)).end_ns)


def test_unfinished_device_work_of_a_step_gates_the_next() -> None:
    # Each step queues 150 us of kernels in 100 us: in a long run it costs 150.
    events: list[Event] = []
    for number in range(3):
        base, late = 100 * number, 150 * number
        events += [
            step(number, base, 100), op("aten::mm", base, 90), launch(base, 5, number),
            kernel("k", late + 10, 150, number),
        ]  # fmt: skip
    assert replay(trace(*events).graph(1)).step_ns == 150_000


# Real traces

_TRACES = (
    "critical_path_alexnet_benchmark_result_2869224_1695835535_trace.json.gz",
    "critical_path_cuda_event_sync_event_sync_trace.json.gz",
    "critical_path_cuda_event_sync_multi_stream_event_sync_trace.json.gz",
    "critical_path_simple_add_benchmark_result_493459_1694039959_trace.json.gz",
    "ns_resolution_trace_rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz",
    "timeline_analysis_sampled_rank-0.json.gz",
    pytest.param("trace_diff_control_control.json.gz", marks=pytest.mark.full),
)
_LARGE = "trace_diff_test_test.json.gz"


@pytest.mark.parametrize("file", _TRACES)
def test_real_traces_are_linked_and_replayed(file: str, shared_data: Path) -> None:
    _check_links(read_kineto(shared_data / "gpu_traces" / file, "all"))


def _check_links(whole: Graph) -> None:
    tasks, links = whole.tasks, whole.edges
    launched = links.target[links.kind == Dependency.LAUNCH]
    device = np.flatnonzero(np.isin(tasks.kind, DEVICE_KINDS))
    # No kernel is unlinked, whether its launch was recorded or came before the recording.
    assert np.isin(device, launched).all()
    recorded = whole.meta["kernels"] - whole.meta["kernels_launched_before"]
    assert whole.meta["kernels_linked"] >= 0.995 * recorded
    line = replay(whole)
    assert line.schedule.step_end_ns[0] == pytest.approx(whole.meta["recorded_ns"], rel=1e-3)
    assert replay(scaled(whole, 0.5)).step_ns <= line.step_ns <= replay(scaled(whole, 2)).step_ns


@pytest.mark.full
def test_launches_before_the_recording_are_the_only_unlinked_ones(shared_data: Path) -> None:
    found = read_trace(shared_data / "gpu_traces" / _LARGE)
    _check_links(found.graph("all"))
    for number in (1010, 1011, 1012, 1013, 1014):
        meta = found.graph(number).meta
        assert meta["kernels_linked"] == meta["kernels"] > 0


def test_halving_kernels_shortens_device_bound_parts(shared_data: Path) -> None:
    found = read_trace(shared_data / "gpu_traces" / _TRACES[4])
    bound = found.graph(104)
    assert bound.meta["launch_queue"] == 1022
    before, after = replay(bound).step_ns, replay(scaled(bound, 0.5)).step_ns
    assert before == pytest.approx(bound.meta["recorded_ns"], rel=2e-3)
    # All its kernels are on the path; copies and the turnaround between them remain.
    kernels = bound.tasks.duration_ns[bound.tasks.kind == Kind.KERNEL].sum()
    assert kernels > 0.97 * before
    assert before - after == pytest.approx(kernels / 2, rel=1e-6)


def test_halving_kernels_leaves_host_bound_parts_unchanged(shared_data: Path) -> None:
    bound = read_kineto(shared_data / "gpu_traces" / _TRACES[5], 551)
    assert replay(scaled(bound, 0.5)).step_ns == replay(bound).step_ns


# Invalid input


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "truncated"),
        (b'{"traceEvents": [', "truncated"),
        (b"[1, 2]", "event 0"),
        (b'{"events": []}', "no list 'traceEvents'"),
        (b'"text"', "no list 'traceEvents'"),
        (b'{"traceEvents": []}', "no operators"),
        (b"[" * 100_000, "truncated"),
    ],
)
def test_a_file_that_is_not_a_trace_is_reported(data: bytes, words: str) -> None:
    with pytest.raises(GraphError, match=words) as caught:
        parse_trace(data, "bad.json")
    assert caught.value.where is not None
    assert "bad.json" in caught.value.where
    assert caught.value.remedy


@pytest.mark.parametrize(
    "change",
    [
        {"ts": "soon"}, {"ts": None}, {"dur": -1}, {"dur": float("nan")}, {"dur": 1e300},
        {"ts": True}, {"args": [1]}, {"args": {"correlation": "x"}}, {"args": {"stream": 1e400}},
        {"cat": ["a"]}, {"ts": [1]}, {"args": {"correlation": 2**70}},
    ],
)  # fmt: skip
def test_a_malformed_event_is_named(change: Event) -> None:
    bad = kernel("the kernel", 10, 5, 1) | change
    with pytest.raises(GraphError) as caught:
        trace(op("fine", 0, 10), launch(0, 5, 1), bad).graph()
    assert caught.value.remedy


def test_kernels_without_correlation_ids_are_refused() -> None:
    lost = kernel("lost", 10, 5, 1)
    lost["args"] = {"device": 0, "stream": 7}
    with pytest.raises(GraphError, match="correlation") as caught:
        graph(op("step", 0, 20), launch(0, 5, 1), lost)
    assert "lost" in str(caught.value.where)


def test_a_missing_step_is_named_with_those_present() -> None:
    with pytest.raises(GraphError, match="no step 9") as caught:
        trace(*_steps()).graph(9)
    assert "5, 6, 7, 8" in str(caught.value.remedy)
    with pytest.raises(GraphError, match="no step 9") as caught:
        trace(op("a", 0, 1)).graph(9)
    assert "'all'" in str(caught.value.remedy)


def test_a_step_without_tasks_is_refused() -> None:
    with pytest.raises(GraphError, match="nothing runs"):
        trace(step(1, 0, 10), op("late", 50, 5)).graph(1)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match=r"\bno file\b.*\bnone\.json\b"):
        read_kineto(tmp_path / "none.json")
    with pytest.raises(GraphError, match="cannot be read"):
        read_kineto(tmp_path)


_GOOD = text([*_steps(), *_backward()])


@given(st.integers(0, len(_GOOD) - 1))
def test_a_truncated_trace_is_refused(length: int) -> None:
    with pytest.raises(GraphError):
        parse_trace(_GOOD[:length])


@settings(max_examples=60)
@given(st.data())
def test_a_damaged_gzip_file_is_refused_or_read(data: st.DataObject) -> None:
    packed = bytearray(gzip.compress(_GOOD, mtime=0))
    cut = data.draw(st.integers(2, len(packed) - 1))
    if data.draw(st.booleans()):
        packed[cut] ^= data.draw(st.integers(1, 255))
    else:
        del packed[cut:]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json.gz"
        path.write_bytes(bytes(packed))
        with contextlib.suppress(GraphError):
            read_kineto(path).check()


_scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
_values = _scalars | st.lists(_scalars, max_size=2)


@settings(max_examples=200)
@given(st.data())
def test_random_changes_to_events_give_a_graph_or_a_graph_error(data: st.DataObject) -> None:
    events = json.loads(_GOOD)["traceEvents"]
    for _ in range(data.draw(st.integers(1, 4))):
        event = data.draw(st.sampled_from(events))
        place = event if data.draw(st.booleans()) else event["args"]
        if not isinstance(place, dict):
            continue
        key = data.draw(st.sampled_from([*sorted(place), "stream", "correlation"]))
        place[key] = data.draw(_values)
    with contextlib.suppress(GraphError):
        found = parse_trace(json.dumps({"traceEvents": events}).encode())
        replay(found.graph("all"))
        replay(found.graph())


@settings(max_examples=150)
@given(st.data())
def test_random_traces_have_no_cycle_and_replay_is_exact(data: st.DataObject) -> None:
    """For any streams and waits, the edges agree with the recorded times."""
    clock, free = 0.0, {7: 0.0, 20: 0.0}
    events: list[Event] = []
    for i in range(data.draw(st.integers(1, 15))):
        clock += data.draw(st.integers(0, 40))
        stream = data.draw(st.sampled_from([7, 20]))
        what = data.draw(st.sampled_from(["kernel", "sync", "wait", "op"]))
        if what == "kernel":
            length = data.draw(st.integers(1, 20))
            start = max(free[stream], clock + data.draw(st.integers(0, 10)))
            free[stream] = start + data.draw(st.integers(1, 60))
            events += [
                launch(clock, length, i),
                kernel(f"k{i}", start, free[stream] - start, i, stream),
            ]
            clock += length
        elif what == "sync":
            done = max(clock, max(free.values())) + 3
            events += [
                call("cudaDeviceSynchronize", clock, done - clock, i),
                sync("Context Sync", clock, done - clock, i, -1),
            ]
            clock = done
        elif what == "wait":
            events += [call("cudaStreamWaitEvent", clock, 1, i)]
            clock += 1
        else:
            events += [op(f"op{i}", clock, 7)]
            clock += 7
    found = graph(op("step", 0, clock + 1), *events)
    assert replay(found).schedule.step_end_ns[0] == pytest.approx(found.meta["recorded_ns"])


# Modules, thread pools, memory


def _module(name: str, ts: float, dur: float, tid: int = 1) -> Event:
    return op(f"module::{name}", ts, dur, tid) | {"cat": "user_annotation"}


def test_a_backward_operator_belongs_to_the_module_of_its_forward() -> None:
    engine = "autograd::engine::evaluate_function: "
    found = graph(
        op("aten::empty", -5, 3),
        _module("model.a", 0, 20), op("aten::linear", 2, 16), op("aten::addmm", 4, 12, **_seq(7)),
        _module("model.b", 30, 20), op("aten::relu", 32, 16, **_seq(8)),
        op(engine + "ReluBackward0", 100, 10, ENGINE, **_seq(8)),
        op("aten::threshold_backward", 102, 5, ENGINE),
        op(engine + "AddmmBackward0", 120, 30, ENGINE, **_seq(7)),
        op("aten::mm", 122, 20, ENGINE), launch(125, 5, 1, ENGINE), kernel("gemm", 135, 60, 1),
        op(engine + "torch::autograd::AccumulateGrad", 160, 10, ENGINE),
        op("aten::add_", 162, 5, ENGINE), op("aten::detach", 300, 5),
    )  # fmt: skip
    module = _modules(found)
    assert module["aten::addmm"] == module["aten::mm"] == module["gemm"] == "model.a"
    assert module["aten::add_"] == "model.a"  # accumulation belongs to where the gradient was made
    assert module["aten::relu"] == module["aten::threshold_backward"] == "model.b"
    assert module["aten::detach"] == ""


def test_backward_operators_without_a_recorded_forward_have_no_module() -> None:
    engine = "autograd::engine::evaluate_function: "
    found = graph(
        op("aten::empty", -5, 3),
        _module("model.a", 0, 20), op("aten::relu", 2, 16, **_seq(7)),
        op(engine + "ReluBackward0", 100, 10, ENGINE, **_seq(7)),
        op("aten::threshold_backward", 102, 5, ENGINE),
        # Zero is a number, too: of operators before the recording.
        op(engine + "MulBackward0", 120, 10, ENGINE, **_seq(0)),
        op("aten::mul", 122, 5, ENGINE),
        op(engine + "torch::autograd::AccumulateGrad", 140, 10, ENGINE),
        op("aten::add_", 142, 5, ENGINE),
    )  # fmt: skip
    module = _modules(found)
    assert module["aten::threshold_backward"] == "model.a"
    assert module["aten::mul"] == module["aten::add_"] == ""


def test_the_gradient_of_a_tensor_without_a_module_has_none() -> None:
    engine = "autograd::engine::evaluate_function: "
    found = graph(
        op("aten::empty", -5, 3),
        # An operator without an autograd node has the number of the next node.
        _module("model.a", 0, 30), op("aten::relu", 2, 16, **_seq(7)),
        op("aten::detach", 20, 5, **_seq(8)),
        op("aten::mul", 40, 16, **_seq(8)),
        op(engine + "ReluBackward0", 100, 10, ENGINE, **_seq(7)),
        op("aten::threshold_backward", 102, 5, ENGINE),
        op(engine + "MulBackward0", 120, 10, ENGINE, **_seq(8)),
        op("aten::div", 122, 5, ENGINE),
        op(engine + "torch::autograd::AccumulateGrad", 140, 10, ENGINE),
        op("aten::add_", 142, 5, ENGINE),
    )  # fmt: skip
    module = _modules(found)
    assert module["aten::detach"] == module["aten::threshold_backward"] == "model.a"
    assert module["aten::mul"] == module["aten::div"] == module["aten::add_"] == ""


def _modules(graph: Graph) -> dict[str, str]:
    """Return the modules of tasks by name."""
    return {
        graph.strings[name]: graph.strings[module]
        for name, module in zip(graph.tasks.name, graph.tasks.module, strict=True)
    }


def _seq(number: int) -> dict[str, int]:
    return {"Sequence number": number}


def test_sequence_numbers_count_per_thread_so_arrows_identify_the_thread() -> None:
    engine = "autograd::engine::evaluate_function: AddmmBackward0"
    forward = [(7, 5, "left"), (8, 6, "right")]
    events: list[Event] = [op("aten::empty", -5, 3)]
    for tid, ts, name in forward:
        events += [_module(name, ts, 20, tid), op("aten::addmm", ts + 2, 9, tid, **_seq(3))]
        events.append(_arrow("s", tid, ts + 2, tid))
    for number, (tid, _, name) in enumerate(forward, start=2):
        ts = 100.0 * number
        arguments = {**_seq(3), "Fwd thread id": number}
        events += [op(engine, ts, 9, **arguments), op(f"mm {name}", ts + 2, 5)]
        events.append(_arrow("f", 1, ts, tid))
    found = graph(*events)
    module = _modules(found)
    assert (module["mm left"], module["mm right"]) == ("left", "right")
    lanes = [
        (found.lanes[found.tasks.lane[s]], found.strings[found.tasks.module[t]])
        for s, t, kind in zip(found.edges.source, found.edges.target, found.edges.kind, strict=True)
        if kind == Dependency.DATA
    ]
    assert sorted(lanes) == [("thread 7", "left"), ("thread 8", "right")]


def _arrow(ph: str, tid: int, ts: float, number: int) -> Event:
    return {
        "ph": ph, "cat": "fwdbwd", "name": "fwdbwd", "pid": 100, "tid": tid, "ts": ts, "id": number
    }  # fmt: skip


def test_a_pool_gets_work_and_is_awaited() -> None:
    events = (
        step(0, 0, 1000), op("stem", 10, 90), op("left", 200, 300, 7), op("right", 210, 500, 8),
        op("head", 750, 50),
    )  # fmt: skip
    found = trace(*events).graph(0)
    handed = Dependency.THREAD_TO_THREAD
    assert edges(found) == {
        ("stem", "left", handed): 1, ("stem", "right", handed): 1,
        ("left", "head", handed): 1, ("right", "head", handed): 1,
    }  # fmt: skip
    assert timeline_us(found)["head"] == [(750, 800)]
    # Only the longer branch delays the step; without it, the shorter one does.
    assert timeline_us(scaled(found, 0.5, "left"))["head"] == [(750, 800)]
    assert timeline_us(scaled(found, 0.1, "right"))["head"] == [(540, 590)]
    assert timeline_us(scaled(found, 0.1, "right", "left"))["head"] == [(300, 350)]


def test_a_thread_may_continue_after_submitting_work() -> None:
    found = trace(
        step(0, 0, 1000), op("stem", 0, 100), op("own", 105, 400), op("given", 150, 200, 7)
    ).graph(0)
    assert edges(found)["stem", "given", Dependency.THREAD_TO_THREAD] == 1
    assert timeline_us(scaled(found, 0.5, "stem"))["given"] == [(100, 300)]


def _memory(ts: float, nbytes: int, device: int = 1, **more: object) -> Event:
    args = {"Device Type": device, "Addr": 4096, "Bytes": nbytes, "Total Allocated": 9000, **more}
    return {"ph": "i", "name": "[memory]", "pid": 100, "tid": 1, "ts": ts, "args": args}


def test_allocations_are_read_in_order_of_time_if_recorded() -> None:
    events = [op("first", 50, 10), _memory(80, -512), _memory(55, 512), _memory(60, 64, device=9)]
    document = {"schemaVersion": 1, "profile_memory": 1, "traceEvents": events}
    found = parse_trace(json.dumps(document).encode()).memory
    assert [(change.time_ns, change.nbytes) for change in found] == [(5000, 512), (30000, -512)]
    assert {(change.device, change.thread, change.total_bytes) for change in found} == {
        ("cuda", "thread 1", 9000)
    }
    assert trace(*events).memory == ()


@pytest.mark.parametrize("wrong", [{"Bytes": "x"}, {"Addr": None}, {"Device Type": [1]}])
def test_a_malformed_allocation_is_an_error_that_names_it(wrong: dict[str, object]) -> None:
    events = [op("first", 50, 10), _memory(55, 512, **wrong)]
    document = {"schemaVersion": 1, "profile_memory": 1, "traceEvents": events}
    with pytest.raises(GraphError, match="memory"):
        parse_trace(json.dumps(document).encode())
