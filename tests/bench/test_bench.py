"""The bench runner: rows appear as measured, full runs resume, quick ones show the past."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from slipstream.errors import UnknownNameError
from slipstream_bench import running
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most

asked: list[BenchOptions] = []


def counting(options: BenchOptions) -> Iterator[Bar]:
    """Three rows; the last is measured by full runs only, and dies when told to."""
    asked.append(options)
    for name, value in (("one", 1.0), ("two", 2.0)):
        if options.wants(name):
            yield at_least(name, value, 1.5, "x")
    if options.full and options.wants("three"):
        yield at_most("three", 3.0, 5.0, "s")


def interrupted(options: BenchOptions) -> Iterator[Bar]:
    yield at_least("one", 1.0, 1.5, "x")
    raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def only_these(monkeypatch: pytest.MonkeyPatch) -> None:
    asked.clear()
    points = [
        EntryPoint("counting", f"{__name__}:counting", running.GROUP),
        EntryPoint("interrupted", f"{__name__}:interrupted", running.GROUP),
    ]
    monkeypatch.setattr(running, "entry_points", lambda group: points)
    monkeypatch.setattr(running, "_commit", lambda: "abc")


def test_a_bar_holds_exactly_when_its_value_reaches_the_target() -> None:
    assert at_least("b", 1.5, 1.5, "x").holds is True
    assert at_least("b", 1.49, 1.5, "x").holds is False
    assert at_most("b", 1.5, 1.5, "x").holds is True
    assert at_most("b", 1.51, 1.5, "x").holds is False


def test_a_quick_run_measures_and_shows_what_a_full_run_recorded(tmp_path: Path) -> None:
    list(running.bench("counting", full=True, results=tmp_path))
    rows = list(running.bench("counting", results=tmp_path))
    assert [(row.bar, row.source) for row in rows] == [
        ("one", "now"),
        ("two", "now"),
        ("one", "recorded"),
        ("two", "recorded"),
        ("three", "recorded"),
    ]
    assert all(row.commit == "abc" and row.device and row.date for row in rows)


def test_a_killed_full_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        list(running.bench("interrupted", full=True, results=tmp_path))
    (tmp_path / "interrupted.jsonl").rename(tmp_path / "counting.jsonl")
    rows = list(running.bench("counting", full=True, results=tmp_path))
    assert set(asked[-1].done) == {"one"}
    assert {row.bar for row in rows} == {"one", "two", "three"}
    assert {bar.bar for bar in running.read_results(tmp_path / "counting.jsonl")} == {
        "one",
        "two",
        "three",
    }


def test_another_commit_starts_a_full_run_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    list(running.bench("counting", full=True, results=tmp_path))
    monkeypatch.setattr(running, "_commit", lambda: "def")
    list(running.bench("counting", full=True, results=tmp_path))
    assert not asked[-1].done
    assert {bar.commit for bar in running.read_results(tmp_path / "counting.jsonl")} == {"def"}


def test_only_measures_the_bars_it_names(tmp_path: Path) -> None:
    assert [row.bar for row in running.bench("counting", only="tw", results=tmp_path)] == ["two"]


def test_an_unknown_bench_suggests_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="counting"):
        list(running.bench("countin", results=tmp_path))


def test_a_quick_run_begins_no_row_once_its_time_is_up_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    list(running.bench("counting", full=True, only="one", results=tmp_path))
    monkeypatch.setattr(running, "QUICK_S", 0.0)
    recorded, left = running.bench("counting", results=tmp_path)
    assert (recorded.bar, recorded.source, recorded.value) == ("one", "recorded", 1.0)
    assert "not measured now: the time of a quick run was used up" in recorded.detail
    assert (left.bar, left.value, left.holds) == ("two", None, None)


def test_rows_keep_their_data_and_old_records_have_none(tmp_path: Path) -> None:
    row = at_least("one", 1.0, 1.5, "x", data={"cells": [[1.0, 2.0]]})
    running.write_results(tmp_path / "counting.jsonl", [row])
    assert running.read_results(tmp_path / "counting.jsonl") == [row]
    (tmp_path / "old.jsonl").write_text(
        '{"bar": "one", "value": 1.0, "unit": "x", "target": "", "holds": true}\n'
    )
    (old,) = running.read_results(tmp_path / "old.jsonl")
    assert old.data == {}
