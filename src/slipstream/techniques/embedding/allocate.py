"""Share a budget of bytes among tables so that the least is lost.

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
    """One choice a table, of at most `budget` bytes together; None where the smallest are more.

    Args:
        choices: of each table, at least one.
        weights: how much a table's loss counts.
    """
    hulls = [lower_hull(of_table) for of_table in choices]
    taken = [hull[0] for hull in hulls]
    left = budget - sum(choice.nbytes for choice in taken)
    if left < 0:
        return None
    steps = sorted(
        (-weights[table] * _slope(one, other), table, number)
        for table, hull in enumerate(hulls)
        for number, (one, other) in enumerate(pairwise(hull), start=1)
    )
    stopped: set[int] = set()
    for _, table, number in steps:
        if table in stopped:
            continue
        more = hulls[table][number].nbytes - taken[table].nbytes
        if more > left:
            stopped.add(table)
            continue
        taken[table] = hulls[table][number]
        left -= more
    return _filled(taken, choices, weights, left)


def lower_hull(choices: Sequence[Choice]) -> list[Choice]:
    """Those on the lower convex hull of loss over bytes, from small to large."""
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


def _slope(one: Choice, other: Choice) -> float:
    """Loss saved per byte."""
    return (one.loss - other.loss) / (other.nbytes - one.nbytes)


def _filled(
    taken: list[Choice], choices: Sequence[Sequence[Choice]], weights: Sequence[float], left: int
) -> list[Choice]:
    """What is left goes, table by table, to the best single change that it pays for."""
    while True:
        gains = [
            (weights[table] * (taken[table].loss - choice.loss), table, choice)
            for table, of_table in enumerate(choices)
            for choice in of_table
            if choice.nbytes - taken[table].nbytes <= left and choice.loss < taken[table].loss
        ]
        gains = [gain for gain in gains if gain[0] > 0]
        if not gains:
            return taken
        _, table, choice = max(gains, key=lambda gain: gain[0])
        left -= choice.nbytes - taken[table].nbytes
        taken[table] = choice
