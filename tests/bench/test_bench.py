"""The bench runner: rows appear as measured, full runs resume, quick ones show the past."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import slipstream
from slipstream.cli.bench import command, more_help
from slipstream.errors import SlipstreamError, UnknownNameError, UsageError
from slipstream_bench import records, running
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most

requested: list[BenchOptions] = []


def counting(options: BenchOptions) -> Iterator[Bar]:
    """Three rows; the last is measured by full runs only, and dies when told to."""
    requested.append(options)
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
    requested.clear()
    points = [
        EntryPoint("counting", f"{__name__}:counting", running.GROUP),
        EntryPoint("interrupted", f"{__name__}:interrupted", running.GROUP),
    ]
    monkeypatch.setattr(running, "entry_points", lambda group: points)
    monkeypatch.setattr(records, "commit", lambda: "abc")
    monkeypatch.setattr(records, "why_not_recordable", lambda: "")


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
    assert all(row.commit == "abc" and row.processor and row.date for row in rows)


def test_a_killed_full_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        list(running.bench("interrupted", full=True, results=tmp_path))
    (tmp_path / "interrupted.jsonl").rename(tmp_path / "counting.jsonl")
    rows = list(running.bench("counting", full=True, results=tmp_path))
    assert set(requested[-1].done) == {"one"}
    assert {row.bar for row in rows} == {"one", "two", "three"}
    recorded = records.read(tmp_path / "counting.jsonl")
    assert [bar.bar for bar in recorded] == ["one", "two", "three"]


def test_another_commit_starts_a_full_run_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    list(running.bench("counting", full=True, results=tmp_path))
    monkeypatch.setattr(records, "commit", lambda: "def")
    list(running.bench("counting", full=True, results=tmp_path))
    assert not requested[-1].done
    recorded = records.read(tmp_path / "counting.jsonl")
    assert [bar.commit for bar in recorded] == ["abc"] * 3 + ["def"] * 3, "no attempt is lost"


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
    assert re.search(r"\bnot measured\b.*\btime\b", recorded.detail)
    assert (left.bar, left.value, left.holds) == ("two", None, None)


def test_a_row_that_takes_longer_than_there_is_time_is_left_out() -> None:
    options = BenchOptions(budget_s=60.0)
    assert options.wants("short", takes_s=30.0)
    assert not options.wants("long", takes_s=90.0)
    assert not options.wants("long", takes_s=90.0)
    assert list(options.left_out) == ["long"]
    assert BenchOptions().wants("long", takes_s=1e9), "a full run has all the time"


def test_a_run_that_could_not_be_measured_again_is_shown_and_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "why_not_recordable", lambda: "the commit is not on main")
    rows = list(running.bench("counting", full=True, results=tmp_path))
    assert len(rows) == 3
    assert all("not on main" in row.detail for row in rows)
    assert not list(tmp_path.iterdir())


def test_what_is_recorded_elsewhere_or_of_other_sources_is_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "sources_hash", lambda entry: "then")
    list(running.bench("counting", full=True, only="three", results=tmp_path))
    (fresh,) = running.bench("counting", only="three", results=tmp_path)
    assert fresh.detail == ""
    monkeypatch.setattr(records, "sources_hash", lambda entry: "now")
    monkeypatch.setattr(records, "processor", lambda: "another")
    (old,) = running.bench("counting", only="three", results=tmp_path)
    assert "STALE" in old.detail
    assert f"on {fresh.processor}" in old.detail
    list(running.bench("counting", full=True, only="three", results=tmp_path))
    (own,) = running.bench("counting", only="three", results=tmp_path)
    assert (own.processor, own.detail) == ("another", "")


def test_where_benches_are_not_installed_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "slipstream_bench", None)
    with pytest.raises(SlipstreamError, match=r"\bbenches\b.*\binstalled\b") as caught:
        command(["engine"])
    assert "pip install -e benchmarks" in str(caught.value.remedy)
    assert "pip install -e benchmarks" in str(more_help())


def test_a_text_that_no_bar_has_is_refused() -> None:
    with pytest.raises(UsageError, match=r"\bcounting\b.*'eleven'"):
        command(["counting"], only="eleven")


def test_of_the_package_the_command_alone_knows_the_benches() -> None:
    source = Path(slipstream.__file__).parent
    importing = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_bytes()))
        if (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("slipstream_bench"))
        or (
            isinstance(node, ast.Import)
            and any(alias.name.startswith("slipstream_bench") for alias in node.names)
        )
    }
    assert importing == {"cli/bench.py"}
