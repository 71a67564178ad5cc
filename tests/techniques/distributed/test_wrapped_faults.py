"""Mistakes of users, and failures of ranks outside the exchange of gradients."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from forked_ranks import run_ranks
from slipstream.errors import InvalidArgumentError, UsageError
from slipstream.techniques.distributed import (
    AdasumOptimizer,
    AdasumState,
    Auto,
    CommunicationError,
    PriorityDDP,
    ShardedUpdate,
    TwoDState,
    adasum_all_reduce,
    adasum_hook,
    average_buffers,
    compress,
    two_d_hook,
)

# Imports of an optimizer, once for all forks.
torch.optim.SGD([torch.zeros(1)], 0.1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def said_by(act: Callable[[], Any]) -> tuple[str, tuple[int, ...]]:
    with pytest.raises(CommunicationError) as caught:
        act()
    return str(caught.value), caught.value.ranks


@pytest.mark.parametrize("what", ["adasum_all_reduce", "average_buffers"])
def test_a_rank_that_ends_is_named_by_functions(what: str) -> None:
    def act() -> None:
        if what == "average_buffers":
            average_buffers(nn.BatchNorm1d(3))
        else:
            adasum_all_reduce(torch.ones(10))

    def work(rank: int) -> Any:
        act()
        if rank == 1:
            os._exit(0)
        return said_by(act)

    found = run_ranks(3, work)
    for rank in (0, 2):
        assert found[rank][1] == (1,), found[rank]


def test_buffers_that_differ_are_named_before_any_exchange() -> None:
    def work(rank: int) -> Any:
        module = nn.BatchNorm1d(3 + rank)
        messages = said_by(lambda: average_buffers(module))
        norm = nn.BatchNorm1d(3)
        norm.running_mean += rank  # type: ignore[operator]
        average_buffers(norm)
        return messages, norm.running_mean

    for (text, ranks), mean in run_ranks(2, work):
        assert "settings of the call" in text
        assert ranks == (1,)
        assert torch.equal(mean, torch.full((3,), 0.5))


def hooked(model: DistributedDataParallel, how: str) -> torch.optim.Optimizer:
    optimizer = sgd(model.module)
    limits: dict[str, Any] = {"timeout_s": 2.0, "patience_s": 1.0}
    if how == "compress":
        compress(model, "cast:bf16", **limits)
    elif how == "sharded":
        optimizer = ShardedUpdate(optimizer, model, **limits)
    elif how == "adasum":
        state = AdasumState(model=model, **limits)
        model.register_comm_hook(state, adasum_hook)
    else:
        model.register_comm_hook(TwoDState(1, model=model, **limits), two_d_hook)
    return optimizer


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
@pytest.mark.parametrize("how", ["compress", "sharded", "adasum", "two_d"])
def test_a_rank_missing_in_a_broadcast_of_buffers_is_named_in_time(
    how: str, end: signal.Signals
) -> None:
    def work(rank: int) -> Any:
        module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        model = DistributedDataParallel(module)
        optimizer = hooked(model, how)
        for _ in range(2):
            model(torch.randn(8, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if rank == 1:
            # A stopped rank would remain: the parent removes it at the end.
            os.kill(os.getpid(), end)
        began = time.monotonic()
        return (*said_by(lambda: model(torch.randn(8, 4))), time.monotonic() - began)

    text, ranks, elapsed_s = run_ranks(3, work, missing=1)[0]
    assert ranks == (1,)
    assert "the model's buffers" in text
    assert elapsed_s < 10.0


def test_buffers_are_those_of_rank_0_as_without_a_hook() -> None:
    def work(rank: int) -> Any:
        torch.manual_seed(rank)
        found = []
        for how in ("", "compress"):
            module = nn.BatchNorm1d(4)
            model = DistributedDataParallel(module)
            if how:
                hooked(model, how)
            torch.manual_seed(10 + rank)
            for _ in range(2):
                model(torch.randn(8, 4)).sum().backward()
            # The start of the third step broadcasts the buffers of the second.
            model.eval()
            model.train()
            model(torch.zeros(2, 4))
            found.append((module.running_mean, module.num_batches_tracked))
        return found

    for (mean, count), (hooked_mean, hooked_count) in run_ranks(2, work):
        assert torch.equal(mean, hooked_mean)
        assert int(count) == int(hooked_count) == 3


def test_a_rank_that_ends_before_auto_chooses_is_named() -> None:
    def work(rank: int) -> Any:
        model = DistributedDataParallel(nn.Linear(4, 4))
        made = compress(model, Auto("cast:bf16"), timeout_s=10.0, patience_s=3.0)
        assert made.chooser is not None
        if rank == 1:
            made.chooser._slowest = lambda numbers: os._exit(0)  # type: ignore[method-assign]

        def train() -> None:
            for _ in range(60):
                model(torch.ones(2, 4)).sum().backward()

        return said_by(train)

    found = run_ranks(2, work)[0]
    assert found[1] == (1,)
    assert "auto" in found[0]


def test_hooks_without_support_for_sparse_gradients_name_them() -> None:
    def work(rank: int) -> list[str]:
        messages = []
        for hooked in ("adasum", "two_d", "sharded"):
            table = nn.Embedding(10, 4, sparse=True)
            model = DistributedDataParallel(table)
            if hooked == "adasum":
                model.register_comm_hook(AdasumState(), adasum_hook)
            elif hooked == "two_d":
                model.register_comm_hook(TwoDState(rows=1), two_d_hook)
            else:
                ShardedUpdate(sgd(table), model)
            with pytest.raises(InvalidArgumentError, match="gradient is sparse") as caught:
                model(torch.tensor([rank, 5])).sum().backward()
            messages.append(str(caught.value))
        return messages

    for messages in run_ranks(2, work):
        assert all("sparse=False" in message for message in messages)


def test_exchanged_gradients_are_not_exchanged_again() -> None:
    wrappers: tuple[Callable[[nn.Module, torch.optim.Optimizer], Any], ...] = (
        lambda model, optimizer: AdasumOptimizer(optimizer),
        lambda model, optimizer: ShardedUpdate(optimizer),
        lambda model, optimizer: PriorityDDP(model, optimizer),
    )

    def work(rank: int) -> list[str]:
        messages = []
        for inner, outer in itertools.product(wrappers, wrappers):
            model = nn.Linear(2, 2)
            nn.init.ones_(model.weight)
            nn.init.zeros_(model.bias)
            plain = sgd(model)
            made = inner(model, plain)
            optimizer = plain if isinstance(made, PriorityDDP) else made
            # Another model: the optimizer is refused.
            with pytest.raises(UsageError) as caught:
                outer(nn.Linear(2, 2), optimizer)
            messages.append(str(caught.value))
        model = nn.Linear(2, 2)
        first = PriorityDDP(model, sgd(model))
        with pytest.raises(UsageError, match=r"PriorityDDP[^\n]*\n.*close\(\)"):
            PriorityDDP(model, sgd(model))
        first.close()
        PriorityDDP(model, sgd(model)).close()
        return messages

    for messages in run_ranks(2, work):
        names = ("AdasumOptimizer", "ShardedUpdate", "PriorityDDP")
        for text, name in zip(messages, [name for name in names for _ in range(3)], strict=True):
            assert f"{name} already" in text


def test_optimizers_agreed_among_ranks_accept_no_more_parameters() -> None:
    def work(rank: int) -> list[str]:
        messages = []
        for wrap in (AdasumOptimizer, ShardedUpdate):
            made = wrap(torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1))
            with pytest.raises(UsageError, match="no more parameters") as caught:
                made.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
            assert len(made.param_groups) == len(made.optimizer.param_groups) == 1
            messages.append(str(caught.value))
        return messages

    for messages in run_ranks(2, work):
        assert "AdasumOptimizer" in messages[0]
        assert "ShardedUpdate" in messages[1]


def test_invalid_timeouts_are_named() -> None:
    def work(rank: int) -> list[str]:
        model = nn.Linear(2, 2)
        messages = []
        for act in (
            lambda: AdasumOptimizer(sgd(model), timeout_s=-1.0),
            lambda: AdasumState(timeout_s=float("inf")),
            lambda: AdasumState(patience_s=float("nan")),
            lambda: AdasumState(patience_s="9s"),  # type: ignore[arg-type]
            lambda: TwoDState(rows=1, patience_s=0.0),
            lambda: compress(DistributedDataParallel(model), "sign", timeout_s=0.0),
        ):
            with pytest.raises(InvalidArgumentError, match=r"\b(patience|timeout)_s\b") as caught:
                act()
            messages.append(str(caught.value))
        return messages

    for messages in run_ranks(2, work):
        for text, name in zip(
            messages,
            ("timeout_s", "timeout_s", "patience_s", "patience_s", "patience_s", "timeout_s"),
            strict=True,
        ):
            assert name in text


def test_a_full_state_requested_by_one_rank_only_ends_no_process() -> None:
    def work(rank: int) -> Any:
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 3))
        model = DistributedDataParallel(plain)
        optimizer = ShardedUpdate(
            torch.optim.Adam(plain.parameters()), model, timeout_s=3.0, patience_s=3.0
        )

        def train(steps: int) -> None:
            for _ in range(steps):
                model(torch.ones(2, 40)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        # DDP communicates without our time limit until its buckets are rebuilt.
        train(4)
        return said_by(lambda: optimizer.full_state_dict() if rank == 0 else train(1))

    found = run_ranks(2, work)
    assert "full_state_dict" in found[0][0]
    assert re.search(r"\bbucket of gradients\b", found[1][0])
