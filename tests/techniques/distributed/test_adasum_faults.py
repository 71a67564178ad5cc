"""Failures of Adasum's hook and optimizer: named on all ranks, or as without Adasum."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from forked_ranks import run_ranks
from slipstream.errors import CommunicationError
from slipstream.techniques.distributed import AdasumOptimizer, AdasumState, adasum_hook

torch.optim.SGD([torch.zeros(1)], 0.1)


class Hollow(nn.Module):
    """A model with an empty parameter in a separate bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.ones(0))
        self.net = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) + self.none.sum()


def _hooked(**options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    model = DistributedDataParallel(Hollow(), bucket_cap_mb=1e-6)
    model.register_comm_hook(AdasumState(**options), adasum_hook)
    return model


def _backward(model: nn.Module, rank: int, step: int, factor: float = 1.0) -> None:
    model.zero_grad()
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * step + rank))
    (factor * model(x)).square().mean().backward()


def _flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_a_single_rank_keeps_its_gradients() -> None:
    def work(rank: int) -> Any:
        plain, hooked = Hollow(), _hooked()
        plain.load_state_dict(hooked.module.state_dict())
        for model in (plain, hooked):
            _backward(model, 0, 0)
        gradients = _flat(plain), _flat(hooked)
        changed = []
        for wrap in (lambda optimizer: optimizer, AdasumOptimizer):
            model = Hollow()
            model.load_state_dict(plain.state_dict())
            optimizer = wrap(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
            for step in range(2):
                _backward(model, 0, step)
                optimizer.step()
            changed.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        return gradients, changed

    (gradients, changed) = run_ranks(1, work)[0]
    assert torch.equal(*gradients)
    assert torch.allclose(*changed, atol=1e-7)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_a_nonfinite_gradient_shows_on_all_ranks_and_the_next_is_finite(bad: float) -> None:
    def work(rank: int) -> Any:
        model = _hooked()
        found = []
        for step in range(3):
            _backward(model, rank, step, bad if rank == 1 and step == 1 else 1.0)
            found.append(_flat(model))
        return found

    first, second = run_ranks(2, work)
    for step, (gradient, other) in enumerate(zip(first, second, strict=True)):
        assert torch.equal(gradient.isfinite(), other.isfinite())
        assert bool(gradient.isfinite().all()) == (step != 1)
        if step != 1:
            assert torch.equal(gradient, other)


def test_a_second_hook_is_refused() -> None:
    def work(rank: int) -> str:
        model = _hooked()
        with pytest.raises(RuntimeError, match="once") as caught:
            model.register_comm_hook(AdasumState(), adasum_hook)
        return str(caught.value)

    assert all("once" in message for message in run_ranks(2, work))


@pytest.mark.parametrize("ending", ["dies", "hangs"])
def test_a_rank_that_ends_or_hangs_is_named_by_backward(ending: str) -> None:
    def work(rank: int) -> Any:
        model = _hooked(timeout_s=10.0, patience_s=2.0)
        for step in range(2):  # in between, DDP itself communicates, to rebuild buckets
            _backward(model, rank, step)
        if rank == 1:
            if ending == "dies":
                os._exit(1)
            time.sleep(25.0)
            return None
        try:
            _backward(model, rank, 2)
        except CommunicationError as error:
            return error

    error = run_ranks(3, work)[0]
    assert isinstance(error, CommunicationError)
    assert 1 in error.ranks
    assert "rank" in error.what


def test_ranks_with_different_hooks_are_detected() -> None:
    def work(rank: int) -> Any:
        AdasumState(algorithm="rvh" if rank else "gram")

    for error in run_ranks(2, work):
        assert isinstance(error, CommunicationError)
        assert error.ranks == (1,)
        assert "rvh" in error.what
