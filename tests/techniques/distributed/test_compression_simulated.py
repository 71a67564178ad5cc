"""Workers simulated in one process, against plain formulas and uncompressed training."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from slipstream.errors import InvalidArgumentError, UsageError
from slipstream.technique import parse
from slipstream.techniques.distributed import (
    ACP,
    Compressor,
    PowerSGD,
    RandomK,
    Sign,
    SimulatedWorkers,
    TopK,
)
from slipstream.techniques.distributed.adasum.exchange import check_algorithm
from slipstream.techniques.distributed.collectives.two_d import need_rows
from slipstream.techniques.distributed.compression.bucket import Layout
from slipstream.techniques.distributed.compression.hook import settings_of

ALL = (
    "cast:fp16",
    "powersgd:2,start=0",
    "acp:2,start=0",
    "topk:0.05",
    "randomk:0.1",
    "sign",
    "block_int:4",
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Two threads that wait for each other's core would take a hundred times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _settings(text: str) -> Compressor:
    (technique,) = parse(text)
    assert isinstance(technique, Compressor)
    return technique


def _step(team: SimulatedWorkers, gradients: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Return the parameters' gradients when every worker has these."""
    for worker in gradients:
        for parameter, gradient in zip(team.parameters.values(), worker, strict=True):
            parameter.grad = gradient.clone()
        team.collect()
    team.reduce()
    return [
        torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in team.parameters.values()
    ]


@pytest.mark.parametrize("text", ALL)
@pytest.mark.parametrize("workers", [1, 3])
def test_sent_and_retained_parts_sum_to_all_gradients(text: str, workers: int) -> None:
    model = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 25))
    team = SimulatedWorkers(model, _settings(text), workers)
    drawn = torch.Generator().manual_seed(0)
    exact = [torch.zeros(p.shape, dtype=torch.float64) for p in model.parameters()]
    arrived = [torch.zeros_like(total) for total in exact]
    for _ in range(6):
        gradients = [
            [torch.randn(p.shape, generator=drawn) for p in model.parameters()]
            for _ in range(workers)
        ]
        for total, *parts in zip(exact, *gradients, strict=True):
            total += torch.stack(parts).double().mean(0)
        for total, part in zip(arrived, _step(team, gradients), strict=True):
            total += part.double()
    residual = torch.zeros(team.layout.numel, dtype=torch.float64)
    for memory in team.memories:
        if team.compressor is not None and team.compressor.keeps:
            residual += memory.residual(team.layout).double() / workers
    expected = torch.cat([total.reshape(-1) for total in exact])
    found = torch.cat([total.reshape(-1) for total in arrived]) + residual
    rounding = 2e-2 if text.startswith("cast") else 1e-5
    assert float((found - expected).abs().max()) <= rounding * float(expected.abs().max())


def test_full_rank_gives_the_mean() -> None:
    """acp projects every other step on a basis that is complete only over both steps."""
    model = nn.Linear(40, 30, bias=False)
    low = torch.randn(30, 3) @ torch.randn(3, 40)
    for settings in (PowerSGD(rank=3, start=0), ACP(rank=3, start=0)):
        team = SimulatedWorkers(model, settings, 2)
        found = [_step(team, [[low * 0.5], [low * 1.5]])[0] for _ in range(4)]
        assert torch.allclose(sum(found) / 4, low, rtol=1e-4, atol=1e-4), str(settings)


@pytest.mark.parametrize("settings", [PowerSGD(rank=2, start=0), ACP(rank=2, start=0)], ids=str)
def test_low_rank_recovers_after_a_gradient_of_zeros(settings: Compressor) -> None:
    model = nn.Linear(40, 40, bias=False)
    team = SimulatedWorkers(model, settings, 2)
    _step(team, [[torch.zeros(40, 40)], [torch.zeros(40, 40)]])
    matrix = torch.outer(torch.arange(40.0), torch.ones(40))
    found = [_step(team, [[matrix], [matrix]])[0] for _ in range(2)]
    assert torch.allclose(sum(found) / 2, matrix, atol=1e-3)


def test_reported_bytes_are_sent() -> None:
    from slipstream.ranks.requests import Gather
    from slipstream.techniques.distributed.compression.bucket import Bucket, Layout, Memory
    from slipstream.techniques.distributed.compression.compressor import mean

    layout = Layout.of({"a": (30, 41), "b": (30,), "c": (0,), "d": ()})
    for text in ALL:
        memory, sent = Memory(), []
        for memory.step in range(2):
            exchange = mean(_settings(text), Bucket(torch.randn(layout.numel), layout), memory, 2)
            sent.append([])
            answer = None
            with contextlib.suppress(StopIteration):
                while True:
                    request = exchange.send(answer)  # type: ignore[arg-type]
                    kind = "all_gather" if isinstance(request, Gather) else "all_reduce"
                    sent[-1].append((kind, request.tensor.numel() * request.tensor.element_size()))
                    answer = request.tensor
                    answer = torch.stack([answer, answer]) if kind == "all_gather" else answer
        # Some send more in every other step: the reported number is the mean.
        messages = _settings(text).messages(layout)
        for even, odd, message in zip(*sent, messages, strict=True):
            assert (even[0], odd[0]) == (message.kind, message.kind), text
            assert (even[1] + odd[1]) / 2 == message.nbytes, text


def test_signs_converge_only_with_feedback() -> None:
    """0.5 |x + y| + |x - y|: the sign of its subgradient always points along x = -y."""

    def distance(settings: Compressor) -> float:
        model = nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[1.0, 1.003]]))
        team = SimulatedWorkers(model, settings, 1)
        for _ in range(600):
            model.zero_grad()
            x, y = model.weight[0]
            (0.5 * (x + y).abs() + (x - y).abs()).backward()
            team.collect()
            team.reduce()
            with torch.no_grad():
                model.weight -= 0.05 * model.weight.grad  # type: ignore[operator]
        return float(model.weight.detach().abs().max())

    assert distance(Sign()) < 0.1
    assert distance(Sign(feedback=False, force=True)) > 0.9


def test_signs_without_feedback_retain_nothing_of_an_uncompressed_step() -> None:
    team = SimulatedWorkers(nn.Linear(40, 1, bias=False), Sign(feedback=False, force=True), 2)
    ones = torch.ones(1, 40)
    (arrived,) = _step(team, [[ones], [ones * torch.nan]])
    assert arrived.isnan().all()
    # The residual of this gradient would outweigh the next one, and flip its signs.
    _step(team, [[100.0 * torch.linspace(-1.0, 3.0, 40)[None]], [ones * torch.inf]])
    (arrived,) = _step(team, [[ones], [ones]])
    assert torch.equal(arrived, ones)


def _digits_accuracy(settings: Compressor | None, seed: int) -> float:
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = torch.from_numpy((digits.data / 16.0).astype(np.float32))
    y = torch.from_numpy(digits.target)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(),
                          nn.Linear(96, 10))  # fmt: skip
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.3)
    team = SimulatedWorkers(model, settings, 2)
    for _ in range(100):
        chosen = torch.randint(0, 1400, (2, 32))
        optimizer.zero_grad()
        for part in chosen:
            nn.functional.cross_entropy(model(x[part]), y[part]).backward()
            team.collect()
        team.reduce()
        optimizer.step()
    with torch.no_grad():
        return float((model(x[1400:]).argmax(1) == y[1400:]).float().mean())


def test_digits_are_learned_equally_well() -> None:
    without = np.mean([_digits_accuracy(None, seed) for seed in range(2)])
    for text in (
        "powersgd:4,start=10", "acp:4,start=10", "topk:0.05", "randomk:0.1", "sign", "block_int:4",
    ):  # fmt: skip
        reached = np.mean([_digits_accuracy(_settings(text), seed) for seed in range(2)])
        assert reached > without - 0.03, text


def test_cycles_and_numbers_of_workers_are_checked() -> None:
    with pytest.raises(InvalidArgumentError):
        SimulatedWorkers(nn.Linear(2, 2), None, 0)
    with pytest.raises(InvalidArgumentError, match="delay"):
        SimulatedWorkers(nn.Linear(2, 2), None, 2, delay=-1)
    team = SimulatedWorkers(nn.Linear(2, 2), None, 2)
    team.collect()
    with pytest.raises(InvalidArgumentError, match="1 of 2"):
        team.reduce()


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_a_delayed_mean_arrives_after_that_many_steps(delay: int) -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    team = SimulatedWorkers(model, None, 2, delay=delay)
    nn.init.ones_(model.weight)
    weights = [1.0]
    for step in range(8):
        optimizer.zero_grad()
        for target in (1.0, 3.0):
            # Of (w - target)^2 / 2.
            (model(torch.ones(1, 1)) - target).square().sum().div(2).backward()
            team.collect()
        team.reduce()
        optimizer.step()
        arrived = weights[step - delay] - 2.0 if step >= delay else 0.0
        weights.append(weights[-1] - 0.1 * arrived)
        assert model.weight.item() == pytest.approx(weights[-1], abs=1e-6)


@pytest.mark.parametrize(("share", "stable"), [(0.97, True), (1.03, False)])
def test_late_gradients_are_stable_up_to_the_theoretical_rate(share: float, stable: bool) -> None:
    delay, curvature = 4, 2.0
    # Of the roots of z^(d + 1) - z^d + rate curvature.
    rate = share * 2.0 / curvature * float(np.sin(np.pi / (4 * delay + 2)))
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), rate)
    team = SimulatedWorkers(model, None, 1, delay=delay)
    gradient = torch.ones(1, 1)
    for _ in range(600):
        optimizer.zero_grad()
        model(gradient).square().mul(curvature / 2).sum().backward()
        team.collect()
        team.reduce()
        optimizer.step()
    assert (abs(model.weight.item()) < 1.0) == stable


@pytest.mark.parametrize("compressor", ["topk:0.01", TopK, 5])
def test_an_invalid_setting_is_named_immediately(compressor: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^compressor: "):
        SimulatedWorkers(torch.nn.Linear(2, 2), compressor, workers=2)
    with pytest.raises(InvalidArgumentError, match=r"^workers: 2\.5 "):
        SimulatedWorkers(torch.nn.Linear(2, 2), None, workers=2.5)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"^model: .*\bfloat64\b.*\bfloat32\b"):
        SimulatedWorkers(torch.nn.Linear(2, 2).double(), None, workers=2)


@pytest.mark.parametrize("how", [None, 5, TopK, torch.nn.Linear])
def test_an_unknown_compressor_is_named(how: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^how: "):
        settings_of(how)


@pytest.mark.parametrize("name", ["adasum:2", "priority_sync:2"])
def test_a_model_without_a_hook_is_refused_before_anything_runs(name: str) -> None:
    with pytest.raises(UsageError) as error:
        parse(f"{name}+topk:0.01")
    assert {f"'{name.partition(':')[0]}'", "'topk'"} <= set(re.findall(r"'\w+'", error.value.what))


def test_rows_and_nodes_are_integers() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^rows: '2' "):
        need_rows("2", 2)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"^per_node: '2' "):
        check_algorithm("auto", 2, "2")  # type: ignore[arg-type]


@pytest.mark.parametrize("numel", [1, 99, 100, 101, 150, 4001])
def test_the_sent_share_is_rounded_up(numel: int) -> None:
    layout = Layout.of({"w": (numel,)})
    exact = -(-numel // 100)
    assert TopK(0.01).count(layout) == exact
    (message,) = RandomK(0.01, block=1).messages(layout)
    assert message.nbytes == 4 * exact
