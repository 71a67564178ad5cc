"""Timelines as Chrome JSON: valid, complete, and readable by our importer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from small_traces import graph as traced
from small_traces import kernel, launch, op

from slipstream.errors import GraphError
from slipstream.graph import Graph, replay, to_perfetto, write_perfetto
from small_graphs import graph_of, graphs


def _of_phase(trace: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def test_tasks_become_slices_of_their_lanes() -> None:
    graph = graph_of([(0, 1000, 0), (1, 3000, 0)], [(0, 1)])
    trace = to_perfetto(replay(graph))
    slices = _of_phase(trace, "X")
    assert [(s["name"], s["tid"], s["ts"], s["dur"]) for s in slices] == [
        ("task 0", 0, 0.0, 1.0),
        ("task 1", 1, 1.0, 3.0),
    ]
    names = {
        (event["name"], event.get("tid")): event["args"].get("name")
        for event in _of_phase(trace, "M")
    }
    assert names["thread_name", 1] == "lane 1"
    assert names["process_name", None] == "rank 0"


def test_slices_show_their_origin() -> None:
    found = traced(op("aten::mm", 0, 20), launch(5, 5, 1), kernel("k", 12, 100, 1))
    trace = to_perfetto(replay(found))
    taken = next(event for event in _of_phase(trace, "X") if event["name"] == "k")
    assert taken["args"]["scope"] == "aten::mm"
    assert taken["args"]["phase"] == "forward"
    assert taken["args"]["provenance"] == "measured"
    assert taken["cat"] == "kernel,critical"
    assert taken["args"]["slack_us"] == 0


def test_dependencies_are_arrows_between_slices() -> None:
    trace = to_perfetto(replay(graph_of([(0, 1000, 0), (1, 3000, 0)], [(0, 1, 500)])))
    (start,), (finish,) = _of_phase(trace, "s"), _of_phase(trace, "f")
    assert start["id"] == finish["id"]
    assert (start["tid"], start["ts"], finish["tid"], finish["ts"]) == (0, 0.0, 1, 1.5)


def test_busy_lanes_are_counted() -> None:
    # lane 0: 0-1, lane 1: 0-3 (us)
    counters = _of_phase(to_perfetto(replay(graph_of([(0, 1000, 0), (1, 3000, 0)]))), "C")
    assert [(c["ts"], c["args"]["lanes"]) for c in counters] == [(0, 2), (1, 1), (3, 0)]


@given(graphs())
def test_the_output_is_json_with_every_task(graph: Graph) -> None:
    line = replay(graph)
    trace = json.loads(json.dumps(to_perfetto(line), allow_nan=False))
    slices = _of_phase(trace, "X")
    assert len(slices) == len(graph)
    ends = max((s["ts"] + s["dur"]) * 1e3 for s in slices)
    assert ends == pytest.approx(line.schedule.step_end_ns[0])


def test_it_is_written_to_a_file_or_refused(tmp_path: Path) -> None:
    line = replay(graph_of([(0, 1, 0)]))
    write_perfetto(line, tmp_path / "run.json")
    assert json.loads((tmp_path / "run.json").read_text())["otherData"]["step_ns"] == 1
    with pytest.raises(GraphError, match="cannot be written"):
        write_perfetto(line, tmp_path / "no" / "run.json")
