"""Orders of pipelines: equal to torch's, with the bubbles and weight versions of theory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slipstream import native
from slipstream.cluster.groups import Mesh
from slipstream.cluster.orders import ORDERS, Action, Order, Slot, asynchronous_order
from slipstream.cluster.placement import Part, Placement
from slipstream.errors import InvalidArgumentError

SIZES = [(p, n) for p in (1, 2, 3, 4, 5, 8) for n in (1, 2, 3, 4, 7, 8, 16)]


def torch_order(name: str, stages: int, micro_batches: int) -> list[list[tuple[str, int]]]:
    """Return torch's schedule, read without processes and without its idle slots."""
    from torch.distributed.pipelining import schedules

    kinds = {"gpipe": "GPipe", "1f1b": "1F1B", "zero_bubble": "InterleavedZeroBubble"}
    kind: Any = getattr(schedules, f"Schedule{kinds[name]}")
    if name == "zero_bubble":
        rounds = max(1, micro_batches // stages)
        schedule = SimpleNamespace(
            n_local_stages=1, pp_group_size=stages, _n_microbatches=micro_batches,
            microbatches_per_round=micro_batches // rounds,
        )  # fmt: skip
        rows = {r: kind._calculate_single_rank_operations(schedule, r) for r in range(stages)}
    else:
        schedule = SimpleNamespace(_num_stages=stages, _n_microbatches=micro_batches)
        rows = kind._get_pipeline_order(schedule)
    if name == "1f1b":
        # Torch lists the forward passes of the last stage, but does not run them, from number 1.
        last = [a for a in rows[stages - 1] if a and a.computation_type.value in "FB"]
        rows[stages - 1] = [
            a._replace(microbatch_index=a.microbatch_index - (a.computation_type.value == "F"))
            for a in last
        ]
    return [
        [(a.computation_type.value, a.microbatch_index) for a in rows[rank]
         if a is not None and a.computation_type.value in "FBIW"]
        for rank in range(stages)
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero_bubble"])
def test_synchronous_orders_equal_those_of_torch(name: str) -> None:
    for stages, micro_batches in itertools.product(range(1, 9), range(1, 17)):
        # Torch refuses fewer micro-batches than stages for 1F1B, and incomplete rounds.
        if name == "1f1b" and micro_batches < stages:
            continue
        if name == "zero_bubble" and micro_batches % max(1, micro_batches // stages):
            continue
        order = ORDERS[name](stages, micro_batches)
        ours = [[(s.action.value, s.micro_batch) for s in row[:-1]] for row in order.slots]
        assert ours == torch_order(name, stages, micro_batches), (stages, micro_batches)
        assert {row[-1] for row in order.slots} == {Slot(Action.UPDATE)}


def utilisation(order: Order) -> float:
    """Return the busy share of the lanes of a steady pipeline with equal forward and backward."""
    index: dict[tuple[int, Action, int], int] = {}
    lanes: list[int] = []
    for stage, row in enumerate(order.slots):
        for slot in row:
            index[stage, slot.action, slot.micro_batch] = len(lanes)
            lanes.append(stage)
    edges = []
    for (stage, action, m), task in index.items():
        for backwards in (Action.BACKWARD, Action.INPUT):
            if action is backwards and stage + 1 < order.stages:
                lag = order.shift(stage, action, m) - order.shift(stage + 1, action, m)
                edges.append((index[stage + 1, action, m], task, lag))
        if action is Action.FORWARD and stage:
            edges.append((index[stage - 1, action, m], task, 0))
    source, target, lags = np.array(edges, np.int32).reshape(-1, 3).T
    duration = {Action.FORWARD: 1.0, Action.BACKWARD: 2.0, Action.UPDATE: 0.0}
    durations = np.array([duration.get(action, 1.0) for _, action, _ in index])
    program = native.Program(
        lane=np.array(lanes, np.int32), duration_ns=durations,
        edges=native.Edges(source, target, lag=lags.astype(np.uint8)), steps=2 + order.max_shift,
    )  # fmt: skip
    ends = native.simulate(program).step_end_ns
    return float(durations.sum() / order.stages / (ends[-1] - ends[-2]))


@pytest.mark.parametrize(("stages", "micro_batches"), [(4, 1), (4, 7), (8, 16), (32, 8), (128, 64)])
def test_utilisation_is_that_of_theory(stages: int, micro_batches: int) -> None:
    synchronous = micro_batches / (micro_batches + stages - 1)
    for name in ("gpipe", "1f1b"):
        order = ORDERS[name](stages, micro_batches)
        assert utilisation(order) == pytest.approx(synchronous, abs=1e-9)
    assert utilisation(ORDERS["async"](stages, micro_batches)) == pytest.approx(1.0, abs=1e-9)


def test_zero_bubble_has_a_third_of_the_bubble() -> None:
    # Its bubble is P-1 slots of 3N + P-1: F, I and W take one each.
    assert utilisation(ORDERS["zero_bubble"](4, 8)) == pytest.approx(24 / 27, abs=1e-9)


def lockstep(stages: int) -> Callable[[int], int]:
    return lambda stage: 2 * (stages - 1 - stage)


@pytest.mark.parametrize(("stages", "n"), SIZES)
def test_versions_of_asynchronous_pipelines_equal_the_exact_count(stages: int, n: int) -> None:
    for delay in (None, lockstep(stages)):
        order = asynchronous_order(stages, n, delay)
        for stage in range(stages):
            late = stages - 1 - stage if delay is None else delay(stage)
            for m in range(4 * stages * n + 1):
                assert order.version(stage, m) == max(0, (m - late) // n)
                assert order.version(stage, m, Action.BACKWARD) == m // n
            assert order.delay(stage) == pytest.approx(late / n)
            assert order.in_flight(stage) == late + 1


@pytest.mark.parametrize(("stages", "n"), SIZES)
def test_synchronous_pipelines_use_current_weights(stages: int, n: int) -> None:
    for name, held in (("gpipe", lambda stage: n), ("1f1b", lambda s: min(stages - s, n))):
        order = ORDERS[name](stages, n)
        for stage in range(stages):
            assert order.delay(stage) == 0
            assert order.in_flight(stage) == held(stage)


def test_invalid_orders_and_placements_are_refused() -> None:
    forward, backward, update = (
        Slot(Action.FORWARD, 0),
        Slot(Action.BACKWARD, 0),
        Slot(Action.UPDATE),
    )
    with pytest.raises(InvalidArgumentError, match="0 is less than 1"):
        ORDERS["gpipe"](2, 0)
    with pytest.raises(InvalidArgumentError, match="B of micro-batch 0 exactly once"):
        Order(1, ((forward, update),))
    with pytest.raises(InvalidArgumentError, match="before its forward pass"):
        Order(1, ((backward, forward, update),))
    order = ORDERS["gpipe"](2, 2)
    first, second = Mesh(np.array([0]), ("stage",)), Mesh(np.array([1]), ("stage",))
    with pytest.raises(InvalidArgumentError, match="it is for 2 parts, but there are 1"):
        Placement((Part("a", (), first, 4),), order)
    with pytest.raises(InvalidArgumentError, match="device 0 is in 'a' and 'b'"):
        Placement((Part("a", (), first, 4), Part("b", ("x",), first, 4)), order)
    with pytest.raises(InvalidArgumentError, match="a step of 'b' has 6 samples"):
        Placement((Part("a", (), first, 4), Part("b", ("x",), second, 3)), order)
    placement = Placement((Part("a", (), first, 4), Part("b", ("x",), second, 4)), order)
    assert (placement.ranks, placement.samples) == (2, 8)
    both = Mesh(np.array([0, 1]), ("layer",))
    nested = Placement((Part("a", (), both, 4), Part("b", ("x",), first, 8)), ORDERS["gpipe"](2, 1))
    assert (nested.ranks, nested.samples) == (2, 8)
