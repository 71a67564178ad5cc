"""Predicted steps of replicas against real ones: two ranks on hosts with shaped links."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from slipstream.cluster.errors import ClusterError
from slipstream.ranks import Netlab, calibrate, why_no_netlab
from slipstream.ranks.calibration import SHAPED_SIZES
from slipstream.techniques.distributed.ddp import DDP
from slipstream.verbs.predicting import predict
from slipstream.verbs.profiling import profile
from slipstream.workload import Workload, build_from
from slipstream_bench.lab import MBIT, on_ranks
from slipstream_bench.rows import Bar, BenchOptions, at_most, not_judged

_BAR = "ddp, two real ranks on shaped links: step time, median error"
_TARGET = 10.0
_WIDTHS = {"narrow": 256, "wide": 640}
_LAYERS = 8
_RATES = (100, 200)
_STEPS = 7


def model_named(name: str) -> tuple[Any, ...]:
    """Return a stack of linear layers with SGD: 2 or 13 MB of gradients."""
    import torch
    from torch import nn

    width = _WIDTHS[name]
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(_LAYERS)]
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    batch = torch.randn(32, width), torch.randint(0, 10, (32,))
    return model, batch, nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), 1e-2)


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield one row over models and rates."""
    if not options.wants(_BAR):
        return
    options.progress(_BAR)
    if (reason := why_no_netlab()) is not None:
        yield not_judged(_BAR, "%", f"<= {_TARGET:g}", reason)
        return
    errors, said = [], []
    try:
        for megabits in _RATES:
            rate = megabits * MBIT
            options.progress(f"{_BAR}: {megabits} Mbit/s")
            sizes = (*SHAPED_SIZES, 2**22)
            cluster = calibrate(2, lab_bytes_per_s=rate, sizes=sizes, repeats=5)
            for name in _WIDTHS:
                graph = profile(Workload.of(*model_named(name)), steps=8, threads=1)
                (found,) = predict(graph, ["ddp:2"], cluster=cluster)
                measured = _measured_ns(name, rate)
                errors.append(100 * (found.step_ns / measured - 1))
                said.append(
                    f"{name}, {megabits} Mbit/s: predicted {found.step_ns / 1e6:.0f}, "
                    f"measured {measured / 1e6:.0f} ms"
                )
    except ClusterError as error:
        yield not_judged(_BAR, "%", f"<= {_TARGET:g}", error.what)
        return
    middle = statistics.median(abs(error) for error in errors)
    yield at_most(_BAR, middle, _TARGET, "%", n=len(errors), detail="; ".join(said))


def _measured_ns(name: str, bytes_per_s: float) -> float:
    """Return the median step time of the slower of two ranks, in ns."""
    with Netlab(2, bytes_per_s) as cables:
        times_s = on_ranks(cables, timed_steps, name=name, warmup=3, steps=_STEPS)
    return float(np.median(np.max(times_s, axis=0))) * 1e9


def timed_steps(name: str, warmup: int, steps: int) -> list[float]:
    """Return seconds of each step of a rank's model under DistributedDataParallel."""
    import torch.distributed as dist

    built = build_from(model_named(name), (DDP(dist.get_world_size()),), 0, name)
    times = []
    for number in range(warmup + steps):
        dist.barrier()
        began = time.perf_counter()
        built.step()
        if number >= warmup:
            times.append(time.perf_counter() - began)
    return times
