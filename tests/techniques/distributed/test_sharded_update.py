"""Each rank updates its share: losses, state and weights equal the unsharded optimizer's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from forked_ranks import run_ranks
from slipstream.errors import InvalidArgumentError, UsageError
from slipstream.techniques.distributed import CommunicationError, Lamb, Lars, ShardedUpdate
from slipstream.techniques.distributed.sharded.layerwise import squares

# Imports of an optimizer, once for all forks.
torch.optim.SGD([torch.zeros(1)], 0.1)
STEPS = 50
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=1e-4),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "lars": lambda p: Lars(p, 0.5, trust=0.01, weight_decay=1e-4),
    "lamb": lambda p: Lamb(p, 1e-2, weight_decay=1e-2),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One thread, as in the ranks: sums over several threads round differently."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Scaled(nn.Module):
    """Smooth in one input, so that rounding errors stay small."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), 0.9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * self.weight)


def small() -> nn.Module:
    """Layers with indivisible sizes, and one of a single element."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 17), nn.Tanh(), nn.Linear(17, 5), Scaled(), nn.Linear(5, 4))


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1000 * step + rank))
    return x, x[:, :4].argmax(1)


def backward(model: nn.Module, rank: int, step: int) -> float:
    x, y = batch(rank, step)
    loss = cross_entropy(model(x), y)
    loss.backward()
    return float(loss.detach())


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def averaged(model: nn.Module, size: int, step: int) -> list[float]:
    """Losses of all ranks; gradients are their means."""
    losses = [backward(model, rank, step) for rank in range(size)]
    for p in model.parameters():
        if p.grad is not None:
            p.grad /= size
    return losses


def alone(name: str, size: int, steps: int = STEPS) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Return losses [steps, ranks], weights and state of one process on all ranks' batches."""
    model = small()
    optimizer = OPTIMIZERS[name](model.parameters())
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(averaged(model, size, step))
        optimizer.step()
    return torch.tensor(losses), flat(model), optimizer.state_dict()


@pytest.mark.parametrize(("size", "in_ddp"), [(1, False), (2, True), (3, False), (4, True)])
def test_losses_equal_those_of_the_unsharded_optimizer(size: int, in_ddp: bool) -> None:
    def work(rank: int) -> Any:
        answers = {}
        for name, make in OPTIMIZERS.items():
            model = small()
            wrapped = DistributedDataParallel(model, bucket_cap_mb=0.0005) if in_ddp else None
            optimizer = ShardedUpdate(make(model.parameters()), wrapped)
            losses = []
            for step in range(STEPS):
                optimizer.zero_grad()
                losses.append(backward(wrapped or model, rank, step))
                optimizer.step()
            full = optimizer.full_state_dict()
            answers[name] = (losses, flat(model), full, optimizer.memory())
        return answers

    found = run_ranks(size, work)
    for name in OPTIMIZERS:
        losses, weights, state = alone(name, size)
        ours = torch.tensor([result[name][0] for result in found]).T
        ours, losses = ours.double().mean(1), losses.double().mean(1)
        assert ((ours - losses).abs() / losses).max() <= (1e-6 if size > 1 else 0.0), name
        assert all(torch.equal(result[name][1], found[0][name][1]) for result in found), name
        assert (found[0][name][1] - weights).abs().max() <= 1e-5
        for number, values in state["state"].items():
            for key, value in values.items():
                if value is not None:
                    again = torch.as_tensor(found[0][name][2]["state"][number][key])
                    assert torch.allclose(again, torch.as_tensor(value), 1e-3, 1e-6), (name, key)
        whole = found[0][name][3].unsharded_bytes
        numbers = sum(result[name][3].sharded_bytes for result in found)
        # Stored once in total, except for step counts, which all ranks keep.
        assert whole <= numbers <= whole + 4 * 8 * size


def test_state_resumes_exactly_and_with_another_number_of_ranks() -> None:
    def train(model: nn.Module, optimizer: Any, rank: int, size: int, steps: range) -> torch.Tensor:
        """Every rank has the same batch, so that the number of ranks does not matter."""
        for step in steps:
            optimizer.zero_grad()
            backward(model, 0, step)
            optimizer.step()
        return flat(model)

    def first(rank: int) -> Any:
        answers = {}
        for name, make in OPTIMIZERS.items():
            model = small()
            optimizer = ShardedUpdate(make(model.parameters()))
            train(model, optimizer, rank, 3, range(4))
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            full = copy.deepcopy(optimizer.full_state_dict())
            end = train(model, optimizer, rank, 3, range(4, 8))
            resumed = small()
            resumed.load_state_dict(saved[0])
            again = ShardedUpdate(make(resumed.parameters()))
            again.load_state_dict(saved[1])
            assert torch.equal(train(resumed, again, rank, 3, range(4, 8)), end), name
            with pytest.raises(InvalidArgumentError, match=f"rank {(rank + 1) % 3} of 3"):
                again.load_state_dict(
                    {**saved[1], "sharded_update": {"rank": (rank + 1) % 3, "ranks": 3}}
                )
            answers[name] = (saved[0], full, end)
        return answers

    before = run_ranks(3, first)[0]

    def second(rank: int) -> Any:
        ends = {}
        for name, make in OPTIMIZERS.items():
            model = small()
            model.load_state_dict(before[name][0])
            optimizer = ShardedUpdate(make(model.parameters()))
            optimizer.load_state_dict(before[name][1])
            ends[name] = train(model, optimizer, rank, 2, range(4, 8))
        return ends

    after = run_ranks(2, second)[0]
    for name, make in OPTIMIZERS.items():
        assert (after[name] - before[name][2]).abs().max() <= 1e-5, name
        model = small()
        model.load_state_dict(before[name][0])
        plain = make(model.parameters())
        plain.load_state_dict(before[name][1])
        assert (train(model, plain, 0, 1, range(4, 8)) - before[name][2]).abs().max() <= 1e-5, name


def test_groups_schedulers_strides_and_parameters_without_a_gradient_work() -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(0)
        model = nn.ModuleDict(
            {
                "conv": nn.Conv2d(2, 3, 3),
                "used": nn.Linear(3, 4),
                "idle": nn.Linear(3, 4),
                "wide": nn.Linear(4, 2).double(),
            }
        ).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        rest = [p for n, p in model.named_parameters() if not n.startswith("conv")]
        groups = [{"params": model["conv"].parameters(), "lr": 0.05}, {"params": rest}]
        optimizer = torch.optim.AdamW(groups, 1e-2, weight_decay=0.1)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def forward(model: Any, rank: int, step: int) -> torch.Tensor:
        x = torch.randn(4, 2, 5, 5, generator=torch.Generator().manual_seed(10 * step + rank))
        x = model["conv"](x.to(memory_format=torch.channels_last)).mean((2, 3))
        # Rank 1 alone uses this one, in one step; the unsharded average has zeros from the others.
        y = model["used"](x) + (model["idle"](x) if rank == 1 and step == 3 else 0.0)
        return model["wide"](y.double()).square().mean()

    def work(rank: int) -> Any:
        model, inner, schedule = made()
        optimizer = ShardedUpdate(inner)
        for step in range(6):
            optimizer.zero_grad()
            forward(model, rank, step).backward()
            norm = optimizer.clip_grad_norm_(0.01)
            optimizer.step()
            schedule.step()
        return [p.detach() for p in model.parameters()], norm, optimizer.param_groups[0]["lr"]

    found = run_ranks(3, work)
    model, optimizer, schedule = made()
    for step in range(6):
        optimizer.zero_grad()
        for rank in range(3):
            (forward(model, rank, step) / 3).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        schedule.step()
    for ours, norm_of_ours, rate in found:
        assert norm_of_ours == pytest.approx(float(norm), rel=1e-4)
        assert rate == pytest.approx(0.05 / 8)
        for p, expected in zip(ours, model.parameters(), strict=True):
            assert p.stride() == expected.stride()
            assert (p - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("in_ddp", [False, True])
def test_overflow_on_one_rank_makes_all_skip_and_nan_arrives_as_unsharded(in_ddp: bool) -> None:
    size = 3

    def work(rank: int) -> Any:
        model = small()
        wrapped = DistributedDataParallel(model) if in_ddp else None
        optimizer = ShardedUpdate(Lamb(model.parameters(), 1e-2), wrapped)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        start = flat(model)

        def scaled(factor: float) -> None:
            x, y = batch(rank, 0)
            loss = cross_entropy((wrapped or model)(x), y)
            scaler.scale(loss * (factor if rank == 1 else 1.0)).backward()

        scaled(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        unchanged, fresh = torch.equal(flat(model), start), not optimizer.state
        optimizer.zero_grad()
        scaled(1.0)
        scaler.step(optimizer)
        once = flat(model)
        optimizer.zero_grad()
        x, y = batch(rank, 1)
        (cross_entropy((wrapped or model)(x), y) * (torch.nan if rank == 1 else 1.0)).backward()
        optimizer.step()
        return unchanged, fresh, optimizer.skipped, once, flat(model), scaler.get_scale()

    found = run_ranks(size, work)
    assert [result[:3] for result in found] == [(True, True, 1)] * size
    if in_ddp:
        assert [result[5] for result in found] == [2.0**9] * size
    plain = small()
    optimizer = Lamb(plain.parameters(), 1e-2)
    averaged(plain, size, 0)
    optimizer.step()
    for outcome in found:
        assert (outcome[3] - flat(plain)).abs().max() <= 1e-6
        assert outcome[4].isnan().all()


def test_overflow_is_found_if_one_rank_has_the_whole_last_bucket() -> None:
    size = 2

    def work(rank: int) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(Scaled(), nn.Linear(8, 5), nn.Linear(5, 4))
        # One bucket per parameter from the second step on, the first parameter's last.
        wrapped = DistributedDataParallel(model, bucket_cap_mb=1e-5)
        optimizer = ShardedUpdate(torch.optim.SGD(model.parameters(), 0.1), wrapped)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        at = torch.zeros(5, 8)
        model[1].weight.register_hook(lambda gradient: gradient + at)
        moved = []
        for most in (0.0, torch.inf if rank == 0 else 0.0):
            at[0, 0] = most
            start = flat(model)
            scaler.scale(wrapped(torch.ones(3, 8)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            moved.append(not torch.equal(flat(model), start))
        return moved, scaler.get_scale()

    assert run_ranks(size, work) == [([True, False], 2.0**9)] * size


def test_gradients_with_other_strides_are_clipped_too() -> None:
    def work(rank: int) -> torch.Tensor:
        conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        nn.init.zeros_(conv.weight)
        nn.init.zeros_(conv.bias)
        optimizer = ShardedUpdate(torch.optim.SGD(conv.parameters(), 1.0))
        for p in conv.parameters():
            p.grad = torch.ones(p.shape)
        optimizer.clip_grad_norm_(1e-3)
        optimizer.step()
        return torch.cat([p.detach().reshape(-1) for p in conv.parameters()])

    for weights in run_ranks(2, work):
        assert float(weights.norm()) == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize("kind", [Lars, Lamb])
def test_layerwise_updates_equal_those_of_the_papers(kind: Any) -> None:
    """Written out for one layer, in float64, as in the papers."""
    drawn = torch.Generator().manual_seed(0)
    w = torch.randn(7, 3, generator=drawn, dtype=torch.float64)
    p = nn.Parameter(w.clone())
    lr, decay = 0.1, 0.01
    optimizer = (
        Lars([p], lr, momentum=0.9, weight_decay=decay, trust=0.02, eps=0.0) if kind is Lars
        else Lamb([p], lr, betas=(0.8, 0.95), eps=1e-3, weight_decay=decay)
    )  # fmt: skip
    v = m = s = torch.zeros_like(w)
    for step in range(1, 5):
        g = torch.randn(7, 3, generator=drawn, dtype=torch.float64)
        p.grad = g.clone()
        optimizer.step()
        if kind is Lars:
            rate = 0.02 * w.norm() / (g.norm() + decay * w.norm())
            v = 0.9 * v + lr * rate * (g + decay * w)
            w = w - v
        else:
            m, s = 0.8 * m + 0.2 * g, 0.95 * s + 0.05 * g**2
            r = (m / (1 - 0.8**step)) / ((s / (1 - 0.95**step)).sqrt() + 1e-3) + decay * w
            w = w - lr * w.norm() / r.norm() * r
        assert (p - w).abs().max() <= 1e-12


@pytest.mark.parametrize("length", [0, 1, 10_003])
def test_squares_of_parts_sum_to_those_of_the_whole(length: int) -> None:
    drawn = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        tensor = torch.randn(length, generator=drawn).to(dtype)
        expected = float(tensor.double().square().sum())
        for parts in (1, 3):
            found = sum(float(squares(part)) for part in tensor.tensor_split(parts))
            assert found == pytest.approx(expected, rel=1e-6)


def test_without_adaptation_they_are_the_plain_optimizers() -> None:
    first, second = small(), small()
    pairs = [
        (Lars(first.parameters(), 0.1, adapt=False, weight_decay=0.1),
         torch.optim.SGD(second.parameters(), 0.1, momentum=0.9, weight_decay=0.1)),
        (Lamb(first.parameters(), 0.01, eps=1e-8, adapt=False),
         torch.optim.Adam(second.parameters(), 0.01)),
    ]  # fmt: skip
    for ours, theirs in pairs:
        for step in range(5):
            for model, optimizer in ((first, ours), (second, theirs)):
                optimizer.zero_grad()
                backward(model, 0, step)
                optimizer.step()
            assert (flat(first) - flat(second)).abs().max() <= 1e-6


def test_unsupported_optimizers_are_named() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"^sharded_update\b.*\bprocess group\b"):
        ShardedUpdate(torch.optim.SGD(model.parameters(), 0.1))
    for kind, settings in (
        (Lars, {"lr": -1.0}), (Lars, {"lr": 1.0, "trust": float("nan")}), (Lamb, {"eps": -1.0}),
        (Lamb, {"betas": (0.9, 1.0)}),
    ):  # fmt: skip
        with pytest.raises(InvalidArgumentError):
            kind(model.parameters(), **settings)

    def work(rank: int) -> list[str]:
        messages = []
        model = nn.Linear(3, 2)
        gaps = nn.Parameter(torch.zeros(4, 4)[:, ::2])
        frozen = nn.Linear(3, 2).requires_grad_(False)
        other = DistributedDataParallel(nn.Linear(3, 2))
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        for act in (
            lambda: ShardedUpdate(model),  # type: ignore[arg-type]
            lambda: ShardedUpdate(torch.optim.Adafactor(model.parameters())),
            lambda: ShardedUpdate(torch.optim.SGD([gaps], 0.1)),
            lambda: ShardedUpdate(
                torch.optim.SGD([*model.parameters(), *frozen.parameters()], 0.1)
            ),
            lambda: ShardedUpdate(sgd, model),  # type: ignore[arg-type]
            lambda: ShardedUpdate(sgd, other),
            lambda: ShardedUpdate(sgd, timeout_s=-1.0),
        ):
            with pytest.raises(InvalidArgumentError) as caught:
                act()
            messages.append(caught.value.argument)
        nn.init.constant_(model.weight, float(rank))
        with pytest.raises(CommunicationError, match="start"):
            ShardedUpdate(sgd)
        kinds = (torch.optim.SGD, torch.optim.Adagrad)
        with pytest.raises(CommunicationError, match="optimizer"):
            ShardedUpdate(kinds[rank](other.parameters(), 0.1))
        done = ShardedUpdate(torch.optim.SGD(other.parameters(), 0.1), other)
        with pytest.raises(UsageError, match="already has a communication hook"):
            ShardedUpdate(torch.optim.SGD(other.parameters(), 0.1), other)
        with pytest.raises(UsageError, match="no more"):
            done.add_param_group({"params": [gaps]})
        with pytest.raises(InvalidArgumentError, match="state_dict"):
            done.load_state_dict({})
        other(torch.ones(1, 3)).sum().backward()
        with pytest.raises(UsageError, match="no_sync"):
            other(torch.ones(1, 3)).sum().backward()
        return messages

    for messages in run_ranks(2, work):
        assert messages == [
            "optimizer", "optimizer", "optimizer.parameters[0]", "optimizer", "model", "model",
            "timeout_s",
        ]  # fmt: skip


def test_a_rank_that_leaves_is_named_by_the_step() -> None:
    def work(rank: int) -> Any:
        model = small()
        optimizer = ShardedUpdate(
            torch.optim.AdamW(model.parameters()), timeout_s=20.0, patience_s=3.0
        )
        if rank == 1:
            return None
        backward(model, rank, 0)
        with pytest.raises(CommunicationError) as caught:
            optimizer.step()
        return caught.value.ranks

    assert run_ranks(3, work) == [(1,), None, (1,)]
