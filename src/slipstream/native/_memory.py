"""Memory over time, from the lifetimes of tensors in a simulated schedule."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slipstream.errors import InvalidArgumentError
from slipstream.native.inputs import Bools, Float64s, Int32s, Int64s, Integers, Tensors


@dataclass(frozen=True, eq=False)
class MemoryTimeline:
    """Lifetimes of all tensors, and the resulting memory.

    Attributes:
        birth_ns, death_ns: float64 [steps, tensors]. The birth of a persistent tensor in every row
            is that of its first step, and its death the end of the simulation; it exists once.
        peak_bytes: int64 [pools].
        peak_time_ns: float64 [pools]; the first time of the peak.
    """

    birth_ns: Float64s
    death_ns: Float64s
    peak_bytes: Int64s
    peak_time_ns: Float64s
    _tensors: Tensors

    def curve(self, pool: int = 0) -> tuple[Float64s, Int64s]:
        """Return the allocated bytes of `pool` as a step function.

        Returns:
            times float64 [changes], ascending, and the bytes allocated from each to the next,
            int64 [changes].

        Raises:
            InvalidArgumentError: there is no such pool.
        """
        if not 0 <= pool < self.peak_bytes.size:
            raise InvalidArgumentError("pool", f"{pool} is not one of {self.peak_bytes.size}")
        changes = _changes(self._tensors, pool, self.birth_ns, self.death_ns)
        births, allocated, deaths, freed = changes
        times = np.unique(np.concatenate([births, deaths]))
        return times, _total_until(times, births, allocated) - _total_until(times, deaths, freed)


def memory_timeline(
    tensors: Tensors,
    start_ns: Float64s,
    end_ns: Float64s,
) -> MemoryTimeline:
    """Return lifetimes under a schedule (`start_ns`, `end_ns`: float64 [steps, tasks]).

    A tensor is born when its producer starts and dies when the last of its consumers ends; without
    consumers, when its producer ends. Without a producer it is born at the beginning of its step
    (time 0, then the earliest start of each step), and with neither it lives to the end of the
    step. At equal times frees come before allocations, so a tensor with an empty lifetime never
    counts.
    """
    steps = start_ns.shape[0]
    birth, death = np.empty((steps, tensors.nbytes.size)), np.empty((steps, tensors.nbytes.size))
    for k in range(steps):
        _lifetimes(tensors, start_ns[k], end_ns[k], k == 0, birth[k], death[k])
    birth[:, tensors.persistent] = birth[:1, tensors.persistent]
    death[:, tensors.persistent] = end_ns.max(initial=0.0)

    pools = int(tensors.pool.max(initial=-1)) + 1
    peak_bytes, peak_time = np.zeros(pools, np.int64), np.zeros(pools)
    for pool in range(pools):
        births, allocated, deaths, freed = _changes(tensors, pool, birth, death)
        if births.size == 0:
            continue
        # The level rises only at births, so the peak is at one of them: of several simultaneous
        # births at the last, whose total includes all.
        level = allocated - _total_until(births, deaths, freed)
        top = int(level.argmax())
        peak_bytes[pool], peak_time[pool] = level[top], births[top]
    return MemoryTimeline(birth, death, peak_bytes, peak_time, tensors)


def _lifetimes(
    tensors: Tensors,
    start_ns: Float64s,
    end_ns: Float64s,
    first_step: bool,
    birth: Float64s,
    death: Float64s,
) -> None:
    step_begin = 0.0 if first_step else start_ns.min(initial=np.inf)
    produced = tensors.producer >= 0
    birth[:] = step_begin
    birth[produced] = start_ns[tensors.producer[produced]]
    death[:] = end_ns.max(initial=step_begin)
    death[produced] = end_ns[tensors.producer[produced]]
    used = np.diff(tensors.consumer_offset) > 0
    if used.any():
        # Empty rows are between their neighbours' offsets, so omitting them changes no row.
        last_use = np.maximum.reduceat(
            end_ns[tensors.consumer_task], tensors.consumer_offset[:-1][used]
        )
        death[used] = np.maximum(last_use, birth[used])


def _changes(
    tensors: Tensors, pool: int, birth: Float64s, death: Float64s
) -> tuple[Float64s, Int64s, Float64s, Int64s]:
    """Return sorted births with total allocated bytes, and sorted deaths with total freed bytes."""
    steps = birth.shape[0]
    in_pool = (tensors.pool == pool) & (tensors.nbytes > 0)
    lasting: Int32s = np.flatnonzero(in_pool & tensors.persistent).astype(np.int32)
    passing: Int32s = np.flatnonzero(in_pool & ~tensors.persistent).astype(np.int32)
    born, died = birth[:, passing].ravel(), death[:, passing].ravel()
    size = np.tile(tensors.nbytes[passing], steps)
    lived: Bools = died > born
    born, died, size = born[lived], died[lived], size[lived]
    born = np.concatenate([birth[0, lasting], born])
    births, allocated = _running_total(born, np.concatenate([tensors.nbytes[lasting], size]))
    deaths, freed = _running_total(died, size)
    return births, allocated, deaths, freed


def _running_total(times: Float64s, nbytes: Integers) -> tuple[Float64s, Int64s]:
    order = np.argsort(times, kind="stable")
    return times[order], np.cumsum(nbytes[order], dtype=np.int64)


def _total_until(times: Float64s, changes: Float64s, totals: Int64s) -> Int64s:
    count = np.searchsorted(changes, times, side="right")
    return np.concatenate([np.zeros(1, np.int64), totals])[count]
