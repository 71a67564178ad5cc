"""The same plan in the prediction and in the model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from slipstream.durations import Durations
from slipstream.errors import InvalidArgumentError, UnknownNameError, UsageError, WorkloadError
from slipstream.graph import Graph, StepPhase
from slipstream.technique import Context, QualityKind, parse
from slipstream.techniques.embedding.formats.robe import ROBEEmbedding
from slipstream.techniques.embedding.formats.tt import TTEmbedding
from slipstream.techniques.embedding.modules import TableEmbedding, TableEmbeddingBag
from slipstream.techniques.embedding.plan_technique import EmbeddingPlan
from slipstream.techniques.embedding.planning import plan
from slipstream.techniques.embedding.timed import module_of
from slipstream.workload import Workload

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from recorded import build, cannot_be_timed, graph_of, mlp

from known_durations import context_for, timed_by_bytes


class Shop(nn.Module):
    """Two tables of one shape, a bag, and one too small to matter."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(4000, 16)
        self.item = nn.Embedding(4000, 16)
        self.seen = nn.EmbeddingBag(3000, 16, mode="sum")
        self.day = nn.Embedding(7, 8)
        self.top = nn.Linear(56, 4)

    def forward(self, user: Any, item: Any, seen: Any, day: Any) -> torch.Tensor:
        parts = [self.user(user), self.item(item), self.seen(seen), self.day(day)]
        made: torch.Tensor = self.top(torch.cat(parts, 1))
        return made


def batch() -> Any:
    user, item = torch.randint(0, 4000, (2, 16))
    return user, item, torch.randint(0, 3000, (16, 5)), torch.randint(0, 7, (16,))


def shop(foreach: bool = False) -> Any:
    model = Shop()
    optimizer = torch.optim.Adam(model.parameters(), 0.01, foreach=foreach)
    return model, (batch(), torch.randint(0, 4, (16,))), cross_entropy, optimizer


def together() -> Any:
    return shop(foreach=True)


def served() -> Any:
    return Shop().eval(), batch()


def sparse() -> Any:
    model, inputs, loss, _ = shop()
    return model, inputs, loss, torch.optim.SparseAdam([model.user.weight])


def unmeasured(tmp_path: Path) -> Context:
    return Context(Durations(threads=1, path=tmp_path / "none.db"))


def trained_shapes(graph: Graph) -> set[tuple[int, ...]]:
    """Return the shapes of all tensors that the optimizer updates."""
    found = set()
    for task in range(len(graph)):
        if graph.tasks.phase[task] == StepPhase.OPTIMIZER and graph.tasks.call[task] >= 0:
            found |= {spec.shape for spec in graph.calls[graph.tasks.call[task]].inputs}
    return found


@pytest.mark.parametrize("make", [shop, together])
def test_prediction_and_model_have_the_same_parameters(make: Any, tmp_path: Path) -> None:
    technique = EmbeddingPlan(4.0, methods="lowdim")
    graph = graph_of(make)
    assert technique.why_not(graph) is None
    after = technique.predict(graph, unmeasured(tmp_path))
    model = build(make, technique).model
    for module in (model.user, model.item):
        assert type(module) is TableEmbedding
        assert (module.nbytes // 4,) in trained_shapes(after)
    assert type(model.seen) is TableEmbeddingBag
    assert type(model.day) is nn.Embedding
    assert not trained_shapes(after) & {(4000, 16), (3000, 16)}
    assert (7, 8) in trained_shapes(after)
    total = sum(module.nbytes for module in (model.user, model.item, model.seen))
    dense = 11_000 * 16 * 4
    roles = graph.memory.role == 1
    fewer = int(graph.memory.nbytes[roles].sum() - after.memory.nbytes[roles].sum())
    assert fewer == pytest.approx(dense - total, abs=16)
    assert "in" in after.edits[-1].what
    assert "lowdim" in after.edits[-1].what


def test_durations_equal_those_of_the_modules() -> None:
    graph = timed_by_bytes(graph_of(shop))
    for methods in ("lowdim", "robe", "tt", "hash"):
        technique = EmbeddingPlan(8.0, methods=methods)
        after = technique.predict(graph, context_for(technique, graph))
        spent = [
            float(g.tasks.duration_ns[g.tasks.phase == StepPhase.OPTIMIZER].sum())
            for g in (graph, after)
        ]
        assert spent[1] < 0.7 * spent[0], methods
        changed = [
            task
            for task in range(len(after))
            if after.tasks.phase[task] == StepPhase.FORWARD
            and "embedding" in after.string(int(after.tasks.name[task]))
        ]
        assert len(changed) == 4


@pytest.mark.parametrize("make", [shop, together])
@pytest.mark.parametrize("methods", ["robe", "tt"])
def test_requested_calls_can_be_timed(make: Any, methods: str) -> None:
    assert (
        cannot_be_timed(EmbeddingPlan(8.0, methods=methods).required_timings(graph_of(make))) == []
    )


def test_inference_may_use_codes(tmp_path: Path) -> None:
    graph = graph_of(served)
    technique = EmbeddingPlan(3.0)
    durations = Durations(threads=1, path=tmp_path / "durations.db")
    durations.measure(technique.required_timings(graph))
    technique.predict(graph, Context(durations))
    assert technique.quality(graph).kind is QualityKind.ROUNDING
    assert technique.quality(graph_of(shop)).kind is QualityKind.NEEDS_TRAINING
    plain, built = build(served), build(served, technique)
    before, after = plain.step(), built.step()
    assert type(built.model.user) is TableEmbedding
    assert 0 < float((before - after).norm() / before.norm()) < 0.2


@pytest.mark.parametrize(
    ("methods", "kind"), [("robe", ROBEEmbedding), ("tt", TTEmbedding), ("hash", TableEmbedding)]
)
def test_the_new_modules_learn(methods: str, kind: type) -> None:
    torch.manual_seed(0)
    built = build(shop, EmbeddingPlan(10.0, methods=methods))
    assert type(built.model.item) is kind
    own = sorted(id(p) for group in built.optimizer.param_groups for p in group["params"])
    assert own == sorted(map(id, built.model.parameters()))
    losses = [float(built.step()) for _ in range(60)]
    assert losses[-1] < 0.6 * losses[0]


def test_a_saved_plan_is_used(tmp_path: Path) -> None:
    torch.manual_seed(0)
    saved = plan(Shop(), ratio=6, methods=["hash"])
    saved.save(tmp_path / "plan.json")
    technique = EmbeddingPlan(file=str(tmp_path / "plan.json"))
    assert technique.why_not(graph_of(shop)) is None
    technique.predict(graph_of(shop), unmeasured(tmp_path))
    model = build(shop, technique).model
    assert model.item.table.rows == saved.tables["item"].settings["rows"]
    other = EmbeddingPlan(file=str(tmp_path / "absent.json"))
    assert "not a plan" in str(other.why_not(graph_of(shop)))


def test_reasons_and_refusals() -> None:
    assert "no embedding table" in str(EmbeddingPlan().why_not(graph_of(mlp)))
    assert "largest table has 4000" in str(EmbeddingPlan(rows=5000).why_not(graph_of(shop)))
    assert "too small" in str(EmbeddingPlan(1e6).why_not(graph_of(shop)))
    assert "no table format" in str(EmbeddingPlan(1.0).why_not(graph_of(shop)))
    with pytest.raises(WorkloadError, match="SparseAdam"):
        build(sparse, EmbeddingPlan())
    with pytest.raises(WorkloadError, match=r"no nn\.Embedding"):
        build(mlp, EmbeddingPlan())


def test_settings_are_parsed_and_checked() -> None:
    (found,) = parse("embedding_plan:ratio=20,methods=lowdim/robe,rows=10")
    assert found == EmbeddingPlan(20.0, "lowdim/robe", "", 10)
    for wrong in ("ratio=0.5", "ratio=inf", "ratio=x"):
        with pytest.raises(InvalidArgumentError):
            parse(f"embedding_plan:{wrong}")
    with pytest.raises(UnknownNameError):
        parse("embedding_plan:methods=low")
    with pytest.raises(UsageError):
        parse("embedding_plan+robe_embedding")


def test_lines_to_write_are_reported() -> None:
    example = Path(__file__).resolve().parents[3] / "examples" / "recommender.py"
    change = EmbeddingPlan().code(Workload(f"{example}:make_workload"))
    assert change is not None
    assert "ss.embedding.plan" in change.note


@pytest.mark.parametrize(("format", "once"), [("int4", True), ("hash", False)])
def test_a_table_that_is_fitted_is_timed_as_one_module(format: str, once: bool) -> None:
    settings = () if once else (("rows", 8),)
    first, second = (module_of(50, 8, format, settings, "") for _ in range(2))
    assert (first is second) == once
