"""Exposed waits of a rank: buckets with known arrivals, layers behind a slow rank, layer names."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from forked_ranks import run_ranks
from slipstream.techniques.distributed import PriorityDDP, compress
from slipstream.techniques.distributed.exposed import (
    ExposedTimes,
    Layers,
    put_hook,
    step_by_step,
    typical,
    watch,
    watch_buckets,
)
from slipstream.techniques.distributed.priority import plan
from slipstream.techniques.distributed.priority.simulate import ORDERS, Link
from slipstream.workload import BuiltWorkload

LATE_S = 0.3
SLOW = Link(dict.fromkeys(ORDERS, 1e-9), dict.fromkeys(ORDERS, 1e-7), 1.0, 1e-7)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def two_layers() -> nn.Sequential:
    """Two buckets of about 0.1 MiB: the second layer's, then the first's."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(160, 160, bias=False), nn.Linear(160, 160, bias=False))


def arriving(delays_s: dict[int, float], *, blocking: bool = False) -> Callable[[Any], Any]:
    """Return a hook whose buckets arrive this long after they were submitted."""
    pending: list[Any] = []

    def on_bucket(bucket: Any) -> Any:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        delivered = future, bucket.buffer()
        threading.Timer(
            delays_s[bucket.index()], lambda: delivered[0].set_result(delivered[1])
        ).start()
        pending.append(future)
        if blocking and bucket.is_last():
            for handle in pending:
                handle.wait()
            pending.clear()
        return future

    return on_bucket


def one_step(
    model: nn.Module, exposed: ExposedTimes, layers: Layers
) -> tuple[dict[str, float], float]:
    """Return seconds by layer of a step, and of its backward pass."""
    loss = model(torch.ones(1, 160)).square().mean()
    began = time.perf_counter()
    loss.backward()
    ended = time.perf_counter()
    watch_buckets(model, exposed)  # type: ignore[arg-type]
    (found,) = step_by_step(exposed, layers, [began, ended])
    exposed.times.clear()
    return found, ended - began


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("blocking", [False, True])
def test_a_wait_counts_for_the_bucket_that_ends_it(blocking: bool) -> None:
    model = DistributedDataParallel(two_layers(), bucket_cap_mb=0.05)
    delays = {0: LATE_S, 1: LATE_S}
    put_hook(model, arriving(delays, blocking=blocking))
    exposed, layers = ExposedTimes(), Layers(model)
    # Its buckets are rebuilt after the first step.
    model(torch.ones(1, 160)).square().mean().backward()
    assert watch(BuiltWorkload(model), exposed)
    found, _ = one_step(model, exposed, layers)
    assert found["model.1"] == pytest.approx(LATE_S, abs=LATE_S / 2)
    # The bucket of the first layer arrives at about the same time.
    assert found.get("model.0", 0.0) < LATE_S / 2
    delays[1] = 3 * LATE_S
    found, whole = one_step(model, exposed, layers)
    assert found["model.0"] == pytest.approx(2 * LATE_S, abs=LATE_S / 2)
    assert found["model.0"] + found["model.1"] <= whole
    # Buckets that arrive during the backward pass are hidden.
    delays.update({0: 0.0, 1: 0.0})
    found, _ = one_step(model, exposed, layers)
    assert sum(found.values()) < LATE_S / 2


@pytest.mark.usefixtures("alone")
def test_nothing_is_recorded_without_watch() -> None:
    model = DistributedDataParallel(two_layers())
    exposed = ExposedTimes()
    assert watch(BuiltWorkload(model), exposed)
    model(torch.ones(1, 160)).sum().backward()
    # Waits of a backward pass are reported when the next one begins, or at the end.
    assert watch(BuiltWorkload(model), None)
    found = list(exposed.times)
    assert {id(p) for exchange in found for p in exchange.parameters} <= {
        id(p) for p in model.parameters()
    }
    model(torch.ones(1, 160)).sum().backward()
    assert exposed.times == found
    strange = DistributedDataParallel(two_layers())
    strange.register_comm_hook(None, lambda state, bucket: arriving({0: 0.0})(bucket))
    assert not watch_buckets(strange, exposed)
    assert not watch(BuiltWorkload(nn.Linear(1, 1)), exposed)


def _behind(rank: int, how: str) -> Any:
    """Return waits by layer and bits of the weights of three steps with a slower rank."""
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    wrapped: nn.Module
    if how == "priority":
        plan.measure_link = lambda ranks, orders, busy: SLOW
        wrapped = PriorityDDP(model, optimizer, order="static")
    else:
        wrapped = DistributedDataParallel(model, bucket_cap_mb=0.05)
        if how == "compressed":
            compress(wrapped, "cast:bf16")

    def step() -> None:
        if rank:
            time.sleep(LATE_S)
        optimizer.zero_grad()
        wrapped(torch.ones(1, 160)).square().mean().backward()
        optimizer.step()

    for _ in range(7):
        step()
    exposed, layers = ExposedTimes(), Layers(wrapped)
    assert watch(BuiltWorkload(wrapped, optimizer=optimizer), exposed)
    step()
    stamps = [time.perf_counter()]
    for _ in range(3):
        step()
        stamps.append(time.perf_counter())
    watch(BuiltWorkload(wrapped, optimizer=optimizer), None)
    if isinstance(wrapped, PriorityDDP):
        wrapped.close()
    return typical(step_by_step(exposed, layers, stamps)), [
        p.sum().item() for p in wrapped.parameters()
    ]


@pytest.mark.parametrize("how", ["plain", "compressed", "priority"])
def test_ranks_wait_for_a_slower_one(how: str) -> None:
    answers = run_ranks(2, lambda rank: _behind(rank, how))
    assert not any(isinstance(answer, Exception) for answer in answers), answers
    (fast, bits), (slow, others) = answers
    assert sum(fast.values()) > 0.6 * LATE_S
    assert sum(slow.values()) < 0.5 * sum(fast.values())
    assert set(fast) <= {"model.0", "model.1"}
    if how == "priority":
        # A step waits at the first layer's gate, when the last layer's gradients have arrived.
        assert fast["model.0"] > 0.6 * LATE_S
    assert bits == others


class Tangled(nn.Module):
    """A model with tied parameters, one that its parent reads, and unused ones."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 30)
        self.table = nn.Embedding(30, 8)
        self.head.weight = self.table.weight
        self.scale = nn.Parameter(torch.ones(8))
        self.attention = nn.MultiheadAttention(8, 2)
        self.idle = nn.Linear(2, 2)

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.table(ids) * self.scale
        return self.head(self.attention(x, x, x)[0])


def test_layers_have_the_names_of_a_recorded_step() -> None:
    model = Tangled()
    layers = Layers(model)
    with layers.watching():
        model(torch.zeros(4, 1, dtype=torch.int64))
    assert not any(module._forward_pre_hooks for module in model.modules())

    def layer(parameter: nn.Parameter) -> str:
        ((found, share),) = layers.shares([parameter]).items()
        assert share == 1.0
        return found

    assert layer(model.table.weight) == "model.table"
    assert layer(model.head.bias) == "model.head"
    assert layer(model.scale) == "model"
    assert layer(model.attention.out_proj.weight) == "model.attention"
    # Its parent is called, but does not compute for it: there is no better name.
    assert layer(model.idle.weight) == "model"
    assert layers.order == ["model", "model.table", "model.attention", "model.head"]
    shares = layers.shares([model.scale, model.table.weight])
    assert shares == {"model": pytest.approx(1 / 31), "model.table": pytest.approx(30 / 31)}
    assert layers.shares([]) == {}


def test_delayed_steps_do_not_count() -> None:
    steps = [{"a": 1.0, "b": 0.0}, {"a": 3.0, "b": 1.0}, {"a": 2.0}, {"a": 90.0, "b": 90.0}]
    assert typical(steps) == {"a": 2.5, "b": 0.5}
    assert typical(steps[:1]) == {"a": 1.0, "b": 0.0}


def test_waits_belong_to_the_step_in_which_they_begin() -> None:
    model = nn.Linear(2, 2)
    exposed, layers = ExposedTimes(), Layers(model)
    for began, ended in ((0.5, 0.6), (1.5, 2.5), (2.5, 2.75), (9.0, 9.5)):
        exposed.add(began, ended, list(model.parameters()))
    exposed.add(2.0, 2.25, (), "new parameters")
    exposed.add(3.0, 3.0, (), "nothing")
    assert step_by_step(exposed, layers, [1.0, 2.0, 3.0]) == [
        {"model": pytest.approx(1.0)},
        {"model": pytest.approx(0.25), "(new parameters)": 0.25},
    ]
