"""The compression bench judges known steps against known predictions."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.cluster import Cluster, ClusterError, Collective
from slipstream.cluster.quantity import Quantity
from slipstream.graph import replay
from slipstream_bench import rank_models as bench_models
from slipstream_bench.rows import Bar, BenchOptions, at_most
from slipstream_bench.systems.compression import bars as bench


def good(auto_ms: float = 201.0, cast_told_ms: float = 303.0) -> Bar:
    """The row of a cell whose predictions are 1 % off."""
    cells = {"none": (400.0, 404.0), "cast:bf16": (300.0, cast_told_ms),
             "powersgd:4,start=2": (200.0, 202.0)}  # fmt: skip
    return at_most(
        "steps", 0.0, 12, "%",
        data={
            "cells": {
                how: {"step_ms": step, "predicted_ms": predicted, "bytes_over_told": 1.004}
                for how, (step, predicted) in cells.items()
            },
            "auto": {"step_ms": auto_ms, "chosen": "powersgd:4"},
        },
    )  # fmt: skip


@dataclass
class _Told:
    step_ns: float
    sent_bytes: float = 1e6

    @property
    def graph(self) -> Any:
        row = SimpleNamespace(
            sent_bytes=self.sent_bytes, ranks=2, collective=SimpleNamespace(kind="all_reduce")
        )
        return SimpleNamespace(exchanges=[row])


def _rows(cells: list[Bar]) -> dict[str, Bar]:
    return {bar.bar: bar for bar in bench._summary(cells)}


def test_summary_rows_hold_if_every_cell_holds() -> None:
    rows = _rows([good()] * 20)
    predicted = rows["predicted step, median error"]
    assert predicted.value == pytest.approx(1.0)
    assert (predicted.holds, predicted.n) == (True, 60)
    assert rows["verdict of the prediction"].value == 100.0
    assert rows["auto against none"].value == pytest.approx(100 * (201 / 400 - 1))
    assert rows["auto within 8 % of the best of its candidates"].holds
    wire = rows["bytes at the interface against those told"]
    assert wire.value == pytest.approx(0.4, abs=1e-6)


def test_an_inaccurate_cell_or_too_few_cells_are_reported() -> None:
    rows = _rows([good(), good(cast_told_ms=500.0)])
    predicted = rows["predicted step, median error"]
    assert predicted.holds is False
    assert re.search(r"\b5\b.*\b6\b.*\bnot\b.*\b60\b.*\b12 %", predicted.detail)
    assert rows["verdict of the prediction"].value == 75.0
    rows = _rows([good(), good(auto_ms=420.0)])
    assert rows["auto against none"].holds is False
    assert rows["auto within 8 % of the best of its candidates"].value == 50.0


def _given(
    monkeypatch: pytest.MonkeyPatch,
    steps: dict[str, list[float]],
    expected_ms: dict[str, list[float]],
) -> None:
    """Replace steps and predictions by these values, run by run."""
    runs = iter(range(99))

    def measured(*_: Any, **__: Any) -> Any:
        run = next(runs)
        arms = {
            how: {"median_s": each[run], "sent": 1.07e6, "chosen": "None"}
            for how, each in steps.items()
        }
        return SimpleNamespace(arms=arms, cluster=run)

    def predicted(graph: Any, model: Any, run: int, methods: Any, *_: Any) -> Any:
        return {how: _Told(expected_ms[how][run] * 1e9) for how in methods}

    monkeypatch.setattr(bench, "measured", measured)
    monkeypatch.setattr(bench, "predicted", predicted)


def test_a_row_of_cells_is_read_back_as_it_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = {how: [0.1 + 0.01 * n] for n, how in enumerate(bench.METHODS)}
    _given(monkeypatch, {**steps, "auto": [0.1]}, {how: [1.04 * s] for how, (s,) in steps.items()})
    row = bench.cell_row("steps", None, "narrow", 60, 2, 1)  # type: ignore[arg-type]
    assert row.holds
    assert row.value == pytest.approx(4.0)
    assert list(bench.cells_of(row)) == list(bench.METHODS)
    assert json.loads(json.dumps(row.data)) == row.data
    assert _rows([row])["predicted step, median error"].value == pytest.approx(4.0)


def test_ranks_without_separate_cores_are_not_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = {how: [1.0] for how in (*bench.METHODS, "auto", bench.MEETING)}
    _given(monkeypatch, steps, {how: [0.6] for how in bench.METHODS})
    monkeypatch.setattr(bench, "_without_bytes", lambda cluster: cluster)
    monkeypatch.setattr(bench, "_shared_machine", lambda graph, ranks, slower: graph)
    with pytest.raises(ClusterError, match=r"\b1000 ms\b.*\b600\b"):
        bench.cell_row("steps", None, "computing", 60, 2, 1)  # type: ignore[arg-type]


def test_ranks_that_compute_are_predicted_at_the_pace_of_concurrent_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = {how: [1.0] for how in (*bench.METHODS, "auto", bench.MEETING)}
    _given(monkeypatch, steps, {how: [0.8] for how in bench.METHODS})
    paces: list[float] = []
    monkeypatch.setattr(bench, "_without_bytes", lambda cluster: cluster)
    monkeypatch.setattr(bench, "_shared_machine", lambda graph, ranks, slower: paces.append(slower))
    row = bench.cell_row("steps", None, "computing", 60, 2, 1)  # type: ignore[arg-type]
    assert paces == [1.0, pytest.approx(1.25)]
    assert " 1.25 x " in row.detail


def test_links_without_bandwidth_cost_still_have_latency() -> None:
    cluster = Cluster.load("workers=2,link=10mbit,latency=0us")
    link = bench._without_bytes(replace(cluster, alpha_ns=Quantity(3e5)))
    for size in (8, 1 << 24):
        assert link.cost(Collective("all_gather", size, link.all())).duration_ns == pytest.approx(
            3e5, rel=0.01
        )


def test_a_crossover_lies_where_the_ratio_passes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    at = bench._AROUND
    _given(
        monkeypatch,
        {"none": [1.0] * 4, "sign": [0.5, 0.8, 1.25, 2.0]},
        {"none": [1.0] * 4, "sign": [0.4, 0.8, 1.25, 1.6]},
    )
    row = bench._crossing_row("crossing", BenchOptions(), None, "sign", 1e-9)  # type: ignore[arg-type]
    assert row.value == pytest.approx(0.0, abs=1e-9)
    assert row.holds
    assert f"measured {(at[1] * at[2]) ** 0.5:.0f} Mbit/s" in row.detail
    _given(
        monkeypatch, {"none": [1.0] * 4, "sign": [0.5] * 4}, {"none": [1.0] * 4, "sign": [0.5] * 4}
    )
    row = bench._crossing_row("crossing", BenchOptions(), None, "sign", 1e-9)  # type: ignore[arg-type]
    assert row.holds is False, "it never crosses"


def test_sleep_of_layers_is_part_of_their_recorded_step() -> None:
    model = bench.Model(3, 16, 0.004, 0.006, 4, 1.0)
    graph = bench.graph_of(model)
    assert replay(graph).step_ns >= 3 * (4e6 + 6e6)


def test_a_layer_measures_its_time_from_the_previous_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    slept: list[float] = []
    monkeypatch.setattr(bench_models.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(bench_models.time, "sleep", slept.append)
    clock = bench_models.Clock()
    clock.begin()
    now[0] = 10.25  # its computation, or a late wake-up
    clock.wait(1.0)
    now[0] = 11.5
    clock.wait(1.0)
    now[0] = 20.0
    clock.wait(1.0)
    assert slept == [0.75, 0.5, 0.0]
