"""allocator removes page faults, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from recorded import graph_of, mlp

from slipstream import heap, technique
from slipstream.durations import Durations
from slipstream.errors import WorkloadError
from slipstream.graph import Kind, replay
from slipstream.graph.edit import append_task
from slipstream.graph.page_faults import PAGE_FAULTS, page_fault_ns
from slipstream.technique import Context, QualityKind
from slipstream.techniques.allocator import Allocator
from slipstream.verbs.predicting import predict
from slipstream.workload import Workload, build_from

_SCRIPT = """import torch

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
"""


def test_a_step_without_page_faults_has_nothing_to_gain() -> None:
    assert "stays mapped" in str(Allocator().why_not(graph_of(mlp)))


def test_page_faults_are_removed_and_nothing_else_changes(tmp_path: Path) -> None:
    plain = graph_of(mlp)
    graph = append_task(plain, PAGE_FAULTS, 3e6, 0.1, Kind.HOST)
    assert Allocator().why_not(graph) is None
    after = Allocator().predict(graph, Context(Durations(1, tmp_path / "d.db")))
    assert page_fault_ns(after) == 0
    assert replay(after).step_ns == pytest.approx(replay(plain).step_ns)
    assert len(after) == len(plain)


def test_differing_faults_between_launches_make_the_gain_less_certain(tmp_path: Path) -> None:
    durations = Durations(1, tmp_path / "d.db")
    sure, unsure = (
        predict(
            append_task(graph_of(mlp), PAGE_FAULTS, 1e6, spread, Kind.HOST),
            ["allocator"],
            durations=durations,
        )
        for spread in (0.1, 0.7)
    )
    assert sure[0].ratio == unsure[0].ratio < 1
    assert unsure[0].high - unsure[0].low > sure[0].high - sure[0].low


def test_it_combines_with_others_and_has_a_spec() -> None:
    assert technique.combination_name(technique.parse("allocator+amp:bf16")) == (
        "amp:bf16+allocator:keep"
    )
    assert Allocator().quality().kind is QualityKind.EXACT


def test_without_glibc_it_gives_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "keep_pages", lambda: False)
    with pytest.raises(WorkloadError, match="no setting to keep"):
        build_from(mlp(), (Allocator(),), 0, "mlp")


def test_its_edit_of_a_script_runs(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(_SCRIPT)
    change = Allocator().code(Workload.parse(str(path)))
    assert change is not None
    assert "+libc.mallopt(-1, -1)" in change.diff
    assert "MALLOC_TRIM_THRESHOLD_" in change.note
