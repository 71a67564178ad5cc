"""Accumulation: forward and backward repeat, the update does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from recorded import build, graph_of, inference, mlp

from slipstream.durations import Durations
from slipstream.errors import InvalidArgumentError, WorkloadError
from slipstream.graph import StepPhase
from slipstream.technique import Context
from slipstream.techniques.accumulation import Accumulation
from slipstream.workload import build_from


@pytest.mark.parametrize("batches", [2, 3])
def test_everything_but_the_update_repeats(batches: int, tmp_path: Path) -> None:
    graph, technique = graph_of(mlp), Accumulation(batches)
    durations = Durations(threads=1, path=tmp_path / "durations.db")
    durations.measure(technique.questions(graph))
    after = technique.predict(graph, Context(durations))
    after.check()
    for phase, factor in (
        (StepPhase.FORWARD, batches),
        (StepPhase.OPTIMIZER, 1),
    ):
        assert (after.tasks.phase == phase).sum() == factor * (graph.tasks.phase == phase).sum()
    assert after.samples == batches * graph.samples


def test_the_same_batch_twice_has_the_gradient_of_once() -> None:
    plain, accumulated = build(mlp), build(mlp, Accumulation(2))
    for _ in range(3):
        torch.testing.assert_close(plain.step(), accumulated.step())
    for ours, theirs in zip(plain.model.parameters(), accumulated.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_inference_has_nothing_to_accumulate() -> None:
    assert Accumulation().why_not(graph_of(inference)) is not None


def test_one_batch_is_no_accumulation() -> None:
    with pytest.raises(InvalidArgumentError, match="batches"):
        Accumulation(1)


def test_a_step_of_ones_own_is_not_replaced() -> None:
    model, batch, loss, optimizer = mlp()

    def step() -> torch.Tensor:
        return torch.zeros(())

    parts = {"model": model, "batch": batch, "loss": loss, "optimizer": optimizer, "step": step}
    with pytest.raises(WorkloadError, match="your own"):
        build_from(parts, [Accumulation(2)], 0, "own step")
