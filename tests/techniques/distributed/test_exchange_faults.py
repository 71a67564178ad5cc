"""Nonfinite gradients and 16-bit overflow give exactly the result of DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from forked_ranks import run_ranks
from slipstream.techniques.distributed import PriorityDDP, TwoDState, two_d_allreduce, two_d_hook
from slipstream.techniques.distributed.priority import plan
from slipstream.techniques.distributed.priority.simulate import ORDERS, Link

# Imports of an optimizer, once for all forks.
torch.optim.SGD([torch.zeros(1)], 0.1)
SLOW = Link(dict.fromkeys(ORDERS, 1e-9), dict.fromkeys(ORDERS, 1e-7), 1.0, 1e-7)
BAD = {"nan": (torch.nan, torch.float32), "infinite": (torch.inf, torch.float32),
       "overflow": (6e4, torch.float16)}  # fmt: skip


def net(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 40), nn.Linear(40, 3)).to(dtype)


def weights(model: Any, optimizer: torch.optim.Optimizer, rank: int, bad: str) -> torch.Tensor:
    factor, dtype = BAD[bad]
    for step in range(8):
        optimizer.zero_grad()
        drawn = torch.Generator().manual_seed(10 * step + rank)
        out = model(torch.randn(4, 6, generator=drawn).to(dtype))
        # One rank has bad gradients once.
        out.backward(torch.full_like(out, factor if (rank, step) == (1, 6) else 0.01))
        optimizer.step()
    return torch.cat([value.flatten() for value in model.state_dict().values()])


@pytest.mark.parametrize("bad", BAD)
def test_priority_gives_the_result_of_ddp(bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "measure_link", lambda ranks, orders, busy: SLOW)

    def work(rank: int) -> Any:
        found = []
        for order in ("ddp", *ORDERS):
            model = net(BAD[bad][1])
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            wrapped: nn.Module = (
                DistributedDataParallel(model) if order == "ddp"
                else PriorityDDP(model, optimizer, order=order, timeout_s=60.0)
            )  # fmt: skip
            found.append(weights(wrapped, optimizer, rank, bad))
        return found

    of_ranks = run_ranks(2, work)
    theirs = of_ranks[0][0]
    assert not theirs.isfinite().all()
    for found in of_ranks:
        for result in found:
            assert torch.equal(result.nan_to_num(7.0), theirs.nan_to_num(7.0))
            assert torch.equal(result.isnan(), theirs.isnan())


def test_two_dimensions_give_the_result_of_one() -> None:
    def work(rank: int) -> Any:
        found = []
        for factor, dtype in BAD.values():
            flat = torch.ones(50, dtype=dtype)
            flat[10 + rank] = factor
            flat[20] = factor if rank else -factor
            flat[30] = factor
            grid = flat.clone()
            dist.all_reduce(flat)
            two_d_allreduce(grid, 2)
            found.append((flat, grid))
        model = net(torch.float32)
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(TwoDState(2), two_d_hook)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        return found, weights(wrapped, optimizer, rank, "nan").isnan().any()

    of_ranks = run_ranks(4, work)
    for found, arrived in of_ranks:
        assert arrived
        for number, (flat, grid) in enumerate(found):
            assert torch.equal(grid.isnan(), flat.isnan())
            assert torch.equal(grid.nan_to_num(7.0), flat.nan_to_num(7.0))
            assert torch.equal(grid.nan_to_num(7.0), of_ranks[0][0][number][1].nan_to_num(7.0))
            assert not flat[30].isfinite()
