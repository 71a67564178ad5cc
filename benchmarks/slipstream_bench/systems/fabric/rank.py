"""A rank of ``slipstream bench fabric``: all-reduces and training through an aggregator."""

from __future__ import annotations

import functools
import os
import signal
import time
import warnings
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from slipstream import data
from slipstream.engines.aggregation import JobMember, attach
from slipstream_bench.lab import Turn

_PATIENT_S = 30.0


def exchanges(nbytes: int, address: str, token: str) -> dict[str, Turn]:
    """Return turns of both ways to sum a tensor."""
    member = JobMember(
        [address], f"of {nbytes}", dist.get_rank(), dist.get_world_size(), token, fragments=True
    )
    tensor, out = torch.randn(nbytes // 4), torch.empty(nbytes // 4)
    return {
        "aggregator": Turn(lambda: member.sum(tensor, out), before=tensor.normal_),
        "gloo": Turn(lambda: dist.all_reduce(tensor), before=tensor.normal_),
    }


def sums(
    addresses: list[str], token: str, count: int, max_values: int, mtu: int | None = None
) -> dict[str, Any]:
    """Sum vectors of random sizes; return wrong sums, seconds, and hashes of the windows.

    The reference adds the ranks' vectors in order, which every rank can generate.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    address = addresses[rank % len(addresses)]
    member = JobMember(
        [address], "sums", rank, world, token, mtu=mtu, silent_s=_PATIENT_S, timeout_s=_PATIENT_S
    )
    sizes = np.random.default_rng(0).integers(1, max_values, count)
    base = [torch.randn(max_values, generator=_seeded(r)) for r in range(world)]
    wrong, elapsed, windows, values = 0, 0.0, [], 0
    for turn, size in enumerate(sizes.tolist()):
        own = base[rank][:size] + turn
        out = torch.empty(size)
        began = time.perf_counter()
        member.sum(own, out)
        elapsed += time.perf_counter() - began
        values += size
        expected = base[0][:size] + turn
        for other in range(1, world):
            expected += base[other][:size] + turn
        wrong += not torch.equal(out, expected)
        windows.append(member.reports[0].windows)
    dist.barrier()
    member.close()
    return {"wrong": wrong, "elapsed_s": elapsed, "windows": windows, "values": values}


def _seeded(rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(rank)


# Without annotations: torch compares them as types, and here they are text.
def _mean_in_order(_, bucket):  # type: ignore[no-untyped-def]
    whole = bucket.buffer()
    parts = [torch.empty_like(whole) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, whole)
    found: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    found.set_result(functools.reduce(torch.add, parts) / len(parts))
    return found


def training(
    steps: int, address: str | None, token: str = "", kill: int = 0, in_order: bool = False
) -> dict[str, Any]:
    """Train on digits; return losses, the longest step, and the state of the hook.

    Args:
        address: of an aggregator; None for gloo.
        in_order: whether gloo's gradients are gathered and added in the order of the ranks.
        kill: process of the aggregator, killed by rank 0 halfway.
    """
    warnings.simplefilter("ignore")
    found = data.get("digits")
    pixels = torch.from_numpy(found.images.copy()).float().flatten(1) / 255
    labels = torch.from_numpy(found.labels.copy()).long()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(),
                        nn.Linear(400, 10))  # fmt: skip
    model = DistributedDataParallel(net, bucket_cap_mb=0.3)
    hook = None if address is None else attach(model, address, token=token)
    if in_order:
        model.register_comm_hook(None, _mean_in_order)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    generator = _seeded(dist.get_rank())
    losses, times = [], []
    for step in range(steps):
        if kill and step == steps // 2 and dist.get_rank() == 0:
            os.kill(kill, signal.SIGKILL)
        chosen = torch.randint(0, len(pixels), (32,), generator=generator)
        optimizer.zero_grad()
        loss = cross_entropy(model(pixels[chosen]), labels[chosen])
        began = time.perf_counter()
        loss.backward()
        times.append(time.perf_counter() - began)
        optimizer.step()
        losses.append(float(loss.detach()))
    weights = float(sum(p.detach().double().sum() for p in net.parameters()))
    result = {"losses": losses, "slowest_s": max(times), "weights": weights,
              "ring": hook and hook.ring, "buckets": hook and hook.buckets}  # fmt: skip
    if hook is not None:
        hook.close()
    return result
