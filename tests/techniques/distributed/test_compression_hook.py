"""Real ranks: replicas stay equal, no part of a gradient is lost, failures are named."""

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
from slipstream.errors import InvalidArgumentError, SlipstreamError
from slipstream.techniques.distributed import CommunicationError
from slipstream.techniques.distributed.compression import hook  # noqa: F401 - before forks

COMPRESSORS = (
    "cast:bf16", "cast:fp16", "powersgd:2,start=2", "acp:2,start=1", "topk:0.05", "randomk:0.1",
    "sign", "block_int:8", "block_int:4",
)  # fmt: skip


class Awkward(nn.Module):
    """Tied, frozen, scalar and empty parameters; one never used, one only by odd ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 40)
        self.tied = nn.Linear(40, 40, bias=False)
        self.again = nn.Linear(40, 40)
        self.again.weight = self.tied.weight
        self.frozen = nn.Linear(40, 40).requires_grad_(False)
        self.never = nn.Linear(40, 30)
        self.sometimes = nn.Linear(40, 40)
        self.scale = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.ones(0))

    def forward(self, x: torch.Tensor, odd: bool) -> torch.Tensor:
        x = torch.relu(self.frozen(self.again(torch.relu(self.tied(self.first(x))))))
        return (self.sometimes(x) if odd else x) * self.scale + self.empty.sum()


def _batch(rank: int, step: int) -> tuple[torch.Tensor, bool]:
    drawn = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(8, 24, generator=drawn), rank % 2 == 1 and step % 3 > 0


def _wrapped(**options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(
        Awkward(), bucket_cap_mb=0.005, find_unused_parameters=True, **options
    )


def _train(
    model: DistributedDataParallel, rank: int, steps: range, totals: dict[str, Any] | None = None
) -> None:
    """Steps of SGD; sum gradients and applied updates by parameter into `totals`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    named = {n: p for n, p in model.module.named_parameters() if p.requires_grad}
    for step in steps:
        x, odd = _batch(rank, step)
        if totals is not None:
            loss = model.module(x, odd).square().mean()
            found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
            for name, gradient in zip(named, found, strict=True):
                if gradient is not None:
                    totals["given"][name] = totals["given"].get(name, 0) + gradient.double()
        optimizer.zero_grad()
        model(x, odd).square().mean().backward()
        optimizer.step()
        if totals is not None:
            for name, parameter in named.items():
                if parameter.grad is not None:
                    taken = totals["taken"].get(name, 0)
                    totals["taken"][name] = taken + parameter.grad.double()


def _parameters(model: nn.Module) -> bytes:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy().tobytes()


def test_replicas_stay_equal_and_every_gradient_is_accounted_for() -> None:
    def work(rank: int) -> Any:
        answers = []
        for how in COMPRESSORS:
            model = _wrapped(gradient_as_bucket_view=how == "topk:0.05")
            compression = ss.distributed.compress(model, how)
            totals: dict[str, Any] = {"given": {}, "taken": {}}
            _train(model, rank, range(7), totals)
            residual = compression.state_dict()["residual"]
            answers.append((totals, residual, _parameters(model), compression.dense_buckets))
        return answers

    first, second = run_ranks(2, work)
    for how, result, other in zip(COMPRESSORS, first, second, strict=True):
        assert result[2] == other[2], how
        assert result[3] == other[3] == 0
        for name in result[0]["given"].keys() | other[0]["given"].keys():
            gradient = sum(side[0]["given"].get(name, 0) for side in (result, other))
            taken = 2 * result[0]["taken"].get(name, torch.zeros(()))
            retained = sum(
                side[1][name].view_as(gradient) for side in (result, other) if name in side[1]
            )
            rounding = 2e-2 if how.startswith("cast") else 1e-5
            error = float((gradient - taken - retained).abs().max()) if gradient.numel() else 0.0
            largest = float(gradient.abs().max()) if gradient.numel() else 0.0
            assert error <= rounding * max(largest, 1e-2), (how, name)


def test_a_checkpoint_continues_bitwise() -> None:
    def work(rank: int) -> Any:
        answers = []
        for how in ("powersgd:2,start=2", "topk:0.05", "randomk:0.1"):
            through = _wrapped()
            ss.distributed.compress(through, how)
            _train(through, rank, range(8))
            before = _wrapped()
            compression = ss.distributed.compress(before, how)
            _train(before, rank, range(4))
            after = _wrapped()
            after.module.load_state_dict(before.module.state_dict())
            resumed = ss.distributed.compress(after, how)
            resumed.load_state_dict(compression.state_dict())
            _train(after, rank, range(4, 8))
            drift = max(
                float((a - b).detach().abs().max())
                for a, b in zip(through.parameters(), after.parameters(), strict=True)
                if a.numel()
            )
            answers.append((_parameters(after), drift))
            state = compression.state_dict()
            bad = {name: residual * torch.nan for name, residual in state["residual"].items()}
            for change in (
                {"rank": 5}, {"settings": "sign"}, {"residual": {"x": torch.ones(3)}},
                {"residual": bad}, {"residual": {**state["residual"], "x": torch.ones(3)}},
            ):  # fmt: skip
                with pytest.raises(InvalidArgumentError):
                    resumed.load_state_dict({**state, **change})
        return answers

    first, second = run_ranks(2, work)
    for result, other in zip(first, second, strict=True):
        assert result[0] == other[0]
        assert result[1] == other[1] == 0.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nonfinite_gradients_arrive_as_without_compression(bad: float) -> None:
    def work(rank: int) -> Any:
        answers = []
        for how in ("none", *COMPRESSORS):
            torch.manual_seed(0)
            model = DistributedDataParallel(nn.Linear(64, 64))
            compression = None if how == "none" else ss.distributed.compress(model, how)
            for step in range(5):
                model.zero_grad()
                x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * rank + step))
                if step == 3:
                    before = compression.state_dict()["residual"] if compression else {}
                    if rank == 1:
                        x[0, 0] = bad
                model(x).square().mean().backward()
                if step == 3:
                    gradients = [p.grad.clone() for p in model.parameters()]
                    after = compression.state_dict()["residual"] if compression else {}
                    moved = max(
                        (float((after[n] - before[n]).abs().max()) for n in before), default=0.0
                    )
            finite = all(bool(p.grad.isfinite().all()) for p in model.parameters())
            buckets = compression.dense_buckets if compression else 1
            answers.append((gradients, moved, finite, buckets))
        return answers

    for rank in run_ranks(2, work):
        exact = rank[0][0]
        for how, (gradients, moved, finite, buckets) in zip(COMPRESSORS, rank[1:], strict=True):
            for gradient, expected in zip(gradients, exact, strict=True):
                assert torch.equal(gradient.isfinite(), expected.isfinite()), how
            assert moved < 1e-6
            assert finite, how
            assert buckets == 1


def test_sums_that_overflow_in_fp16_are_exchanged_uncompressed() -> None:
    def work(rank: int) -> Any:
        model = DistributedDataParallel(nn.Linear(8, 8, bias=False))
        compression = ss.distributed.compress(model, "cast:fp16")
        (model(torch.full((1, 8), 1e6)) * (rank + 1)).sum().backward()
        return model.module.weight.grad, compression.dense_buckets

    for gradient, buckets in run_ranks(2, work):
        assert torch.equal(gradient, torch.full((8, 8), 1.5e6))
        assert buckets == 1


def test_a_single_rank_trains_as_without_compression() -> None:
    def work(rank: int) -> Any:
        plain, wrapped = _wrapped(), _wrapped()
        ss.distributed.compress(wrapped, "topk:0.01")
        for model in (plain, wrapped):
            _train(model, rank, range(3))
        automatic = _wrapped()
        ss.distributed.compress(automatic, "auto")
        _train(automatic, rank, range(3))
        other = _wrapped()
        return [_parameters(m) for m in (plain, wrapped, automatic)], _refusals(other)

    (parameters, refusals) = run_ranks(1, work)[0]
    assert len(set(parameters)) == 1
    assert refusals == ["UsageError", *["UnknownNameError"] * 1, *["UsageError"] * 2,
                        *["InvalidArgumentError"] * 6]  # fmt: skip


def _refusals(model: DistributedDataParallel) -> list[str]:
    found = []
    ss.distributed.compress(model, "sign")
    double = nn.Linear(2, 2)
    for target, how, options in (
        (model, "sign", {}),
        (_wrapped(), "nothing", {}),
        (_wrapped(), "sign+topk", {}),
        (_wrapped(), "amp:bf16", {}),
        (double, "sign", {}),
        (_wrapped(), "topk:0", {}),
        (_wrapped(), "powersgd:0", {}),
        (_wrapped(), "sign:feedback=false", {}),
        (_wrapped(), "block_int:3", {}),
        (_wrapped(), "sign", {"timeout_s": 0.0}),
    ):
        try:
            ss.distributed.compress(target, how, **options)  # type: ignore[arg-type]
        except SlipstreamError as error:
            found.append(type(error).__name__)
        else:
            found.append("accepted")
    return found


def test_gradients_of_other_dtypes_are_exchanged_uncompressed() -> None:
    def work(rank: int) -> Any:
        model = DistributedDataParallel(nn.Linear(8, 8).double())
        ss.distributed.compress(model, "sign")
        model(torch.full((1, 8), float(rank + 1), dtype=torch.float64)).sum().backward()
        return model.module.weight.grad

    for gradient in run_ranks(2, work):
        assert torch.equal(gradient, torch.full((8, 8), 1.5, dtype=torch.float64))


def test_sparse_gradients_are_exchanged_uncompressed() -> None:
    def work(rank: int) -> Any:
        model = DistributedDataParallel(nn.Embedding(10, 4, sparse=True))
        ss.distributed.compress(model, "topk:0.5")
        model(torch.tensor([rank, 5])).sum().backward()
        return model.module.weight.grad.to_dense()

    for gradient in run_ranks(2, work):
        expected = torch.zeros(10, 4)
        expected[0] = expected[1] = 0.5
        expected[5] = 1.0
        assert torch.equal(gradient, expected)


def test_ranks_with_different_settings_are_named() -> None:
    def work(rank: int) -> Any:
        model = DistributedDataParallel(nn.Linear(8, 8))
        ss.distributed.compress(model, "sign" if rank == 1 else "topk:0.01")

    for error in run_ranks(2, work):
        assert isinstance(error, CommunicationError)
        assert error.ranks == (1,)
        assert "sign" in error.what
        assert "topk" in error.what


@pytest.mark.parametrize(
    ("how", "ending"), [("topk:0.05", "dies"), ("powersgd:2,start=0", "hangs"), ("auto", "dies")]
)
def test_a_rank_that_ends_or_hangs_is_named_by_all_others(how: str, ending: str) -> None:
    def work(rank: int) -> Any:
        model = _wrapped()
        compression = ss.distributed.compress(model, how, timeout_s=10.0, patience_s=2.0)
        _train(model, rank, range(2))
        if rank == 1:
            if ending == "dies":
                os._exit(1)
            time.sleep(25.0)
            return None
        began = time.monotonic()
        try:
            _train(model, rank, range(2, 4))
        except CommunicationError as error:
            return error, time.monotonic() - began, compression.memory.step

    answers = run_ranks(2, work)
    error, seconds, step = answers[0]
    assert isinstance(error, CommunicationError)
    assert error.ranks == (1,)
    assert "rank 1" in error.what
    assert "step 2" in str(error)
    assert seconds < 30.0
    assert step == 2
