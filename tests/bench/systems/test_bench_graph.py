"""The graph bench: its random graphs, its verdicts, and an optional peer."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.graph import Graph, read_trace, replace_tasks
from slipstream_bench.rows import Bar, BenchOptions
from slipstream_bench.systems.graph import bars as bench_graph
from slipstream_bench.systems.graph import capture, exact, peer
from slipstream_bench.systems.graph.exact import random_graph, same_graph


@pytest.mark.parametrize(
    "holds",
    [
        exact.identity_edit_changes_nothing,
        exact.step_is_bounded_below,
        exact.shorter_is_never_longer,
        exact.insert_then_remove_restores,
        exact.round_trips_are_equal,
        exact.acyclic_or_named_cycle,
    ],
)
def test_exact_properties_hold_for_random_graphs(holds: Any) -> None:
    assert all(holds(np.random.default_rng(seed)) for seed in range(1000, 1015))


def test_random_graphs_cover_every_column() -> None:
    graphs = [random_graph(np.random.default_rng(seed)) for seed in range(30)]
    for part in dataclasses.fields(Graph):
        if part.name != "shrunk":
            values = [getattr(graph, part.name) for graph in graphs]
            assert any(not isinstance(v, np.ndarray) and v for v in values) or any(
                isinstance(v, np.ndarray) and len(v) for v in values
            )
    assert any((graph.edges.lag == 1).any() for graph in graphs)
    assert any(graph.edges.delay_ns.any() for graph in graphs)


@pytest.mark.parametrize("part", ["tasks", "edges", "memory"])
def test_one_changed_value_makes_graphs_differ(part: str) -> None:
    graph = next(
        graph
        for graph in (random_graph(np.random.default_rng(seed)) for seed in range(100))
        if len(graph.edges) and len(graph.memory)
    )
    assert same_graph(graph, dataclasses.replace(graph))
    table: Any = getattr(graph, part)
    for column in dataclasses.fields(table):
        changed = getattr(table, column.name).copy()
        changed[-1] += 1
        other = dataclasses.replace(table, **{column.name: changed})
        assert not same_graph(graph, dataclasses.replace(graph, **{part: other}))
    assert not same_graph(graph, dataclasses.replace(graph, samples=graph.samples + 1))


def test_a_failing_property_gives_a_failed_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exact, "_QUICK", 4)
    monkeypatch.setattr(exact, "step_is_bounded_below", lambda rng: False)
    (row,) = exact.rows(BenchOptions(only="(b)"))
    assert (row.value, row.unit, row.holds) == (0, "of 4", False)
    assert "seeds [0, 1, 2, 3]" in row.detail


# The peer


def _no_peer(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def refused(*arguments: Any, **keywords: Any) -> Any:
        raise subprocess.CalledProcessError(1, "pip")

    monkeypatch.setattr(peer, "cache_folder", lambda: folder)
    monkeypatch.setattr(peer.venv, "create", lambda path, with_pip: path.mkdir())
    monkeypatch.setattr(peer.subprocess, "run", refused)


def test_rows_of_a_missing_peer_are_not_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _no_peer(monkeypatch, tmp_path)
    monkeypatch.setattr(peer, "_answers", lambda python: False)
    monkeypatch.setattr(bench_graph, "_traces", lambda: {bench_graph._LARGEST: tmp_path})
    found = list(bench_graph._peer_rows(BenchOptions()))
    assert [(row.holds, row.value) for row in found] == [(None, None)] * 2
    assert all("traceinsight 0.6.1 cannot be installed" in row.detail for row in found)
    # The incomplete build is removed, so that the next run tries again.
    assert not list(tmp_path.glob("peers/*"))


def test_rows_of_missing_traces_are_not_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SLIPSTREAM_DATA", raising=False)
    for rows in (bench_graph._peer_rows, bench_graph._fixture_rows):
        found = list(rows(BenchOptions()))
        assert found
        assert all(row.holds is None and "gpu_traces" in row.detail for row in found)


def test_halved_kernels_are_compared_with_the_recording(shared_data: Path) -> None:
    golden = bench_graph._GOLDENS[1]
    graph = read_trace(shared_data / "gpu_traces" / f"{golden.trace}.json.gz").graph(golden.step)
    assert bench_graph._halved("row", golden, graph).holds is True
    longer = replace_tasks(graph, gap_ns=graph.tasks.gap_ns + 1000.0)
    row = bench_graph._halved("row", golden, longer)
    assert row.holds is False
    assert "differs from the golden values" in row.detail


# Judging captures


def _repeat(step_ns: float, plain: tuple[float, float], loaded_ns: float = 0.0) -> dict[str, Any]:
    idle = {"step_ns": step_ns, "wall_ns": 100.0, "events": 10, "per_event_ns": 1.0, "scale": 1.0}
    loaded = {"step_ns": loaded_ns, "wall_ns": 190.0}
    return {"idle": idle, "plain_ns": plain, "loaded": loaded}


def _residual(*repeats: dict[str, Any]) -> Bar:
    return capture._residual("row", list(repeats))


def test_a_residual_is_judged_if_plain_steps_agree() -> None:
    calm = [_repeat(102.0, (100.0, 101.0)), _repeat(99.0, (100.0, 102.0))]
    row = _residual(*calm, _repeat(98.0, (100.0, 100.0)))
    assert row.holds is True
    assert row.value == pytest.approx(2.0)
    assert _residual(*[_repeat(105.0, (100.0, 100.0))] * 3).holds is False


def test_a_residual_is_not_judged_if_plain_steps_differ() -> None:
    calm = _repeat(102.0, (100.0, 101.0))
    row = _residual(calm, calm, _repeat(102.0, (100.0, 110.0)))
    assert row.holds is None
    assert "contended" in row.detail


def test_load_may_change_a_prediction_by_five_percent() -> None:
    def row(loaded_ns: float) -> Bar:
        return capture._under_load("row", [_repeat(100.0, (1, 1), loaded_ns)] * 3, 2)

    assert row(104.0).holds is True
    assert row(94.0).holds is False
    assert "+90 %" in row(104.0).detail


def test_a_capture_is_timed_in_a_child_process() -> None:
    options = BenchOptions(full=False)
    found = capture._in_child(options, capture._workload("perceptron"), "build_times", steps=3)
    assert found["events"] > 0
    assert found["tasks"] > 0
    assert 0 < found["profiler_s"] < found["profiler_s"] + found["build_s"]
