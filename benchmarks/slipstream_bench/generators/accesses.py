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


def tier_accesses(seed: int, files: int = 6000, days: float = 30.0) -> AccessTrace:
    """Return files of several kinds in the same folders, created at random times of `days`.

    Shards are read for five days, then no more; results are read a few times in an hour, and
    deleted; checkpoints and logs are hardly ever read. Kinds appear in names and contexts.
    """
    (random,) = streams(seed, 1)
    day_ns = 86_400 * 10**9
    # Mean reads, days of reading, days until the deletion, median bytes.
    kinds = {
        "shard": (400.0, 5.0, 60.0, 2e8), "result": (60.0, 0.05, 1.0, 5e8),
        "checkpoint": (0.1, 1.0, 3.0, 4e9), "log": (0.5, 10.0, 60.0, 1e8),
    }  # fmt: skip
    rows: list[tuple[float, str, int, int, dict[str, str]]] = []
    for number in range(files):
        kind = str(random.choice(list(kinds)))
        reads, active, life, middle = kinds[kind]
        name = f"/job{random.integers(4)}/{kind}-{number:06d}"
        size = int(random.lognormal(np.log(middle), 0.5))
        born = float(random.uniform(0, days))
        gone = born + float(random.exponential(life))
        context = {"task": f"write {kind}", "user": f"user{random.integers(20)}"}
        rows.append((born, name, size, 3, context))
        times = born + random.exponential(active / 2, random.poisson(reads))
        rows += [(float(at), name, size, 1, context) for at in times if at < min(gone, days)]
        if gone < days:
            rows.append((gone, name, size, 4, context))
    rows.sort(key=lambda row: row[0])
    return AccessTrace.of(
        [row[1] for row in rows], [row[2] for row in rows],
        time_ns=[round(row[0] * day_ns) for row in rows], ops=[row[3] for row in rows],
        contexts=[row[4] for row in rows],
    )  # fmt: skip
