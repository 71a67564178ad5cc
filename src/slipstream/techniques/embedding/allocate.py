"""Allocate a budget of bytes to tables with the least total loss.

Each table has choices of (bytes, loss). On the lower convex hull of these points the loss saved per
byte falls from one choice to the next, so that taking the steepest steps first is optimal for every
budget at which a step ends, and off by less than one step in between.

Source: Shoham and Gersho, "Efficient Bit Allocation for an Arbitrary Set of Quantizers", IEEE
Transactions on Acoustics, Speech and Signal Processing, 1988.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from slipstream.techniques.embedding.formats.format import Choice


def allocate(
    choices: Sequence[Sequence[Choice]], weights: Sequence[float], budget: int
) -> list[Choice] | None:
    """Return one choice per table, of at most `budget` bytes in total; None if none fits.

    Args:
        choices: at least one per table.
        weights: weight of each table's loss.
    """
    hulls = [lower_hull(of_table) for of_table in choices]
    taken = [hull[0] for hull in hulls]
    remaining = budget - sum(choice.nbytes for choice in taken)
    if remaining < 0:
        return None
    steps = sorted(
        (-weights[table] * _slope(smaller, larger), table, number)
        for table, hull in enumerate(hulls)
        for number, (smaller, larger) in enumerate(pairwise(hull), start=1)
    )
    stopped: set[int] = set()
    for _, table, number in steps:
        if table in stopped:
            continue
        more = hulls[table][number].nbytes - taken[table].nbytes
        if more > remaining:
            stopped.add(table)
            continue
        taken[table] = hulls[table][number]
        remaining -= more
    return _filled(taken, choices, weights, remaining)


def lower_hull(choices: Sequence[Choice]) -> list[Choice]:
    """Return the choices on the lower convex hull of loss over bytes, by ascending bytes."""
    best: dict[int, Choice] = {}
    for choice in choices:
        if choice.nbytes not in best or choice.loss < best[choice.nbytes].loss:
            best[choice.nbytes] = choice
    hull: list[Choice] = []
    for nbytes in sorted(best):
        new = best[nbytes]
        if hull and new.loss >= hull[-1].loss:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], new):
            hull.pop()
        hull.append(new)
    return hull


def _slope(smaller: Choice, larger: Choice) -> float:
    """Return the loss saved per byte."""
    return (smaller.loss - larger.loss) / (larger.nbytes - smaller.nbytes)


def _filled(
    taken: list[Choice],
    choices: Sequence[Sequence[Choice]],
    weights: Sequence[float],
    remaining: int,
) -> list[Choice]:
    """Spend the remaining bytes on the best single change that fits, until none does."""
    while True:
        gains = [
            (weights[table] * (taken[table].loss - choice.loss), table, choice)
            for table, of_table in enumerate(choices)
            for choice in of_table
            if choice.nbytes - taken[table].nbytes <= remaining and choice.loss < taken[table].loss
        ]
        gains = [gain for gain in gains if gain[0] > 0]
        if not gains:
            return taken
        _, table, choice = max(gains, key=lambda gain: gain[0])
        remaining -= choice.nbytes - taken[table].nbytes
        taken[table] = choice
