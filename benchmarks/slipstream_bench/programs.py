"""Seeded random programs for tests and benchmarks of the engine."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from slipstream.native import (
    Edges,
    Flows,
    Packets,
    Policy,
    Program,
    Resources,
    Tensors,
    quantize_ns,
)
from slipstream.native.inputs import Float64s


def seeded(holds: Callable[[np.random.Generator], bool]) -> Callable[[int], bool]:
    """Turn a property of a generator into a property of its seed."""
    return lambda seed: holds(np.random.default_rng(seed))


def large_program(
    tasks: int,
    *,
    lanes: int = 32,
    policy: Policy = Policy.FIXED,
    locality: int | None = 256,
    seed: int = 0,
) -> Program:
    """Generate a program with one edge into each task but the first, from a recent one.

    This resembles traces, where a task waits for something that happened among the last `locality`
    tasks. Without `locality` the source is any earlier task, the worst case for caches. Together
    with the order within lanes there are about 2 * `tasks` dependencies.
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
    """Generate a small program that uses most features.

    Args:
        rng: determines the program.
        fixed: only FIXED lanes and no resources.
        acyclic: edges within a step follow a hidden order, which FIXED lanes share; otherwise
            they are arbitrary.
        on_grid: times are multiples of 2^-10 ns, so that sums are exact; otherwise any float.
    """
    tasks = int(rng.integers(1, 40))
    lanes = int(rng.integers(1, 6))
    policies = np.zeros(lanes) if fixed else rng.integers(0, 4, lanes)
    # Few distinct values cause ties, many cause none; test both.
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


def random_transfers(
    rng: np.random.Generator,
    *,
    flows: int = 40,
    links: int = 12,
    weighted: bool = True,
    classes: int = 3,
    chained: bool = True,
) -> Program:
    """Generate transfers over random paths, with ties, latencies, weights and priorities.

    Args:
        rng: determines the program.
        weighted: half of the programs have weights, from 10^-3 to 10^3.
        classes: maximum number of priorities.
        chained: some begin when others end, or run sequentially; otherwise they arrive randomly.
    """
    hops = rng.integers(1, min(5, links) + 1, flows)
    path = [rng.choice(links, count, replace=False) for count in hops]
    even = rng.random() < 0.5
    weight = np.ones(flows)
    if weighted and rng.random() < 0.5:
        weight = 10.0 ** rng.uniform(-3, 3, flows) if rng.random() < 0.5 else hops.astype(float)
    nbytes = rng.integers(1, 4, flows) * 8.0 if even else rng.lognormal(2.0, 1.5, flows)
    capacity = rng.integers(1, 4, links) if even else rng.lognormal(0.0, 1.0, links)
    lanes = np.zeros(flows, np.int32)
    edges = Edges(np.empty(0, np.int32), np.empty(0, np.int32))
    policies = [Policy.CONCURRENT]
    if chained:
        # A lane outside the network runs one of its transfers at a time.
        policies += [Policy(int(rng.integers(0, 3)))]
        lanes = (rng.random(flows) < 0.2).astype(np.int32)
        edges = _random_edges(rng, flows, acyclic=True)
        nbytes = nbytes * (rng.random(flows) < 0.9)
    arrival = np.cumsum(rng.exponential(np.mean(nbytes) / 4.0, flows))
    return Program(
        lane=lanes,
        duration_ns=_sparse_times(rng, flows) if chained else arrival,
        priority=rng.integers(0, classes, flows),
        policies=np.array(policies, np.uint8),
        edges=edges,
        steps=int(rng.integers(1, 4)) if chained else 1,
        flows=Flows(
            capacity=capacity.astype(np.float64),
            path_offset=np.concatenate([[0], np.cumsum(hops)]),
            path_link=np.concatenate(path),
            nbytes=np.asarray(nbytes, np.float64),
            weight=np.asarray(weight, np.float64),
        ),
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


def random_packets(rng: np.random.Generator) -> Program:
    """Generate transfers as packets that wait for each other, on links with short queues."""
    links, transfers = int(rng.integers(2, 10)), int(rng.integers(2, 30))
    paths = [
        rng.permutation(links)[: int(rng.integers(1, min(links, 4) + 1))] for _ in range(transfers)
    ]
    first = np.arange(1, transfers)
    waits = first[rng.random(transfers - 1) < 0.3]
    return Program(
        lane=np.zeros(transfers, np.int32),
        duration_ns=rng.random(transfers) * 1e4,
        priority=rng.integers(0, int(rng.integers(1, 4)), transfers),
        policies=np.array([Policy.CONCURRENT], np.uint8),
        edges=Edges((waits * rng.random(waits.size)).astype(np.int64), waits),
        steps=int(rng.integers(1, 3)),
        flows=Flows(
            capacity=rng.uniform(0.5, 20.0, links),
            path_offset=np.concatenate([[0], np.cumsum([path.size for path in paths])]),
            path_link=np.concatenate(paths).astype(np.int32),
            nbytes=np.floor(rng.lognormal(10, 1.5, transfers)) + 1.0,
            packets=Packets(
                latency_ns=rng.random(links) * 3000.0,
                queue_bytes=np.where(rng.random(links) < 0.3, np.inf, rng.uniform(0, 5e4, links)),
                mark_bytes=np.where(rng.random(links) < 0.5, np.inf, rng.uniform(0, 2e4, links)),
                payload_bytes=float(rng.integers(200, 2000)),
                header_bytes=float(rng.integers(0, 100)),
                first_window=int(rng.integers(1, 20)),
                max_window=int(rng.integers(4, 100)),
                timeout_ns=float(rng.uniform(1e4, 1e6)),
            ),
        ),
    )
