"""The bench runner: rows appear as measured, full runs resume, quick ones show the past."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import slipstream
from slipstream.cli.bench import command, more_help
from slipstream.errors import SlipstreamError, UnknownNameError
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


def test_a_row_that_takes_longer_than_there_is_time_is_left_out() -> None:
    options = BenchOptions(budget_s=60.0)
    assert options.wants("short", takes_s=30.0)
    assert not options.wants("long", takes_s=90.0)
    assert not options.wants("long", takes_s=90.0)
    assert list(options.left_out) == ["long"]
    assert BenchOptions().wants("long", takes_s=1e9), "a full run has all the time"


def test_a_recorded_row_is_stale_when_a_room_that_the_bench_imports_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not when another room has."""
    bench = tmp_path / "benchmarks" / "toy_bench" / "systems" / "toy"
    rooms = {name: tmp_path / "src" / "slipstream" / name for name in ("graph", "report")}
    for folder in (bench, *rooms.values()):
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("")
    (bench / "bars.py").write_text("from slipstream.graph import Graph\n")
    monkeypatch.chdir(tmp_path)

    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "before")
    commit, entry = git("rev-parse", "HEAD"), "toy_bench.systems.toy.bars:bars"
    assert running.rooms_of(entry) == ["src/slipstream/graph"]
    assert not running.changed_since(commit, entry)
    (rooms["report"] / "__init__.py").write_text("changed = True\n")
    assert not running.changed_since(commit, entry)
    (rooms["graph"] / "__init__.py").write_text("changed = True\n")
    assert running.changed_since(commit, entry)
    assert running.changed_since("0" * 40, entry), "of a commit that is not here nothing is known"


def test_where_benches_are_not_installed_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "slipstream_bench", None)
    with pytest.raises(SlipstreamError, match="benches are not installed") as caught:
        command(["engine"])
    assert "pip install -e benchmarks" in str(caught.value.remedy)
    assert "pip install -e benchmarks" in str(more_help())


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
