"""Tests of steps on other devices: GPUs by data sheet, instruction sets by known durations."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from known_durations import KnownDurations
from slipstream.durations import Timing
from slipstream.durations.levels import LEVELS, Level, level, level_of
from slipstream.durations.roofline import Limits
from slipstream.errors import InvalidArgumentError, UnknownNameError
from slipstream.graph import Graph, Kind, read_kineto, replay
from slipstream.provenance import Provenance
from slipstream.verbs.devices import elsewhere
from slipstream.verbs.devices.elsewhere import DevicePredictions, devices_for, predict_device
from small_steps import graph_of

AVX512, AVX2, SSE = LEVELS


class AtLevel(KnownDurations):
    """Every call takes a microsecond; three on the oldest level, where matmuls take nine."""

    def __init__(self, level: Level | None) -> None:
        self.old = level is SSE

    def lookup(self, call: Any) -> Timing | None:
        if "addmm" in call.name and "unknown" not in call.name:
            return Timing(9000.0 if self.old else 1000.0, 0.01, Provenance.MICROBENCHMARK)
        if "relu" in call.name:
            return None  # cannot be run alone
        return Timing(3000.0 if self.old else 1000.0, 0.01, Provenance.MICROBENCHMARK)

    def measure(self, calls: Any, report: Any = None, until: Any = None, **how: Any) -> None:
        pass

    def limits(self, dtypes: frozenset[str]) -> Limits:
        rate = 1e9 if self.old else 4e9
        return Limits({"float32": rate}, rate, 500.0)


def at_level(threads: int, level: Level | None) -> Any:
    return AtLevel(level)


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Graph:
    """A step recorded on the newest of three levels, all of which this CPU supports."""
    monkeypatch.setattr(elsewhere, "levels_here", lambda: LEVELS)
    graph = graph_of("mlp")
    return replace(graph, meta={**graph.meta, "cpu_capability": "AVX512", "threads": 1})


def test_every_operator_has_its_own_ratio(step: Graph) -> None:
    found = predict_device(step, "sse4.1", durations=at_level)
    after = found.prediction.graph
    assert after is not None
    assert found.provenance is Provenance.MICROBENCHMARK
    seen = set()
    for task, number in enumerate(step.tasks.call.tolist()):
        before_ns, after_ns = (g.tasks.duration_ns[task] for g in (step, after))
        if number < 0:
            assert after_ns == before_ns
            continue
        name = step.calls[number].name
        ratio = 9 if "addmm" in name else 3
        if "relu" in name:
            # By the limits of both: a quarter of the bandwidth at the same call overhead.
            ratio = (500 + 4 * (before_ns - 500)) / before_ns
        assert after_ns == pytest.approx(ratio * before_ns)
        seen.add(name)
    assert any("addmm" in name for name in seen)
    assert found.prediction.ratio > 3 * 0.5
    assert found.sample_ns == found.prediction.step_ns / step.samples


def test_a_round_trip_restores_the_step(step: Graph) -> None:
    older = predict_device(step, "sse41", durations=at_level).prediction
    assert older.graph is not None
    old = replace(older.graph, meta={**older.graph.meta, "cpu_capability": "DEFAULT"})
    back = predict_device(old, "avx512", durations=at_level).prediction
    assert back.step_ns == pytest.approx(replay(step).step_ns, rel=0.02)


def test_the_recorded_level_changes_nothing(step: Graph) -> None:
    found = predict_device(step, "AVX-512", durations=at_level).prediction
    assert found.ratio == 1.0


@pytest.mark.parametrize(
    ("device", "meta", "says"),
    [
        ("avx2", {"cpu_capability": "NO AVX512"}, "does not contain"),
        ("avx512", {"cpu_capability": "AVX2"}, "has no avx512"),
    ],
)
def test_reports_why_a_level_cannot_be_predicted(
    step: Graph, monkeypatch: pytest.MonkeyPatch, device: str, meta: dict[str, str], says: str
) -> None:
    monkeypatch.setattr(elsewhere, "levels_here", lambda: (AVX2, SSE))
    graph = replace(step, meta={**step.meta, **meta})
    found = predict_device(graph, device, durations=at_level)
    assert says in str(found.prediction.why_not)
    assert math.isnan(found.sample_ns)
    assert found.dollars_per_million is None


def test_scales_a_cpu_step_to_a_data_sheet(step: Graph) -> None:
    found = predict_device(step, "H100", durations=at_level)
    assert found.device == "h100-sxm"
    assert found.provenance is Provenance.DATASHEET
    assert found.prediction.shares[Provenance.DATASHEET] > 0
    after = found.prediction.graph
    assert after is not None
    # A kernel takes at least its launch.
    changed = after.tasks.provenance != step.tasks.provenance
    assert after.tasks.duration_ns[changed].min() >= 5000
    assert found.dollars_per_million is not None
    assert found.dollars_per_million == pytest.approx(6.88 * found.sample_ns * 1e6 / 3.6e12)
    other = predict_device(step, "cpu-zen4", durations=at_level)
    assert other.price_per_hour is None


def test_accepts_common_device_names(step: Graph) -> None:
    names = [
        predict_device(step, name, durations=at_level).device for name in ("h100", "H200", "t4")
    ]
    assert names == ["h100-sxm", "h200", "t4"]
    with pytest.raises(UnknownNameError, match="rtx"):
        predict_device(step, "rtx")
    with pytest.raises(InvalidArgumentError, match="graph"):
        predict_device("run.slipgraph", "avx2")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="threads"):
        predict_device(step, "threads:0", durations=at_level)
    assert {"avx2", "sse4.1", "h100-sxm", "cpu-zen4"} <= set(devices_for(step))
    assert "avx512" not in devices_for(step)


def test_a_step_that_does_not_fit_is_refused(step: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(
        elsewhere.device_kinds()["t4"], memory_bytes=elsewhere.device_kinds()["t4"].streams
    )
    monkeypatch.setattr(elsewhere, "device_kinds", lambda: {"t4": small})
    found = predict_device(step, "t4", durations=at_level)
    assert "its tensors take" in str(found.prediction.why_not)


@pytest.fixture
def trace(shared_data: Path) -> Graph:
    """AlexNet on an A100."""
    folder = shared_data / "gpu_traces"
    name = "critical_path_alexnet_benchmark_result_2869224_1695835535_trace.json.gz"
    return read_kineto(folder / name)


def test_kernels_on_other_gpus(trace: Graph) -> None:
    launches = trace.meta["launches"]
    kernels = trace.tasks.kind == Kind.KERNEL
    names = [trace.string(int(i)) for i in trace.tasks.name[kernels]]
    assert sum(map(len, launches.values())) == len(names)
    assert all(len(row) == 4 and row[0] > 0 for rows in launches.values() for row in rows)
    found = {name: predict_device(trace, name) for name in devices_for(trace)}
    assert found["a100-sxm"].prediction.ratio == 1.0
    for prediction in found.values():
        after = prediction.prediction.graph
        assert after is not None
        # The host's tasks are unchanged.
        assert (after.tasks.duration_ns == trace.tasks.duration_ns)[~kernels].all()
    totals = {
        name: float(prediction.prediction.graph.tasks.duration_ns[kernels].sum())  # type: ignore[union-attr]
        for name, prediction in found.items()
    }
    assert totals["h200"] < totals["h100-sxm"] < totals["a100-sxm"] < totals["v100"] < totals["t4"]
    # Each kernel changes by no more than bandwidth, clocks and peaks do.
    assert totals["h200"] > totals["a100-sxm"] / 10
    times = [
        prediction.sample_ns for prediction in DevicePredictions.of(step, found.values()).devices
    ]
    assert times == sorted(times)
    wide = found["t4"].prediction
    assert wide.high / wide.low > found["a100-sxm"].prediction.high


def test_reports_an_unknown_gpu(trace: Graph) -> None:
    nameless = {key: value for key, value in trace.meta.items() if key != "device_name"}
    found = predict_device(replace(trace, meta=nameless), "h100")
    assert "does not name" in str(found.prediction.why_not)
    other = replace(trace, meta={**trace.meta, "device_name": "Contoso 9000"})
    assert "no data sheet" in str(predict_device(other, "h100").prediction.why_not)
    assert predict_device(trace, "cpu-zen4").prediction.why_not is not None
    assert "GPU" in str(predict_device(trace, "avx2").prediction.why_not)


def test_recordings_without_launches_assume_a_full_device(trace: Graph) -> None:
    bare = replace(trace, meta={**trace.meta, "launches": {}})
    prediction = predict_device(bare, "v100").prediction
    assert prediction.why_not is None
    assert prediction.ratio >= predict_device(trace, "v100").prediction.ratio


def test_levels_have_names() -> None:
    assert level("SSE41") is SSE
    assert level_of("avx2") is AVX2
    assert level_of("VSX") is None
    with pytest.raises(UnknownNameError, match="avx1024"):
        level("avx1024")
