"""Real communications between real processes, timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from slipstream.cluster.samples import Operation, Sample
from slipstream.ranks.launch import Host, ask

_LIMIT_S = 300.0


def run_operations(
    hosts: Sequence[Host],
    operations: Sequence[Operation],
    *,
    rounds: int = 1,
    limit_s: float = _LIMIT_S,
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
    answers = ask(hosts, "slipstream.ranks.operations:time_all", asked, limit_s=limit_s)
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
