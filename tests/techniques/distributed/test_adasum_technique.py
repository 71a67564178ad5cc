"""The technique adasum: its exchange follows the update, and nothing hides it."""

from __future__ import annotations

import pytest

from slipstream.errors import InvalidArgumentError, WorkloadError
from slipstream.graph import StepPhase, replay
from slipstream.technique import QualityKind, clash, parse, registry
from slipstream.techniques.distributed.adasum.technique import Adasum
from slipstream.techniques.distributed.gradients import gradients
from slipstream.workload import BuiltWorkload
from small_steps import COPY_NS, SLOW, context, graph_of


def test_the_step_grows_by_the_exchange_and_five_copies() -> None:
    graph = graph_of("mlp")
    found = Adasum(4).predict(graph, context(SLOW))
    found.check()
    (row,) = found.exchanges
    nbytes = sum(gradient.spec.nbytes for gradient in gradients(graph))
    assert row.collective.nbytes == nbytes
    assert found.samples == 4 * graph.samples
    cost = SLOW.cost(row.collective).duration_ns
    copies = 5 * COPY_NS * len(gradients(graph))
    grown = replay(found).step_ns - replay(graph).step_ns
    assert grown == pytest.approx(cost + copies, rel=1e-6)
    assert replay(found).peak_bytes >= replay(graph).peak_bytes


def test_it_is_found_by_name_and_among_the_ways_to_distribute_a_step() -> None:
    (found,) = parse("adasum:workers=8")
    assert found == Adasum(8)
    techniques = registry()
    assert all(clash(techniques["adasum"], techniques[other]) for other in ("ddp", "fsdp"))
    assert found.quality().kind is QualityKind.NEEDS_TRAINING
    note = found.code(None).note  # type: ignore[arg-type,union-attr]
    assert "AdasumOptimizer(optimizer)" in note, "one worker per node is the default"


def test_invalid_combinations_are_named() -> None:
    with pytest.raises(InvalidArgumentError, match="adasum:workers"):
        Adasum(1)
    with pytest.raises(WorkloadError, match="a single one"):
        Adasum(2).apply(BuiltWorkload(model=None))
    graph = graph_of("mlp")
    assert (graph.tasks.phase == StepPhase.OPTIMIZER).any()
    assert Adasum(2).why_not(Adasum(2).predict(graph, context(SLOW))) is not None
