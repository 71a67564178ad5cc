"""What one rank of a measurement does: an `Operation`, as often as asked, timed each time."""

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

# Products of square matrices, of so many numbers a side: some ten milliseconds.
_SIDE, _PRODUCTS = 512, 12


def time_all(operations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Time operations in the calling rank of torch's default process group.

    Args:
        operations: an `Operation` each, as JSON.

    Returns:
        ``times_s``: by operation, as of `timed`; ``torch``: its version.
    """
    import torch
    import torch.distributed as dist

    asked = [Operation(**{**one, "ranks": tuple(one["ranks"])}) for one in operations]
    # Every rank makes every group, in one order.
    limit = timedelta(seconds=RANK_TIMEOUT_S)
    members = dict.fromkeys(ranks for one in asked for ranks in _groups_of(one))
    groups = {ranks: dist.new_group(list(ranks), timeout=limit) for ranks in members}
    rank = dist.get_rank()
    # Who computes has no right of way.
    computed = [timed(one, rank, groups) if one.kind in COMPUTING else [] for one in asked]
    go_first()
    times = [
        before or timed(one, rank, groups) for one, before in zip(asked, computed, strict=True)
    ]
    dist.barrier()
    return {"times_s": times, "torch": torch.__version__}


def go_first() -> None:
    """Run before all who are not in as much of a hurry, where the system lets us.

    What is to be timed is the link; ranks only hand over bytes, and on busy cores each would wait
    for its turn at every piece of a ring. Their threads are there already, and ask one by one.
    """
    with contextlib.suppress(AttributeError, OSError):
        for thread in os.listdir("/proc/self/task"):
            os.sched_setscheduler(int(thread), os.SCHED_RR, os.sched_param(1))


def _groups_of(operation: Operation) -> list[tuple[int, ...]]:
    """The groups of ranks that it takes, the whole one first."""
    ranks = operation.ranks
    if operation.kind != "2d":
        return [ranks]
    half = len(ranks) // 2
    rows = [ranks[:half], ranks[half:]]
    return [ranks, *rows, *((a, b) for a, b in zip(*rows, strict=True))]


def timed(
    operation: Operation, rank: int, groups: Mapping[tuple[int, ...], Any]
) -> list[tuple[float, float]]:
    """When every repeat began on this rank and how long it took, seconds; none where it takes no
    part."""
    import torch.distributed as dist

    mine = [members for members in _groups_of(operation) if rank in members]
    if not mine:
        return []
    if operation.kind in COMPUTING:
        return _computed(operation, groups[mine[0]])
    run = _operation(operation, rank, [groups[members] for members in mine], mine)
    times = []
    for repeat in range(operation.warmup + operation.repeats):
        dist.barrier(groups[mine[0]])
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
        took = time.monotonic() - before
        done.set()
        if talk.ident is not None:
            talk.join()
        if repeat >= operation.warmup:
            times.append((before, took))
    return times


def _talk(nbytes: int, group: Any, done: threading.Event) -> None:
    """All-reduces one after the other until it is done on every rank: the first number says so."""
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
    """The operation, as often as it is done at a stretch."""
    import torch
    import torch.distributed as dist

    n, kind, in_a_row = len(members[0]), operation.kind, operation.in_a_row
    count = max(1, operation.nbytes // 4)
    tensor = torch.zeros(count)
    if kind == "p2p":
        other = members[0][1 - members[0].index(rank)]
        first = members[0][0] == rank

        def there_and_back() -> None:
            # All there before any comes back: a cable's bucket saves up while the other is used.
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
        # What is sent, not what it is called: gloo's reduce_scatter_tensor is an all-reduce.
        for _ in range(in_a_row):
            dist.all_reduce(tensor, group=groups[1])
            dist.all_reduce(half, group=groups[2])
            dist.all_gather_into_tensor(
                torch.empty(half.numel() * len(members[1])), half, group=groups[1]
            )

    return two_dimensions
