"""What one rank of a measurement does: an `Operation`, as often as asked, timed each time.

As a program it reads one JSON object from its standard input and writes one to its standard output;
`slipstream.ranks.launch` starts it, on this machine or in a network namespace.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from slipstream.cluster.samples import COMPUTING
from slipstream.ranks.launch import RANK_TIMEOUT, join

# Products of square matrices, of so many numbers a side: some ten milliseconds.
_SIDE, _PRODUCTS = 512, 12


def groups_of(operation: dict[str, Any]) -> list[tuple[int, ...]]:
    """The groups of ranks that it takes, the whole one first."""
    ranks = operation["ranks"]
    if operation["kind"] != "2d":
        return [tuple(ranks)]
    half = len(ranks) // 2
    rows = [tuple(ranks[:half]), tuple(ranks[half:])]
    return [tuple(ranks), *rows, *((a, b) for a, b in zip(*rows, strict=True))]


def timed(
    operation: dict[str, Any], rank: int, groups: dict[tuple[int, ...], Any]
) -> list[tuple[float, float]]:
    """When every repeat began on this rank and how long it took, seconds; none where it takes no
    part."""
    import torch.distributed as dist

    mine = [members for members in groups_of(operation) if rank in members]
    if not mine:
        return []
    if operation["kind"] in COMPUTING:
        return _computed(operation, groups[mine[0]])
    count = operation.get("in_a_row", 1)
    run = _operation(operation, rank, [groups[members] for members in mine], mine, count)
    times = []
    for repeat in range(operation["repeats"] + operation["warmup"]):
        dist.barrier(groups[mine[0]])
        before = time.monotonic()
        if operation["pause_s"] > 0.0:
            time.sleep(operation["pause_s"])
        run()
        if repeat >= operation["warmup"]:
            times.append((before, (time.monotonic() - before) / count))
    return times


def _computed(operation: dict[str, Any], group: Any) -> list[tuple[float, float]]:
    """As `timed`, of computing."""
    import torch
    import torch.distributed as dist

    matrix = torch.ones(_SIDE, _SIDE)
    product = torch.empty_like(matrix)
    times = []
    for repeat in range(operation["repeats"] + operation["warmup"]):
        done = threading.Event()
        talk = threading.Thread(target=_talk, args=(operation["nbytes"], group, done))
        dist.barrier(group)
        before = time.monotonic()
        if operation["kind"] == "beside":
            talk.start()
        for _ in range(_PRODUCTS):
            torch.mm(matrix, matrix, out=product)
        took = time.monotonic() - before
        done.set()
        if talk.ident is not None:
            talk.join()
        if repeat >= operation["warmup"]:
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
    operation: dict[str, Any], rank: int, groups: list[Any], members: list[tuple[int, ...]],
    in_a_row: int,
) -> Callable[[], object]:  # fmt: skip
    """The operation, so often at a stretch."""
    import torch
    import torch.distributed as dist

    n, kind = len(members[0]), operation["kind"]
    count = max(1, operation["nbytes"] // 4)
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


def main() -> None:
    """Join the group, time every operation asked for, print median and all times."""
    asked = json.load(sys.stdin)
    join(asked)
    import torch
    import torch.distributed as dist

    groups: dict[tuple[int, ...], Any] = {}
    for operation in asked["operations"]:
        for ranks in groups_of(operation):
            if ranks not in groups:
                # Every rank makes every group, in one order.
                groups[ranks] = dist.new_group(list(ranks), timeout=RANK_TIMEOUT)
    rank, operations = asked["rank"], asked["operations"]
    # Who computes has no right of way.
    computed = [timed(one, rank, groups) if one["kind"] in COMPUTING else [] for one in operations]
    _go_first()
    times = [
        before or timed(one, rank, groups) for one, before in zip(operations, computed, strict=True)
    ]
    dist.barrier()
    dist.destroy_process_group()
    json.dump({"times_s": times, "torch": torch.__version__}, sys.stdout)


def _go_first() -> None:
    """Run before all who are not in as much of a hurry, where the system lets us.

    What is to be timed is the link; ranks only hand over bytes, and on busy cores each would wait
    for its turn at every piece of a ring. Their threads are there already, and ask one by one.
    """
    with contextlib.suppress(AttributeError, OSError):
        for thread in os.listdir("/proc/self/task"):
            os.sched_setscheduler(int(thread), os.SCHED_RR, os.sched_param(1))


if __name__ == "__main__":
    main()
