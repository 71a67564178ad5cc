"""``slipstream bench collectives``: bytes and speed, sharded updates, predicted steps."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import numpy as np
import torch

from slipstream.cluster import Cluster, ClusterError
from slipstream.graph import Graph
from slipstream.ranks import Netlab, calibrate, why_no_netlab
from slipstream.verbs.predicting import predict
from slipstream.verbs.profiling import profile
from slipstream.workload import Workload
from slipstream_bench.lab import MBIT, on_ranks
from slipstream_bench.rank_models import batch_of, model_of
from slipstream_bench.rows import Bar, BenchOptions, at_most, not_judged
from slipstream_bench.systems.collectives import exchange, rank
from slipstream_bench.systems.collectives.exchange import racks_cluster, racks_lab
from slipstream_bench.systems.compression.bars import Model, asleep

_BAR = "predicted step, 4 ranks, median error"
# 2.1 MB. It sleeps, because four ranks that compute on fewer cores would measure the scheduler.
_MODEL = Model(8, 256, forward_s=0.003, backward_s=0.006, rows=8, bucket_mb=0.5)
_STAR = 60
_SIZES = (1 << 15, 1 << 17, 1 << 19, 1 << 21)
_TECHNIQUES = {"plain": "", "sharded": "+sharded_update", "two_d": "+two_d_allreduce:2"}


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows. Quick: fewer turns."""
    yield from exchange.bars(options)
    if not options.wants(_BAR):
        return
    if (reason := why_no_netlab()) is not None:
        yield not_judged(_BAR, "%", "<= 10", reason)
        return
    options.progress(_BAR)
    try:
        yield _steps(7 if options.full else 3)
    except ClusterError as error:
        yield not_judged(_BAR, "%", "<= 10", error.what)


def _steps(turns: int) -> Bar:
    graph = _graph()
    errors, notes = [], []
    for where, racks in (("one switch", False), ("two racks", True)):
        with racks_lab() if racks else Netlab(4, _STAR * MBIT) as lab:
            cluster = racks_cluster(lab) if racks else _switch()
            results = on_ranks(
                lab, rank.steps, model_spec=_MODEL.spec(), bucket_mb=_MODEL.bucket_mb,
                repeats=turns, arms=list(_TECHNIQUES),
            )  # fmt: skip
        for arm, predicted_s in _predicted_s(graph, cluster).items():
            measured_s = float(np.median(np.max([result[arm] for result in results], axis=0)))
            errors.append(100 * abs(predicted_s / measured_s - 1.0))
            notes.append(
                f"{where}: {arm} {1e3 * measured_s:.0f} ms, predicted {1e3 * predicted_s:.0f}"
            )
    return at_most(
        _BAR, statistics.median(errors), 10.0, "%", n=len(errors),
        detail=f"largest {max(errors):.0f} %; one switch: {_STAR} Mbit/s; {'; '.join(notes)}",
    )  # fmt: skip


def _switch() -> Cluster:
    return calibrate(4, lab_bytes_per_s=_STAR * MBIT, sizes=_SIZES, repeats=5)


def _graph() -> Graph:
    """Return the recorded step of one process, including its sleep."""
    torch.set_num_threads(1)
    net = model_of(_MODEL.spec())
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    workload = Workload.of(net, batch_of(_MODEL.spec(), 0), lambda out: out.sum(), optimizer)
    return asleep(profile(workload, steps=8, threads=1), _MODEL)


def _predicted_s(graph: Graph, cluster: Cluster) -> dict[str, float]:
    # gloo's flat all-reduce is a ring.
    ddp = f"ddp:4,bucket_mb={_MODEL.bucket_mb:g},algo=ring"
    predictions = predict(graph, [ddp + more for more in _TECHNIQUES.values()], cluster=cluster)
    return {
        arm: prediction.step_ns / 1e9
        for arm, prediction in zip(_TECHNIQUES, predictions, strict=True)
    }
