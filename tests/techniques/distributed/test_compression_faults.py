"""Failures of real ranks: no silent divergence and no endless wait."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import slipstream as ss
from forked_ranks import run_ranks
from slipstream import technique
from slipstream.errors import UsageError, WorkloadError
from slipstream.techniques.distributed import CommunicationError
from slipstream.techniques.distributed.compression import hook  # noqa: F401 - before forks
from slipstream.workload import BuiltWorkload

EVERY = (
    "cast:bf16", "cast:fp16", "powersgd:2,start=2", "acp:2,start=1", "topk:0.05", "randomk:0.1",
    "sign", "block_int:8", "block_int:4",
)  # fmt: skip


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 8)
    )


def _x(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 24, generator=torch.Generator().manual_seed(1000 * rank + step))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(_x(rank, step)).square().mean().backward()
        optimizer.step()


def _bits(model: nn.Module) -> bytes:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy().tobytes()


def test_a_resumed_run_is_bitwise_equal_with_every_compressor() -> None:
    def work(rank: int) -> Any:
        answers = []
        for how in EVERY:
            through = DistributedDataParallel(_net())
            ss.distributed.compress(through, how)
            optimizer = torch.optim.SGD(through.parameters(), lr=0.05, momentum=0.9)
            _train(through, optimizer, rank, range(3))
            going = DistributedDataParallel(_net())
            compression = ss.distributed.compress(going, how)
            other = torch.optim.SGD(going.parameters(), lr=0.05, momentum=0.9)
            _train(going, other, rank, range(3))
            resumed = DistributedDataParallel(_net())
            resumed.module.load_state_dict(going.module.state_dict())
            last = torch.optim.SGD(resumed.parameters(), lr=0.05, momentum=0.9)
            last.load_state_dict(other.state_dict())
            state = compression.state_dict()
            loaded = ss.distributed.compress(resumed, how)
            loaded.load_state_dict(state)
            # Saved again before a step, it is equal.
            assert loaded.state_dict()["buckets"] == state["buckets"]
            loaded.load_state_dict(loaded.state_dict())
            _train(through, optimizer, rank, range(3, 6))
            _train(resumed, last, rank, range(3, 6))
            answers.append((_bits(through), _bits(resumed)))
        return answers

    first, second = run_ranks(2, work)
    for how, result, other in zip(EVERY, first, second, strict=True):
        assert result[0] == other[0], how
        assert result[1] == result[0], how
        assert other[1] == other[0], how


def test_accumulated_gradients_are_compressed_once() -> None:
    def work(rank: int) -> Any:
        answers = []
        for how in ("none", "powersgd:24,start=0", "block_int:8"):
            model = DistributedDataParallel(_net())
            compression = None if how == "none" else ss.distributed.compress(model, how)
            for step in range(2):
                model.zero_grad()
                with model.no_sync():
                    model(_x(rank, 2 * step)).square().mean().backward()
                model(_x(rank, 2 * step + 1)).square().mean().backward()
            steps = 2 if compression is None else compression.memory.step
            flat = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
            answers.append((steps, flat))
        return answers

    for answers in run_ranks(2, work):
        assert [steps for steps, _ in answers] == [2, 2, 2]
        exact = answers[0][1]
        for _, found in answers[1:]:
            assert float((found - exact).norm() / exact.norm()) < 0.05


def test_an_empty_bucket_is_passed_on() -> None:
    class Hollow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.none = nn.Parameter(torch.ones(0))
            self.net = nn.Linear(24, 8)
            self.nothing = nn.Parameter(torch.ones(0, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x) + self.none.sum() + self.nothing.sum()

    def work(rank: int) -> Any:
        answers = []
        for how in EVERY:
            torch.manual_seed(0)
            # One parameter per bucket.
            model = DistributedDataParallel(Hollow(), bucket_cap_mb=1e-6)
            ss.distributed.compress(model, how)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            _train(model, optimizer, rank, range(4))
            answers.append(_bits(model))
        return answers

    first, second = run_ranks(2, work)
    assert first == second


def test_two_models_in_one_process_are_independent() -> None:
    def work(rank: int) -> Any:
        sides = []
        for how in ("topk:0.05", "powersgd:2,start=1"):
            model = DistributedDataParallel(_net())
            compression = ss.distributed.compress(model, how)
            sides.append((model, compression, torch.optim.SGD(model.parameters(), lr=0.05)))
        for step in range(4):
            for model, _, optimizer in sides if step % 2 else sides[::-1]:
                _train(model, optimizer, rank, range(step, step + 1))
        return [(_bits(model), compression.memory.step) for model, compression, _ in sides]

    first, second = run_ranks(2, work)
    assert first == second
    assert [steps for _, steps in first] == [4, 4]
    assert first[0][0] != first[1][0]


def test_ranks_with_different_parameter_names_are_detected() -> None:
    def work(rank: int) -> Any:
        torch.manual_seed(0)
        names = ("encoder", "decoder") if rank == 0 else ("decoder", "encoder")
        model = nn.Sequential()
        for name in names:
            model.add_module(name, nn.Linear(8, 8))
        ss.distributed.compress(DistributedDataParallel(model), "sign")

    for error in run_ranks(2, work):
        assert isinstance(error, CommunicationError)
        assert error.ranks == (1,)
        assert "list of parameters" in error.what


def test_ranks_that_start_compression_at_different_steps_are_detected() -> None:
    def work(rank: int) -> Any:
        model = DistributedDataParallel(_net())
        ss.distributed.compress(model, f"powersgd:2,start={3 + rank}")

    for error in run_ranks(2, work):
        assert isinstance(error, CommunicationError)
        assert error.ranks == (1,)


@pytest.mark.parametrize(("odd", "ending"), [(0, "dies"), (1, "leaves early")])
def test_a_rank_that_dies_or_stops_training_is_named(odd: int, ending: str) -> None:
    def work(rank: int) -> Any:
        model = DistributedDataParallel(_net())
        ss.distributed.compress(model, "topk:0.05", timeout_s=10.0, patience_s=2.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        _train(model, optimizer, rank, range(2))
        if rank == odd:
            if ending == "dies":
                os._exit(1)
            # It is alive, but does not respond.
            time.sleep(25.0)
            return
        _train(model, optimizer, rank, range(2, 4))

    error = run_ranks(2, work)[1 - odd]
    assert isinstance(error, CommunicationError)
    assert error.ranks == (odd,)
    assert f"rank {odd}" in error.what
    assert "step 2" in str(error)


def test_the_technique_is_attached_once_and_to_replicas_only() -> None:
    def work(rank: int) -> Any:
        (sign,) = technique.parse("sign")
        built = BuiltWorkload(_net(), _x(rank, 0))
        errors = []
        for attempt in range(3):
            if attempt == 1:
                built.model = DistributedDataParallel(built.model)
            try:
                sign.apply(built)
            except (UsageError, WorkloadError) as error:
                errors.append((attempt, type(error).__name__, error.what))
        return errors

    for errors in run_ranks(2, work):
        (first, second) = errors
        assert first[:2] == (0, "WorkloadError")
        assert second[:2] == (2, "UsageError")
        assert "communication hook" in second[2]
