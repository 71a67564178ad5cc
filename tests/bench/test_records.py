"""Records of benches: appended, at a commit on main, with a hash of their sources."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slipstream_bench import records
from slipstream_bench.rows import Bar, at_least, at_most

ROW = at_least("one", 2.0, 1.5, "x", data={"cells": [[1.0, 2.0]]})


def git(*arguments: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a repository of a bench and two packages, one of which it imports, and enter it."""
    bench = tmp_path / "benchmarks" / "toy_bench" / "systems" / "toy"
    for folder in (bench, tmp_path / "src/slipstream/graph", tmp_path / "src/slipstream/report"):
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("")
    (bench / "bars.py").write_text("from slipstream.graph import Graph\n")
    monkeypatch.chdir(tmp_path)
    git("init", "-q", "-b", "main")
    git("add", ".")
    git("commit", "-qm", "before")
    return tmp_path


def test_every_attempt_is_stored_with_its_data(tmp_path: Path) -> None:
    path = tmp_path / "results" / "one.jsonl"
    assert records.read(path) == []
    from_numpy = at_most("two", np.int64(1), 0, "of 2", n=2)
    attempts = [ROW, replace(ROW, value=1.0, holds=False), from_numpy]
    for attempt in attempts:
        records.append(path, attempt)
    assert records.read(path) == attempts


def test_a_truncated_last_line_is_ignored_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    records.append(path, ROW)
    with path.open("a") as file:
        file.write('{"bar": "tw')
    assert records.read(path) == [ROW]
    records.append(path, ROW)
    assert records.read(path) == [ROW, ROW]


@pytest.mark.parametrize(
    ("value", "low", "high", "standing"),
    [
        (1.6, 1.55, 1.7, "holds"),
        (1.6, 1.4, 1.7, "at the bar"),
        (1.4, 1.3, 1.6, "at the bar"),
        (1.4, 1.3, 1.5, "falls short"),
        (1.4, None, None, "falls short"),
        (1.5, None, None, "holds"),
    ],
)
def test_a_value_within_its_noise_of_the_bar_is_undecided(
    value: float, low: float | None, high: float | None, standing: str
) -> None:
    assert replace(at_least("one", value, 1.5, "x"), low=low, high=high).standing == standing
    if low is not None and high is not None:
        other = replace(at_most("one", -value, -1.5, "x"), low=-high, high=-low)
        assert other.standing == standing


def test_a_row_that_is_not_judged_has_no_position() -> None:
    assert Bar("one", 1.0, "x", ">= 1", None, limit=1.0, low=0.5, high=1.5).standing == "not judged"


def test_the_nearest_attempt_is_the_newest_on_this_processor() -> None:
    here, elsewhere = replace(ROW, processor="here"), replace(ROW, processor="there", value=9.0)
    later = replace(here, value=3.0)
    assert records.nearest([here, later, elsewhere], "here") == {"one": later}
    assert records.nearest([elsewhere, here], "here") == {"one": here}
    assert records.nearest([here, elsewhere], "elsewhere") == {"one": elsewhere}


def test_only_a_commit_on_main_with_nothing_changed_is_recordable(clone: Path) -> None:
    assert records.why_not_recordable() == ""
    graph = clone / "src/slipstream/graph/__init__.py"
    graph.write_text("changed = True\n")
    assert "uncommitted" in records.why_not_recordable()
    git("switch", "-qc", "other")
    git("commit", "-qam", "aside")
    assert "not on main" in records.why_not_recordable()
    git("switch", "-q", "main")
    assert records.why_not_recordable() == ""


def test_outside_a_clone_nothing_is_recordable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "not a clone" in records.why_not_recordable()


def test_commits_that_are_not_in_the_history_are_found(clone: Path) -> None:
    committed = replace(ROW, commit=records.commit())
    lost = replace(ROW, commit="0123456789ab")
    assert records.unknown_commits([committed, lost, ROW]) == {"0123456789ab", ""}


def test_sources_are_the_bench_its_imported_packages_and_the_engine(clone: Path) -> None:
    entry = "toy_bench.systems.toy.bars:bars"
    before = records.sources_hash(entry)
    assert len(before) == 16
    (clone / "src/slipstream/report/__init__.py").write_text("changed = True\n")
    assert records.sources_hash(entry) == before, "the bench imports no report"
    for part in ("src/slipstream/graph/__init__.py", "native/engine.cpp",
                 "benchmarks/toy_bench/systems/toy/bars.py"):  # fmt: skip
        (clone / part).parent.mkdir(exist_ok=True)
        with (clone / part).open("a") as file:
            file.write("# changed\n")
        assert records.sources_hash(entry) != before, part
        before = records.sources_hash(entry)


def test_a_processor_is_named_with_its_cores() -> None:
    assert records.processor().endswith("cores")


def test_every_recorded_row_names_a_commit_in_the_history() -> None:
    root = Path(__file__).parents[2]
    if (root / ".git" / "shallow").exists():
        pytest.skip("a shallow clone has no history")
    rows = [
        bar for path in (root / "benchmarks/results").glob("*.jsonl") for bar in records.read(path)
    ]
    assert rows
    assert records.unknown_commits(rows) == set()
