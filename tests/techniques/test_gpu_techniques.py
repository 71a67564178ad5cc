"""tf32, cudnn_benchmark and cuda_graphs: predicted on recorded GPU steps, refused on a CPU."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recorded import build, graph_of, images, mlp

from slipstream.errors import WorkloadError
from slipstream.graph import PROVENANCES, Graph, Kind, read_kineto, replace_tasks, replay
from slipstream.provenance import Provenance
from slipstream.technique import Technique, refusal
from slipstream.techniques.batch_size import BatchSize
from slipstream.techniques.cuda_graphs import CudaGraphs
from slipstream.techniques.cudnn_benchmark import CudnnBenchmark
from slipstream.techniques.inference_mode import InferenceMode
from slipstream.techniques.memory_format import ChannelsLast
from slipstream.techniques.tf32 import Tf32
from slipstream.verbs.predicting import predict
from slipstream.workload import Workload

_V100 = "ns_resolution_trace_rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz"
_LAUNCH_BOUND = "timeline_analysis_sampled_rank-0.json.gz"
_A100 = "critical_path_simple_add_benchmark_result_493459_1694039959_trace.json.gz"
_STREAMS = "critical_path_cuda_event_sync_multi_stream_event_sync_trace.json.gz"
_ALL = (Tf32(), CudnnBenchmark(), CudaGraphs())


@pytest.fixture
def trace(shared_data: Path) -> Callable[..., Graph]:
    return lambda file, step=None: read_kineto(shared_data / "gpu_traces" / file, step)


def device_times(graph: Graph) -> list[float]:
    """Return durations of tasks on the device, in order of lanes."""
    busy = np.isin(graph.tasks.kind, (Kind.KERNEL, Kind.COPY, Kind.COMMUNICATION))
    return sorted(graph.tasks.duration_ns[busy].tolist())


@pytest.mark.parametrize("technique", _ALL, ids=str)
def test_on_a_cpu_the_reason_is_reported(technique: Technique) -> None:
    reason = technique.why_not(graph_of(images))
    assert reason is not None
    assert "NVIDIA GPUs" in reason
    assert re.search(r"\bCPU\b", reason)


@pytest.mark.parametrize("technique", _ALL, ids=str)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is an NVIDIA GPU")
def test_applied_without_a_gpu_it_is_a_clear_error(technique: Technique) -> None:
    with pytest.raises(WorkloadError, match=r"(?i)\btorch\b.*\bnone\b"):
        build(mlp, technique)


@pytest.fixture
def cuda(require: Callable[[str, bool, str], None]) -> None:
    require("cuda", torch.cuda.is_available(), "torch sees no NVIDIA GPU")


def on_gpu() -> Any:
    model, (inputs, targets), loss, _ = mlp()
    model = model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    return model, (inputs.cuda(), targets.cuda()), loss, optimizer


@pytest.mark.parametrize("technique", _ALL, ids=str)
def test_applied_on_a_gpu_the_loss_stays(technique: Technique, cuda: None) -> None:
    plain, changed = build(on_gpu), build(on_gpu, technique)
    for _ in range(3):
        torch.testing.assert_close(plain.step(), changed.step(), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("technique", [ChannelsLast(), InferenceMode(), BatchSize()], ids=str)
def test_a_trace_without_arguments_is_not_judged_by_them(
    technique: Technique, trace: Callable[..., Graph]
) -> None:
    # Its kernels are those of an AlexNet: "no cuDNN convolution" would be wrong.
    graph = trace("critical_path_alexnet_benchmark_result_2869224_1695835535_trace.json.gz")
    assert "no operators' arguments" in (refusal(technique, graph) or "")
    assert refusal(Tf32(), graph) is None


def test_graphs_speed_up_a_launch_bound_step_and_keep_its_kernels(
    trace: Callable[..., Graph],
) -> None:
    graph = trace(_LAUNCH_BOUND, 551)
    assert CudaGraphs().why_not(graph) is None
    after = CudaGraphs().predict(graph, context=None)  # type: ignore[arg-type]
    after.check()
    assert device_times(after) == device_times(graph)
    assert replay(after).step_ns < 0.8 * replay(graph).step_ns
    names = [after.string(int(name)) for name in after.tasks.name]
    assert 1 <= names.count("cudaGraphLaunch") < 10
    # Tasks that wait for the device stay in place.
    assert (after.tasks.kind == Kind.WAIT).sum() == (graph.tasks.kind == Kind.WAIT).sum()


def test_a_device_bound_step_keeps_its_length(trace: Callable[..., Graph]) -> None:
    graph = trace(_V100, 104)
    after = CudaGraphs().predict(graph, context=None)  # type: ignore[arg-type]
    assert len(after) < len(graph) / 4
    assert replay(after).step_ns == pytest.approx(replay(graph).step_ns, rel=1e-3)


def test_a_launch_bound_step_becomes_bound_by_kernels_under_graphs(
    trace: Callable[..., Graph],
) -> None:
    graph = trace(_V100, 104)
    short = np.where(graph.tasks.kind == Kind.KERNEL, 0.05, 1.0)
    launched = replace_tasks(graph, duration_ns=graph.tasks.duration_ns * short)
    after = CudaGraphs().predict(launched, context=None)  # type: ignore[arg-type]
    assert replay(after).step_ns < 0.8 * replay(launched).step_ns


def test_a_step_without_a_capturable_range_reports_what_it_waits_for(
    trace: Callable[..., Graph],
) -> None:
    reason = CudaGraphs().why_not(trace(_STREAMS))
    assert reason is not None
    assert re.search(r"\bGPU 1 times\b", reason)


def test_predictions_of_graphs_have_an_interval(trace: Callable[..., Graph]) -> None:
    (found,) = predict(trace(_LAUNCH_BOUND, 551), [CudaGraphs()])
    assert found.metric == "wall"
    assert found.high / found.low > 1.1
    assert found.provenance is Provenance.ASSUMED


def test_tf32_changes_float32_matmuls_only_and_as_an_assumption(
    trace: Callable[..., Graph],
) -> None:
    graph = trace(_A100)
    after = Tf32().predict(graph, context=None)  # type: ignore[arg-type]
    changed = np.flatnonzero(after.tasks.duration_ns != graph.tasks.duration_ns)
    names = {graph.string(int(graph.tasks.name[task])) for task in changed}
    assert names == {"ampere_sgemm_32x32_sliced1x4_tn"}
    assumed = PROVENANCES.index(Provenance.ASSUMED)
    assert (after.tasks.provenance[changed] == assumed).all()


def test_the_interval_of_tf32_ranges_from_no_gain_to_the_data_sheets(
    trace: Callable[..., Graph],
) -> None:
    graph = trace(_STREAMS)
    # As if the step were only matmuls.
    product = np.array([graph.string(int(n)) == "ampere_sgemm_128x64_nn" for n in graph.tasks.name])
    tasks = graph.tasks
    bare = replace_tasks(
        graph,
        duration_ns=np.where(product, tasks.duration_ns * 1000, 0.0),
        gap_ns=np.zeros(len(graph)),
        lane=np.zeros(len(graph), np.int32),
    )
    edges = dataclasses.replace(bare.edges, delay_ns=np.zeros(len(bare.edges)))
    (found,) = predict(dataclasses.replace(bare, edges=edges), [Tf32()])
    assert found.low < 1 / 8
    assert found.high > 1
    assert found.verdict == "inconclusive"


def test_tf32_needs_ampere(trace: Callable[..., Graph]) -> None:
    assert "older than Ampere" in (Tf32().why_not(trace(_V100, 104)) or "")


def test_the_gain_of_autotuning_is_uncertain(trace: Callable[..., Graph]) -> None:
    graph = trace(_V100, 104)
    assert CudnnBenchmark().why_not(graph) is None
    (found,) = predict(graph, [CudnnBenchmark()])
    assert found.ratio == 1
    assert found.low < 0.9
    assert found.verdict == "inconclusive"
    assert "no cuDNN convolution" in (CudnnBenchmark().why_not(trace(_LAUNCH_BOUND, 551)) or "")


@pytest.mark.parametrize(
    ("technique", "line"),
    [
        (Tf32(), "+torch.backends.cuda.matmul.allow_tf32 = True"),
        (CudnnBenchmark(), "+torch.backends.cudnn.benchmark = True"),
    ],
    ids=str,
)
def test_the_source_edit_is_the_flag(technique: Technique, line: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\n\nmodel = torch.nn.Linear(2, 2)\n")
    change = technique.code(Workload.parse(str(script)))
    assert change is not None
    assert line in change.diff


def test_graphs_are_written_by_hand() -> None:
    change = CudaGraphs().code(Workload.of(*mlp()))
    assert change is not None
    assert not change.diff
    assert "make_graphed_callables" in change.note
