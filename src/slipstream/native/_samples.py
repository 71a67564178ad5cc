"""Programs made by seed, for tests and benchmarks of the engine."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from slipstream.native._program import Edges, Float64s, Policy, Program, Resources, Tensors
from slipstream.native.engine import quantize_ns


def seeded(holds: Callable[[np.random.Generator], bool]) -> Callable[[int], bool]:
    """A property of what a generator makes, as one of its seed."""
    return lambda seed: holds(np.random.default_rng(seed))


def large_program(
    tasks: int,
    *,
    lanes: int = 32,
    policy: Policy = Policy.FIXED,
    locality: int | None = 256,
    seed: int = 0,
) -> Program:
    """One edge into each task but the first, from one of the `locality` tasks before it.

    Traces look like this: a task waits for something that happened shortly before. Without
    `locality` the source is any earlier task, which is the worst case for caches. With the order
    within lanes that makes about 2 * `tasks` dependencies.
    """
    rng = np.random.default_rng(seed)
    dst = np.arange(1, tasks)
    if locality is None:
        src = (dst * rng.random(tasks - 1)).astype(np.int64)
    else:
        src = np.maximum(dst - 1 - rng.integers(0, locality, tasks - 1), 0)
    return Program(
        lane=rng.integers(0, lanes, tasks),
        duration_ns=quantize_ns(rng.random(tasks) * 1000.0),
        priority=rng.integers(0, 1000, tasks),
        policies=np.full(lanes, policy),
        edges=Edges(src, dst),
    )


def random_program(
    rng: np.random.Generator,
    *,
    fixed: bool = False,
    acyclic: bool = True,
    on_grid: bool = True,
) -> Program:
    """A small program with a bit of everything.

    Args:
        rng: decides all.
        fixed: only FIXED lanes and no resources.
        acyclic: edges within a step follow one hidden order, which FIXED lanes share. Without,
            they go anywhere.
        on_grid: times are multiples of 2^-10 ns, so that sums are exact; without, any float.
    """
    tasks = int(rng.integers(1, 40))
    lanes = int(rng.integers(1, 6))
    policies = np.zeros(lanes) if fixed else rng.integers(0, 4, lanes)
    # Few distinct values make ties, many make none; both are worth testing.
    if rng.random() < 0.5:
        duration = rng.integers(0, 4, tasks).astype(np.float64)
    else:
        duration = rng.random(tasks) * 10.0
    return Program(
        lane=rng.integers(0, lanes, tasks),
        duration_ns=quantize_ns(duration) if on_grid else duration,
        gap_ns=_sparse_times(rng, tasks),
        priority=rng.integers(-2, 3, tasks),
        policies=policies.astype(np.uint8),
        quantum_ns=rng.choice([0.0, 0.0, 0.75, 1.0, 2.0], lanes),
        edges=_random_edges(rng, tasks, acyclic),
        steps=int(rng.integers(1, 4)),
        resources=None if fixed or rng.random() < 0.4 else _random_resources(rng, tasks),
        tensors=_random_tensors(rng, tasks),
    )


def _sparse_times(rng: np.random.Generator, count: int) -> Float64s:
    return (rng.integers(1, 4, count) * (rng.random(count) < 0.2)).astype(np.float64)


def _random_edges(rng: np.random.Generator, tasks: int, acyclic: bool) -> Edges:
    count = int(rng.integers(0, 2 * tasks + 1))
    src, dst = rng.integers(0, tasks, count), rng.integers(0, tasks, count)
    lag = (rng.random(count) < 0.2).astype(np.uint8)
    if acyclic:
        forward = (lag == 1) | (src < dst)
        src, dst, lag = src[forward], dst[forward], lag[forward]
    return Edges(src, dst, _sparse_times(rng, src.size), lag)


def _random_resources(rng: np.random.Generator, tasks: int) -> Resources:
    count = int(rng.integers(1, 4))
    capacity = rng.integers(1, 5, count)
    needs = rng.random((tasks, count)) < 0.4
    task, resource = np.nonzero(needs)
    return Resources(capacity, task, resource, rng.integers(0, capacity[resource] + 1))


def _random_tensors(rng: np.random.Generator, tasks: int) -> Tensors:
    count = int(rng.integers(0, 2 * tasks))
    uses = rng.integers(0, 4, count)
    offset = np.concatenate([[0], np.cumsum(uses)])
    return Tensors(
        nbytes=rng.integers(0, 100, count),
        producer=rng.integers(-1, tasks, count),
        consumer_offset=offset,
        consumer_task=rng.integers(0, tasks, int(offset[-1])),
        persistent=rng.random(count) < 0.1,
        pool=rng.integers(0, 3, count),
    )
