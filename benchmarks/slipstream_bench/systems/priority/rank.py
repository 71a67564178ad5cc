"""A rank of ``slipstream bench priority``: trains with each method and times it."""

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
    """Wrap a model; `how`: ``ddp:MiB`` of a bucket (default 25), ``ORDER:ELEMENTS``, ``auto``."""
    name, _, size = how.partition(":")
    if name == "ddp":
        cap = None if float(size) == 25.0 else float(size)
        return DistributedDataParallel(model, bucket_cap_mb=cap, **options)
    return PriorityDDP(model, optimizer, order=name, slice_elems=int(size) if size else "auto")


def steps(
    workload: str, compute_s: float, methods: Sequence[str], count: int
) -> list[dict[str, Any]]:
    """Return the step times of each method, and their predictions."""
    return [_steps_of(how, *_model_of(workload, compute_s), count) for how in methods]


def _steps_of(how: str, model: nn.Module, x: torch.Tensor, count: int) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    wrapped_model = wrapped(model, optimizer, how)

    def train(steps: int) -> list[float]:
        times = []
        for _ in range(steps):
            began = time.perf_counter()
            _step(wrapped_model, optimizer, x)
            times.append(time.perf_counter() - began)
        return times

    while isinstance(wrapped_model, PriorityDDP) and not wrapped_model.is_plan_final:
        train(1)
    # DDP rebuilds its buckets in the second step.
    train(_WARM)
    dist.barrier()
    sampler = _Sampler(wrapped_model)
    # One more, since a step ends when the next one begins to compute.
    times = train(count + 1)[1:]
    results = {"how": how, "median_s": statistics.median(times), "sampled": sampler.end()}
    if isinstance(wrapped_model, PriorityDDP):
        results.update(_learned(wrapped_model))
        wrapped_model.close()
    return results


def _model_of(workload: str, compute_s: float) -> tuple[nn.Module, torch.Tensor]:
    """Return a model and its batch; ranks that do not compute get a higher priority.

    Ranks that sleep nearly all the time wake when data arrives. For ranks that compute a priority
    would be wrong: with real-time scheduling, a computing thread keeps its core for 100 ms from
    threads that send, and from the kernel's threads that move packets.
    """
    if workload not in REAL:
        raise_priority()
    if workload in (*REAL, TINY):
        return real(workload)
    model = Emulated(named(workload, compute_s))
    return model, torch.zeros(1, requires_grad=True)


def weights(methods: Sequence[str], optimizers: Sequence[str], count: int) -> list[dict[str, Any]]:
    """Return the difference of the weights from those of DDP, for each optimizer and method."""
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
    wrapped_model = wrapped(model, optimizer, how, **options)
    generator = torch.Generator().manual_seed(rank)
    for step in range(steps):
        optimizer.zero_grad()
        odd = rank % 2 == 1 and step % 3 > 0
        wrapped_model(torch.randn(8, 24, generator=generator), odd).square().mean().backward()
        optimizer.step()
    if isinstance(wrapped_model, PriorityDDP):
        wrapped_model.close()
    return [parameter.detach().clone() for parameter in model.parameters()]


# Typical training loops; the first ones read gradients before the step.
_READ, _LOOPS = 2, ("clipping by norm", "GradScaler", "loss.item()", "a closure")


def loops(order: str, count: int) -> dict[str, bool]:
    """Return for each loop whether its weights equal DDP's, and its cost is reported, if any."""
    raise_priority()
    found = {}
    for kind in _LOOPS:
        theirs, _ = _looped(kind, "ddp:25", count)
        ours, messages = _looped(kind, order, count)
        reported = [" ms in this one" in message for message in messages]
        expected = [True] if kind in _LOOPS[:_READ] else []
        found[kind] = reported == expected and all(map(torch.equal, ours, theirs))
    model = Tied()
    try:
        wrapped(model, torch.optim.LBFGS(model.parameters()), order)
        found["LBFGS"] = False
    except InvalidArgumentError:
        found["LBFGS"] = True
    return found


def _looped(kind: str, how: str, steps: int) -> tuple[list[torch.Tensor], list[str]]:
    """Return the weights after some steps, and the warnings."""
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    options = {"find_unused_parameters": True} if how.startswith("ddp") else {}
    wrapped_model = wrapped(model, optimizer, how, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=kind == "GradScaler")
    generator = torch.Generator().manual_seed(dist.get_rank())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = (
            wrapped_model(torch.randn(8, 24, generator=generator), False).square().mean()
        )
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
    if isinstance(wrapped_model, PriorityDDP):
        wrapped_model.close()
    messages = [str(each.message) for each in caught if each.category is SlipstreamWarning]
    return [parameter.detach().clone() for parameter in model.parameters()], messages


def turns(workload: str, methods: Sequence[str], count: int, turns: int) -> dict[str, Any]:
    """Time `count` steps of each method, in `turns` parts; also return the first one's plan."""
    runs = []
    for how in methods:
        model, x = _model_of(workload, 0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        runs.append((wrapped(model, optimizer, how), optimizer))
    for run in runs:
        while isinstance(run[0], PriorityDDP) and not run[0].is_plan_final:
            _step(*run, x)
    times_s: list[list[float]] = []
    for turn in range(turns + 1):
        row = []
        # Methods run in both orders.
        for run in runs if turn % 2 else reversed(runs):
            dist.barrier()
            _step(*run, x)
            # From the start of a step's computation to that of a later one.
            began = time.perf_counter()
            for _ in range(count // turns):
                _step(*run, x)
            row.append(time.perf_counter() - began)
            if isinstance(run[0], PriorityDDP):
                run[0].synchronize()
        if turn:
            times_s.append(row if turn % 2 else row[::-1])
    first = runs[0][0]
    assert isinstance(first, PriorityDDP)
    return {"turns_s": times_s, **_learned(first)}


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def _learned(model: PriorityDDP) -> dict[str, Any]:
    """Return what was predicted, tried and chosen."""
    assert model.plan is not None
    assert model.costs is not None
    step, link = model.costs
    return {
        "chosen": model.plan.name,
        "predicted": model.plan.predicted_s,
        "tried": model.plan.measured_s,
        "compute_s": step.compute_s,
        "remaining": [
            f"{name} x{ahead} {100 * rates.link:.0f} and {100 * rates.core:.0f} %"
            for (name, ahead), rates in link.contention.items()
        ],
    }


class _Sampler:
    """Counter of bytes through the interface while gradients are in transit."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._ended = model, False
        self._bytes, self._seconds = [0, 0], 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> tuple[list[int], float]:
        """Return bytes received and sent, and seconds, while gradients were in transit."""
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
        # Gradients that are ready and have not arrived keep the link busy.
        return channel is not None and any(
            unit.missing and all(unit.handed) for unit in channel.units
        )
