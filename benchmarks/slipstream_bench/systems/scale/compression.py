"""Predicted network time of compressed gradients by number of workers."""

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
# Power of the workers with which network time grows; the (n - 1) of n pieces of an all-gather and
# an all-reduce give slightly less than 1 and more than 0 over these numbers.
_EXPECTED = {"topk:0.01": 1.0, "sign": 1.0, "powersgd:4": 0.0}
_OFF = 0.2


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield a row per method; see `slipstream_bench.systems.scale.bars`."""
    selected = {
        method: bar
        for method in _EXPECTED
        if options.wants(bar := f"{method}: time on the network against the workers")
    }
    if not selected:
        return
    options.progress("compressed gradients, 6 to 96 workers")
    graph = profile(Workload.of(*model_named("narrow")), steps=4, threads=1)
    cluster = Cluster.load(f"workers={_WORKERS[-1]},link=1gbit,latency=1us")
    for method, bar in selected.items():
        predictions = predict(graph, [f"ddp:{n}+{method}" for n in _WORKERS], cluster=cluster)
        times = []
        for prediction in predictions:
            assert prediction.graph is not None
            tasks = prediction.graph.tasks
            times.append(float(tasks.duration_ns[tasks.kind == Kind.COMMUNICATION].sum()))
        power = float(np.polyfit(np.log(_WORKERS), np.log(times), 1)[0])
        expected = _EXPECTED[method]
        yield Bar(
            bar, power, "power", f"{expected:g} within {_OFF:g}", abs(power - expected) <= _OFF,
            len(_WORKERS), "on 1 Gbit/s, ms: "
            + ", ".join(f"{n}: {t / 1e6:.2f}" for n, t in zip(_WORKERS, times, strict=True)),
        )  # fmt: skip
