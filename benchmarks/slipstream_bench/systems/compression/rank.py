"""A rank of ``slipstream bench compression``: trains with each method and times it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from slipstream.cluster.samples import Operation
from slipstream.ranks.group import ProcessGroup
from slipstream.ranks.operations import timed
from slipstream.ranks.requests import Exchange, Reduce
from slipstream.ranks.wire import Wire
from slipstream.technique import parse
from slipstream.techniques.distributed.compression.bucket import Bucket, Layout, Memory
from slipstream.techniques.distributed.compression.compressor import Compressor, mean
from slipstream.techniques.distributed.compression.hook import compress, settings_of
from slipstream.workload import build_from
from slipstream_bench.lab import own_interface
from slipstream_bench.rank_models import Tied, batch_of, model_of

MEETING = "meeting"
"""Name of a method that sends one number of every bucket, so that ranks wait for each other."""
# Steps of each method before all timed ones, and timed steps per turn.
_WARM, _TURN = 5, 2


def slowly(settings: Compressor, s_per_byte: float) -> Compressor:
    """Return a compressor whose encoder takes longer, as on a slower device.

    Args:
        s_per_byte: sleep per byte of gradients, before the first communication.
    """
    slower, exchange = copy(settings), settings.exchange

    def later(bucket: Bucket, memory: Memory, workers: int, sound: bool) -> Exchange:
        time.sleep(s_per_byte * 4 * bucket.layout.numel)
        return exchange(bucket, memory, workers, sound)

    object.__setattr__(slower, "exchange", later)
    return slower


@dataclass(frozen=True)
class Meeting(Compressor):
    """`MEETING`: ranks' threads share cores and wait for each other, but send almost no bytes."""

    name: ClassVar[str] = MEETING
    keeps: ClassVar[bool] = False

    def exchange(self, bucket: Bucket, memory: Memory, workers: int, sound: bool) -> Exchange:
        """Leave gradients unchanged."""
        yield Reduce(torch.zeros(1))
        return True


def _hooked(model: nn.Module, how: str, slow_s: float = 0.0, **options: Any) -> Any:
    wrapped = DistributedDataParallel(model, **options)
    if how == MEETING:
        return wrapped, compress(wrapped, Meeting())
    if how == "none":
        return wrapped, None
    settings: Any = settings_of(how)
    if slow_s and isinstance(settings, Compressor):
        settings = slowly(settings, slow_s)
    return wrapped, compress(wrapped, settings)


def replicas(methods: Sequence[str], steps: int) -> list[str]:
    """Return the parameters' digest after `steps` steps, by method."""
    return [_digest(how, steps) for how in methods]


def _digest(how: str, steps: int) -> str:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model, _ = _hooked(Tied(), how, bucket_cap_mb=0.005, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    drawn = torch.Generator().manual_seed(rank)
    for step in range(steps):
        optimizer.zero_grad()
        odd = rank % 2 == 1 and step % 3 > 0
        model(torch.randn(8, 24, generator=drawn), odd).square().mean().backward()
        optimizer.step()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def losses(methods: Sequence[str], steps: int, rank_of: int, start: int) -> list[list[float]]:
    """Return the mean loss over ranks of every step; ``torch``: torch's hook, same settings."""
    return [_losses(how, steps, rank_of, start) for how in methods]


def _losses(how: str, steps: int, rank_of: int, start: int) -> list[float]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = torch.from_numpy(digits.data).float() / 16.0
    y = torch.from_numpy(digits.target)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(),
                        nn.Linear(96, 10))  # fmt: skip
    model: Any = DistributedDataParallel(net)
    if how == "torch":
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=rank_of, start_powerSGD_iter=start
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        compress(model, settings_of(how))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    drawn = torch.Generator().manual_seed(dist.get_rank())
    losses = torch.zeros(steps, dtype=torch.float64)
    for step in range(steps):
        chosen = torch.randint(0, len(x), (64,), generator=drawn)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen])
        torch.autograd.backward(loss)
        optimizer.step()
        losses[step] = float(loss.detach())
    dist.all_reduce(losses)
    found: list[float] = (losses / dist.get_world_size()).tolist()
    return found


def exchanges(methods: Sequence[str], side: int, repeats: int) -> list[list[float]]:
    """Return seconds of exchanging one bucket with each method, alternately."""
    layout = Layout.of({"p": (side, side)})
    flat = torch.randn(layout.numel, generator=torch.Generator().manual_seed(dist.get_rank()))
    ranks = ProcessGroup(dist.group.WORLD, 60.0, 5.0, "exchanges")
    settings: dict[str, Any] = {how: settings_of(how) for how in methods}
    memories = {how: Memory() for how in settings}
    times: dict[str, list[float]] = {how: [] for how in settings}
    for _ in range(repeats + 1):
        for how, compressor in settings.items():
            bucket = Bucket(flat.clone(), layout)
            dist.barrier()
            began = time.perf_counter()
            ranks.exchange(mean(compressor, bucket, memories[how], ranks.size), how)
            times[how].append(time.perf_counter() - began)
    return [times[how][1:] for how in settings]


def steps(
    methods: Sequence[str], model: list[Any], bucket_mb: float, slow_s: float, decide: int,
    rounds: int, operations: Sequence[Mapping[str, Any]],
) -> tuple[list[dict[str, Any]], list[list[Any]]]:  # fmt: skip
    """Return per method step times, bytes sent and `auto`'s choice; and times of operations.

    The methods alternate, each with one uncounted step and some counted ones, so that other load
    on the machine affects all of them.

    Args:
        methods: compressors; `MEETING`; ``none``.
        model: see `model_of`.
        slow_s: see `slowly`.
        decide: steps in which `auto` decides.
        operations: communications that alternate with the steps, an `Operation` each.
    """
    arms = {how: _arm(how, model, bucket_mb, slow_s) for how in methods}
    times: dict[str, list[float]] = {how: [] for how in arms}
    sent = dict.fromkeys(arms, 0)
    for step, hook in arms.values():
        decides = hook is not None and hook.chooser is not None
        for _ in range(decide if decides else _WARM):
            step()
    timed_operations = [
        Operation(**{**fields, "ranks": tuple(fields["ranks"])}) for fields in operations
    ]
    rank = dist.get_rank()
    everybody = {tuple(range(dist.get_world_size())): dist.group.WORLD}
    links: list[list[Any]] = [[] for _ in operations]
    for _ in range(rounds):
        for operation, taken in zip(timed_operations, links, strict=True):
            shifts = operation.kind == "p2p"
            taken += _shifted(operation) if shifts else timed(operation, rank, everybody)
        for how, (step, _) in arms.items():
            step()
            dist.barrier()
            wire = own_interface()
            for _ in range(_TURN):
                began = time.perf_counter()
                step()
                times[how].append(time.perf_counter() - began)
            sent[how] += wire.sent_bytes
    found = []
    for how, (_, hook) in arms.items():
        chosen = None if hook is None or hook.chooser is None else str(hook.chooser.current)
        found.append(
            {"how": how, "times_s": times[how], "sent": sent[how] / len(times[how]),
             "chosen": chosen}
        )  # fmt: skip
    return found, links


def _shifted(operation: Operation) -> list[tuple[float, float]]:
    """Return when all ranks began to send their neighbours this message twice in a row, and the
    duration: as for one message there and back (see `Operation`), with both directions in use."""
    wire = Wire.of()
    sent = torch.zeros(operation.nbytes, dtype=torch.uint8)
    received = torch.empty_like(sent)
    after, before = (wire.rank + 1) % wire.size, (wire.rank - 1) % wire.size
    times = []
    for _ in range(operation.repeats):
        dist.barrier()
        began = time.monotonic()
        for _ in range(2):
            wire.swap({after: sent}, {before: received})
        times.append((began, time.monotonic() - began))
    return times


def _arm(
    how: str, spec: list[Any], bucket_mb: float, slow_s: float
) -> tuple[Callable[[], Any], Any]:
    """Return a step of a separate model, with ``accumulation:4+`` before its hook; and the hook."""
    first, _, rest = how.partition("+")
    accumulates = first.startswith("accumulation")
    model, hook = _hooked(
        model_of(spec), (rest or "none") if accumulates else how,
        slow_s=slow_s, bucket_cap_mb=bucket_mb,
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = batch_of(spec, dist.get_rank())
    built = build_from(
        (model, x, lambda out: out.sum(), optimizer), parse(first) if accumulates else (), 0, how
    )
    return built.step, hook
