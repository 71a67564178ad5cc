"""Rows of ``bench accuracy`` from given measurements of cells."""

from __future__ import annotations

import json
import math

import pytest

from slipstream_bench.rows import Bar, BenchOptions
from slipstream_bench.systems.accuracy import bars as bench_accuracy
from slipstream_bench.systems.accuracy.bars import bars
from slipstream_bench.systems.accuracy.cells import Cell


def cell(model: str, technique: str, predicted: float, measured: float, half: float = 0.01) -> Cell:
    return Cell(
        model, technique, predicted, predicted * 0.95, predicted * 1.05,
        measured, measured * (1 - half), measured * (1 + half),
    )  # fmt: skip


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> object:
    """Run the bench with the families of `cells`."""

    def run(*cells: Cell, **options: object) -> dict[str, Bar]:
        grid: dict[str, tuple[str, ...]] = {}
        for measured_cell in cells:
            grid[measured_cell.model] = (
                *grid.get(measured_cell.model, ()),
                measured_cell.technique,
            )
        monkeypatch.setattr(bench_accuracy, "_grid", lambda full: grid)

        def measured(
            family: str, workload: object, techniques: list[str], budget: str, report: object
        ) -> list[Cell]:
            return [cell for cell in cells if cell.model == family and cell.technique in techniques]

        monkeypatch.setattr(bench_accuracy, "measure_cells", measured)
        monkeypatch.setattr(bench_accuracy, "workload_of", lambda family: None)
        return {row.bar: row for row in bars(BenchOptions(**options))}  # type: ignore[arg-type]

    return run


GOOD = [cell("net", f"t{i}", 1 + i / 10, 1.01 + i / 10) for i in range(6)]


def test_a_cell_is_read_back_from_its_row() -> None:
    original = cell("net", "amp:bf16", 1.25, 1.2)
    again = Cell.from_row(original.to_row())
    assert again == original
    unjudged = Cell("net", "amp:bf16", 1.2, 1.1, 1.3, note="measured too widely")
    row = unjudged.to_row()
    json.dumps(row.data, allow_nan=False)
    again = Cell.from_row(row)
    assert not again.judged
    assert (again.note, again.predicted_high) == ("measured too widely", 1.3)


def test_errors_are_judged_over_all_cells(rows: object) -> None:
    found = rows(*GOOD)  # type: ignore[operator]
    assert found["error of predicted speed-up, median"].holds
    assert found["error of predicted speed-up, maximum"].value == pytest.approx(100 * 0.01 / 1.01)
    assert found["printed 90 % intervals that hold"].value == 100
    assert found["rank correlation, worst family"].value == 1


def test_a_missed_slow_down_and_a_wrong_order_are_detected(rows: object) -> None:
    found = rows(*GOOD, cell("net", "slow", 1.3, 0.8))  # type: ignore[operator]
    slow = found["slow-downs beyond 3 % not predicted as one"]
    assert slow.value == 1
    assert not slow.holds
    assert "net slow" in slow.detail
    assert not found["error of predicted speed-up, maximum"].holds
    assert not found["rank correlation, worst family"].holds


def test_following_a_wrong_first_choice_costs(rows: object) -> None:
    best_missed = [cell("net", f"t{i}", 1.5 - i / 10, 1 + i / 10) for i in range(6)]
    found = rows(*best_missed)  # type: ignore[operator]
    row = found["families where the first choice is within 3 % of the best"]
    assert not row.holds
    assert row.value == 0


def test_too_few_judged_cells_give_no_verdict(rows: object) -> None:
    wide = [Cell("net", f"w{i}", 1.0, 0.9, 1.1, note="too wide") for i in range(9)]
    found = rows(*GOOD[:5], *wide)  # type: ignore[operator]
    assert found["error of predicted speed-up"].holds is None


def test_inapplicable_techniques_do_not_count(rows: object) -> None:
    nan = math.nan
    refused = [
        Cell("net", f"r{i}", nan, nan, nan, note="does not apply: it is too small", applies=False)
        for i in range(9)
    ]
    found = rows(*GOOD, *refused)  # type: ignore[operator]
    assert found["error of predicted speed-up, median"].n == 6
    assert found["net r0"].holds is None


def test_a_killed_run_resumes_with_the_remaining_cells(rows: object) -> None:
    done = {entry.name: entry.to_row() for entry in GOOD[:4]}
    found = rows(*GOOD, full=True, done=done)  # type: ignore[operator]
    assert "net t0" not in found
    assert "net t5" in found
    assert found["error of predicted speed-up, median"].n == 6


def test_one_remeasured_family_is_judged_with_the_recorded_ones(rows: object) -> None:
    other = [cell("mlp", f"t{i}", 1.0, 1.2) for i in range(6)]
    recorded = {entry.name: entry.to_row() for entry in (*GOOD, *other)}
    found = rows(*GOOD, *other, full=True, only="mlp", recorded=recorded)  # type: ignore[operator]
    assert "net t0" not in found
    assert "mlp t0" in found
    assert found["error of predicted speed-up, median"].n == 12


def test_pairs_are_judged_separately(rows: object) -> None:
    pairs = [cell("net", f"a+b{i}", 1.0, 1.1) for i in range(5)]
    found = rows(*GOOD, *pairs)  # type: ignore[operator]
    assert found["error of predicted speed-up, maximum"].holds
    assert found["error of predicted pairs, maximum"].n == 5
    assert found["error of predicted pairs, median"].value == pytest.approx(100 * 0.1 / 1.1)


def test_cells_have_the_names_of_predictions() -> None:
    grid = bench_accuracy._grid(True)
    assert "compile:default" in grid["perceptron"]
    assert "batch_size:x2+checkpointing" in grid["perceptron"]
    assert len(grid) >= 7
