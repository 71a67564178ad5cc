"""Contents of a report: the graph's numbers, missing data, and shared reports without names."""

from __future__ import annotations

import base64
import hashlib
import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reports import AlikeDurations, Report, empty_graph, without_memory

from slipstream import technique
from slipstream.errors import SlipstreamError, UnknownNameError
from slipstream.graph import Graph, StepPhase, find_critical_path, replay
from slipstream.report import write_report
from slipstream.report._arrays import Arrays
from slipstream.report._families import FAMILIES, families
from slipstream.report.what_if import what_ifs
from tiny_models import captured


@pytest.fixture(scope="module")
def graph() -> Graph:
    return captured("transformer")


@pytest.fixture(scope="module")
def report(graph: Graph, tmp_path_factory: pytest.TempPathFactory) -> Report:
    path = tmp_path_factory.mktemp("report") / "report.html"
    techniques = ["fused_optimizer:fused", "checkpointing", "accumulation:4", "channels_last"]
    return Report(write_report(graph, path, techniques=techniques, durations=AlikeDurations()))


def test_the_timeline_equals_the_simulated_one(graph: Graph, report: Report) -> None:
    timeline, document = replay(graph), report.document
    scene = document["scenes"][0]
    columns = {name: report.column(found) for name, found in scene["columns"].items()}
    assert scene["step_ns"] == timeline.step_ns
    np.testing.assert_array_equal(columns["start"], timeline.start_ns)
    np.testing.assert_allclose(columns["duration"], timeline.end_ns - timeline.start_ns, rtol=1e-6)
    names = [document["strings"][i] for i in columns["name"]]
    assert names == [graph.string(i) for i in graph.tasks.name]
    # The breakdown sums to the step.
    total = columns["busy"].sum(dtype=np.float64) + columns["waited"].sum(dtype=np.float64)
    assert total == pytest.approx(timeline.step_ns, rel=1e-5)
    assert set(np.flatnonzero(columns["critical"])) == set(find_critical_path(timeline).task)


def test_levels_above_a_task_are_phase_modules_and_operators(graph: Graph, report: Report) -> None:
    document = report.document
    path = report.column(document["scenes"][0]["columns"]["path"])
    for task in range(len(graph)):
        levels = []
        at = int(path[task])
        while at:
            parent, kind, label = document["paths"][at - 1]
            levels.insert(0, (kind, label))
            at = parent
        phase = StepPhase(graph.tasks.phase[task])
        assert [label for kind, label in levels if kind == "phase"] == (
            [phase.name.lower()] if phase else []
        )
        modules = [label.split(" ")[0] for kind, label in levels if kind == "module"]
        assert ".".join(modules) == graph.string(graph.tasks.module[task])


def test_the_memory_curve_reaches_the_peak(graph: Graph, report: Report) -> None:
    memory = report.document["scenes"][0]["memory"]
    levels = np.stack([report.column(level) for level in memory["levels"]]).sum(axis=0)
    assert levels.max() == replay(graph).peak_bytes == memory["peak_bytes"]
    times = report.column(memory["times"])
    assert times[levels.argmax()] == memory["peak_ns"]
    tensors = {name: report.column(found) for name, found in memory["tensors"].items()}
    assert (np.diff(tensors["bytes"]) <= 0).all()
    lasts = (tensors["producer"] < 0) & (tensors["release"] < 0)
    alive = lasts | (tensors["birth"] <= memory["peak_ns"]) & (memory["peak_ns"] < tensors["death"])
    assert tensors["bytes"][alive].sum() == memory["peak_bytes"]


def test_every_allowed_combination_of_few_techniques_is_included(report: Report) -> None:
    found = report.document["what_ifs"]
    names = {"+".join(sorted(p["parts"])) for p in found["predictions"]}
    singles = {"accumulation:4", "checkpointing", "fused_optimizer:fused"}
    assert singles <= names
    assert {
        "+".join(sorted(pair)) for pair in (("checkpointing", "fused_optimizer:fused"),)
    } < names
    assert [row["technique"] for row in found["not_applicable"]] == ["channels_last"]
    for prediction in found["predictions"]:
        scene = report.document["scenes"][prediction["scene"]]
        assert scene["step_ns"] == prediction["step_ns"]
        low, high = prediction["speedup_interval"]
        assert low < prediction["speedup"] < high
        assert sum(prediction["shares"].values()) == pytest.approx(1)


def test_the_machine_is_the_recording_machine(graph: Graph, tmp_path: Path) -> None:
    def run(**meta: object) -> dict[str, Any]:
        facts = replace(graph, meta={**graph.meta, "contended": False, **meta})
        path = write_report(facts, tmp_path / "r.html", what_if=False)
        found: dict[str, Any] = Report(path).document["run"]
        return found

    here = run()
    assert not [note for note in here["notes"] if "machine" in note]
    elsewhere = run(machine={"cpu.model": "Abacus 3", "cpu.logical": 96}, torch="2.9.0")
    assert elsewhere["machine"] == [
        ["processor", "Abacus 3"], ["logical cores", "96"], ["torch", "2.9.0"],
    ]  # fmt: skip
    (note,) = [note for note in elsewhere["notes"] if "another machine" in note]
    assert dict(here["machine"])["processor"] in note
    unknown = run(machine=None)
    assert unknown["machine"]
    assert any("is unknown" in note for note in unknown["notes"])


def test_nothing_can_be_loaded(report: Report) -> None:
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', report.text)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; script-src 'sha256-")
    for tag in ("script", "style"):
        content = re.findall(rf"<{tag}>(.*?)</{tag}>", report.text, re.S)
        digest = base64.b64encode(hashlib.sha256(content[0].encode()).digest()).decode()
        assert len(content) == 1
        assert f"'sha256-{digest}'" in policy[1]
    assert not re.search(r"<(?:link|img|script|iframe)[^>]+(?:src|href)=\"(?!data:)", report.text)


def test_a_shared_report_names_no_host_user_or_folder(graph: Graph, tmp_path: Path) -> None:
    host = socket.gethostname()
    meta = {**graph.meta, "workload": f"/home/user/secret/train.py on {host}"}
    path = write_report(replace(graph, meta=meta), tmp_path / "r.html", what_if=False, redact=True)
    document = Report(path).document
    assert document["run"]["workload"] == "…/train.py on <host>"
    assert "somebody" not in path.read_text(encoding="utf-8")


def test_names_cannot_break_out_of_their_element(graph: Graph, tmp_path: Path) -> None:
    meta = {**graph.meta, "workload": "</script><script>alert(1)</script>"}
    path = write_report(replace(graph, meta=meta), tmp_path / "r.html", what_if=False)
    assert Report(path).document["run"]["workload"] == meta["workload"]
    assert path.read_text(encoding="utf-8").count("alert(1)</script>") == 0


def test_an_empty_graph_and_one_without_memory_are_states(graph: Graph, tmp_path: Path) -> None:
    empty = Report(write_report(empty_graph(), tmp_path / "empty.html")).document
    assert empty["run"]["tasks"] == 0
    assert empty["run"]["interval_ns"] is None
    assert empty["what_ifs"]["state"] == "skipped"
    bare = Report(write_report(without_memory(graph), tmp_path / "b.html", what_if=False)).document
    assert bare["scenes"][0]["memory"] is None
    assert bare["run"]["peak_bytes"] == 0


def test_a_failing_technique_does_not_hide_the_others(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = technique.registry()["fused_optimizer"]

    def breaks(self: object, graph: Graph, context: object) -> Graph:
        raise KeyError("no such thing")

    monkeypatch.setattr(kind, "predict", breaks)
    techniques = ["checkpointing", "fused_optimizer:fused"]
    found = what_ifs(graph, techniques, durations=AlikeDurations())
    assert found.state == "ready"
    assert [p.technique for p in found.predictions] == ["checkpointing"]
    assert found.failed == (("fused_optimizer:fused", "KeyError: 'no such thing'"),)


def test_a_huge_graph_asks_for_names(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.report.what_if._MAX_TASKS", len(graph) - 1)
    found = what_ifs(graph, durations=AlikeDurations())
    assert found.state == "skipped"
    assert "--technique" in found.reason
    named = what_ifs(graph, ["checkpointing"], durations=AlikeDurations())
    assert [p.technique for p in named.predictions] == ["checkpointing"]


def test_an_unknown_technique_and_an_unwritable_file_are_named(
    graph: Graph, tmp_path: Path
) -> None:
    with pytest.raises(UnknownNameError):
        write_report(graph, tmp_path / "r.html", techniques=["chekpointing"])
    with pytest.raises(SlipstreamError, match="cannot be written"):
        write_report(graph, tmp_path / "none" / "r.html", what_if=False)
    assert list(tmp_path.iterdir()) == []


def test_columns_have_the_narrowest_type_and_are_aligned() -> None:
    arrays = Arrays()
    found = [
        arrays.integers([0, 255]), arrays.integers([0, 256]), arrays.integers([-1, 3]),
        arrays.real([0.5]), arrays.times([1e12 + 0.25]),
    ]  # fmt: skip
    assert [column["type"] for column in found] == ["u8", "u16", "i32", "f32", "f64"]
    assert all(column["at"] % 8 == 0 for column in found)
    with pytest.raises(ValueError, match="32 bits"):
        arrays.integers([1 << 40])


def test_families_separate_matmuls_from_other_operators(graph: Graph) -> None:
    found = families(graph)
    named = {
        graph.string(name): FAMILIES[family]
        for name, family in zip(graph.tasks.name, found, strict=True)
    }
    assert named["aten::addmm"] == "matrix product"
    assert named["aten::native_layer_norm"] == "normalisation"
    assert named["aten::gelu"] == "elementwise"
    assert named["aten::embedding"] == "lookup and copy"
    assert "attention" in named.values()
