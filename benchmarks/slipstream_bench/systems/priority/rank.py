"""One rank of ``slipstream bench priority``: trains as it is told and says what it took."""

from __future__ import annotations

import statistics
import threading
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from slipstream.errors import InvalidArgumentError, SlipstreamWarning
from slipstream.ranks.operations import raise_priority
from slipstream.techniques.distributed.priority.wrapper import PriorityDDP
from slipstream_bench.lab import own_interface
from slipstream_bench.rank_models import Tied
from slipstream_bench.systems.priority.workloads import REAL, TINY, Emulated, named, real

_SAMPLE_S = 0.005
_WARM = 3


def wrapped(
    model: nn.Module, optimizer: torch.optim.Optimizer, how: str, **options: Any
) -> nn.Module:
    """`how`: ``ddp:MiB`` of a bucket (25: as it comes), ``ORDER:ELEMENTS``, or ``auto``."""
    name, _, size = how.partition(":")
    if name == "ddp":
        cap = None if float(size) == 25.0 else float(size)
        return DistributedDataParallel(model, bucket_cap_mb=cap, **options)
    return PriorityDDP(model, optimizer, order=name, slice_elems=int(size) if size else "auto")


def steps(
    workload: str, compute_s: float, methods: Sequence[str], count: int
) -> list[dict[str, Any]]:
    """For each method: times of steps, and what was predicted for them."""
    return [_steps_of(how, *_model_of(workload, compute_s), count) for how in methods]


def _steps_of(how: str, model: nn.Module, x: torch.Tensor, count: int) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    one = wrapped(model, optimizer, how)

    def train(steps: int) -> list[float]:
        times = []
        for _ in range(steps):
            began = time.perf_counter()
            _step(one, optimizer, x)
            times.append(time.perf_counter() - began)
        return times

    while isinstance(one, PriorityDDP) and not one.settled:
        train(1)
    # DDP rebuilds its buckets in the second step.
    train(_WARM)
    dist.barrier()
    sampler = _Sampler(one)
    # One more: a step ends where the next one begins to compute.
    times = train(count + 1)[1:]
    found = {"how": how, "median_s": statistics.median(times), "sampled": sampler.end()}
    if isinstance(one, PriorityDDP):
        found.update(_learned(one))
        one.close()
    return found


def _model_of(workload: str, compute_s: float) -> tuple[nn.Module, torch.Tensor]:
    """A model and its batch; what does not compute goes before other programs.

    Ranks that sleep nearly all the time wake when the network says. Where they compute that would
    be wrong: in real time, a thread that computes keeps its core for 100 ms from those that send,
    and from the kernel's own that move packets.
    """
    if workload not in REAL:
        raise_priority()
    if workload in (*REAL, TINY):
        return real(workload)
    model = Emulated(named(workload, compute_s))
    return model, torch.zeros(1, requires_grad=True)


def weights(methods: Sequence[str], optimizers: Sequence[str], count: int) -> list[dict[str, Any]]:
    """For each optimizer and method: how far the weights are from those of DDP."""
    raise_priority()
    found = []
    for kind in optimizers:
        theirs = _trained("ddp:25", kind, count)
        for how in methods:
            ours = _trained(how, kind, count)
            off = max(float((a - b).abs().max() / b.abs().max()) for a, b in
                      zip(ours, theirs, strict=True))  # fmt: skip
            found.append({"how": f"{kind}, {how}", "off": off})
    return found


def _trained(how: str, kind: str, steps: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    rank = dist.get_rank()
    model = Tied()
    optimizer: torch.optim.Optimizer
    if kind == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    else:
        momentum = 0.9 if kind == "momentum" else 0.0
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=momentum)
    options = {"find_unused_parameters": True} if how.startswith("ddp") else {}
    one = wrapped(model, optimizer, how, **options)
    drawn = torch.Generator().manual_seed(rank)
    for step in range(steps):
        optimizer.zero_grad()
        odd = rank % 2 == 1 and step % 3 > 0
        one(torch.randn(8, 24, generator=drawn), odd).square().mean().backward()
        optimizer.step()
    if isinstance(one, PriorityDDP):
        one.close()
    return [parameter.detach().clone() for parameter in model.parameters()]


# Loops of users; the first ones read gradients before the step.
_READ, _LOOPS = 2, ("clipping by norm", "GradScaler", "loss.item()", "a closure")


def loops(order: str, count: int) -> dict[str, bool]:
    """Of each kind of loop: whether weights are DDP's to the bit, and its cost is told, if any."""
    raise_priority()
    found = {}
    for kind in _LOOPS:
        theirs, _ = _looped(kind, "ddp:25", count)
        ours, said = _looped(kind, order, count)
        told = [" ms in this one" in one for one in said]
        wanted = [True] if kind in _LOOPS[:_READ] else []
        found[kind] = told == wanted and all(map(torch.equal, ours, theirs))
    model = Tied()
    try:
        wrapped(model, torch.optim.LBFGS(model.parameters()), order)
        found["LBFGS"] = False
    except InvalidArgumentError:
        found["LBFGS"] = True
    return found


def _looped(kind: str, how: str, steps: int) -> tuple[list[torch.Tensor], list[str]]:
    """Weights after some steps, and what was warned of."""
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    options = {"find_unused_parameters": True} if how.startswith("ddp") else {}
    one = wrapped(model, optimizer, how, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=kind == "GradScaler")
    drawn = torch.Generator().manual_seed(dist.get_rank())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = one(torch.randn(8, 24, generator=drawn), False).square().mean()
        torch.autograd.backward(scaler.scale(loss))
        return loss

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            if kind == "a closure":
                optimizer.step(closure)
                continue
            loss = closure()
            if kind == "loss.item()":
                loss.item()
            if kind == "clipping by norm":
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
    if isinstance(one, PriorityDDP):
        one.close()
    said = [str(each.message) for each in caught if each.category is SlipstreamWarning]
    return [parameter.detach().clone() for parameter in model.parameters()], said


def turns(workload: str, methods: Sequence[str], count: int, turns: int) -> dict[str, Any]:
    """Seconds of `count` steps of each method, in `turns` parts, and what the first one learned."""
    runs = []
    for how in methods:
        model, x = _model_of(workload, 0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        runs.append((wrapped(model, optimizer, how), optimizer))
    for one in runs:
        while isinstance(one[0], PriorityDDP) and not one[0].settled:
            _step(*one, x)
    found: list[list[float]] = []
    for turn in range(turns + 1):
        row = []
        # Each is first in some turns, and last in others.
        for one in runs if turn % 2 else reversed(runs):
            dist.barrier()
            _step(*one, x)
            # From where a step begins to compute to where a later one does.
            began = time.perf_counter()
            for _ in range(count // turns):
                _step(*one, x)
            row.append(time.perf_counter() - began)
            if isinstance(one[0], PriorityDDP):
                one[0].synchronize()
        if turn:
            found.append(row if turn % 2 else row[::-1])
    first = runs[0][0]
    assert isinstance(first, PriorityDDP)
    return {"turns_s": found, **_learned(first)}


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def _learned(model: PriorityDDP) -> dict[str, Any]:
    """What was predicted, tried and chosen."""
    assert model.plan is not None
    assert model.learned is not None
    step, link = model.learned
    return {
        "chosen": model.plan.name,
        "predicted": model.plan.predicted_s,
        "tried": model.plan.measured_s,
        "compute_s": step.compute_s,
        "beside": [
            f"{name} x{ahead} {100 * left.link:.0f} and {100 * left.core:.0f} %"
            for (name, ahead), left in link.beside.items()
        ],
    }


class _Sampler:
    """Bytes through the interface while gradients are on their way."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._ended = model, False
        self._bytes, self._seconds = [0, 0], 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> tuple[list[int], float]:
        """Bytes received and sent, and seconds, while something was on its way."""
        self._ended = True
        self._thread.join()
        return self._bytes, self._seconds

    def _run(self) -> None:
        wire = own_interface()
        before, at, pending = (0, 0), time.perf_counter(), False
        while not self._ended:
            time.sleep(_SAMPLE_S)
            now, then = (wire.received_bytes, wire.sent_bytes), time.perf_counter()
            still = self._pending()
            if pending and still:
                self._bytes = [b + n - o for b, n, o in zip(self._bytes, now, before, strict=True)]
                self._seconds += then - at
            before, at, pending = now, then, still

    def _pending(self) -> bool:
        rounds = getattr(self._model, "_rounds", None)
        channel = None if rounds is None else rounds.channel
        # What is ready here and has not arrived: the link has something to do.
        return channel is not None and any(unit.left and all(unit.handed) for unit in channel.units)
