"""Steps cut into parts and placed on ranks: the plain step, its work, memory and order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from slipstream.cluster import Mesh
from slipstream.cluster.orders import ORDERS, Action, Order, asynchronous_order
from slipstream.cluster.placement import Part, Placement
from slipstream.errors import GraphError, InvalidArgumentError
from slipstream.graph import (
    Allocations,
    Editor,
    Graph,
    Kind,
    Role,
    StepPhase,
    find_peak,
    load,
    replace_tasks,
    replay,
    save,
    with_overlap,
)
from slipstream.graph.edit import append_task
from slipstream.graph.page_faults import (
    PAGE_FAULTS,
    page_fault_ns,
    page_fault_tasks,
    with_page_faults,
)
from slipstream.graph.parts import balanced, boundaries, cut
from slipstream.graph.place import place
from slipstream.provenance import Provenance
from slipstream.workload import build_from
from small_steps import FAST, SLOW, graph_of, still, tail_heavy
from tiny_models import record


@pytest.fixture(scope="module")
def graph() -> Graph:
    return graph_of("transformer")


def placement(graph: Graph, order: Order) -> Placement:
    modules = balanced(graph, order.stages)
    return Placement(
        tuple(
            Part(f"stage {n}", modules[n - 1 : n] if n else (), Mesh(np.array([n]), ("stage",)), 3)
            for n in range(order.stages)
        ),
        order,
    )


def placed(graph: Graph, order: Order) -> Graph:
    """Return the step of all ranks whose micro-batches are as large as the recorded batch."""
    return place(graph, placement(graph, order), FAST, micro=graph)


def test_one_part_and_one_micro_batch_is_the_plain_step(graph: Graph) -> None:
    assert place(graph, placement(graph, ORDERS["gpipe"](1, 1)), FAST) == graph


@pytest.mark.parametrize("stages", [2, 3, 6])
def test_one_micro_batch_takes_the_plain_step_without_parallel_updates(
    graph: Graph, stages: int
) -> None:
    """Passes of all stages run sequentially; only updates run simultaneously."""
    made = placed(graph, ORDERS["1f1b"](stages, 1))
    parts = cut(graph, balanced(graph, stages))
    busy = graph.tasks.duration_ns
    saved_ns = sum(busy[tasks].sum() for tasks in parts.update[1:]) + busy[parts.end].sum()
    sending = made.tasks.duration_ns[made.tasks.kind == Kind.COMMUNICATION].sum()
    expected = replay(graph).step_ns - saved_ns + sending
    assert replay(made).step_ns == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("name", sorted(ORDERS))
def test_every_task_runs_once_per_micro_batch_or_step(graph: Graph, name: str) -> None:
    made = placed(graph, ORDERS[name](3, 4))
    repeats = np.where(np.isin(graph.tasks.phase, (StepPhase.FORWARD, StepPhase.BACKWARD)), 4, 1)
    computing = made.tasks.kind != Kind.COMMUNICATION
    total = made.tasks.duration_ns[computing].sum()
    assert total == pytest.approx((graph.tasks.duration_ns * repeats).sum())
    # Two transfers per boundary and micro-batch, each with an edge in and an edge out.
    assert (len(made.exchanges), len(made.edges)) == (2 * 2 * 4, 2 * 2 * 2 * 4)
    assert {row.purpose for row in made.exchanges} == {"activation"}


def test_an_asynchronous_pipeline_is_as_fast_as_its_slowest_stage(graph: Graph) -> None:
    for order in (
        ORDERS["async"](3, 4),
        ORDERS["async"](6, 1),
        asynchronous_order(4, 1, lambda stage: 2 * (3 - stage)),
    ):
        made = placed(graph, order)
        timeline = replay(made)
        slowest = max(timeline.lane_busy_ns[: order.stages])
        assert timeline.step_ns == pytest.approx(slowest, rel=1e-6)
        assert made.warm_steps == order.max_shift
        assert timeline.start_ns.min() == 0.0


@pytest.mark.parametrize("name", sorted(ORDERS))
@pytest.mark.parametrize(("stages", "micro_batches"), [(3, 4), (3, 1), (6, 8)])
def test_activations_of_a_stage_are_those_in_flight(
    graph: Graph, name: str, stages: int, micro_batches: int
) -> None:
    order = ORDERS[name](stages, micro_batches)
    parts = cut(graph, balanced(graph, stages))
    huge = 10**9
    for stage in range(stages):
        # From the first forward task to the last one whose slot ends the micro-batch.
        last = parts.weights[stage] if order.splits_backward else parts.backward(stage)
        row = [huge], [-1], [int(Role.ACTIVATION)], [parts.forward[stage][0]], [last[-1]]
        made = placed(replace(graph, memory=Allocations.of(*row)), order)
        peaks = replay(made).memory.peak_bytes // huge
        assert peaks.max() == peaks[stage] == order.in_flight(stage)


def test_memory_that_lasts_adds_up_to_that_of_the_plain_step(graph: Graph) -> None:
    made = placed(graph, ORDERS["1f1b"](3, 4))
    memory = graph.memory
    for role in (Role.PARAMETER, Role.OPTIMIZER, Role.INPUT):
        expected = memory.nbytes[memory.role == role].sum()
        assert made.memory.nbytes[made.memory.role == role].sum() == expected > 0
    # The recorded states of a parameter are on its rank: Adam has two of its size, and a counter.
    ranks = made.tasks.rank[made.memory.producer]
    for rank in range(3):
        totals = [
            made.memory.nbytes[(made.memory.role == role) & (ranks == rank)].sum()
            for role in (Role.PARAMETER, Role.OPTIMIZER)
        ]
        assert totals[1] == pytest.approx(2 * totals[0], rel=0.02)


def test_the_peak_is_that_of_the_fullest_rank(graph: Graph) -> None:
    timeline = replay(placed(graph, ORDERS["1f1b"](3, 4)))
    peak = find_peak(timeline)
    assert peak.nbytes == timeline.memory.peak_bytes.max() == timeline.peak_bytes
    assert sum(nbytes for _, nbytes in peak.by_role) == peak.nbytes


def test_page_faults_are_shared_by_the_stages(graph: Graph) -> None:
    faulty = append_task(graph, PAGE_FAULTS, 9e5, 0.1, Kind.HOST)
    made = placed(faulty, ORDERS["1f1b"](3, 1))
    tasks = page_fault_tasks(made)
    assert page_fault_ns(made) == pytest.approx(9e5)
    assert sorted(made.tasks.rank[tasks].tolist()) == [0, 1, 2]
    after = replay(made)
    assert with_page_faults(replay(faulty), after) is after


def test_stashed_weights_are_held_by_their_stage(graph: Graph) -> None:
    order = ORDERS["pipedream"](2, 1)
    plain = replay(placed(graph, order)).memory.peak_bytes
    stashed = place(graph, placement(graph, order), FAST, weight_copies=(3, 1))
    more = replay(stashed).memory.peak_bytes - plain
    weights = stashed.memory.nbytes[stashed.memory.role == Role.PARAMETER].sum()
    assert more[1] == 0 < more[0]
    assert weights == graph.memory.nbytes[graph.memory.role == Role.PARAMETER].sum() + more[0]


class Largest(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, at = x.view(len(x), -1, 2).max(dim=2)
        return values, at


class Weighted(nn.Module):
    def forward(self, both: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        values, at = both
        return values * at


@pytest.fixture(scope="module")
def frozen() -> Graph:
    """A step whose first layer is not trained, and in which two tensors pass between layers."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8),
        Largest(), Weighted(), nn.Linear(4, 4),
    )  # fmt: skip
    batch = torch.randn(12, 8), torch.randn(12, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    result = model, batch, nn.functional.mse_loss, optimizer
    return still(record(build_from(result, (), 0, "frozen")))


@pytest.mark.parametrize("name", sorted(ORDERS))
def test_layers_that_are_not_trained_wait_for_no_gradients(frozen: Graph, name: str) -> None:
    order = ORDERS[name](4, 3)
    modules = ("model.1", "model.2", "model.3")
    parts = tuple(
        Part(f"stage {n}", modules[n - 1 : n] if n else (), Mesh(np.array([n]), ("stage",)), 4)
        for n in range(4)
    )
    made = place(frozen, Placement(parts, order), FAST, micro=frozen)
    senders = made.tasks.rank[[row.task for row in made.exchanges]]
    # Activations from three stages, and gradients from the last two.
    assert np.bincount(senders).tolist() == [3, 3, 6, 3]
    # A step takes at least the work of a stage.
    timeline = replay(made)
    assert timeline.step_ns >= timeline.lane_busy_ns.max()


def test_two_tensors_do_not_pass_a_cut(frozen: Graph) -> None:
    modules = [boundary.module for boundary in boundaries(frozen)]
    assert modules == ["model.1", "model.2", "model.3", "model.4", "model.6"]


def test_an_update_of_all_parameters_is_divided_by_their_bytes() -> None:
    graph = tail_heavy()
    update = np.flatnonzero(graph.tasks.phase == StepPhase.OPTIMIZER)
    parts = cut(graph, ("model.6",))
    # The last layer has half of the parameters, but an eighth of the tensors.
    assert parts.share[1, update].sum() == pytest.approx(len(update) / 7, rel=0.05)
    together = int(update[-1])
    storages = [s for task in update.tolist() for s in graph.storages(task).tolist()]
    updated = sorted(set(storages) & set(graph.parameters.tolist()))
    starts, operands = graph.gathered(
        np.where(np.arange(len(graph)) == together, -1, np.arange(len(graph))),
        {together: np.array(updated, np.int32)},
    )
    specs = {}
    for task in range(len(graph)):
        view = graph.task(task)
        inputs, _ = view.operands
        if view.call is not None:
            specs.update(zip(inputs, view.call.inputs, strict=True))
    call = replace(
        graph.task(together).known_call, arguments=([specs[s] for s in updated],), outputs=()
    )
    tasks = graph.tasks.call.copy()
    tasks[together] = len(graph.calls)
    joint = replace(
        replace_tasks(graph, call=tasks),
        calls=(*graph.calls, call), operand_start=starts, operands=operands, shrunk=(),
    )  # fmt: skip
    assert cut(joint, ("model.6",)).share[1, together] == pytest.approx(0.5, abs=0.03)


def test_a_residual_is_not_cut(graph: Graph) -> None:
    modules = [boundary.module for boundary in boundaries(graph)]
    assert "model.blocks.1" in modules
    assert not {"model.blocks.1.out", "model.blocks.1.down"} & set(modules)
    with pytest.raises(InvalidArgumentError, match=r"cannot be cut before 'model\.blocks\.1\.out'"):
        cut(graph, ("model.blocks.1.out",))
    with pytest.raises(InvalidArgumentError, match="not in the order of the forward pass"):
        cut(graph, modules[1::-1])
    with pytest.raises(InvalidArgumentError, match="at most 6 parts, not 9"):
        balanced(graph, 9)


def test_invalid_requests_are_refused(graph: Graph) -> None:
    order = ORDERS["gpipe"](2, 2)
    with pytest.raises(InvalidArgumentError, match="there are several micro-batches"):
        place(graph, placement(graph, order), FAST)
    edit = Editor(graph, "")
    edit.insert(0, "more", 1.0, Provenance.USER)
    with pytest.raises(GraphError, match="other tasks than the whole step"):
        place(graph, placement(graph, order), FAST, micro=edit.apply(""))
    pair = Mesh(np.array([0, 1]), ("data",))
    with pytest.raises(InvalidArgumentError, match="'all' has 2 devices"):
        place(graph, Placement((Part("all", (), pair, 3),), ORDERS["gpipe"](1, 1)), FAST)
    alone = Mesh(np.array([0]), ("layer",))
    twice = Part("all", (), alone, 3), Part("head", ("model.head",), alone, 3)
    with pytest.raises(InvalidArgumentError, match="some share a device"):
        place(graph, Placement(twice, ORDERS["gpipe"](2, 1)), FAST)


def test_files_keep_a_placed_step(graph: Graph, tmp_path: Path) -> None:
    made = placed(graph, ORDERS["async"](3, 2))
    save(made, tmp_path / "run.slipgraph")
    again = load(tmp_path / "run.slipgraph")
    assert again == made
    assert replay(again).step_ns == replay(made).step_ns
    odd = replace(made, meta={**made.meta, "warm_steps": "many"})
    assert odd.warm_steps == 0


def test_only_the_ranks_of_a_transfer_are_slowed_by_it(graph: Graph) -> None:
    slow = replace(SLOW, overlap_penalty=replace(SLOW.overlap_penalty, value=0.5))
    order = ORDERS["1f1b"](3, 4)
    made = place(graph, placement(graph, order), slow, micro=graph)
    after = with_overlap(made, slow)
    changed = np.flatnonzero(after.tasks.duration_ns != made.tasks.duration_ns)
    timeline = replay(made)
    assert len(changed)
    for task in changed.tolist():
        rank = made.tasks.rank[task]
        assert any(
            rank in row.collective.group.members  # type: ignore[union-attr]
            and timeline.start_ns[row.task] < timeline.end_ns[task]
            and timeline.end_ns[row.task] > timeline.start_ns[task]
            for row in made.exchanges
        )
    assert order.shift(0, Action.FORWARD, 0) == 0
