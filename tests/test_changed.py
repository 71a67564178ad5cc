"""Tests selected for a change: all that could fail because of it, but not everything."""

from __future__ import annotations

from pathlib import Path

import pytest

import changed


def reached(*files: str) -> set[str]:
    found = changed.reached_by(files)
    assert found is not None
    return {path.name for path in found}


def test_a_test_affects_only_itself() -> None:
    assert reached("tests/test_units.py") == {"test_units.py"}


def test_a_technique_affects_its_tests_and_the_verbs_but_no_lower_package() -> None:
    found = reached("src/slipstream/techniques/memory_format.py")
    assert {"test_memory_format.py", "test_predict.py", "test_cli_predict.py"} <= found
    assert not {"test_units.py", "test_sparse_metrics.py", "test_statistics.py"} & found


def test_the_lowest_layer_affects_many_tests() -> None:
    found = reached("src/slipstream/errors.py")
    assert {"test_errors.py", "test_prove.py", "test_sparse_metrics.py"} <= found


def test_modules_run_in_child_processes_affect_their_callers() -> None:
    assert "test_child.py" in reached("src/slipstream/child/process.py")
    assert "test_bench_graph.py" in reached("benchmarks/slipstream_bench/systems/graph/peer.py")


def test_a_page_affects_the_tests_of_pages() -> None:
    found = reached("docs/tutorial.md")
    assert "test_docs_commands.py" in found
    assert "test_units.py" not in found


def test_the_build_affects_everything() -> None:
    assert changed.reached_by(["pyproject.toml"]) is None


def test_records_affect_nothing() -> None:
    assert reached("benchmarks/results/engine.jsonl", "CHANGELOG.md") == set()


def test_a_conftest_affects_the_tests_of_its_folder() -> None:
    found = reached("tests/live/conftest.py")
    assert "test_live_page.py" in found
    assert "test_units.py" not in found


@pytest.mark.parametrize(
    "package", sorted(p.name for p in (changed.ROOT / "tests").iterdir() if p.is_dir())
)
def test_every_folder_of_tests_is_affected_by_the_package(package: str) -> None:
    src = changed.ROOT / "src"
    if package.startswith("_") or not any((changed.ROOT / "tests" / package).glob("**/test_*.py")):
        return
    everything = [str(path.relative_to(changed.ROOT)) for path in src.rglob("*.py")]
    found = changed.reached_by(everything) or set[Path]()
    assert {p for p in found if p.is_relative_to(changed.ROOT / "tests" / package)}
