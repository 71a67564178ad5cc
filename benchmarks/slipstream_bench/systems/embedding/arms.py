"""Timing look-ups beside each other: arms in turns in one process, CPU time of one thread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import psutil

BATCHES = 8
"""Batches of other ids that an arm runs in its turn, so that the caches hold its own data."""

Arms = dict[str, Callable[[int], object]]


def in_turns(
    arms: Arms,
    rounds: int,
    batches: int = BATCHES,
    clock: Callable[[], int] = time.thread_time_ns,
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """By arm: time of the first arm over its own in each round, and its median ns a batch.

    Args:
        clock: in ns; the wall's for arms on several threads.
    """
    taken: dict[str, list[int]] = {name: [] for name in arms}
    for round_ in range(rounds + 1):
        for name, run in arms.items():
            run(round_)
            begin = clock()
            for batch in range(batches):
                run(round_ * batches + batch)
            if round_:
                taken[name].append(clock() - begin)
    first = next(iter(taken.values()))
    ratios = {n: [a / b for a, b in zip(first, own, strict=True)] for n, own in taken.items()}
    return ratios, {n: statistics.median(own) / batches for n, own in taken.items()}


def fits(nbytes: int) -> bool:
    """Whether so much memory, and half as much again, is free."""
    return bool(psutil.virtual_memory().available > 1.5 * nbytes)
