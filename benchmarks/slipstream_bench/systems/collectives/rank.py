"""A rank of ``slipstream bench collectives``: makes exchanges and times them."""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from slipstream import data
from slipstream.cluster import Cluster
from slipstream.techniques.distributed.collectives.scatter import reduce_scatter
from slipstream.techniques.distributed.collectives.two_d import (
    TwoDState,
    two_d_allreduce,
    two_d_hook,
)
from slipstream.techniques.distributed.sharded.layerwise import Lamb, Lars
from slipstream.techniques.distributed.sharded.optimizer import ShardedUpdate
from slipstream_bench.lab import Turn
from slipstream_bench.rank_models import batch_of, model_of

_ROWS = 2
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-3),
    "LAMB": lambda p: Lamb(p, 5e-3, weight_decay=1e-2),
    "LARS": lambda p: Lars(p, 0.3, trust=0.01, weight_decay=1e-4),
}


def exchanges(nbytes: int, arms: Sequence[str], cluster: str | None = None) -> dict[str, Turn]:
    """Return turns of ways to exchange a tensor.

    Args:
        cluster: the file of the cluster by which ``auto`` chooses.
    """
    # gloo's reduce_scatter_tensor warns that it has been renamed.
    warnings.simplefilter("ignore")
    numbers = nbytes // 4
    tensor, part = torch.randn(numbers), torch.empty(numbers // dist.get_world_size())
    chosen_by = None if cluster is None else Cluster.load(cluster)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(tensor),
        "two_d": lambda: two_d_allreduce(tensor, _ROWS),
        "auto": lambda: two_d_allreduce(tensor, _ROWS, algorithm="auto", cluster=chosen_by),
        "gloo reduce_scatter": lambda: dist.reduce_scatter_tensor(part, tensor),
        "reduce_scatter": lambda: reduce_scatter(tensor),
    }
    return {name: Turn(calls[name], before=tensor.normal_) for name in arms}


def equal(numbers: int) -> tuple[float, str]:
    """Return 2-D's difference from flat all-reduce, relative to the maximum, and a digest."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    flat = torch.randn(numbers, generator=generator)
    grid = flat.clone()
    dist.all_reduce(flat)
    two_d_allreduce(grid, _ROWS)
    off = float((flat - grid).abs().max() / flat.abs().max())
    return off, hashlib.sha256(grid.numpy().tobytes()).hexdigest()


def _images() -> tuple[torch.Tensor, torch.Tensor]:
    found = data.get("digits")
    pixels = torch.from_numpy(found.images.copy()).float().flatten(1) / 255
    return pixels, torch.from_numpy(found.labels.copy()).long()


def training(steps: int, repeats: int) -> dict[str, Any]:
    """Train with each optimizer, unsharded in DDP and sharded: return losses, and of the latter
    the memory and the CPU time of a larger model's update."""
    pixels, labels = _images()
    by_optimizer = {}
    for name, make in OPTIMIZERS.items():
        losses: dict[bool, list[float]] = {}
        for sharded in (False, True):
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 50), nn.ReLU(),
                                nn.Linear(50, 10))  # fmt: skip
            model = DistributedDataParallel(net)
            plain = make(net.parameters())
            optimizer: Any = ShardedUpdate(plain, model) if sharded else plain
            losses[sharded] = []
            generator = torch.Generator().manual_seed(dist.get_rank())
            for _ in range(steps):
                chosen = torch.randint(0, len(pixels), (32,), generator=generator)
                optimizer.zero_grad()
                loss = cross_entropy(model(pixels[chosen]), labels[chosen])
                torch.autograd.backward(loss)
                optimizer.step()
                losses[sharded].append(float(loss.detach()))
            if sharded:
                memory = optimizer.memory()
        by_optimizer[name] = {
            "unsharded": losses[False], "sharded": losses[True], "memory": memory.share,
            "update": _update_ratio(make, repeats),
        }  # fmt: skip
    return by_optimizer


def _update_ratio(make: Callable[[Any], torch.optim.Optimizer], repeats: int) -> list[float]:
    """Return CPU time of the sharded update over that of the whole, measured alternately."""
    nets = [nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(12))) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    dist.barrier()
    for p in (*nets[0].parameters(), *nets[1].parameters()):
        dist.broadcast(p.data, 0)
    whole, sharded = make(nets[0].parameters()), ShardedUpdate(make(nets[1].parameters()))
    ratios = []
    for repeat in range(repeats + 2):
        for p in (*nets[0].parameters(), *nets[1].parameters()):
            p.grad = torch.randn_like(p)
        times_s = []
        for update in (whole.step, sharded._update):
            began = time.thread_time()
            with torch.no_grad():
                update()
            times_s.append(time.thread_time() - began)
        if repeat >= 2:
            ratios.append(times_s[1] / times_s[0])
    return ratios


def steps(
    model_spec: list[Any], bucket_mb: float, repeats: int, arms: Sequence[str]
) -> dict[str, list[float]]:
    """Return seconds of each arm's steps, measured alternately."""
    trained: dict[str, tuple[Any, Any]] = {}
    for name in arms:
        net = model_of(model_spec)
        model = DistributedDataParallel(net, bucket_cap_mb=bucket_mb)
        optimizer: Any = torch.optim.AdamW(net.parameters(), 1e-3)
        if name == "two_d":
            model.register_comm_hook(TwoDState(_ROWS), two_d_hook)
        elif name == "sharded":
            optimizer = ShardedUpdate(optimizer, model)
        trained[name] = model, optimizer
    batch = batch_of(model_spec, dist.get_rank())
    times_s: dict[str, list[float]] = {name: [] for name in trained}
    for turn in range(repeats):
        for name, (model, optimizer) in trained.items():
            # Buckets are rebuilt after the first step; the first step of a turn is not counted.
            for counted in ([False] * 4 if not turn else [False]) + [True, True]:
                began = time.perf_counter()
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()
                if counted:
                    times_s[name].append(time.perf_counter() - began)
    return times_s
