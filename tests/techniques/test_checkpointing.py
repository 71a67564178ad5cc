"""Checkpointing: chosen blocks, recomputation, remaining memory, and equal results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import build, graph_of, inference, mlp
from torch import nn
from torch.nn.functional import cross_entropy

from slipstream.durations import Durations
from slipstream.errors import WorkloadError
from slipstream.graph import Graph, Role, StepPhase, replay
from slipstream.technique import Context, combine, parse
from slipstream.techniques.accumulation import Accumulation
from slipstream.techniques.checkpointing import Checkpointing
from slipstream.workload import BuiltWorkload, build_from
from tiny_models import record


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


def blocks() -> Any:
    """Four residual blocks; activations outweigh parameters."""
    model = nn.Sequential(nn.Linear(8, 32), *(Block() for _ in range(4)), nn.Linear(32, 4))
    batch = (torch.randn(512, 8), torch.randint(0, 4, (512,)))
    return model, batch, cross_entropy, torch.optim.SGD(model.parameters(), lr=1e-2)


def predicted(graph: Graph, folder: Path, *techniques: Any) -> Graph:
    durations = Durations(threads=1, path=folder / "durations.db")
    after = combine(graph, techniques, Context(durations))
    after.check()
    return after


def recorded(*techniques: Any) -> Graph:
    return record(build(blocks, *techniques), steps=2)


@pytest.mark.parametrize(
    "techniques",
    [(Checkpointing(),), (Checkpointing(only="[12]"),), (Accumulation(2), Checkpointing())],
    ids=["all", "two", "accumulated"],
)
def test_the_predicted_peak_equals_that_of_the_real_step(
    techniques: tuple[Any, ...], tmp_path: Path
) -> None:
    graph = graph_of(blocks)
    after, real = predicted(graph, tmp_path, *techniques), recorded(*techniques)
    peak = replay(after).peak_bytes
    assert peak == pytest.approx(replay(real).peak_bytes, rel=0.05)
    assert peak < 0.9 * replay(graph).peak_bytes or len(techniques) > 1


def test_a_block_is_recomputed_before_its_own_backward(tmp_path: Path) -> None:
    graph = graph_of(blocks)
    after = predicted(graph, tmp_path, Checkpointing())
    names = [after.string(int(name)) for name in after.tasks.name]
    modules = [after.string(int(module)) for module in after.tasks.module]
    begins = [t for t, name in enumerate(names) if name == "checkpoint"]
    assert len(begins) == 4
    assert (after.tasks.phase[begins] == StepPhase.BACKWARD).all()
    for t, block in zip(begins, ("4", "3", "2", "1"), strict=True):
        assert modules[t + 1].startswith(f"model.{block}")
    # No gradient needs the output of the last linear layer, so it is not recomputed.
    again = names.count("aten::addmm") - [graph.string(int(n)) for n in graph.tasks.name].count(
        "aten::addmm"
    )
    assert again == 8
    assert len(after) > len(graph)


def test_other_tasks_keep_their_times(tmp_path: Path) -> None:
    graph = graph_of(blocks)
    after = predicted(graph, tmp_path, Checkpointing())
    update = after.tasks.phase == StepPhase.OPTIMIZER
    before = graph.tasks.phase == StepPhase.OPTIMIZER
    assert after.tasks.duration_ns[update].tolist() == graph.tasks.duration_ns[before].tolist()
    assert replay(after).step_ns > replay(graph).step_ns


def test_the_cost_of_checkpointing_itself_is_measured(tmp_path: Path) -> None:
    technique, graph = Checkpointing(), graph_of(blocks)
    durations = Durations(threads=1, path=tmp_path / "durations.db")
    durations.measure(technique.required_timings(graph))
    answers = [durations.lookup(call) for call in technique.required_timings(graph)]
    # As a difference it may be zero on a busy machine.
    assert all(answer is not None and answer.nanoseconds >= 0 for answer in answers)


def test_fewer_activations_exist_when_the_backward_begins(tmp_path: Path) -> None:
    def activation_bytes(graph: Graph) -> int:
        memory = graph.memory
        first = int((graph.tasks.phase == StepPhase.BACKWARD).argmax())
        alive = (memory.producer < first) & (memory.release >= first)
        return int(memory.nbytes[alive & (memory.role == Role.ACTIVATION)].sum())

    graph = graph_of(blocks)
    assert activation_bytes(predicted(graph, tmp_path, Checkpointing())) < 0.4 * activation_bytes(
        graph
    )


def test_real_steps_give_equal_results_including_dropout() -> None:
    plain, checkpointed = build(blocks), build(blocks, Checkpointing())
    for _ in range(3):
        torch.manual_seed(7)
        expected = plain.step()
        torch.manual_seed(7)
        assert torch.equal(checkpointed.step(), expected)
    for ours, theirs in zip(plain.model.parameters(), checkpointed.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_blocks_are_chosen_by_name() -> None:
    graph = graph_of(blocks)

    def chosen(text: str) -> set[str]:
        (technique,) = parse(text)
        assert isinstance(technique, Checkpointing)
        return set(technique._blocks(graph).module)

    assert chosen("checkpointing") == {f"model.{i}" for i in range(1, 5)}
    assert chosen("checkpointing:[12]") == {"model.1", "model.2"}
    assert chosen("checkpointing:except=1") == {"model.2", "model.3", "model.4"}
    assert chosen("checkpointing:only=2.*,except=2.n*") == {
        "model.2.up", "model.2.down", "model.2.drop",
    }  # fmt: skip


@pytest.mark.parametrize("text", ["checkpointing", "checkpointing:1", "checkpointing:except=1"])
def test_settings_round_trip(text: str) -> None:
    (technique,) = parse(text)
    assert str(technique) == text
    assert parse(str(technique)) == (technique,)


def test_an_inapplicable_step_has_a_reason() -> None:
    assert "no backward" in (Checkpointing().why_not(graph_of(inference)) or "")
    assert "no block repeats" in (Checkpointing().why_not(graph_of(mlp)) or "")
    assert "nowhere" in (Checkpointing("nowhere").why_not(graph_of(blocks)) or "")
    opaque = replace(graph_of(blocks), meta={})
    assert "modules" in (Checkpointing().why_not(opaque) or "")


def test_a_model_that_recomputes_its_blocks_needs_no_checkpointing() -> None:
    assert "already recomputes these" in (Checkpointing().why_not(recorded(Checkpointing())) or "")
    some = recorded(Checkpointing(only="[12]"))
    assert "already recomputes '1'" in (Checkpointing().why_not(some) or "")
    assert Checkpointing(only="[34]").why_not(some) is None


class Gathered(torch.autograd.Function):
    """A product with a gathered matrix, which is gathered again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight.clone().T, x.T @ gradients[0]


class Sharded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.weight = nn.LayerNorm(8), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + Gathered.apply(self.norm(x), self.weight).tanh()
        return out


def test_a_repeated_gather_recomputes_no_block() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Sharded(), Sharded())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    parts = model, torch.randn(4, 8), lambda out: out.square().mean(), optimizer
    graph = record(build_from(parts, (), 0, "sharded"))
    assert sum(graph.string(int(name)) == "aten::clone" for name in graph.tasks.name) == 4
    assert Checkpointing().why_not(graph) is None


def test_an_opaque_step_cannot_be_checkpointed() -> None:
    with pytest.raises(WorkloadError, match="hides"):
        Checkpointing().apply(BuiltWorkload(None, step=lambda: None))
    with pytest.raises(WorkloadError, match="no module"):
        build(mlp, Checkpointing())
