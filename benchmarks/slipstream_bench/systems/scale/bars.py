"""``slipstream bench scale``: predictions for many workers, against logs, formulas and ranks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from slipstream.cluster import Cluster, Collective, Job, Tasks, simulate
from slipstream_bench.harness import times_s
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most
from slipstream_bench.systems.scale import compression, mlperf, spatial
from slipstream_bench.systems.scale import ranks as bench_scale_ranks
from slipstream_bench.systems.scale.training_run import Pace

# Gradients of ResNet-50, in float32.
_GRADIENT_BYTES = 25.6e6 * 4


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows."""
    yield from mlperf.bars(options)
    yield from _law_rows(options)
    yield from _cost_rows(options)
    yield from compression.bars(options)
    yield from spatial.bars(options)
    yield from bench_scale_ranks.bars(options)


def _law_rows(options: BenchOptions) -> Iterator[Bar]:
    bar = "2-D all-reduce: latency grows with x + y"
    if not options.wants(bar):
        return
    options.progress(bar)
    grids = [(4, 4), (8, 8), (16, 8), (16, 16), (32, 16), (32, 32), (64, 32), (128, 32)]
    found = []
    for x, y in grids:
        cluster = Cluster.load("tpu-v3-multipod", dims=[x, y])
        found.append(cluster.cost(Collective("all_reduce", 1e8, algo="line*ring2")).latency_ns)
    latency = np.array(found, np.float64)
    sides = np.array([x + y / 2 for x, y in grids], np.float64)
    fit = np.polyfit(sides, latency, 1)
    left = latency - np.polyval(fit, sides)
    r2 = 1 - float((left**2).sum() / ((latency - latency.mean()) ** 2).sum())
    note = "against x + y/2: a line of x, a ring of y in both directions; 16 to 4096 chips"
    yield at_least(bar, r2, 0.99, "R2", n=len(grids), detail=note)


def _cost_rows(options: BenchOptions) -> Iterator[Bar]:
    closed, fluid = "4096 chips, a step, closed form", "4096 chips, a step, simulated"
    if options.wants(closed):
        cluster = Cluster.load("tpu-v3-multipod")
        pace = Pace(6e5, _GRADIENT_BYTES)
        pace.step(cluster, 65536)
        spent_s = float(times_s(lambda: pace.step(cluster, 65536), settle=0)[0])
        yield at_most(closed, 1e3 * spent_s, 20.0, "ms")
    if options.wants(fluid):
        cluster = Cluster.load("tpu-v3-multipod")
        step = Tasks()
        done = [step.compute(rank, 9.6e6) for rank in range(cluster.devices)]
        step.communicate(Collective("all_reduce", _GRADIENT_BYTES, algo="2d"), done)
        spent_s = float(times_s(lambda: simulate(cluster, Job(step)), settle=0)[0])
        yield at_most(fluid, spent_s, 2.0, "s")
