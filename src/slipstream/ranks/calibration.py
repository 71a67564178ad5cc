"""Calibration of a cluster: gloo between processes of this machine or in a network lab."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from slipstream.cluster.cluster import Cluster
from slipstream.cluster.errors import ClusterError
from slipstream.cluster.fitting import Fit, fit
from slipstream.cluster.generators import loopback, star
from slipstream.cluster.quantity import NOT_GIVEN, Calibration, Quantity
from slipstream.cluster.samples import COMPUTING, Operation, Sample
from slipstream.cluster.topology import LinkKind
from slipstream.errors import InvalidArgumentError
from slipstream.measure.environment import capture, machine_id
from slipstream.provenance import Provenance
from slipstream.ranks.launch import LIMIT_S, Host, joined
from slipstream.ranks.netlab import Netlab

# Dense enough to find the sizes at which messages change the protocol.
SIZES = tuple(2**k for k in range(10, 24))
MAX_REGIMES = 3
ROUNDS = 3
# The first measures latency only; a token bucket passes messages of sizes between it and the second
# unshaped.
SHAPED_SIZES = (2**9, 2**17, 2**18, 2**19, 2**20, 2**21)
# Size of messages sent while a rank computes.
_OVERLAPPED_BYTES = 2**17


def cores() -> int:
    """Return the number of logical cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def fitted_operations(
    ranks: int, sizes: Sequence[int], repeats: int, shaped: bool = False
) -> list[Operation]:
    """Return a calibration's operations: point-to-point, all-reduces of two and all, computing.

    On shaped cables addition is timed instead of point-to-point messages. It is too short next to
    the cable's time to follow from the difference of two communications, and one direction at a
    time is faster than both at the same time, as collectives send.
    """
    groups = sorted({2, ranks})
    if shaped:
        fitted = [Operation("add", max(sizes), tuple(range(ranks)), repeats)]
    else:
        fitted = [Operation("p2p", size, (0, 1), repeats) for size in sizes]
    for count in groups:
        fitted += [Operation("all_reduce", size, tuple(range(count)), repeats) for size in sizes]
    return fitted + computing_operations(ranks, repeats)


def computing_operations(ranks: int, repeats: int) -> list[Operation]:
    """Return the operations of all ranks for `overlap_penalty`."""
    return [Operation(kind, _OVERLAPPED_BYTES, tuple(range(ranks)), repeats) for kind in COMPUTING]


def overlap_penalty(samples: Sequence[Sample], source: str) -> Quantity:
    """Return the relative slow-down of computing during communication, `NOT_GIVEN` if unknown."""
    duration_ns = {sample.operation.kind: sample.duration_ns for sample in samples}
    if not duration_ns.keys() >= {*COMPUTING}:
        return NOT_GIVEN
    alone, overlapped = (duration_ns[kind] for kind in COMPUTING)
    return Quantity(max(overlapped / alone - 1.0, 0.0), Provenance.FITTED, source)


def calibrate(
    ranks: int = 2,
    *,
    lab_bytes_per_s: float | None = None,
    sizes: Sequence[int] | None = None,
    repeats: int = 9,
    oversubscribe: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> Cluster:
    """Time communications between processes, and fit latency, bandwidth and cost of additions.

    Args:
        ranks: number of processes.
        lab_bytes_per_s: rate of cables in a network lab with one rank per host (needs root); None
            for communication through this machine's memory.
        oversubscribe: whether to allow more ranks than cores, which also measures the scheduler.

    Returns:
        A cluster of `ranks` devices, with the fit's residuals and intervals.

    Raises:
        ClusterError: there are more ranks than cores, or the fit has no bandwidth.
    """
    if ranks < 2:
        raise InvalidArgumentError(
            "ranks", f"{ranks} is less than 2, the minimum for communication"
        )
    share = ranks / cores()
    if share > 1.0 and lab_bytes_per_s is None and not oversubscribe:
        raise ClusterError(
            f"{ranks} ranks on {cores()} cores would measure the scheduler, not the link",
            remedy=f"use at most {cores()} ranks or a network lab, or pass oversubscribe",
        )
    shaped = lab_bytes_per_s is not None
    message_sizes = sizes or (SHAPED_SIZES if shaped else SIZES)
    operations = fitted_operations(ranks, message_sizes, repeats, shaped)
    progress(f"timing {len(operations)} operations of {ranks} ranks")
    if lab_bytes_per_s is None:
        samples, torch = run_operations([Host()] * ranks, operations, rounds=ROUNDS)
        where = "memory of this machine"
    else:
        with Netlab(ranks, lab_bytes_per_s) as lab:
            samples, torch = run_operations(lab.ranks(), operations)
        where = f"network lab, cables of {lab_bytes_per_s * 8 / 1e6:g} Mbit/s"
    # A lab's cables have one rate.
    fitted = fit(samples, most_regimes=1 if shaped else MAX_REGIMES)
    return fitted_cluster(ranks, where, shaped, fitted, samples, f"torch {torch}, gloo")


def fitted_cluster(
    ranks: int, where: str, shaped: bool, result: Fit, samples: Sequence[Sample], libraries: str
) -> Cluster:
    """Return the cluster described by a fit to samples.

    Raises:
        ClusterError: the fit has no bandwidth.
    """
    share = ranks / cores()
    date = time.strftime("%Y-%m-%d", time.gmtime())
    source = f"{libraries}, {ranks} ranks, {where}, {date}"
    if result.ns_per_byte <= 0.0:
        raise ClusterError(
            "the measurements show no bandwidth: larger messages do not take longer",
            remedy="use larger sizes",
        )
    link = LinkKind.of("measured", 1e9 / result.ns_per_byte, provenance=Provenance.FITTED,
                       source=source)  # fmt: skip
    detail = {
        "ranks": ranks,
        "where": where,
        "samples": [
            [s.operation.kind, len(s.operation.ranks), s.operation.nbytes, s.duration_ns]
            for s in samples
        ],
        **{f"{name}_interval": list(ends) for name, ends in result.intervals.items()},
    }
    calibration = Calibration(
        date, machine_id(capture(torch=False)), libraries, result.residual, result.residual_p90,
        share, detail,
    )  # fmt: skip
    make = star if shaped else loopback
    return Cluster(
        f"measured {date}",
        make(ranks, link),
        alpha_ns=Quantity(result.alpha_ns, Provenance.FITTED, source),
        reduce_ns_per_byte=Quantity(result.reduce_ns_per_byte, Provenance.FITTED, source),
        overlap_penalty=overlap_penalty(samples, source),
        calibration=calibration,
        about=f"Fitted to gloo between {ranks} ranks: {where}",
        regimes=result.regimes,
    )


def run_operations(
    hosts: Sequence[Host],
    operations: Sequence[Operation],
    *,
    rounds: int = 1,
    limit_s: float = LIMIT_S,
) -> tuple[list[Sample], str]:
    """Return the times of all operations, and the version of torch.

    Args:
        hosts: of the ranks.
        rounds: number of passes over all operations, so that a temporary slow-down affects all of
            them. Repeats of all rounds form one sample.

    Raises:
        ClusterError: a rank failed or took too long; all are ended.
    """
    every_round = [*operations] * rounds
    arguments = {"operations": [asdict(operation) for operation in every_round]}
    with joined(hosts, limit_s=limit_s) as call:
        answers = call("slipstream.ranks.operations:time_all", arguments)
    samples = samples_of(every_round, [answer["times_s"] for answer in answers])
    count = len(operations)
    return [_pooled(samples[n::count]) for n in range(count)], str(answers[0]["torch"])


def samples_of(operations: Sequence[Operation], times_s: Sequence[Sequence[Any]]) -> list[Sample]:
    """Return a sample per operation, from each rank's (start, duration) of every repeat."""
    return [
        _sample(operation, [of_rank[n] for of_rank in times_s])
        for n, operation in enumerate(operations)
    ]


def _sample(operation: Operation, of_ranks: Sequence[Any]) -> Sample:
    # [ranks that took part, repeats, (start, duration)]
    table = np.array([times for times in of_ranks if times]) * 1e9
    slowest, began = table[:, :, 1].max(axis=0), table[:, :, 0].min(axis=0)
    if operation.kind == "p2p":
        slowest = slowest / 2
    return Sample(
        operation, float(np.median(slowest)), tuple(slowest.tolist()), tuple(began.tolist())
    )


def _pooled(rounds: Sequence[Sample]) -> Sample:
    repeats = tuple(time_ns for sample in rounds for time_ns in sample.repeats_ns)
    began = tuple(when for sample in rounds for when in sample.began_ns)
    return Sample(rounds[0].operation, float(np.median(repeats)), repeats, began)


def calibrated_here(cluster: Cluster) -> bool | None:
    """Whether the cluster was calibrated on this machine; None without a calibration."""
    if cluster.calibration is None:
        return None
    return cluster.calibration.fingerprint == machine_id(capture(torch=False))
