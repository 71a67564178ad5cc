"""Memory of a step: a curve by role, and the lifetimes of the largest tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.graph import Role, Timeline
from slipstream.report._arrays import Arrays

# Points of the curve; for the recorded step as many as a wide screen has columns.
_POINTS, _FEW_POINTS = 4096, 512
_TENSORS, _FEW_TENSORS = 3000, 400
# From the bottom of the stack: lasting tensors, temporary ones, others.
_ORDER = (
    Role.PARAMETER, Role.BUFFER, Role.OPTIMIZER, Role.GRADIENT, Role.INPUT, Role.ACTIVATION,
    Role.TEMPORARY, Role.OTHER,
)  # fmt: skip
Floats = NDArray[np.float64]


def holdings(timeline: Timeline, arrays: Arrays, *, detail: bool) -> dict[str, Any] | None:
    """Return curve and lifetimes; None if memory was not recorded.

    The curve retains the maximum of every interval, and so the peak. The tensors are the largest
    at the peak and the largest of the whole step.
    """
    memory = timeline.graph.memory
    if not len(memory):
        return None
    lives = timeline.memory
    birth, death = lives.birth_ns[0], lives.death_ns[0]
    roles = [role for role in _ORDER if (memory.role == role).any()]
    times, _ = timeline.memory_curve()
    levels = np.stack(
        [
            _level(times, memory.nbytes[of_role], birth[of_role], death[of_role])
            for of_role in (memory.role == role for role in roles)
        ]
    )
    points = _highest(times, levels.sum(axis=0), _POINTS if detail else _FEW_POINTS)
    largest = _largest(timeline, _TENSORS if detail else _FEW_TENSORS)
    return {
        "peak_bytes": timeline.peak_bytes,
        "peak_ns": float(lives.peak_time_ns[0]),
        "points": len(times),
        "roles": [role.name.lower() for role in roles],
        "times": arrays.times(times[points]),
        "levels": [arrays.times(level[points]) for level in levels],
        "allocations": len(memory),
        "tensors": {
            "bytes": arrays.times(memory.nbytes[largest]),
            "birth": arrays.times(birth[largest]),
            "death": arrays.times(death[largest]),
            "role": arrays.integers([roles.index(Role(r)) for r in memory.role[largest].tolist()]),
            "producer": arrays.integers(memory.producer[largest]),
            "release": arrays.integers(memory.release[largest]),
            "user": arrays.integers(_first_users(timeline, largest)),
        },
    }


def _largest(timeline: Timeline, most: int) -> NDArray[np.int64]:
    """Return at most `most` allocations, largest first: half of the peak, half of the rest."""
    memory, lives = timeline.graph.memory, timeline.memory
    birth, death, peak_ns = lives.birth_ns[0], lives.death_ns[0], lives.peak_time_ns[0]
    by_size = np.argsort(-memory.nbytes, kind="stable")
    by_size = by_size[(memory.nbytes[by_size] > 0) & (death[by_size] > birth[by_size])]
    lasting = (memory.producer < 0) & (memory.release < 0)
    at_peak = (lasting | ((birth <= peak_ns) & (peak_ns < death)))[by_size]
    first = by_size[at_peak][: most // 2]
    rest = by_size[~np.isin(by_size, first)][: most - len(first)]
    chosen = np.concatenate([first, rest])
    return chosen[np.argsort(-memory.nbytes[chosen], kind="stable")]


def _level(
    times: Floats, nbytes: NDArray[np.int64], birth: Floats, death: Floats
) -> NDArray[np.int64]:
    """Return the bytes alive from each time to the next, int64 [times]."""

    def until(moments: Floats) -> NDArray[np.int64]:
        order = np.argsort(moments, kind="stable")
        total = np.concatenate([[0], np.cumsum(nbytes[order])])
        sums: NDArray[np.int64] = total[np.searchsorted(moments[order], times, side="right")]
        return sums

    level = until(birth) - until(death)
    if len(level):
        # Allocations that live to the end count there too.
        level[-1] += int(nbytes[death >= times[-1]].sum())
    return level


def _highest(times: Floats, total: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Return the indices of the first and highest points of equal time intervals."""
    if len(times) <= most:
        return np.arange(len(times))
    width = (times[-1] - times[0]) / (most // 2)
    stretch = np.minimum(((times - times[0]) / width).astype(np.int64), most // 2 - 1)
    by_height = np.lexsort((np.arange(len(times)), -total, stretch))
    first_of = np.concatenate([[True], stretch[by_height][1:] != stretch[by_height][:-1]])
    first = np.flatnonzero(np.concatenate([[True], stretch[1:] != stretch[:-1]]))
    return np.unique(np.concatenate([by_height[first_of], first, [len(times) - 1]]))


def _first_users(timeline: Timeline, chosen: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the first task that uses each storage, int64 [chosen]; -1 if none does."""
    graph = timeline.graph
    task_of = np.repeat(np.arange(len(graph)), np.diff(graph.operand_start))
    storages, first = np.unique(graph.operands, return_index=True)
    requested = graph.memory.storage[chosen]
    place = np.searchsorted(storages, requested)
    used = (requested >= 0) & (place < len(storages))
    used[used] = storages[place[used]] == requested[used]
    users = np.full(len(chosen), -1, np.int64)
    users[used] = task_of[first[place[used]]]
    return users
