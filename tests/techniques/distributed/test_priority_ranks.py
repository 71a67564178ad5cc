"""PriorityDDP between real processes: the weights of DDP, in every order and training loop."""

from __future__ import annotations

import copy
import os
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import slipstream as ss
from forked_ranks import run_ranks
from slipstream.errors import (
    InvalidArgumentError,
    SlipstreamWarning,
    UsageError,
    WorkloadError,
)
from slipstream.technique import parse
from slipstream.techniques.distributed import CommunicationError, PriorityDDP
from slipstream.techniques.distributed.priority import plan
from slipstream.techniques.distributed.priority.simulate import ORDERS, Link
from slipstream.workload import BuiltWorkload

# Imports of an optimizer, once for all forks.
torch.optim.SGD([torch.zeros(1)], 0.1)
# A link on which nothing can be hidden, and one on which hiding is always worth it.
FAST = Link(dict.fromkeys(ORDERS, 1e-3), dict.fromkeys(ORDERS, 1e-12), 1e-9, 1e-12)
SLOW = Link(dict.fromkeys(ORDERS, 1e-9), dict.fromkeys(ORDERS, 1e-7), 1.0, 1e-7)
STEPS = 9
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
}


@pytest.fixture(autouse=True)
def known_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "measure_link", lambda ranks, orders, busy: SLOW)


class Awkward(nn.Module):
    """Tied, frozen, scalar and empty parameters; one never used, one only by odd ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        # Registered in another order than used.
        self.last = nn.Linear(20, 9)
        self.first = nn.Linear(12, 20)
        self.tied = nn.Linear(20, 20, bias=False)
        self.again = nn.Linear(20, 20)
        self.again.weight = self.tied.weight
        self.frozen = nn.Linear(20, 20).requires_grad_(False)
        self.never = nn.Linear(20, 10)
        self.sometimes = nn.Linear(9, 9)
        self.scale = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.ones(0))
        self.norm = nn.LayerNorm(20)

    def forward(self, x: torch.Tensor, odd: bool = False) -> torch.Tensor:
        x = self.norm(torch.relu(self.frozen(self.again(torch.relu(self.tied(self.first(x)))))))
        x = self.last(x)
        return (self.sometimes(x) if odd else x) * self.scale + self.empty.sum()


def batch(rank: int, step: int) -> tuple[torch.Tensor, bool]:
    drawn = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(5, 12, generator=drawn), rank % 2 == 1 and step % 3 > 0


def trained(kind: str, rank: int, loop: Any = None, **options: Any) -> dict[str, torch.Tensor]:
    """Return weights after some steps of DDP (no options) or of PriorityDDP."""
    model = Awkward()
    optimizer = OPTIMIZERS[kind](model.parameters())
    wrapped: Any
    if options:
        wrapped = PriorityDDP(model, optimizer, timeout_s=60.0, **options)
    else:
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    (loop or plain_loop)(wrapped, optimizer, rank)
    return {name: tensor.clone() for name, tensor in wrapped.state_dict().items()}


def plain_loop(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        x, odd = batch(rank, step)
        model(x, odd).square().mean().backward()
        optimizer.step()


def to_the_end(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
    plain_loop(model, optimizer, rank)
    model.synchronize()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_two_ranks_equal_ddp_bitwise(kind: str) -> None:
    def work(rank: int) -> dict[str, bool]:
        theirs = trained(kind, rank)
        return {
            order: same(theirs, trained(kind, rank, order=order, slice_elems=256, credit=credit))
            for order, credit in zip(ORDERS, (1, 3000, 10**6, 2000), strict=True)
        }

    assert run_ranks(2, work) == [dict.fromkeys(ORDERS, True)] * 2


def test_four_ranks_are_bitwise_equal_and_equal_ddp_up_to_rounding() -> None:
    def work(rank: int) -> Any:
        theirs = trained("momentum", rank)
        found = []
        for order in ORDERS:
            ours = trained("momentum", rank, order=order, slice_elems=256)
            off = max(
                float((ours[n] - t).abs().max() / t.abs().max()) for n, t in theirs.items()
                if t.numel()
            )  # fmt: skip
            found.append((off, torch.cat([t.flatten() for t in ours.values()])))
        return found

    answers = run_ranks(4, work)
    for of_ranks in zip(*answers, strict=True):
        assert of_ranks[0][0] <= 1e-6
        assert all(torch.equal(flat, of_ranks[0][1]) for _, flat in of_ranks)


def clipping_loop(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        model(*batch(rank, step)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()


def scaling_loop(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(*batch(rank, step)).square().mean()
        # An overflow on one rank makes all ranks skip the step.
        scaler.scale(loss * torch.inf if step == 6 and rank == 1 else loss).backward()
        scaler.step(optimizer)
        scaler.update()


def scheduled_loop(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        model(*batch(rank, step)).square().mean().backward()
        optimizer.step()
        scheduler.step()


def accumulating_loop(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
    for step in range(STEPS):
        with model.no_sync():
            model(*batch(rank, 3 * step)).square().mean().backward()
        model(*batch(rank, 3 * step + 1)).square().mean().backward()
        optimizer.step()
        # Not through the optimizer: gradients in transfer must not be zeroed.
        model.module.zero_grad(set_to_none=step % 2 == 0)


def twice_backward_loop(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(2):
            model(batch(rank, 3 * step + part)[0]).square().mean().backward()
        optimizer.step()


def closure_loop(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
    for step in range(STEPS):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(*batch(rank, step)).square().mean()  # noqa: B023
            loss.backward()
            return loss

        value: Any = optimizer.step(closure)
        assert float(value.detach()) > 0.0


def reading_loop(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Reads weights and gradients after the step, and evaluates."""
    seen = 0.0
    for step in range(STEPS):
        optimizer.zero_grad()
        model(*batch(rank, step)).square().mean().backward()
        optimizer.step()
        seen += sum(float(p.grad.sum()) for p in model.parameters() if p.grad is not None)
        model.eval()
        with torch.no_grad():
            seen += float(model(batch(rank, step)[0]).sum())
        model.train()
    with torch.no_grad():
        model.module.scale.fill_(seen if seen == seen else 0.0)


def replacing_loop(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Replaces gradients, and removes one."""
    for step in range(STEPS):
        optimizer.zero_grad()
        model(*batch(rank, step)).square().mean().backward()
        model.module.last.weight.grad = 0.5 * model.module.last.weight.grad
        model.module.first.bias.grad = None
        optimizer.step()


LOOPS = {
    "clipping": clipping_loop, "scaling": scaling_loop, "scheduled": scheduled_loop,
    "accumulating": accumulating_loop, "twice": twice_backward_loop, "closure": closure_loop,
    "reading": reading_loop, "replacing": replacing_loop,
}  # fmt: skip


def test_every_kind_of_loop_trains_as_with_ddp() -> None:
    def work(rank: int) -> dict[str, bool]:
        warnings.simplefilter("ignore", SlipstreamWarning)
        found = {}
        for name, loop in LOOPS.items():
            order = ORDERS[len(found) % len(ORDERS)]
            ours = trained("momentum", rank, loop, order=order, slice_elems=300)
            found[name] = same(trained("momentum", rank, loop), ours)
        return found

    assert run_ranks(2, work) == [dict.fromkeys(LOOPS, True)] * 2


def test_reading_gradients_before_the_step_warns_of_its_cost() -> None:
    def work(rank: int) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trained("sgd", rank, clipping_loop, order="static")
        return [str(warning.message) for warning in caught if warning.category is SlipstreamWarning]

    for messages in run_ranks(2, work):
        assert len(messages) == 1
        assert re.search(r"optimizer\.step\(\).*\b[\d.]+ ms\b", messages[0])


def test_updates_run_layer_by_layer_before_any_access() -> None:
    def work(rank: int) -> Any:
        model = Awkward()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        wrapped = PriorityDDP(model, optimizer, order="static", timeout_s=60.0)
        plain_loop(wrapped, optimizer, rank)
        rounds = wrapped._rounds
        assert wrapped.plan is not None
        units = [unit.parameters for unit in rounds.units]
        order = [p is q for p, q in zip([u[0] for u in units], _as_used(model), strict=False)]
        found = {"order": all(order), "due": rounds.due, "step": all(u.due for u in rounds.units)}
        before = model.last.weight.detach().clone()
        model.first(torch.zeros(1, 12))
        found["gate"] = not rounds.at[id(model.first.weight)][0].due
        saved = copy.deepcopy(optimizer.state_dict())
        found["settled"] = not rounds.due
        found["moved"] = not torch.equal(before, model.last.weight)
        weights = copy.deepcopy(wrapped.state_dict())
        plain_loop(wrapped, optimizer, rank)
        # A checkpoint continues exactly in a new wrapper.
        wrapped.close()
        other = Awkward()
        again = torch.optim.SGD(other.parameters(), 0.1, momentum=0.9)
        resumed = PriorityDDP(other, again, order="p2p", timeout_s=60.0)
        resumed.load_state_dict(weights)
        again.load_state_dict(saved)
        plain_loop(resumed, again, rank)
        with resumed.synchronize():
            found["resumed"] = same(dict(model.state_dict()), dict(other.state_dict()))
        return found

    expected = dict.fromkeys(("order", "due", "step", "gate", "settled", "moved", "resumed"), True)
    assert run_ranks(2, work) == [expected] * 2


def _as_used(model: Awkward) -> list[nn.Parameter]:
    """Return the first parameters of units, after those that were never read."""
    return [model.never.weight]


def test_auto_follows_the_prediction_and_is_equal_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def work(rank: int) -> Any:
        found = []
        for link in (FAST, SLOW):
            monkeypatch.setattr(plan, "measure_link", lambda ranks, orders, busy, link=link: link)
            model = Awkward()
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            wrapped = PriorityDDP(model, optimizer, timeout_s=60.0)
            plain_loop(wrapped, optimizer, rank)
            with wrapped.no_sync():
                wrapped(*batch(rank, 0)).sum().backward()
            assert wrapped.plan is not None
            found.append((wrapped.plan, same(trained("sgd", rank), wrapped.state_dict())))
        return found

    fast, slow = run_ranks(2, work)
    assert [result[1] for result in fast] == [True, True]
    assert [result[0] for result in fast] == [result[0] for result in slow]
    assert fast[0][0].order == "ddp"
    assert fast[1][0].order in ORDERS
    assert {"ddp:25", "static:12500"} <= fast[1][0].predicted_s.keys()


def test_a_single_process_trains_unchanged() -> None:
    def work(rank: int) -> bool:
        model, other = Awkward(), Awkward()
        own = torch.optim.SGD(model.parameters(), 0.1)
        theirs = torch.optim.SGD(other.parameters(), 0.1)
        alone = PriorityDDP(model, own)
        plain_loop(alone, own, rank)
        plain_loop(other, theirs, rank)
        return alone.is_plan_final and same(dict(model.state_dict()), dict(other.state_dict()))

    assert run_ranks(1, work) == [True]


@pytest.mark.parametrize("order", ORDERS)
def test_a_rank_that_ends_is_named_on_all(order: str) -> None:
    def work(rank: int) -> Any:
        model = Awkward()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        wrapped = PriorityDDP(model, optimizer, order=order, timeout_s=60.0, patience_s=2.0)
        plain_loop(wrapped, optimizer, rank)
        wrapped.synchronize()
        if rank == 1:
            os._exit(1)
        with pytest.raises(CommunicationError) as caught:
            to_the_end(wrapped, optimizer, rank)
        # On a busy machine, another one may be slow to report that it is alive.
        return 1 in caught.value.ranks

    assert run_ranks(3, work) == [True, None, True]


@pytest.mark.parametrize("lives", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_rank_that_raises_in_its_backward_pass_is_named(lives: bool) -> None:
    ended, end = os.pipe()

    def work(rank: int) -> Any:
        model = Awkward()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        limit = 10.0 if lives else 60.0
        wrapped = PriorityDDP(model, optimizer, order="leader", timeout_s=limit, patience_s=1.0)
        plain_loop(wrapped, optimizer, rank)
        if rank == 0:
            loss = wrapped(batch(0, 0)[0]).sum()
            model.last.weight.register_hook(_raise)
            with pytest.raises(ZeroDivisionError):
                loss.backward()
            if lives:
                os.read(ended, 1)  # hanging, as far as the other can see
            with pytest.raises(UsageError, match="backward"):
                optimizer.step()
            return "raised"
        with pytest.raises(CommunicationError) as caught:
            to_the_end(wrapped, optimizer, rank)
        os.write(end, b"!")
        return caught.value.ranks

    assert run_ranks(2, work) == ["raised", (0,)]


def _raise(gradient: torch.Tensor) -> None:
    raise ZeroDivisionError


def test_invalid_uses_are_named() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="process group"):
        PriorityDDP(model, torch.optim.SGD(model.parameters(), 0.1))

    def work(rank: int) -> list[str]:
        messages = []

        def refused(make: Callable[[], Any]) -> None:
            with pytest.raises((InvalidArgumentError, UsageError, CommunicationError)) as caught:
                make()
            messages.append(str(caught.value))

        sgd = torch.optim.SGD(model.parameters(), 0.1)
        refused(lambda: PriorityDDP(model, torch.optim.LBFGS(model.parameters())))
        refused(lambda: PriorityDDP(model, None))  # type: ignore[arg-type]
        refused(lambda: PriorityDDP(model, sgd, order="ring"))
        refused(lambda: PriorityDDP(model, sgd, slice_elems=3))
        refused(lambda: PriorityDDP(model, sgd, credit=True))
        refused(lambda: PriorityDDP(model, sgd, timeout_s=0.0))
        compiled = torch.compile(model, backend="eager")
        refused(lambda: PriorityDDP(compiled, sgd))  # type: ignore[arg-type]
        refused(lambda: PriorityDDP(DistributedDataParallel(nn.Linear(2, 2)), sgd))
        wide = nn.Linear(2, 2 + rank)
        refused(lambda: PriorityDDP(wide, torch.optim.SGD(wide.parameters(), 0.1)))
        wrapped = PriorityDDP(model, sgd, timeout_s=60.0)
        refused(lambda: PriorityDDP(model, sgd))
        refused(lambda: sgd.add_param_group({"params": [torch.zeros(1)]}))
        double = nn.Linear(2, 2, dtype=torch.complex64)
        refused(lambda: PriorityDDP(double, torch.optim.SGD(double.parameters(), 0.1)))
        table = nn.Embedding(5, 2, sparse=True)
        rows = PriorityDDP(table, torch.optim.SGD(table.parameters(), 0.1))
        refused(lambda: rows(torch.tensor([1])).sum().backward())
        dist.barrier()
        wrapped.close()
        return messages

    words = (
        "LBFGS", "optimizer", "order", "slice_elems", "credit", "timeout_s", "compiled",
        "DistributedDataParallel", "model", "already in a PriorityDDP", "cannot add parameters",
        "complex", "sparse",
    )  # fmt: skip
    for messages in run_ranks(2, work):
        for message, word in zip(messages, words, strict=True):
            assert word in message


def test_optimizers_that_read_several_parameters_step_together() -> None:
    class Mine(torch.optim.SGD):
        pass

    def work(rank: int) -> Any:
        model = Awkward()
        optimizer = Mine(model.parameters(), 0.1)
        wrapped = PriorityDDP(model, optimizer, order="static", timeout_s=60.0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            plain_loop(wrapped, optimizer, rank)
        messages = [
            str(warning.message) for warning in caught if warning.category is SlipstreamWarning
        ]
        return messages, wrapped._rounds.due, same(trained("sgd", rank), wrapped.state_dict())

    for messages, due, equal in run_ranks(2, work):
        assert len(messages) == 1
        assert messages[0].startswith("Mine")
        assert (due, equal) == (False, True)


def test_the_technique_attaches_it() -> None:
    def work(rank: int) -> bool:
        model = Awkward()
        built = BuiltWorkload(model, optimizer=torch.optim.SGD(model.parameters(), 0.1))
        (technique,) = parse("priority_sync:2,slice=300")
        technique.apply(built)
        plain_loop(built.model, built.optimizer, rank)
        done = isinstance(built.model, PriorityDDP) and built.model.plan is not None
        with pytest.raises(WorkloadError, match="optimizer"):
            technique.apply(BuiltWorkload(model))
        return done and built.model.plan.slice_elems == 300

    assert run_ranks(2, work) == [True, True]
    assert ss.distributed.PriorityDDP is PriorityDDP
