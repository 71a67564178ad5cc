"""Large tables become one array, in the graph, the model and the optimizer."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from slipstream.durations import Durations
from slipstream.errors import InvalidArgumentError, WorkloadError
from slipstream.graph import Graph, StepPhase
from slipstream.technique import Context, QualityKind, parse
from slipstream.techniques.embedding.formats.robe import SIGN, ROBEEmbedding, ROBEEmbeddingBag
from slipstream.techniques.embedding.technique import RobeEmbedding
from slipstream.workload import Workload

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from recorded import build, cannot_be_timed, graph_of, inference, mlp

from known_durations import context_for, timed_by_bytes

ROWS = 5000


class Clicks(nn.Module):
    """Two large tables of one shape, a third, and one too small to matter."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.seen = nn.EmbeddingBag(ROWS, 16, mode="mean", sparse=sparse)
        self.item = nn.Embedding(ROWS, 16, padding_idx=0)
        self.user = nn.Embedding(3000, 32)
        self.day = nn.Embedding(7, 8)
        self.top = nn.Linear(72, 4)

    def forward(self, seen: Any, item: Any, user: Any, day: Any) -> torch.Tensor:
        parts = [self.seen(seen), self.item(item), self.user(user), self.day(day)]
        made: torch.Tensor = self.top(torch.cat(parts, 1))
        return made


def batch() -> Any:
    ids = [torch.randint(0, top, (32,)) for top in (ROWS, 3000, 7)]
    return (torch.randint(0, ROWS, (32, 6)), *ids)


def clicks(foreach: bool = False) -> Any:
    model = Clicks()
    optimizer = torch.optim.Adam(model.parameters(), 0.01, foreach=foreach)
    return model, (batch(), torch.randint(0, 4, (32,))), cross_entropy, optimizer


def together() -> Any:
    return clicks(foreach=True)


def sparse() -> Any:
    model = Clicks(sparse=True)
    optimizer = torch.optim.SparseAdam([model.seen.weight], 0.01)
    return model, (batch(), torch.randint(0, 4, (32,))), cross_entropy, optimizer


def looked_up() -> Any:
    return Clicks().eval(), batch()


def spent(graph: Graph, phase: StepPhase) -> float:
    return float(graph.tasks.duration_ns[graph.tasks.phase == phase].sum())


NUMBERS = round((2 * ROWS * 16 + 3000 * 32) / 50)


@pytest.mark.parametrize("make", [clicks, together])
def test_three_tables_are_updated_as_one_array(make: Any) -> None:
    graph, technique = timed_by_bytes(graph_of(make)), RobeEmbedding(50.0, rows=2000)
    after = technique.predict(graph, context_for(technique, graph))
    assert spent(after, StepPhase.OPTIMIZER) < 0.7 * spent(graph, StepPhase.OPTIMIZER)
    updated = {
        spec.shape
        for task in range(len(after))
        if after.tasks.phase[task] == StepPhase.OPTIMIZER and after.tasks.call[task] >= 0
        for spec in after.calls[after.tasks.call[task]].inputs
    }
    assert (NUMBERS,) in updated
    assert not updated & {(ROWS, 16), (3000, 32)}
    assert (7, 8) in updated, "the small one stays"
    assert re.search(rf"\b3\b.*\b1000 KiB.*\b{NUMBERS}\b", after.edits[-1].what)
    sums = [t for t in range(len(after)) if after.string(int(after.tasks.name[t])) == "aten::add"]
    assert len(sums) == 2, "three gradients become one"


def test_memory_is_that_of_the_array() -> None:
    graph, technique = graph_of(clicks), RobeEmbedding(50.0, rows=2000)
    after = technique.predict(graph, context_for(technique, graph))
    parameters = graph.memory.role == 1
    dense = (2 * ROWS * 16 + 3000 * 32) * 4
    fewer = int(
        graph.memory.nbytes[parameters].sum() - after.memory.nbytes[after.memory.role == 1].sum()
    )
    assert abs(fewer - (dense - NUMBERS * 4)) <= 3


@pytest.mark.parametrize("make", [clicks, together])
def test_requested_calls_can_be_timed(make: Any) -> None:
    assert cannot_be_timed(RobeEmbedding(50.0, rows=2000).required_timings(graph_of(make))) == []


def test_unknown_durations_are_assumed(tmp_path: Path) -> None:
    graph = graph_of(clicks)
    after = RobeEmbedding(rows=2000).predict(
        graph, Context(Durations(threads=1, path=tmp_path / "none.db"))
    )
    assert spent(after, StepPhase.FORWARD) == pytest.approx(spent(graph, StepPhase.FORWARD))


def test_reasons_why_not() -> None:
    assert RobeEmbedding(rows=2000).why_not(graph_of(clicks)) is None
    assert "no embedding table" in str(RobeEmbedding(rows=2000).why_not(graph_of(mlp)))
    assert "no embedding table" in str(RobeEmbedding(rows=2000).why_not(graph_of(inference)))
    reason = str(RobeEmbedding().why_not(graph_of(clicks)))
    assert re.search(r"\b5000 rows\b.*\b10000\b", reason)
    reason = str(RobeEmbedding(1e5, rows=2000).why_not(graph_of(clicks)))
    assert re.search(r"^100000 times\b.*\bblock of \d+$", reason)
    assert RobeEmbedding(rows=4000).why_not(graph_of(clicks)) is None


def test_tables_that_fit_the_cache_are_left_alone_in_inference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from slipstream.techniques.embedding import technique

    graph = graph_of(looked_up)
    monkeypatch.setattr(technique, "_cache_bytes", lambda: 4 << 20)
    assert "second-level cache" in str(RobeEmbedding(rows=2000).why_not(graph))
    monkeypatch.setattr(technique, "_cache_bytes", lambda: 1 << 19)
    assert RobeEmbedding(rows=2000).why_not(graph) is None


def test_modules_and_parameters_are_replaced() -> None:
    torch.manual_seed(0)
    built = build(clicks, RobeEmbedding(50.0, rows=2000))
    model: Any = built.model
    assert type(model.seen) is ROBEEmbeddingBag
    assert type(model.item) is ROBEEmbedding
    assert type(model.user) is ROBEEmbedding
    assert type(model.day) is nn.Embedding
    assert model.seen.mode == "mean"
    assert model.item.padding_idx == 0
    assert model.seen.pool is model.user.pool
    array = model.seen.pool.array
    assert array.shape == (NUMBERS,)
    assert float(array.detach().std()) == pytest.approx(1.0, abs=0.05)
    trained = [id(p) for group in built.optimizer.param_groups for p in group["params"]]
    assert sorted(trained) == sorted(map(id, model.parameters()))
    losses = [float(built.step()) for _ in range(40)]
    assert losses[-1] < 0.5 * losses[0]


def test_unsupported_models_are_refused() -> None:
    with pytest.raises(WorkloadError, match="SparseAdam"):
        build(sparse, RobeEmbedding(rows=2000))
    with pytest.raises(WorkloadError, match=r"no nn\.Embedding"):
        build(mlp, RobeEmbedding(rows=2000))
    with pytest.raises(InvalidArgumentError, match="block"):
        build(clicks, RobeEmbedding(1e6, rows=2000))


def test_settings_are_parsed_and_checked() -> None:
    (found,) = parse("robe_embedding:ratio=20,block=16,sign=on,rows=10")
    assert found == RobeEmbedding(20.0, 16, True, 10)
    (usual,) = parse("robe_embedding:ratio=20")
    assert usual == RobeEmbedding(20.0, sign=SIGN)
    assert found.quality().kind is QualityKind.NEEDS_TRAINING
    for wrong in ("ratio=0", "ratio=-1", "block=0", "ratio=inf"):
        with pytest.raises(InvalidArgumentError):
            parse(f"robe_embedding:{wrong}")


def test_lines_to_write_are_reported() -> None:
    example = Path(__file__).resolve().parents[3] / "examples" / "recommender.py"
    change = RobeEmbedding().code(Workload(f"{example}:make_workload"))
    assert change is not None
    assert not change.diff
    assert "SharedArray.compressing" in change.note
