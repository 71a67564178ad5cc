"""The fused update: one task instead of many, and equal parameters after real steps."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from recorded import build, graph_of, inference, mlp

from slipstream.durations import Durations
from slipstream.graph import Graph, StepPhase
from slipstream.technique import Context
from slipstream.techniques.fused_optimizer import FusedOptimizer

KINDS = ("fused", "foreach")


def update_names(graph: Graph) -> list[str]:
    return [
        graph.string(int(name))
        for name, phase, scope in zip(
            graph.tasks.name, graph.tasks.phase, graph.tasks.scope, strict=True
        )
        if phase == StepPhase.OPTIMIZER and "zero_grad" not in graph.string(int(scope))
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_the_update_becomes_one_measured_task(kind: str, tmp_path: Path) -> None:
    graph, technique = graph_of(mlp), FusedOptimizer(kind)
    durations = Durations(threads=1, path=tmp_path / "durations.db")
    durations.measure(technique.required_timings(graph))
    after = technique.predict(graph, Context(durations))
    assert len(update_names(graph)) > 20
    assert update_names(after) == [f"{kind} update"]
    others = [name for name in after.strings if name.startswith("aten::addmm")]
    assert others, "the forward pass is still there"


@pytest.mark.parametrize("kind", KINDS)
def test_real_steps_give_the_same_parameters(kind: str) -> None:
    plain, fused = build(mlp), build(mlp, FusedOptimizer(kind))
    for _ in range(5):
        plain.step()
        fused.step()
    for ours, theirs in zip(plain.model.parameters(), fused.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_it_is_really_fused() -> None:
    built = build(mlp, FusedOptimizer())
    assert all(group["fused"] for group in built.optimizer.param_groups)
    calls = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with calls:
        built.step()
    assert any("_fused_adamw_" in event.name for event in calls.events())


def test_every_optimizer_must_be_fused_to_need_no_flag() -> None:
    parameters = [torch.zeros(2, requires_grad=True) for _ in range(2)]
    fused, looped = (
        torch.optim.Adam([p], fused=flag) for p, flag in zip(parameters, (True, False), strict=True)
    )
    built = dataclasses.replace(build(mlp), optimizer=fused, other_optimizers=(looped,))
    assert FusedOptimizer().already(built) is None
    FusedOptimizer().apply(built)
    assert FusedOptimizer().already(built) == "the optimizer is fused already"


def test_inference_has_no_optimizer_to_fuse() -> None:
    assert "no optimizer" in str(FusedOptimizer().why_not(graph_of(inference)))


def test_an_optimizer_without_a_fused_form_is_refused_with_a_reason() -> None:
    from dataclasses import replace

    graph = graph_of(mlp)
    described = {**graph.meta["optimizer"], "class": "LBFGS"}
    other = replace(graph, meta={**graph.meta, "optimizer": described})
    assert "LBFGS" in str(FusedOptimizer().why_not(other))
