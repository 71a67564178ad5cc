"""Large tables become tensor trains, in the graph, the model and the optimizer."""

from __future__ import annotations

import copy
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from slipstream.durations import Durations
from slipstream.errors import InvalidArgumentError, UsageError, WorkloadError
from slipstream.graph import StepPhase
from slipstream.technique import Context, QualityKind, parse
from slipstream.techniques.embedding.formats.tt import TTEmbedding, TTEmbeddingBag
from slipstream.techniques.embedding.tt_shape import TTShape
from slipstream.techniques.embedding.tt_technique import TTEmbeddings
from slipstream.workload import Workload

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from recorded import build, cannot_be_timed, graph_of, mlp

from known_durations import context_for, timed_by_bytes

ROWS, DIM = 30_000, 16
TRAIN = TTShape.of(ROWS, DIM, (8, 8)).numbers


class Films(nn.Module):
    """Two large tables, one whose dimension has no three factors, and a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.EmbeddingBag(ROWS, DIM, mode="mean")
        self.item = nn.Embedding(ROWS, DIM, padding_idx=0)
        self.prime = nn.Embedding(ROWS, 7)
        self.day = nn.Embedding(7, 8)
        self.top = nn.Linear(2 * DIM + 15, 4)

    def forward(self, seen: Any, item: Any, day: Any) -> torch.Tensor:
        parts = [self.seen(seen), self.item(item), self.prime(item), self.day(day)]
        made: torch.Tensor = self.top(torch.cat(parts, 1))
        return made


def films(foreach: bool = False) -> Any:
    model = Films()
    ids = [torch.randint(0, top, (32,)) for top in (ROWS, 7)]
    batch = (torch.randint(0, ROWS, (32, 6)), *ids)
    optimizer = torch.optim.Adam(model.parameters(), 0.01, foreach=foreach)
    return model, (batch, torch.randint(0, 4, (32,))), cross_entropy, optimizer


def together() -> Any:
    return films(foreach=True)


def sparse() -> Any:
    model = nn.EmbeddingBag(ROWS, DIM, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters(), 0.01)
    ids = torch.randint(0, ROWS, (32, 6))
    return model, (ids, torch.randint(0, DIM, (32,))), cross_entropy, optimizer


def test_updates_and_memory_equal_those_of_the_cores() -> None:
    graph, technique = timed_by_bytes(graph_of(films)), TTEmbeddings(8)
    after = technique.predict(graph, context_for(technique, graph))
    spent = [
        float(g.tasks.duration_ns[g.tasks.phase == StepPhase.OPTIMIZER].sum())
        for g in (graph, after)
    ]
    assert spent[1] < 0.7 * spent[0]
    assert re.search(r"\b2\b.*\b3\.66 MiB", after.edits[-1].what)
    parameters = [int(g.memory.nbytes[g.memory.role == 1].sum()) for g in (graph, after)]
    assert abs(parameters[0] - parameters[1] - 2 * 4 * (ROWS * DIM - TRAIN)) <= 2


def test_requested_calls_can_be_timed() -> None:
    assert cannot_be_timed(TTEmbeddings(8).required_timings(graph_of(films))) == []


@pytest.mark.parametrize("make", [films, together])
def test_unknown_durations_are_assumed(make: Any, tmp_path: Path) -> None:
    graph = graph_of(make)
    none = Durations(threads=1, path=tmp_path / "none.db")
    after = TTEmbeddings(8).predict(graph, Context(none))
    forward = [
        float(g.tasks.duration_ns[g.tasks.phase == StepPhase.FORWARD].sum()) for g in (graph, after)
    ]
    assert forward[1] == pytest.approx(forward[0])
    updated = {
        spec.shape
        for task in range(len(after))
        if after.tasks.phase[task] == StepPhase.OPTIMIZER and after.tasks.call[task] >= 0
        for spec in after.calls[after.tasks.call[task]].inputs
    }
    assert (ROWS, DIM) not in updated
    assert (7, 8) in updated, "the small one stays"


def test_reasons_why_not() -> None:
    graph = graph_of(films)
    assert TTEmbeddings(8).why_not(graph) is None
    assert "no embedding table" in str(TTEmbeddings().why_not(graph_of(mlp)))
    too_small = str(TTEmbeddings(rows=40_000).why_not(graph))
    assert re.search(r"\b30000\b.*\b40000\b", too_small)
    assert "rank 500" in str(TTEmbeddings(500).why_not(graph))


@pytest.mark.parametrize("make", [films, together])
def test_modules_and_parameters_are_replaced(make: Any) -> None:
    torch.manual_seed(0)
    built = build(make, TTEmbeddings(8))
    model: Any = built.model
    assert type(model.seen) is TTEmbeddingBag
    assert type(model.item) is TTEmbedding
    assert type(model.prime) is nn.Embedding
    assert type(model.day) is nn.Embedding
    assert model.seen.mode == "mean"
    assert model.item.padding_idx == 0
    assert float(model.seen.to_dense().std()) == pytest.approx(1.0, abs=0.05)
    trained = [id(p) for group in built.optimizer.param_groups for p in group["params"]]
    assert sorted(trained) == sorted(map(id, model.parameters()))
    losses = [float(built.step()) for _ in range(40)]
    assert losses[-1] < 0.5 * losses[0]


def test_trained_tables_are_approximated_by_svd() -> None:
    shape = ((25, 30, 40), (2, 2, 4))
    train = TTEmbedding(ROWS, DIM, (4, 4), shape, init_std=1.0)
    model = nn.Embedding.from_pretrained(train.to_dense(), freeze=False)

    def alone() -> Any:
        ids = torch.randint(0, ROWS, (32,))
        return nn.Sequential(copy.deepcopy(model)), ids

    module = build(alone, TTEmbeddings(8, svd=True)).model[0]
    assert module.shape.ranks == (1, 8, 8, 1)
    # Balanced factors differ from the table's: the nearest train, far nearer than chance.
    distance = (module.to_dense() - model.weight).norm() / model.weight.norm()
    assert float(distance) < 1
    assert type(build(alone, TTEmbeddings(8)).model[0]) is TTEmbedding


def test_unsupported_models_are_refused() -> None:
    with pytest.raises(WorkloadError, match="SparseAdam"):
        build(sparse, TTEmbeddings())
    with pytest.raises(WorkloadError, match=r"no nn\.Embedding"):
        build(mlp, TTEmbeddings())


def test_settings_are_parsed_and_checked() -> None:
    (found,) = parse("tt_embedding:8,cores=2,rows=10,svd=on")
    assert found == TTEmbeddings(8, 2, 10, True)
    assert found.quality().kind is QualityKind.NEEDS_TRAINING
    for wrong in ("rank=0", "cores=1", "cores=5"):
        with pytest.raises(InvalidArgumentError):
            parse(f"tt_embedding:{wrong}")
    with pytest.raises(UsageError, match="cannot be combined"):
        parse("tt_embedding+robe_embedding")


def test_lines_to_write_are_reported() -> None:
    example = Path(__file__).resolve().parents[3] / "examples" / "recommender.py"
    change = TTEmbeddings().code(Workload(f"{example}:make_workload"))
    assert change is not None
    assert not change.diff
    assert "TTEmbeddingBag" in change.note
