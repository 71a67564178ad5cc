"""Time on the network of compressed gradients, as predicted from a step, against the workers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from slipstream.cluster import Cluster
from slipstream.graph import Kind
from slipstream.verbs.predicting import predict
from slipstream.verbs.profiling import profile
from slipstream.workload import Workload
from slipstream_bench.rows import Bar, BenchOptions
from slipstream_bench.systems.scale.ranks import model_named

_WORKERS = (6, 12, 24, 48, 96)
# By how many powers of the workers the time on the network grows, and what an all-gather's and an
# all-reduce's (n - 1) of n pieces leave of 1 and 0 over these numbers.
_EXPECTED = {"topk:0.01": 1.0, "sign": 1.0, "powersgd:4": 0.0}
_OFF = 0.2


def bars(options: BenchOptions) -> Iterator[Bar]:
    """A row a method; see `slipstream_bench.systems.scale.bars`."""
    wanted = {
        method: bar
        for method in _EXPECTED
        if options.wants(bar := f"{method}: time on the network against the workers")
    }
    if not wanted:
        return
    options.progress("compressed gradients, 6 to 96 workers")
    graph = profile(Workload.of(*model_named("narrow")), steps=4, threads=1)
    cluster = Cluster.load(f"workers={_WORKERS[-1]},link=1gbit,latency=1us")
    for method, bar in wanted.items():
        found = predict(graph, [f"ddp:{n}+{method}" for n in _WORKERS], cluster=cluster)
        times = []
        for one in found:
            assert one.graph is not None
            tasks = one.graph.tasks
            times.append(float(tasks.duration_ns[tasks.kind == Kind.COMMUNICATION].sum()))
        power = float(np.polyfit(np.log(_WORKERS), np.log(times), 1)[0])
        expected = _EXPECTED[method]
        yield Bar(
            bar, power, "power", f"{expected:g} within {_OFF:g}", abs(power - expected) <= _OFF,
            len(_WORKERS), "on 1 Gbit/s, ms: "
            + ", ".join(f"{n}: {t / 1e6:.2f}" for n, t in zip(_WORKERS, times, strict=True)),
        )  # fmt: skip
