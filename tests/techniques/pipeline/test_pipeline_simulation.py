"""Simulated pipelines: the updates of delayed weights by hand, plain training without delay."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import slipstream as ss
from slipstream.cluster.orders import Action, Order, Slot, asynchronous_order
from slipstream.errors import InvalidArgumentError, WorkloadError
from slipstream.technique import parse
from slipstream.techniques.pipeline.technique import Pipeline

STEPS, RATE = 40, 0.03


class Product(nn.Module):
    """Multiplies by two scalars, so that backward passes depend on the weights they use."""

    def __init__(self, first: float, second: float) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.tensor([first, second], dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weights[0] * self.weights[1]


def by_hand(technique: Pipeline, delays: list[int], data: list[tuple[float, float]]) -> list[float]:
    """Return the losses of products with one micro-batch per step, from versions of the weights."""
    versions = [[np.array([0.9, 1.1])] for _ in delays]
    motions = [np.zeros(2) for _ in delays]
    losses = []
    for step, (value, target) in enumerate(data):
        late = [delay if step >= technique.warmup else 0 for delay in delays]
        used = [
            rows[max(step - delay, technique.warmup if delay else 0)]
            for rows, delay in zip(versions, late, strict=True)
        ]
        inputs = [value]
        for weights in used:
            inputs.append(inputs[-1] * weights[0] * weights[1])
        losses.append((inputs[-1] - target) ** 2)
        gradient = 2 * (inputs[-1] - target)
        for stage in reversed(range(len(delays))):
            now, delay = versions[stage][-1], delays[stage]
            backward = now
            if technique.schedule == "pipedream":
                backward = used[stage]
            elif late[stage] and technique.correction:
                backward = now - delay * motions[stage]
            rate = RATE
            if step >= technique.warmup and technique.rescheduling:
                done = min((step - technique.warmup) / technique.rescheduling, 1.0)
                rate /= max(delay, 1) ** (1 - done)
            # The second product's other factor is an activation of the forward pass.
            factors = np.array([backward[1], used[stage][0]])
            following = now - rate * gradient * inputs[stage] * factors
            if delay and technique.correction:
                decay = technique.correction ** (1 / delay)
                motions[stage] = decay * motions[stage] + (1 - decay) * (following - now)
            versions[stage].append(following)
            gradient *= backward[0] * backward[1]
    return losses


@pytest.mark.parametrize(
    "settings",
    [
        "schedule=async",
        "schedule=pipedream,rescheduling=9",
        "schedule=async,rescheduling=25,correction=0.135",
        "schedule=async,correction=0.5,warmup=7",
    ],
)
@pytest.mark.parametrize("lockstep", [False, True])
def test_updates_are_those_of_delayed_weights(settings: str, lockstep: bool) -> None:
    (technique,) = parse(f"pipeline:4,micro_batches=1,{settings}")
    assert isinstance(technique, Pipeline)
    delays = [(3 - stage) * (1 + lockstep) for stage in range(4)]
    generator = np.random.default_rng(0)
    data = [(float(x), 1.5 * float(x)) for x in generator.normal(size=STEPS)]
    stages = [Product(0.9, 1.1) for _ in delays]
    optimizer = torch.optim.SGD([p for stage in stages for p in stage.parameters()], RATE)
    batches = [tuple(torch.tensor([v], dtype=torch.float64) for v in pair) for pair in data]
    order = asynchronous_order(4, 1, delays.__getitem__)
    assert [order.delay(stage) for stage in range(4)] == delays
    history = ss.pipeline.simulate(
        stages, batches, nn.functional.mse_loss, optimizer, technique, order=order
    )
    expected = by_hand(technique, delays, data)
    assert history.losses == pytest.approx(expected, rel=1e-9)
    assert history.in_flight == [order.in_flight(stage) for stage in range(4)]
    # The last backward passes follow the last forward pass.
    assert [len(log) for log in history.log] == [2 * STEPS] * 4


def model_and_batches() -> tuple[list[nn.Module], list[Any]]:
    torch.manual_seed(0)
    stages: list[nn.Module] = [
        nn.Sequential(nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(8, 8)) for _ in range(3)
    ]
    return stages, [(torch.randn(12, 8), torch.randn(12, 8)) for _ in range(10)]


@pytest.mark.parametrize(
    ("stages", "settings"),
    [
        (1, "schedule=async,rescheduling=5,correction=0.135"),
        (3, "schedule=async,rescheduling=5,correction=0.135,warmup=10"),
        (3, "schedule=gpipe"),
        (3, "schedule=zero_bubble"),
    ],
)
def test_without_delay_the_weights_are_those_of_plain_training_to_the_bit(
    stages: int, settings: str
) -> None:
    layers, batches = model_and_batches()
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, amsgrad=True)
    torch.manual_seed(1)
    plain = []
    for x, y in batches:
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        plain.append(loss.item())
    expected = [p.detach().clone() for p in model.parameters()]
    layers, batches = model_and_batches()
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, amsgrad=True)
    torch.manual_seed(1)
    history = ss.pipeline.simulate(
        [model] if stages == 1 else layers, batches, nn.functional.mse_loss, optimizer,
        f"pipeline:3,micro_batches=1,{settings}",
        order=asynchronous_order(1, 1) if stages == 1 else None,
    )  # fmt: skip
    assert history.losses == plain
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected, strict=True))


def test_rates_follow_a_scheduler_and_are_restored() -> None:
    layers, batches = model_and_batches()
    optimizer = torch.optim.SGD(nn.Sequential(*layers).parameters(), 1.0)

    def decaying() -> Iterator[Any]:
        for number, batch in enumerate(batches):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
            yield batch

    spec = "pipeline:3,micro_batches=2,schedule=async,rescheduling=100"
    ss.pipeline.simulate(layers, decaying(), nn.functional.mse_loss, optimizer, spec)
    (group,) = optimizer.param_groups
    assert group["lr"] == 0.1 / len(batches)
    assert len(group["params"]) == 6


def test_what_cannot_be_simulated_is_refused() -> None:
    layers, batches = model_and_batches()
    optimizer = torch.optim.SGD(nn.Sequential(*layers).parameters(), 0.1)
    loss = nn.functional.mse_loss
    for count, spec, problem in (
        (3, "ddp:2", "'ddp:2' is not a pipeline"),
        (2, "pipeline:3", "there are 2, but the schedule has 3"),
    ):
        with pytest.raises(InvalidArgumentError, match=problem):
            ss.pipeline.simulate(layers[:count], batches, math.dist, optimizer, spec)
    with pytest.raises(WorkloadError, match="12 samples do not make 5 equal micro-batches"):
        ss.pipeline.simulate(layers, batches, loss, optimizer, "pipeline:3,micro_batches=5")
    x, y = batches[0]
    for batch in ((x, y[:4]), (x,), (x, None)):
        with pytest.raises(WorkloadError, match="batch 1 is not two tensors of equal length"):
            ss.pipeline.simulate(layers, [batch], loss, optimizer, "pipeline:3")  # type: ignore[list-item]
    with pytest.raises(WorkloadError, match=r"\(LSTM\) returns a tuple"):
        ss.pipeline.simulate(
            [nn.LSTM(x.shape[1], 4), *layers[1:]], batches, loss, optimizer, "pipeline:3"
        )
    rows = ("F0 B0 F1 B1 U", "F0 F1 B0 B1 U")
    slots = [
        tuple(Slot(Action(text[0]), int(text[1:] or -1)) for text in row.split()) for row in rows
    ]
    with pytest.raises(InvalidArgumentError, match="its stages wait for each other"):
        ss.pipeline.simulate(
            layers[:2], batches, loss, optimizer, "pipeline:2", order=Order(2, tuple(slots))
        )
    layers[2] = layers[0]
    with pytest.raises(WorkloadError, match=r"'2.weight' of stage 3 is shared .* 1 and 3"):
        ss.pipeline.simulate(layers, batches, math.dist, optimizer, "pipeline:3")
