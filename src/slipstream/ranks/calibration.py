"""A cluster from measurements: gloo between processes of this machine, or in a network lab."""

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

# Close enough to each other to tell where messages begin to take another way.
SIZES = tuple(2**k for k in range(10, 24))
MOST_REGIMES = 3
ROUNDS = 3
# The first shows latency alone; between it and the others a token bucket lets a message pass that
# it has saved up for.
SHAPED_SIZES = (2**9, 2**17, 2**18, 2**19, 2**20, 2**21)
# Of what is sent while a rank computes.
_TALKED = 2**17


def cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def fitted_operations(
    ranks: int, sizes: Sequence[int], repeats: int, shaped: bool = False
) -> list[Operation]:
    """What a calibration times: one to another, all-reduces of two and of all, and computing.

    On shaped cables adding up by itself in place of the former: beside the time on such a cable it
    is too little to be told from the difference of two communications. And one way after the other
    is faster than both ways at once, as collectives send, which keep this machine's cores busy.
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
    """Of all ranks, for `overlap_penalty`."""
    return [Operation(kind, _TALKED, tuple(range(ranks)), repeats) for kind in COMPUTING]


def overlap_penalty(samples: Sequence[Sample], source: str) -> Quantity:
    """By how much computing takes longer while its rank communicates; not given where unknown."""
    took = {one.operation.kind: one.duration_ns for one in samples}
    if not took.keys() >= {*COMPUTING}:
        return NOT_GIVEN
    alone, beside = (took[kind] for kind in COMPUTING)
    return Quantity(max(beside / alone - 1.0, 0.0), Provenance.FITTED, source)


def calibrate(
    ranks: int = 2,
    *,
    lab_bytes_per_s: float | None = None,
    sizes: Sequence[int] | None = None,
    repeats: int = 9,
    oversubscribe: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> Cluster:
    """Time communications between processes and fit latency, bandwidth and the cost of adding up.

    Args:
        ranks: processes.
        lab_bytes_per_s: put each on a host of a network lab with cables of that rate (needs
            root); else all communicate through this machine's memory.
        oversubscribe: allow more ranks than cores; what is measured then is the scheduler too.

    Returns:
        A cluster of that many devices, with the fit's residuals and intervals.

    Raises:
        ClusterError: more ranks than cores, or measurements that no latency and bandwidth explain.
    """
    if ranks < 2:
        raise InvalidArgumentError("ranks", f"{ranks} is less than 2; nobody to talk to")
    share = ranks / cores()
    if share > 1.0 and lab_bytes_per_s is None and not oversubscribe:
        raise ClusterError(
            f"{ranks} ranks on {cores()} cores would measure the scheduler, not the link",
            remedy=f"at most {cores()} ranks, a network lab, or oversubscribe if that is meant",
        )
    shaped = lab_bytes_per_s is not None
    chosen = sizes or (SHAPED_SIZES if shaped else SIZES)
    operations = fitted_operations(ranks, chosen, repeats, shaped)
    progress(f"timing {len(operations)} operations of {ranks} ranks")
    if lab_bytes_per_s is None:
        samples, torch = run_operations([Host()] * ranks, operations, rounds=ROUNDS)
        where = "memory of this machine"
    else:
        with Netlab(ranks, lab_bytes_per_s) as lab:
            samples, torch = run_operations(lab.ranks(), operations)
        where = f"network lab, cables of {lab_bytes_per_s * 8 / 1e6:g} Mbit/s"
    # A lab's cables have one rate.
    fitted = fit(samples, most_regimes=1 if shaped else MOST_REGIMES)
    return fitted_cluster(ranks, where, shaped, fitted, samples, f"torch {torch}, gloo")


def fitted_cluster(
    ranks: int, where: str, shaped: bool, found: Fit, samples: Sequence[Sample], libraries: str
) -> Cluster:
    """The cluster that a fit to samples describes.

    Raises:
        ClusterError: the fit has no bandwidth.
    """
    share = ranks / cores()
    date = time.strftime("%Y-%m-%d", time.gmtime())
    source = f"{libraries}, {ranks} ranks, {where}, {date}"
    if found.ns_per_byte <= 0.0:
        raise ClusterError(
            "the measurements show no bandwidth: larger messages do not take longer",
            remedy="larger sizes",
        )
    link = LinkKind.of("measured", 1e9 / found.ns_per_byte, provenance=Provenance.FITTED,
                       source=source)  # fmt: skip
    detail = {
        "ranks": ranks,
        "where": where,
        "samples": [
            [s.operation.kind, len(s.operation.ranks), s.operation.nbytes, s.duration_ns]
            for s in samples
        ],
        **{f"{name}_interval": list(ends) for name, ends in found.intervals.items()},
    }
    calibration = Calibration(
        date, machine_id(capture(torch=False)), libraries, found.residual, found.residual_p90,
        share, detail,
    )  # fmt: skip
    make = star if shaped else loopback
    return Cluster(
        f"measured {date}",
        make(ranks, link),
        alpha_ns=Quantity(found.alpha_ns, Provenance.FITTED, source),
        reduce_ns_per_byte=Quantity(found.reduce_ns_per_byte, Provenance.FITTED, source),
        overlap_penalty=overlap_penalty(samples, source),
        calibration=calibration,
        about=f"Fitted to gloo between {ranks} ranks: {where}",
        regimes=found.regimes,
    )


def run_operations(
    hosts: Sequence[Host],
    operations: Sequence[Operation],
    *,
    rounds: int = 1,
    limit_s: float = LIMIT_S,
) -> tuple[list[Sample], str]:
    """Times of all operations, and the version of torch.

    Args:
        hosts: of the ranks.
        rounds: how often all are timed, one after the other; a machine that is slow for a while is
            then slow for all of them. Repeats of all rounds are one sample.

    Raises:
        ClusterError: a rank failed or took too long; none is left behind.
    """
    every_round = [*operations] * rounds
    asked = {"operations": [asdict(one) for one in every_round]}
    with joined(hosts, limit_s=limit_s) as call:
        answers = call("slipstream.ranks.operations:time_all", asked)
    samples = samples_of(every_round, [answer["times_s"] for answer in answers])
    count = len(operations)
    return [_pooled(samples[n::count]) for n in range(count)], str(answers[0]["torch"])


def samples_of(operations: Sequence[Operation], times_s: Sequence[Sequence[Any]]) -> list[Sample]:
    """Of each operation, from every rank's list of (began, took) of each repeat."""
    return [_sample(one, [of[n] for of in times_s]) for n, one in enumerate(operations)]


def _sample(operation: Operation, of_ranks: Sequence[Any]) -> Sample:
    # Per rank and repeat: when it began, and how long it took; nothing of who took no part.
    table = np.array([times for times in of_ranks if times]) * 1e9
    slowest, began = table[:, :, 1].max(axis=0), table[:, :, 0].min(axis=0)
    if operation.kind == "p2p":
        slowest = slowest / 2
    return Sample(
        operation, float(np.median(slowest)), tuple(slowest.tolist()), tuple(began.tolist())
    )


def _pooled(rounds: Sequence[Sample]) -> Sample:
    repeats = tuple(took for sample in rounds for took in sample.repeats_ns)
    began = tuple(when for sample in rounds for when in sample.began_ns)
    return Sample(rounds[0].operation, float(np.median(repeats)), repeats, began)


def measured_here(cluster: Cluster) -> bool | None:
    """Whether its calibration is of this machine; None where it has none."""
    if cluster.calibration is None:
        return None
    return cluster.calibration.fingerprint == machine_id(capture(torch=False))
