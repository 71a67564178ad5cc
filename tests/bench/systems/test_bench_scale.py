"""The scale bench: its rows on logged runs are consistent."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slipstream.data.errors import MissingDataError
from slipstream_bench import datasets
from slipstream_bench.rows import BenchOptions
from slipstream_bench.systems.scale import mlperf


def test_the_mlperf_rows_are_judged_and_name_the_evaluation_tail(
    require: Callable[[str, bool, str], None],
) -> None:
    try:
        times = datasets.mlperf_v07()
    except MissingDataError as error:
        require("data", False, str(error))
        return
    rows = {bar.bar: bar for bar in mlperf.bars(BenchOptions(only="M"))}
    median = rows["MLPerf v0.7 run times: median error"]
    assert median.holds
    assert median.n == len(mlperf.TARGETS)
    run = mlperf.logged(mlperf.steps_of(times, "bert", "tpu-v3-8192-JAX"))
    assert run.wall == "evaluation tail"
    assert run.parts["evaluation tail"] > 0.5 * run.total_ns
    other = mlperf.logged(mlperf.steps_of(times, "resnet", "tpu-v4-16-TF"))
    assert other.wall == "steps"


def test_rows_report_missing_data(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> None:
        raise MissingDataError("mlperf_v07", "not here", remedy="")

    monkeypatch.setattr(datasets, "mlperf_v07", gone)
    rows = list(mlperf.bars(BenchOptions()))
    assert rows
    assert all(row.holds is None for row in rows)
