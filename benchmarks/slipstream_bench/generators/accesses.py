"""Storage requests of training jobs that share a cache, with the contexts that jobs have.

Each job reads its shards once per epoch in a new order, then its validation shards, and writes a
checkpoint of four shards' size that is never read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.engines.storage import AccessTrace
from slipstream_bench.generators._random import streams


@dataclass(frozen=True)
class TrainingJob:
    """A job: shards, epochs, mean seconds per shard."""

    name: str
    shards: int
    epochs: int
    shard_s: float
    starts_s: float = 0.0


JOBS = (
    TrainingJob("alpha", 400, 30, 1.0), TrainingJob("beta", 80, 100, 1.5),
    TrainingJob("gamma", 1500, 3, 1.2), TrainingJob("delta", 150, 60, 1.3),
)  # fmt: skip
"""37,553 requests to 2,403 objects."""


def training_accesses(
    seed: int,
    jobs: Sequence[TrainingJob] = JOBS,
    *,
    shard_bytes: int = 100,
    validation: int = 20,
) -> AccessTrace:
    """Return the requests of jobs that run together, in order of time."""
    rows: list[tuple[float, str, int, str]] = []
    for job, random in zip(jobs, streams(seed, len(jobs)), strict=True):
        time_s = job.starts_s + float(random.uniform(0, 100))
        for epoch in range(job.epochs):
            order: NDArray[np.int64] = random.permutation(job.shards)
            waits = random.exponential(job.shard_s, job.shards)
            for shard, wait in zip(order.tolist(), waits.tolist(), strict=True):
                rows.append((time_s, f"/{job.name}/train/{shard:05d}.tar", shard_bytes, job.name))
                time_s += wait
            for shard in range(validation):
                rows.append((time_s, f"/{job.name}/val/{shard:05d}.tar", shard_bytes, job.name))
                time_s += job.shard_s
            rows.append(
                (time_s, f"/{job.name}/checkpoint-{epoch:05d}.pt", 4 * shard_bytes, job.name)
            )
    rows.sort()
    return AccessTrace.of(
        [name for _, name, _, _ in rows], [size for _, _, size, _ in rows],
        time_ns=[round(time_s * 1e9) for time_s, *_ in rows],
        contexts=[{"job": job} for *_, job in rows],
    )  # fmt: skip
