"""A recording knows whether its source file has changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.graph import Graph
from slipstream.graph.origin import describe_source, has_changed
from tiny_models import captured


def test_only_a_change_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = Path("train.py")
    code.write_text("a = 1")
    graph = recorded_of(code)
    assert has_changed(graph) is None
    code.write_text("a = 2")
    assert has_changed(graph) == "train.py"
    code.write_text("a = 1")
    assert has_changed(graph) is None
    code.unlink()
    assert has_changed(graph) is None


def test_another_file_of_that_name_is_not_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "there"
    for folder in (here, elsewhere):
        folder.mkdir()
        (folder / "train.py").write_text(folder.name)
    monkeypatch.chdir(here)
    graph = recorded_of(Path("train.py"))
    # A recording that is passed on names no folder.
    assert str(tmp_path) not in str(graph.meta["source"])
    monkeypatch.chdir(elsewhere)
    assert has_changed(graph) is None


def test_an_older_recording_reports_nothing(tmp_path: Path) -> None:
    assert has_changed(captured("mlp")) is None
    assert describe_source(tmp_path / "absent" / "train.py") is None


def recorded_of(code: Path) -> Graph:
    graph = captured("mlp")
    return replace(graph, meta={**graph.meta, "source": describe_source(code)})
