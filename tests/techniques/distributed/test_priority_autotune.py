"""Trials of plans: the choice between timed steps, and weights across the changes."""

from __future__ import annotations

import itertools
import os
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from forked_ranks import run_ranks
from slipstream.techniques.distributed import CommunicationError, PriorityDDP
from slipstream.techniques.distributed.priority import autotune, plan
from slipstream.techniques.distributed.priority.autotune import Autotune
from slipstream.techniques.distributed.priority.plan import SlicePlan
from slipstream.techniques.distributed.priority.rounds import Hooks, Rounds
from slipstream.techniques.distributed.priority.simulate import ORDERS, Link
from slipstream.techniques.distributed.priority.updates import Updates

# Imports of an optimizer, once for all forks.
torch.optim.SGD([torch.zeros(1)], 0.1)
# A link on which hiding communication is always worth it.
SLOW = Link(dict.fromkeys(ORDERS, 1e-9), dict.fromkeys(ORDERS, 1e-7), 1.0, 1e-7)
TRIED = [SlicePlan("leader"), SlicePlan("ddp", bucket_mb=1.0), SlicePlan("ddp")]


class Net(nn.Module):
    """A few layers, and one that odd ranks use at times."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(12, 20), nn.Linear(20, 9)
        self.sometimes = nn.Linear(9, 9)

    def forward(self, x: torch.Tensor, odd: bool = False) -> torch.Tensor:
        x = self.last(torch.relu(self.first(x)))
        return self.sometimes(x) if odd else x


def train(model: Any, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        drawn = torch.Generator().manual_seed(100 * rank + step)
        x = torch.randn(5, 12, generator=drawn)
        model(x, rank % 2 == 1 and step % 3 > 0).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("taken", "expected"),
    [
        ((1.0, 1.3, 1.2), "leader:50000"),
        ((1.3, 1.0, 1.2), "ddp:1"),
        ((1.3, 1.25, 1.2), "ddp:25"),
        ((0.99, 1.1, 1.0), "ddp:25"),  # a hundredth is no reason to switch
        ((6.0, 2.1, 2.0), "ddp:25"),
    ],
)
def test_the_last_plan_stays_unless_another_is_clearly_faster(
    taken: tuple[float, ...], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(autotune.time, "perf_counter", lambda: now)
    trying = Autotune(TRIED, step_s=10.0)
    for seconds in taken:
        assert not trying.over
        for step in itertools.count():
            trying.begin()
            # The first steps settle; one of the others is delayed.
            now += seconds * (50.0 if step in (0, 1, 4) else 1.0)
            if trying.turn_over:
                break
        trying.next()
    assert trying.over
    assert trying.fastest().name == expected
    assert list(trying.measured_s.values()) == pytest.approx(taken)


def test_a_temporary_delay_does_not_change_the_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps of 3 ms: ten in a row take 20 times as long while DistributedDataParallel trains."""
    now = 0.0
    monkeypatch.setattr(autotune.time, "perf_counter", lambda: now)
    trying = Autotune(TRIED, step_s=0.003)
    while not trying.over:
        held_up = trying.current.order == "ddp"
        for step in itertools.count():
            trying.begin()
            now += (0.003 if held_up else 0.006) * (20.0 if held_up and 5 <= step < 15 else 1.0)
            if trying.turn_over:
                break
        trying.next()
    assert trying.fastest().name == "ddp:25"


def test_hooks_are_removed_completely() -> None:
    model = Net()
    rounds = Rounds(list(model.parameters()), 2, Updates(torch.optim.SGD(model.parameters(), 0.1)))
    hooks = Hooks(rounds)
    own = model.last.weight.register_hook(lambda gradient: None)
    hooks.attach()
    hooks.set_gates([(model.first, [])])
    hooks.detach()
    assert not any(module._forward_pre_hooks for module in model.modules())
    for parameter in model.parameters():
        tensor: Any = parameter
        assert tensor._post_accumulate_grad_hooks is None
        # An empty dictionary would still be visited in every backward pass.
        assert (tensor._backward_hooks is None) == (parameter is not model.last.weight)
    own.remove()


@pytest.mark.parametrize("taken", [(1.0, 2.0, 2.0), (2.0, 1.0, 2.0), (2.0, 2.0, 1.0)])
def test_weights_equal_ddps_for_every_plan(
    taken: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "measure_link", lambda ranks, orders, busy: SLOW)
    monkeypatch.setattr(plan, "_BUCKETS_MB", (0.001,))
    monkeypatch.setattr(plan, "_MAX_PLANS", 1)
    monkeypatch.setattr(autotune, "_TURN_S", 0.0)

    def work(rank: int) -> Any:
        monkeypatch.setattr(
            Autotune, "fastest", lambda self: self.plans[min(range(3), key=taken.__getitem__)]
        )
        models = Net(), Net()
        own, theirs = (torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in models)
        ours = PriorityDDP(models[0], own, timeout_s=60.0)
        ddp = DistributedDataParallel(models[1], find_unused_parameters=True)
        tried, equal = [], []
        alive: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        for step in range(40):
            train(ours, own, rank, range(step, step + 1))
            train(ddp, theirs, rank, range(step, step + 1))
            if ours.plan is not None and ours.plan.name not in tried[-1:]:
                tried.append(ours.plan.name)
            alive.update(ours._ddp)
            if step % 7 == 6:
                equal.append(all(map(torch.equal, ours.parameters(), models[1].parameters())))
        assert ours.plan is not None
        found = tried, all(equal), ours.is_plan_final, list(ours.plan.measured_s), len(alive)
        ours.close()
        train(models[0], own, rank, range(1))
        return found, len(alive)

    every = ["leader:12500", "ddp:0.001", "ddp:25"]
    won = taken.index(1.0)
    expected = [*every, every[won]] if won < 2 else every
    assert run_ranks(2, work) == [((expected, True, True, every, int(won > 0)), 0)] * 2


def test_a_rank_that_ends_during_a_trial_of_ddp_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "choose", lambda *_: [SlicePlan("ddp")])
    monkeypatch.setattr(plan, "measure_link", lambda ranks, orders, busy: SLOW)

    def work(rank: int) -> Any:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        wrapped = PriorityDDP(model, optimizer, timeout_s=60.0, patience_s=2.0)
        train(wrapped, optimizer, rank, range(9))
        assert wrapped.plan is not None
        assert wrapped.plan.name == "ddp:25"
        assert wrapped.plan.words == "DDP, buckets of 25 MiB"
        if rank == 1:
            os._exit(1)
        with pytest.raises(CommunicationError) as caught:
            train(wrapped, optimizer, rank, range(9, 12))
        return 1 in caught.value.ranks

    assert run_ranks(3, work) == [True, None, True]
