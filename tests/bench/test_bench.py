"""The bench runner: rows appear when measured, full runs resume, quick runs show past results."""

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
    """Three rows; the last is measured by full runs only, and fails on request."""
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


def test_a_quick_run_also_shows_results_of_full_runs(tmp_path: Path) -> None:
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


def test_a_killed_full_run_resumes(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        list(running.bench("interrupted", full=True, results=tmp_path))
    (tmp_path / "interrupted.jsonl").rename(tmp_path / "counting.jsonl")
    rows = list(running.bench("counting", full=True, results=tmp_path))
    assert set(requested[-1].done) == {"one"}
    assert {row.bar for row in rows} == {"one", "two", "three"}
    recorded = records.read(tmp_path / "counting.jsonl")
    assert [bar.bar for bar in recorded] == ["one", "two", "three"]


def test_another_commit_restarts_a_full_run(
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


def test_a_quick_run_starts_no_row_after_its_time_limit_and_reports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    list(running.bench("counting", full=True, only="one", results=tmp_path))
    monkeypatch.setattr(running, "QUICK_S", 0.0)
    recorded, left = running.bench("counting", results=tmp_path)
    assert (recorded.bar, recorded.source, recorded.value) == ("one", "recorded", 1.0)
    assert re.search(r"\bnot measured\b.*\btime\b", recorded.detail)
    assert (left.bar, left.value, left.holds) == ("two", None, None)


def test_a_row_longer_than_the_remaining_time_is_left_out() -> None:
    options = BenchOptions(budget_s=60.0)
    assert options.wants("short", takes_s=30.0)
    assert not options.wants("long", takes_s=90.0)
    assert not options.wants("long", takes_s=90.0)
    assert list(options.left_out) == ["long"]
    assert BenchOptions().wants("long", takes_s=1e9), "a full run has no time limit"


def test_a_run_that_could_not_be_measured_is_shown_and_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "why_not_recordable", lambda: "the commit is not on main")
    rows = list(running.bench("counting", full=True, results=tmp_path))
    assert len(rows) == 3
    assert all("not on main" in row.detail for row in rows)
    assert not list(tmp_path.iterdir())


def test_records_of_other_machines_or_sources_are_marked(
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


def test_without_benches_the_command_names_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "slipstream_bench", None)
    with pytest.raises(SlipstreamError, match=r"\bbenches\b.*\binstalled\b") as caught:
        command(["engine"])
    assert "pip install -e benchmarks" in str(caught.value.remedy)
    assert "pip install -e benchmarks" in str(more_help())


def test_a_text_that_matches_no_bar_is_refused() -> None:
    with pytest.raises(UsageError, match=r"\bcounting\b.*'eleven'"):
        command(["counting"], only="eleven")


def test_only_the_command_imports_the_benches() -> None:
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
