"""The accumulation bench summarises its rows; verdicts depend on the recorded full run."""

from __future__ import annotations

import re
from typing import Any

import pytest

from slipstream.cluster import ClusterError
from slipstream_bench.rows import Bar, BenchOptions, at_most
from slipstream_bench.systems import accumulation
from slipstream_bench.systems.compression import bars as compression_bars

_ALL = "predicted step of several batches, median error"


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulation, "why_no_netlab", lambda: None)
    monkeypatch.setattr(compression_bars, "graph_of", lambda model: None)


def run(
    monkeypatch: pytest.MonkeyPatch, predictions: dict[str, float], options: BenchOptions
) -> dict[str, Bar]:
    """Run all rows with steps of 100 ms; `predictions` by rate, 100 by default."""

    def cell_row(bar: str, graph: Any, name: str, megabits: int, ranks: int, *rest: Any) -> Bar:
        if ranks == 4:
            raise ClusterError("the cores are busy")
        _, methods = rest
        cells = {
            how: {
                "step_ms": 100.0,
                "predicted_ms": predictions.get(how, 100.0),
                "bytes_over_told": 1.046,
            }
            for how in methods
        }
        return at_most(bar, 0.0, 12, "%", n=len(cells), data={"cells": cells})

    monkeypatch.setattr(compression_bars, "cell_row", cell_row)
    return {bar.bar: bar for bar in accumulation.bars(options)}


def test_judged_cells_are_summarised_and_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = run(monkeypatch, {"accumulation:4": 90.0}, BenchOptions(full=True))
    busy = [row for row in rows.values() if row.holds is None]
    assert [row.detail for row in busy] == ["the cores are busy"] * 2
    whole = rows[_ALL]
    assert (whole.holds, whole.n) == (True, 4 * (len(rows) - 3))
    assert whole.value == 0.0
    assert re.search(r"\b10\.0 %.*\b24\b.*\b24\b.*\b12 %", whole.detail)


def test_one_inaccurate_cell_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(monkeypatch, {"accumulation:2": 88.0 + 1e-6}, BenchOptions(full=True))[_ALL]
    assert whole.holds is True
    whole = run(monkeypatch, {"accumulation:2": 87.0}, BenchOptions(full=True))[_ALL]
    assert whole.holds is False
    assert "18 of 24 cells" in whole.detail


def test_a_single_row_is_judged_with_the_recorded_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded = run(monkeypatch, {}, BenchOptions(full=True))
    recorded.pop(_ALL)
    only = "narrow, 15 Mbit/s"
    far = dict.fromkeys(accumulation.METHODS, 107.0)
    rows = run(monkeypatch, far, BenchOptions(full=True, only=only, recorded=recorded))
    assert len(rows) == 2
    assert rows[_ALL].n == 24
    assert "largest 7.0 %" in rows[_ALL].detail


def test_a_quick_run_takes_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = run(monkeypatch, {}, BenchOptions())
    assert len(rows) == 2
    assert rows[_ALL].holds is None
    assert re.search(r"\b4\b.*\b4\b.*\b12 %.*\bnot\b.*\b20\b", rows[_ALL].detail)
