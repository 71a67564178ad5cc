"""Exports have every sample, in formats that other programs read."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import json
import math
import re
from pathlib import Path

import pytest
from made_up import claim, experiment, prediction, series

from slipstream.errors import InvalidArgumentError, MissingExtraError, SlipstreamError
from slipstream.measure.export import COLUMNS, export
from slipstream.measure.records import Phase

_MADE = experiment(experiment_id="e1", predictions={"fast": prediction()})
_SAMPLES = sum(s.values.size for s in _MADE.series.values())


def test_json_lines_have_everything(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    assert export([(_MADE, [claim(high=math.inf)]), (_MADE, [])], "jsonl", path) == 2
    first, second = map(json.loads, path.read_text().splitlines())
    assert first["claims"][0]["ratio"] == 0.8
    assert first["claims"][0]["high"] is None
    assert second["claims"] == []
    assert first["environment"]["cpu.model"] == "Testor 3000"
    assert first["predictions"]["fast"]["technique"] == "lowrank:0.25"
    found = {(s["arm"], s["metric"], s["phase"]): s["values"] for s in first["series"]}
    assert found == {key: s.values.tolist() for key, s in _MADE.series.items()}


def test_csv_has_every_sample_exactly(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    assert export([(_MADE, [])], "csv", path) == _SAMPLES
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    key = ("fast", "cpu", "measure")
    values = [float(r["value"]) for r in rows if (r["arm"], r["metric"], r["phase"]) == key]
    assert values == _MADE.series["fast", "cpu", Phase.MEASURE].values.tolist()


def test_parquet_needs_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def without(name: str, package: str | None = None) -> object:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(MissingExtraError, match="pyarrow") as caught:
        export([(_MADE, [])], "parquet", tmp_path / "r.parquet")
    assert "slipstream[parquet]" in (caught.value.remedy or "")
    assert list(tmp_path.iterdir()) == []


def test_parquet_has_every_sample_exactly(tmp_path: Path) -> None:
    if importlib.util.find_spec("pyarrow") is None:
        pytest.skip("pyarrow is not installed")
    path = tmp_path / "r.parquet"
    empty = experiment(series={})
    assert export([(_MADE, []), (empty, [])], "parquet", path) == _SAMPLES
    table = importlib.import_module("pyarrow.parquet").read_table(path)
    assert tuple(table.column_names) == COLUMNS
    expected = [v for s in _MADE.series.values() for v in s.values.tolist()]
    assert table["value"].to_pylist() == expected


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="'xls'") as caught:
        export([], "xls", tmp_path / "r.xls")
    assert caught.value.argument == "to"
    assert {"jsonl", "csv", "parquet"} <= set(re.findall(r"\w+", caught.value.remedy or ""))
    assert list(tmp_path.iterdir()) == []


def test_a_failed_export_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    path.write_text("old")

    def broken():
        yield _MADE, []
        raise OSError(28, "No space left on device")

    with pytest.raises(SlipstreamError, match="No space left"):
        export(broken(), "csv", path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_text_with_commas_and_line_breaks_round_trips(tmp_path: Path) -> None:
    title = 'a, "b"\nc'
    made = experiment(title=title, series={("base", "wall", Phase.MEASURE): series([1.0])})
    export([(made, [])], "csv", tmp_path / "r.csv")
    with (tmp_path / "r.csv").open(newline="") as file:
        assert next(csv.DictReader(file))["title"] == title
