"""A bench row that cannot be measured reports its reason, and the other rows follow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.data import MissingDataError
from slipstream_bench import models
from slipstream_bench.rows import BenchOptions
from slipstream_bench.systems import ensembles
from slipstream_bench.systems.accuracy.cells import Cell
from slipstream_bench.systems.lowrank import bars as lowrank
from slipstream_bench.systems.movement import bars as movement

_CELL = Cell("conv_net", "ensemble:2", 1.1, 1.0, 1.2, measured=1.0, memory_error=0.02)


def test_lowrank_rows_without_their_data_set_are_not_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(*settings: Any) -> float:
        raise MissingDataError("fashion_mnist", "no such data set here", remedy="install it")

    monkeypatch.setattr(lowrank, "percent", missing)
    rows = list(lowrank.bars(BenchOptions(only="accuracy of")))
    assert len(rows) == 4
    assert {(row.value, row.detail) for row in rows} == {(None, "no such data set here")}


def test_ensembles_continue_without_their_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ensembles, "fashion", lambda name: None)
    monkeypatch.setattr(ensembles, "measure_cells", lambda *args, **options: iter([_CELL]))
    time, memory = list(ensembles.bars(BenchOptions(only="predicted")))[-2:]
    assert (time.bar, memory.bar) == (
        "predicted step of members: conv_net", "predicted memory of members: conv_net",
    )  # fmt: skip
    assert (time.value, memory.value) == pytest.approx((10.0, 2.0))


def test_unmeasured_members_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    unmeasured = replace(_CELL, technique="ensemble:4", measured=float("nan"), note="it failed")
    for cells, value in (([_CELL], 10.0), ([unmeasured], None), ([], None)):
        monkeypatch.setattr(
            ensembles, "measure_cells", lambda *args, cells=cells, **options: iter(cells)
        )
        rows = list(ensembles._predicted_rows(BenchOptions(only="step of members: conv_net")))
        assert [row.value for row in rows] == [value if value is None else pytest.approx(value)]


def test_movement_profiles_a_users_copy_of_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    profiled: list[Path] = []

    def profile(workload: str) -> None:
        path = Path(workload.rpartition(":")[0])
        assert path.read_bytes() == Path(models.__file__).read_bytes()
        profiled.append(path)
        raise MissingDataError("none", "not profiled in this test", remedy="none")

    monkeypatch.setattr(movement.ss, "profile", profile)
    with pytest.raises(MissingDataError):
        list(movement.bars(BenchOptions(only="bytes with a class")))
    # Lines of a file in an installed package do not count as the user's.
    assert not profiled[0].is_relative_to(Path(models.__file__).parent)
