"""Accumulation repeats the forward and backward pass, but not the update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from recorded import build, graph_of, inference, mlp
from torch import distributed, nn

from slipstream.durations import Durations
from slipstream.errors import InvalidArgumentError, WorkloadError
from slipstream.graph import Graph, StepPhase, replay
from slipstream.source import AlreadyAppliedError, EditLocationError
from slipstream.technique import Context, Stage, TechniqueSettings, Traits
from slipstream.techniques.accumulation import Accumulation
from slipstream.workload import BuiltWorkload, build_from
from small_steps import COPY_NS, context
from tiny_models import record


@pytest.mark.parametrize("batches", [2, 3])
def test_everything_except_the_update_repeats(batches: int, tmp_path: Path) -> None:
    graph, technique = graph_of(mlp), Accumulation(batches)
    durations = Durations(threads=1, path=tmp_path / "durations.db")
    durations.measure(technique.required_timings(graph))
    after = technique.predict(graph, Context(durations))
    after.check()
    for phase, factor in (
        (StepPhase.FORWARD, batches),
        (StepPhase.OPTIMIZER, 1),
    ):
        assert (after.tasks.phase == phase).sum() == factor * (graph.tasks.phase == phase).sum()
    assert after.samples == batches * graph.samples


def test_adding_to_gradients_follows_every_pass_but_the_first() -> None:
    graph = graph_of(mlp)
    after = Accumulation(4).predict(graph, context(None))
    names = [after.string(int(name)) for name in after.tasks.name]
    added = [place for place, name in enumerate(names) if name == "accumulate gradients"]
    assert len(added) == 3
    assert after.tasks.duration_ns[added].tolist() == [6 * COPY_NS] * 3
    # Each follows a whole pass.
    _, second, third = np.diff([0, *added])
    assert second == third
    assert len(after) == len(graph) + 3 * second
    assert set(after.tasks.phase[added].tolist()) == {StepPhase.BACKWARD}
    for place in added:
        assert len(after.storages(place)) == 0


def test_the_same_batch_twice_has_the_gradient_of_once() -> None:
    plain, accumulated = build(mlp), build(mlp, Accumulation(2))
    for _ in range(3):
        torch.testing.assert_close(plain.step(), accumulated.step())
    for ours, theirs in zip(plain.model.parameters(), accumulated.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_inference_has_nothing_to_accumulate() -> None:
    assert Accumulation().why_not(graph_of(inference)) is not None


def test_one_batch_is_not_accumulation() -> None:
    with pytest.raises(InvalidArgumentError, match="try: for example accumulation:4"):
        Accumulation(1)


def test_a_user_defined_step_is_not_replaced() -> None:
    model, batch, loss, optimizer = mlp()

    def step() -> torch.Tensor:
        return torch.zeros(())

    parts = {"model": model, "batch": batch, "loss": loss, "optimizer": optimizer, "step": step}
    with pytest.raises(WorkloadError, match="your own"):
        build_from(parts, [Accumulation(2)], 0, "own step")


@pytest.fixture
def one_rank() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def replicated() -> Any:
    """Like `mlp`, with gradients exchanged between replicas."""
    model, batch, loss, _ = mlp()
    model = nn.parallel.DistributedDataParallel(model)
    return model, batch, loss, torch.optim.SGD(model.parameters(), lr=1e-2)


def exchanges(graph: Graph) -> int:
    return sum(graph.string(int(name)) == "c10d::allreduce_" for name in graph.tasks.name)


def test_replicas_exchange_gradients_once_per_update(one_rank: None, tmp_path: Path) -> None:
    graph = record(build(replicated))
    assert exchanges(graph) == 1
    after = Accumulation(3).predict(graph, Context(Durations(threads=1, path=tmp_path / "d.db")))
    after.check()
    real = record(build(replicated, Accumulation(3)))
    assert exchanges(after) == exchanges(real) == 1
    names = [Counter(g.string(int(n)) for n in g.tasks.name) for g in (after, real)]
    # Dividing the loss is not predicted; adding gradients is one task there.
    for name in ("aten::addmm", "aten::mm", "aten::relu", "c10d::allreduce_", "aten::copy_"):
        assert names[0][name] == names[1][name], name
    peaks = [replay(g).peak_bytes for g in (after, real)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.05)


class Replicates(TechniqueSettings):
    """Make replicas, like a technique that is applied after accumulation."""

    name: ClassVar[str] = "replicates"
    traits: ClassVar[Traits] = Traits(stage=Stage.DISTRIBUTION)

    def apply(self, built: BuiltWorkload) -> None:
        built.model = nn.parallel.DistributedDataParallel(built.model)


def test_replicas_made_afterwards_exchange_once_too(one_rank: None) -> None:
    assert exchanges(record(build(mlp, Replicates()))) == 1
    assert exchanges(record(build(mlp, Accumulation(3), Replicates()))) == 1


def test_a_script_is_edited_and_its_step_has_more_samples() -> None:
    model, batch, _, optimizer = mlp()
    built = BuiltWorkload(model, batch=batch, optimizer=optimizer, samples=8, samples_before=8)
    Accumulation(2).apply(built)
    assert (built.samples, built.samples_before) == (16, 8)
    text = LOOP.format(header="for x in data:")
    edited = Accumulation(2).edit_script(Path("train.py"), text.encode(), range(0)).decode()
    assert "(loss / 2).backward()" in edited
    with pytest.raises(AlreadyAppliedError):
        Accumulation(2).edit_script(Path("train.py"), edited.encode(), range(0))
    text = LOOP.format(header="while True:")
    with pytest.raises(EditLocationError, match="not a for loop"):
        Accumulation(2).edit_script(Path("train.py"), text.encode(), range(0))


LOOP = """\
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = torch.ones(9, 3, 2)
{header}
    loss = model(data[0]).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
