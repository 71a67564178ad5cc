"""Timing of an `Operation` in one rank of a measurement."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from slipstream.cluster.samples import COMPUTING, Operation
from slipstream.ranks.launch import RANK_TIMEOUT_S

# Number of matrix products and side of the matrices, for about ten milliseconds.
_SIDE, _PRODUCTS = 512, 12


def time_all(operations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Time operations in the calling rank of torch's default process group.

    Args:
        operations: a list of `Operation` as JSON.

    Returns:
        ``times_s``, the result of `timed` per operation, and ``torch``, its version.
    """
    import torch
    import torch.distributed as dist

    parsed = [Operation(**{**fields, "ranks": tuple(fields["ranks"])}) for fields in operations]
    # Every rank creates all groups in the same order.
    limit = timedelta(seconds=RANK_TIMEOUT_S)
    members = dict.fromkeys(ranks for operation in parsed for ranks in _groups_of(operation))
    groups = {ranks: dist.new_group(list(ranks), timeout=limit) for ranks in members}
    rank = dist.get_rank()
    # Computing is timed at normal priority.
    computed = [timed(op, rank, groups) if op.kind in COMPUTING else [] for op in parsed]
    raise_priority()
    times = [
        measured or timed(op, rank, groups) for op, measured in zip(parsed, computed, strict=True)
    ]
    dist.barrier()
    return {"times_s": times, "torch": torch.__version__}


def raise_priority() -> None:
    """Schedule all threads of this process in real time, if the system allows it.

    The measurement is of the link. On busy cores ranks would wait for a core at every piece of a
    ring.
    """
    with contextlib.suppress(AttributeError, OSError):
        for thread in os.listdir("/proc/self/task"):
            os.sched_setscheduler(int(thread), os.SCHED_RR, os.sched_param(1))


def _groups_of(operation: Operation) -> list[tuple[int, ...]]:
    """Return the groups of ranks that an operation uses, the whole one first."""
    ranks = operation.ranks
    if operation.kind != "2d":
        return [ranks]
    half = len(ranks) // 2
    rows = [ranks[:half], ranks[half:]]
    return [ranks, *rows, *((a, b) for a, b in zip(*rows, strict=True))]


def timed(
    operation: Operation, rank: int, groups: Mapping[tuple[int, ...], Any]
) -> list[tuple[float, float]]:
    """Return start and duration of each repeat on this rank, in s; none if it takes no part."""
    import torch.distributed as dist

    own_groups = [members for members in _groups_of(operation) if rank in members]
    if not own_groups:
        return []
    if operation.kind in COMPUTING:
        return _computed(operation, groups[own_groups[0]])
    run = _operation(operation, rank, [groups[members] for members in own_groups], own_groups)
    times = []
    for repeat in range(operation.warmup + operation.repeats):
        dist.barrier(groups[own_groups[0]])
        before = time.monotonic()
        if operation.pause_ns > 0.0:
            time.sleep(operation.pause_ns / 1e9)
        run()
        if repeat >= operation.warmup:
            times.append((before, (time.monotonic() - before) / operation.in_a_row))
    return times


def _computed(operation: Operation, group: Any) -> list[tuple[float, float]]:
    import torch
    import torch.distributed as dist

    matrix = torch.ones(_SIDE, _SIDE)
    product = torch.empty_like(matrix)
    times = []
    for repeat in range(operation.warmup + operation.repeats):
        done = threading.Event()
        talk = threading.Thread(target=_talk, args=(operation.nbytes, group, done))
        dist.barrier(group)
        before = time.monotonic()
        if operation.kind == "beside":
            talk.start()
        for _ in range(_PRODUCTS):
            torch.mm(matrix, matrix, out=product)
        elapsed_s = time.monotonic() - before
        done.set()
        if talk.ident is not None:
            talk.join()
        if repeat >= operation.warmup:
            times.append((before, elapsed_s))
    return times


def _talk(nbytes: int, group: Any, done: threading.Event) -> None:
    """Run all-reduces until `done` is set on all ranks, as counted by the first element."""
    import torch
    import torch.distributed as dist

    tensor = torch.zeros(max(1, nbytes // 4))
    while tensor[0] < dist.get_world_size(group):
        tensor.zero_()
        tensor[0] = float(done.is_set())
        dist.all_reduce(tensor, group=group)


def _operation(
    operation: Operation, rank: int, groups: list[Any], members: list[tuple[int, ...]]
) -> Callable[[], object]:
    """Return a function that runs the operation `in_a_row` times."""
    import torch
    import torch.distributed as dist

    n, kind, in_a_row = len(members[0]), operation.kind, operation.in_a_row
    count = max(1, operation.nbytes // 4)
    tensor = torch.zeros(count)
    if kind == "p2p":
        other = members[0][1 - members[0].index(rank)]
        first = members[0][0] == rank

        def there_and_back() -> None:
            # All messages there before any back, so that a cable's bucket fills in between.
            for sends in (first, not first):
                for _ in range(in_a_row):
                    if sends:
                        dist.send(tensor, other, group=groups[0])
                    else:
                        dist.recv(tensor, other, group=groups[0])

        return there_and_back
    if kind == "add":
        received = torch.zeros(count)
        return lambda: [tensor.add_(received) for _ in range(in_a_row)]
    whole = torch.zeros(-(-count // n) * n)
    part = torch.zeros(whole.numel() // n)
    once: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(tensor, group=groups[0]),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=groups[0]),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=groups[0]),
    }
    if kind in once:
        return lambda: [once[kind]() for _ in range(in_a_row)]
    half = torch.zeros(-(-count // len(members[1])))

    def two_dimensions() -> None:
        # The same traffic: gloo's reduce_scatter_tensor is an all-reduce.
        for _ in range(in_a_row):
            dist.all_reduce(tensor, group=groups[1])
            dist.all_reduce(half, group=groups[2])
            dist.all_gather_into_tensor(
                torch.empty(half.numel() * len(members[1])), half, group=groups[1]
            )

    return two_dimensions
