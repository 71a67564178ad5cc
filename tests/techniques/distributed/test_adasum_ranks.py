"""Adasum between real processes: the reference, with equal bits on all, as simulated."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from forked_ranks import run_ranks
from slipstream.errors import CommunicationError, InvalidArgumentError, UsageError
from slipstream.ranks.wire import Wire
from slipstream.techniques.distributed import (
    AdasumOptimizer,
    AdasumState,
    Lamb,
    adasum_all_reduce,
    adasum_hook,
    average_buffers,
)
from slipstream.techniques.distributed.adasum import optimizer as optimizer_of
from slipstream.techniques.distributed.adasum.exchange import check, exchange
from slipstream_bench.systems.adasum.reference import adasum_of

# Imports of an optimizer, once for all forks.
torch.optim.SGD([torch.zeros(1)], 0.1)
LENGTH = 10_007
# A layer of one element, an empty one, one that no slice contains completely, and the rest.
LAYERS = (0, 1, 1, 300, 6000, 10_000)


def ours(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    common = torch.randn(LENGTH, generator=generator)
    generator.manual_seed(100 + rank)
    return (common + 2 * torch.randn(LENGTH, generator=generator)).to(dtype)


def expected(size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    rows = [ours(rank, dtype).double() for rank in range(size)]
    ends = [*LAYERS[1:], LENGTH]
    return torch.cat(
        [adasum_of([row[a:b] for row in rows]) for a, b in zip(LAYERS, ends, strict=True) if b > a]
    )


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7, 8])
def test_ranks_compute_the_reference_with_equal_bits(size: int) -> None:
    algorithms = ["gram"] + ["rvh"] * (size & (size - 1) == 0)
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    bounds = (1e-6, 1e-12, 1e-2, 2e-3)

    def work(rank: int) -> Any:
        answers = []
        for algorithm in algorithms:
            for dtype in dtypes:
                tensor = ours(rank, dtype)
                adasum_all_reduce(tensor, LAYERS, algorithm=algorithm)
                answers.append(tensor)
        return answers

    found = run_ranks(size, work)
    for number, (dtype, bound) in enumerate(
        zip(dtypes * len(algorithms), bounds * 2, strict=False)
    ):
        assert all(torch.equal(result[number], found[0][number]) for result in found)
        assert off(found[0][number], expected(size, dtype)) <= bound


@pytest.mark.parametrize("size", [2, 3, 4])
def test_scaling_is_exact(size: int) -> None:
    """Powers of two, from 1e-12 to 1e12, cause no rounding."""
    algorithms = ["gram"] + ["rvh"] * (size & (size - 1) == 0)

    def work(rank: int) -> Any:
        answers = []
        for algorithm in algorithms:
            for scale in (1.0, 2.0**-40, 2.0**40):
                tensor = scale * ours(rank)
                adasum_all_reduce(tensor, LAYERS, algorithm=algorithm)
                answers.append(tensor / scale)
        return answers

    for found in run_ranks(size, work):
        for number in range(0, len(found), 3):
            assert torch.equal(found[number + 1], found[number])
            assert torch.equal(found[number + 2], found[number])


@pytest.mark.parametrize("algorithm", ["gram", "rvh"])
def test_bytes_equal_those_of_an_all_reduce(algorithm: str) -> None:
    size, length = 4, 4096

    def work(rank: int) -> tuple[int, int]:
        flat = torch.randn(length)
        wire = Wire.of()
        exchange(flat, check(flat, (0, 100, 2000), algorithm, size), wire, algorithm)
        return wire.payload_bytes, wire.product_bytes

    for payload, product in run_ranks(size, work):
        assert payload == 2 * 4 * length * (size - 1) // size
        # Cuts at 1024, 2048 and 3072 run through two of three layers, that of the first level, at
        # 2048, through one; and all report whether their gradients are finite.
        doubles = 2 * 10 + 1 if algorithm == "gram" else (3 + 1) + (2 * 3 + 1)
        assert product == 8 * doubles


@pytest.mark.parametrize("algorithm", ["gram", "rvh"])
def test_communicated_dot_products_do_not_grow_with_layers(algorithm: str) -> None:
    def work(rank: int) -> list[int]:
        sent = []
        for layers in (10, 1000):
            flat = torch.randn(4096)
            starts = check(flat, list(range(0, 4000, 4000 // layers)), algorithm, 4)
            wire = Wire.of()
            exchange(flat, starts, wire, algorithm)
            sent.append(wire.product_bytes)
        return sent

    for few, many in run_ranks(4, work):
        assert many <= few


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(6, 8, generator=generator)
    return x, x[:, :4].argmax(1)


def backward(model: nn.Module, rank: int, step: int) -> float:
    x, y = batch(rank, step)
    loss = cross_entropy(model(x), y)
    loss.backward()
    return float(loss.detach())


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, 1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),
    "lamb": lambda p: Lamb(p, 1e-2),
}


def test_weights_stay_equal_and_a_checkpoint_continues_exactly() -> None:
    def work(rank: int) -> Any:
        answers = {}
        for name, make in OPTIMIZERS.items():
            model = small()
            optimizer = AdasumOptimizer(make(model.parameters()))
            for step in range(6):
                optimizer.zero_grad()
                backward(model, rank, step)
                optimizer.step()
                if step == 2:
                    saved = {k: v.clone() for k, v in model.state_dict().items()}
                    state = copy.deepcopy(optimizer.state_dict())
            resumed = small()
            resumed.load_state_dict(saved)
            again = AdasumOptimizer(make(resumed.parameters()))
            again.load_state_dict(state)
            for step in range(3, 6):
                again.zero_grad()
                backward(resumed, rank, step)
                again.step()
            same = all(
                torch.equal(a, b)
                for a, b in zip(model.parameters(), resumed.parameters(), strict=True)
            )
            average_buffers(model)
            flat = torch.cat([v.flatten().double() for v in model.state_dict().values()])
            answers[name] = (flat, same)
        return answers

    found = run_ranks(3, work)
    for name in OPTIMIZERS:
        assert all(torch.equal(result[name][0], found[0][name][0]) for result in found), name
        # A momentum in a checkpoint must have been copied to continue exactly.
        assert all(result[name][1] for result in found), name


def test_processes_train_like_simulated_workers() -> None:
    size, steps = 4, 50

    def work(rank: int) -> list[float]:
        model = small().eval()
        optimizer = AdasumOptimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
        losses = []
        for step in range(steps):
            optimizer.zero_grad()
            losses.append(backward(model, rank, step))
            optimizer.step()
        return losses

    models = [small().eval() for _ in range(size)]
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in models]
    simulated = []
    for step in range(steps):
        start = [p.detach().clone() for p in models[0].parameters()]
        losses = []
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            losses.append(backward(model, rank, step))
            optimizer.step()
        simulated.append(losses)
        with torch.no_grad():
            for number, before in enumerate(start):
                of_all = [list(m.parameters())[number] for m in models]
                change = adasum_of([p - before for p in of_all])
                for parameter in of_all:
                    parameter.copy_(before + change)
    found = np.array(run_ranks(size, work)).T
    assert np.abs(found - np.array(simulated)).max() <= 1e-4


def test_overflow_on_one_worker_makes_all_skip() -> None:
    def work(rank: int) -> Any:
        model = small()
        optimizer = AdasumOptimizer(torch.optim.Adam(model.parameters(), 1e-2))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        before = [p.detach().clone() for p in model.parameters()]
        x, y = batch(rank, 0)
        scaler.scale(cross_entropy(model(x), y)).backward()
        if rank == 1:
            next(model.parameters()).grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        unchanged = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        fresh = not optimizer.optimizer.state
        optimizer.zero_grad()
        scaler.scale(cross_entropy(model(x), y)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        moved = not torch.equal(before[0], next(model.parameters()))
        return unchanged, fresh, optimizer.skipped, moved, scaler.get_scale()

    found = run_ranks(2, work)
    assert [result[:4] for result in found] == [(True, True, 1, True)] * 2
    assert found[1][4] < found[0][4]


def test_the_hook_applies_adasum_to_the_gradients_of_a_model_in_ddp() -> None:
    def work(rank: int) -> Any:
        model = DistributedDataParallel(small().eval(), bucket_cap_mb=0.0004)
        model.register_comm_hook(AdasumState(), adasum_hook)
        for step in (0, 0):  # buckets are rebuilt after the first
            model.zero_grad()
            backward(model, rank, step)
        return [p.grad.clone() for p in model.parameters()]

    gradients = []
    for rank in range(3):
        model = small().eval()
        backward(model, rank, 0)
        gradients.append([p.grad for p in model.parameters()])
    found = run_ranks(3, work)
    for number, per_rank in enumerate(zip(*gradients, strict=True)):
        expected = adasum_of([tensor.double() for tensor in per_rank])
        assert off(found[0][number], expected) <= 1e-6
        assert all(torch.equal(result[number], found[0][number]) for result in found)


def test_differences_between_ranks_are_named_on_all() -> None:
    def work(rank: int) -> list[str]:
        messages = []
        model = nn.Linear(3 + (rank == 1), 2)
        for act in (
            lambda: adasum_all_reduce(torch.zeros(4 + rank)),
            lambda: adasum_all_reduce(torch.full((4,), torch.nan if rank else 1.0)),
            lambda: AdasumOptimizer(torch.optim.SGD(model.parameters(), 0.1)),
        ):
            with pytest.raises(CommunicationError) as caught:
                act()
            messages.append(str(caught.value))
        linear = nn.Linear(2, 2)
        nn.init.constant_(linear.weight, float(rank))
        with pytest.raises(CommunicationError) as caught:
            AdasumOptimizer(torch.optim.SGD(linear.parameters(), 0.1))
        return [*messages, str(caught.value)]

    for messages in run_ranks(2, work):
        for message, part in zip(
            messages, ("shape of the call", "not finite", "parameters", "start"), strict=True
        ):
            assert part in message


def test_parameters_in_several_slices_equal_those_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(rank: int, part_bytes: int, momentum: float) -> tuple[int, Any]:
        monkeypatch.setattr(optimizer_of, "_PART_BYTES", part_bytes)
        model = small().eval()
        sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=momentum)
        optimizer = AdasumOptimizer(sgd)
        for step in range(3):
            optimizer.zero_grad()
            backward(model, rank, step)
            optimizer.step()
        return len(optimizer._parts), [p.detach().clone() for p in model.parameters()]

    def work(rank: int) -> Any:
        return [trained(rank, size, m) for size in (1 << 20, 200) for m in (0.0, 0.9)]

    found = run_ranks(2, work)
    for (count, single), (parts, many) in zip(found[0][:2], found[0][2:], strict=True):
        assert count == 1
        assert parts > 2
        for a, b in zip(single, many, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    for own, theirs in zip(found[0], found[1], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(own[1], theirs[1], strict=True))


def test_gradients_of_only_some_ranks_count_as_zero_on_the_others() -> None:
    """From a branch that not all took, and for rows of a table; accumulated over two batches."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(6, 4, sparse=True)
            self.left, self.right = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, rank: int) -> torch.Tensor:
            x = self.table(torch.tensor([rank, 5]))
            return (self.left if rank == 0 else self.right)(x)

    def work(rank: int) -> Any:
        torch.manual_seed(0)
        model = Branches()
        before = [p.detach().clone() for p in model.parameters()]
        optimizer = AdasumOptimizer(torch.optim.SGD(model.parameters(), 0.1))
        for _ in range(2):
            model(rank).square().sum().backward()
        ours = [None if p.grad is None else p.grad.to_dense() for p in model.parameters()]
        optimizer.step()
        pairs = zip(model.parameters(), before, strict=True)
        return ours, [(after - start).detach() for after, start in pairs]

    found = run_ranks(2, work)
    for number, change in enumerate(found[0][1]):
        assert torch.equal(change, found[1][1][number])
        gradients = [ranks[0][number] for ranks in found]
        zero = torch.zeros_like(change)
        expected = adasum_of(
            [zero if gradient is None else -0.1 * gradient for gradient in gradients]
        )
        assert torch.allclose(change, expected, atol=1e-6)


def test_a_rank_that_ends_is_named() -> None:
    def work(rank: int) -> str:
        model = small()
        optimizer = AdasumOptimizer(
            torch.optim.Adam(model.parameters()), timeout_s=5.0, patience_s=5.0
        )
        backward(model, rank, 0)
        if rank == 1:
            os._exit(0)
        with pytest.raises(CommunicationError) as caught:
            optimizer.step()
        return str(caught.value)

    found = run_ranks(3, work)
    assert found[1] is None
    assert "rank 1" in found[0]
    assert "rank 1" in found[2]


def test_invalid_arguments_are_named() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"^AdasumOptimizer\b.*\bprocess group\b"):
        AdasumOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    for flat, layers, algorithm, size, name in (
        (torch.zeros(4, dtype=torch.int32), None, "auto", 2, "tensor"),
        (torch.zeros(4, 4).T, None, "auto", 2, "tensor"),
        (torch.eye(3).to_sparse(), None, "auto", 2, "tensor"),
        (torch.zeros(4), (0, 3, 2), "auto", 2, "layers"),
        (torch.zeros(4), (1,), "auto", 2, "layers"),
        (torch.zeros(4), (0, 9), "auto", 2, "layers"),
        (torch.zeros(4), None, "ring", 2, "algorithm"),
        (torch.zeros(4), None, "rvh", 3, "algorithm"),
    ):
        with pytest.raises(InvalidArgumentError, match=name):
            check(flat, layers, algorithm, size)

    def work(rank: int) -> str:
        model = nn.Linear(2, 2)
        optimizer = AdasumOptimizer(torch.optim.SGD(model.parameters(), 0.1))
        with pytest.raises(InvalidArgumentError, match="state_dict") as caught:
            optimizer.load_state_dict(
                {**optimizer.state_dict(), "adasum": {"rank": 1 - rank, "size": 2}}
            )
        with pytest.raises(InvalidArgumentError, match="state_dict"):
            optimizer.load_state_dict(optimizer.optimizer.state_dict())
        dist.barrier()
        return str(caught.value)

    assert "rank 1 of 2" in run_ranks(2, work)[0]
