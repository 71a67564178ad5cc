"""Tests of `ss.explain`, `ss.diff` and `ss.export`."""

from __future__ import annotations

import csv
import importlib.metadata
import json
import resource
import signal
from pathlib import Path

import pytest

import slipstream as ss
from slipstream.errors import GraphError, InvalidArgumentError, UnknownNameError
from slipstream.graph import Editor, read_chakra, replay
from slipstream.provenance import Provenance
from tiny_models import captured


def slower(graph: ss.Graph, task: int) -> ss.Graph:
    edit = Editor(graph, "by hand")
    edit.set_duration(task, float(graph.tasks.duration_ns[task]) * 1000, Provenance.USER)
    return edit.apply("one task a thousand times as slow")


def test_version_matches_the_distribution() -> None:
    assert ss.__version__ == importlib.metadata.version("slipstream")


@pytest.mark.parametrize("by", ["operator", "module", "line", "phase", "lane", "kind"])
def test_explain_returns_the_step_time(by: str) -> None:
    graph = captured("mlp")
    found = ss.explain(graph, by, top=10_000)
    step_ns = replay(graph).step_ns
    assert found.data["step_ns"] == pytest.approx(step_ns)
    assert "|" in str(found)
    assert "<table" in found._repr_html_()
    with pytest.raises(InvalidArgumentError):
        ss.explain(graph, "colour")


def test_diff_detects_a_slower_task() -> None:
    graph = captured("mlp")
    assert not ss.diff(graph, graph, 0.5).judged[0]
    task = int(graph.tasks.duration_ns.argmax())
    found = ss.diff(graph, slower(graph, task), 0.5)
    assert found.judged[0]


def test_the_suffix_selects_the_export_format(tmp_path: Path) -> None:
    graph = captured("mlp")
    assert read_chakra(ss.export(graph, tmp_path / "run.et")) == graph
    rows = list(csv.DictReader(ss.export(graph, tmp_path / "run.csv").open()))
    assert [float(row["duration_ns"]) for row in rows] == graph.tasks.duration_ns.tolist()
    assert json.loads(ss.export(graph, tmp_path / "run.json").read_text())["traceEvents"]
    with pytest.raises(UnknownNameError):
        ss.export(graph, tmp_path / "run.doc")


@pytest.mark.parametrize("name", ["run.et", "run.csv", "run.json"])
def test_a_failed_export_leaves_the_old_file(tmp_path: Path, name: str) -> None:
    graph = captured("mlp")
    path = tmp_path / name
    path.write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        with pytest.raises(GraphError, match="cannot be written"):
            ss.export(graph, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
