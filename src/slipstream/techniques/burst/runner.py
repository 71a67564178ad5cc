"""Run the layers of a model on nested sets of ranks, which share a batch.

Of a part on g ranks, rank r < g computes rows r, r + g, ... of the batch. Between parts, rows move
to the ranks that compute them next, and their gradients move back. Gradients of parameters are
summed by the ranks of their part while earlier parts compute theirs.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import statistics
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _compute_bucket_assignment_by_size
from torch.nn.modules.batchnorm import _BatchNorm

from slipstream.cluster import Cluster
from slipstream.cluster.samples import Operation
from slipstream.errors import CommunicationError, InvalidArgumentError, WorkloadError
from slipstream.ranks.launch import RANK_TIMEOUT_S
from slipstream.ranks.operations import timed
from slipstream.ranks.wire import Wire
from slipstream.surgery.check import evaluating
from slipstream.techniques.burst.costs import burst_layers, device_options
from slipstream.techniques.burst.planner import plan, spread
from slipstream.techniques.distributed.chains import (
    LayerMessage,
    chain,
    layer_messages,
    layer_times,
    shared_batch,
    writable,
)
from slipstream.techniques.distributed.gradients import BUCKET_BYTES, FIRST_BUCKET_BYTES
from slipstream.workload import BuiltWorkload

# Messages that determine latency and bandwidth for a plan, in bytes.
_SHORT, _LONG = 1 << 9, 1 << 18


def run_in_bursts(
    built: BuiltWorkload, bursts: Sequence[tuple[int, str]], limits: dict[str, float]
) -> None:
    """Let each step run this rank's share of every layer.

    Args:
        bursts: devices and first module of each part; if empty, rank 0 times its layers and
            messages to rank 1, and plans.
        limits: of the plan, see `plan`.

    Raises:
        WorkloadError: the model is not a chain of layers, the batch is not a pair of tensors or
            cannot be divided, the loss is not a mean over samples, or a layer on several ranks is a
            batch norm or shares a parameter.
    """
    names, layers = zip(*chain(built.model, "burst"), strict=True)
    inputs, targets = shared_batch(built, "burst")
    messages = layer_messages(layers, inputs)
    try:
        counts = spread(bursts, names) if bursts else _planned(layers, messages, inputs, limits)
    except InvalidArgumentError as error:
        raise WorkloadError(error.what, remedy=error.remedy) from error
    _check(names, layers, counts, len(inputs))
    _check_loss(built, layers, inputs, targets, counts[-1])
    step = _Step(layers, counts, messages, built.loss, built.optimizer, inputs, targets)
    built.step = step
    # The ranks share the samples of a step.
    each, remainder = divmod(built.samples_before, step.wire.size)
    built.samples = each + (step.wire.rank < remainder)


def _check(
    names: Sequence[str], layers: Sequence[nn.Module], counts: Sequence[int], samples: int
) -> None:
    owner: dict[int, int] = {}
    part = 0
    for number, (name, layer, devices) in enumerate(zip(names, layers, counts, strict=True)):
        part += number > 0 and devices != counts[number - 1]
        if samples % devices:
            raise WorkloadError(
                f"{samples} samples do not divide among {devices} devices",
                remedy="pass a plan with numbers of devices that divide the batch",
            )
        for module in layer.modules():
            if devices > 1 and isinstance(module, _BatchNorm) and module.training:
                raise WorkloadError(
                    f"layer '{name}' has batch norm, which would normalise the samples of each "
                    "device separately",
                    remedy="run it on one device, or freeze its statistics with eval()",
                )
        for parameter in layer.parameters():
            if owner.setdefault(id(parameter), part) != part:
                raise WorkloadError(
                    f"layer '{name}' shares a parameter with a layer of another part of the plan",
                    remedy="pass a plan with equal numbers of devices from one to the other",
                )


def _check_loss(
    built: BuiltWorkload, layers: Sequence[nn.Module], inputs: torch.Tensor, targets: torch.Tensor,
    devices: int,
) -> None:  # fmt: skip
    """Raise a `WorkloadError` unless the loss is the mean of those of the devices' samples."""
    loss: Any = built.loss
    with evaluating(built.model), torch.no_grad(), torch.random.fork_rng(devices=[]):
        for layer in layers:
            inputs = layer(writable(layer, inputs))
        whole = loss(inputs, targets)
        parts = [loss(inputs[n::devices], targets[n::devices]) for n in range(devices)]
    tolerance = 1e-5 if whole.dtype.itemsize > 2 else 2e-2
    mean = torch.stack(parts).mean()
    if not torch.isclose(mean, whole, rtol=tolerance, equal_nan=True):
        raise WorkloadError(
            f"the loss is not a mean over samples: {float(whole):.6g} for the batch, but "
            f"{float(mean):.6g} on average for the samples of {devices} devices",
            remedy='use reduction="mean" without class weights, or end the plan with one device',
        )


def _planned(
    layers: Sequence[nn.Module], messages: Sequence[LayerMessage], x: torch.Tensor,
    limits: dict[str, float],
) -> list[int]:  # fmt: skip
    """Return the number of devices of each layer, planned from times on the first ranks."""
    cluster = _network()
    counts = torch.zeros(len(layers), dtype=torch.int64)
    if dist.get_rank() == 0:
        options = device_options(cluster.devices, len(x))
        times = np.array([layer_times(layers, x[::devices]) for devices in options]).T * 1e9
        nbytes = [sum(p.nbytes for p in layer.parameters() if p.requires_grad) for layer in layers]
        outputs = [m.shape.numel() * m.dtype.itemsize for m in messages]
        names = [str(number) for number in range(len(layers))]
        made = burst_layers(cluster, options, names, times, nbytes, outputs)
        with contextlib.suppress(InvalidArgumentError):
            counts[:] = torch.tensor(plan(made, options, **limits).devices)
    dist.broadcast(counts, 0)
    if not counts.all():
        raise InvalidArgumentError("plan", "no plan is within the limits, as timed on rank 0")
    return [int(count) for count in counts]


def _network() -> Cluster:
    """Return all ranks, joined by links like those between the first two."""
    pair: dict[tuple[int, ...], Any] = {(0, 1): dist.new_group([0, 1])}
    short_s, long_s = (
        # There and back.
        statistics.median([spent for _, spent in timed(operation, dist.get_rank(), pair)] or [0])
        / 2
        for operation in (Operation("p2p", nbytes, (0, 1), 5) for nbytes in (_SHORT, _LONG))
    )
    rate = 8 * (_LONG - _SHORT) / max(long_s - short_s, 1e-9)
    return Cluster.load(
        f"workers={dist.get_world_size()},link={rate / 1e6}mbit,latency={short_s * 1e6}us"
    )


class _Part(NamedTuple):
    """Consecutive layers on the first `devices` ranks; `message` enters it if it is not first."""

    module: nn.Sequential
    devices: int
    message: LayerMessage | None
    sums: _Sums | None


class _Step:
    """A training step; every rank calls it."""

    def __init__(
        self, layers: Sequence[nn.Module], counts: Sequence[int], messages: Sequence[LayerMessage],
        loss: Any, optimizer: Any, inputs: torch.Tensor, targets: torch.Tensor,
    ) -> None:  # fmt: skip
        limit = timedelta(seconds=RANK_TIMEOUT_S)
        # Tags of other messages of these ranks may be equal.
        self.wire = Wire.of(dist.new_group(timeout=limit))
        self.loss, self.optimizer = loss, optimizer
        rank, first, last = self.wire.rank, counts[0], counts[-1]
        self.inputs = inputs[rank::first].contiguous() if rank < first else inputs[:0]
        self.targets = targets[rank::last].contiguous() if rank < last else targets[:0]
        groups = {g: dist.new_group(range(g), timeout=limit) for g in sorted({*counts}) if g > 1}
        self.parts, at = [], 0
        for devices, run in itertools.groupby(counts):
            end = at + len(list(run))
            module = nn.Sequential(*layers[at:end])
            own = devices > 1 and self.wire.rank < devices
            sums = _Sums(module, groups[devices]) if own else None
            self.parts.append(_Part(module, devices, messages[at - 1] if at else None, sums))
            at = end

    def __call__(self) -> torch.Tensor:
        """Run one optimizer step; return the loss of the whole batch, float64."""
        rank, rows = self.wire.rank, self.inputs
        total = torch.zeros((), dtype=torch.float64)
        # Input and output of each part; both without rows on ranks that do not run it.
        held: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number, part in enumerate(self.parts):
            if part.message is not None:
                rows = self._moved(rows.detach(), number, backwards=False)
                rows.requires_grad_(part.message.trains)
            entering = rows
            if rank < part.devices:
                rows = part.module(writable(part.module[0], rows))
                if number == len(self.parts) - 1:
                    rows = self.loss(rows, self.targets) / part.devices
                    total += rows.detach()
            held.append((entering, rows))
        reported = dist.all_reduce(total, group=self.wire.group, async_op=True)
        gradient: torch.Tensor | None = None
        for number in reversed(range(len(self.parts))):
            part, (entering, leaving) = self.parts[number], held[number]
            if rank < part.devices and leaving.requires_grad:
                leaving.backward(gradient)
            if part.message is None or not part.message.trains:
                break
            rows = entering if entering.grad is None else entering.grad
            gradient = self._moved(rows.detach(), number, backwards=True)
        for part in self.parts:
            if part.sums is not None:
                part.sums.wait()
        _wait(reported, "another rank")
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def _moved(self, rows: torch.Tensor, number: int, *, backwards: bool) -> torch.Tensor:
        """Return this rank's rows of what enters a part, or of its gradient."""
        part, rank = self.parts[number], self.wire.rank
        assert part.message is not None
        a, b = self.parts[number - 1].devices, part.devices
        if backwards:
            a, b = b, a
        shape, dtype, _ = part.message
        result = torch.empty((shape[0] // b if rank < b else 0, *shape[1:]), dtype=dtype)
        sent, received, places = {}, {}, {}
        for source, target, from_rows, to_rows in _routes(a, b):
            if rank == source == target:
                result[to_rows] = rows[from_rows]
            elif rank == source:
                sent[target] = rows[from_rows].contiguous()
            elif rank == target:
                received[source] = torch.empty_like(result[to_rows])
                places[source] = to_rows
        for peer, work in self.wire.post(sent, received, tag=2 * number + backwards).items():
            _wait(work, f"rank {max(peer, -1 - peer)}")
        for source, place in places.items():
            result[place] = received[source]
        return result


@functools.cache
def _routes(a: int, b: int) -> list[tuple[int, int, slice, slice]]:
    """Return sender, receiver, and which rows of theirs move from `a` ranks to `b`."""
    period = math.lcm(a, b)
    return [
        (row % a, row % b, slice(row // a, None, period // a), slice(row // b, None, period // b))
        for row in range(period)
    ]


class _Sums:
    """All-reduces of a part's gradients, in buckets like those of DistributedDataParallel."""

    def __init__(self, module: nn.Module, group: Any) -> None:
        self.group, self.pending = group, list[tuple[Any, torch.Tensor, list[torch.Tensor]]]()
        trained = list[torch.Tensor](p for p in module.parameters() if p.requires_grad)[::-1]
        limits = [FIRST_BUCKET_BYTES, BUCKET_BYTES]
        numbers = _compute_bucket_assignment_by_size(trained, limits)[0] if trained else []
        self.buckets = [[trained[number] for number in bucket] for bucket in numbers]
        self.missing = list(map(len, self.buckets))
        for number, bucket in enumerate(self.buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(functools.partial(self._ready, number))

    def _ready(self, number: int, parameter: torch.Tensor) -> None:
        self.missing[number] -= 1
        if not self.missing[number]:
            self._send(number)

    def _send(self, number: int) -> None:
        found = [p.grad for p in self.buckets[number] if p.grad is not None]
        if found:
            flat = torch.cat([gradient.reshape(-1) for gradient in found])
            work = dist.all_reduce(flat, group=self.group, async_op=True)
            self.pending.append((work, flat, found))

    def wait(self) -> None:
        """Replace the gradients by their sums, also in buckets with unused parameters."""
        for number in np.flatnonzero(self.missing).tolist():
            self._send(number)
        for work, flat, found in self.pending:
            _wait(work, "another rank")
            pieces = flat.split([gradient.numel() for gradient in found])
            for gradient, piece in zip(found, pieces, strict=True):
                gradient.copy_(piece.view_as(gradient))
        self.pending.clear()
        self.missing = list(map(len, self.buckets))


def _wait(work: Any, peer: str) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise CommunicationError(
            f"rank {dist.get_rank()} of the burst lost {peer}: {reason}",
            remedy="look at the output of that rank",
        ) from error
