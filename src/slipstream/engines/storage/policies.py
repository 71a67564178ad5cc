"""Cache policies in compiled code: one object decides in a simulation and in a running cache."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.arguments import as_integer
from slipstream.errors import InvalidArgumentError, SlipstreamError, UnknownNameError
from slipstream.native.family import DOUBLE, INT32, INT64, POINTER, UINT64, Family, array_pointer

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Float64s = npt.NDArray[np.float64]

POLICIES = (
    "lru", "fifo", "sieve", "s3fifo", "lirs", "wtinylfu", "belady", "learned", "auto",
)  # fmt: skip
"""``learned`` ranks objects by the hit density (Gittins index) of their contexts; ``auto`` follows
whichever of lru, s3fifo, lirs, wtinylfu and learned had the most hits lately. ``belady`` knows the
future, and serves as a bound."""
BINS = 64
"""Number of bins of an interval distribution, see `bin_edges`."""
NEVER = np.iinfo(np.int64).max
_CACHED, _STORED = 1, 2
_MAX_NUMBER = (1 << 31) - 1
_FAMILY = Family("cache", {
    "cache_create": [INT32, INT64, INT32, UINT64],
    "cache_free": [POINTER],
    "cache_request": [POINTER, INT32, INT64, INT32],
    "cache_evicted": [POINTER, POINTER, INT64],
    "cache_simulate": [POINTER, INT64] + [POINTER] * 5,
    "cache_prior": [POINTER, INT32, POINTER, DOUBLE],
    "cache_followed": [POINTER],
    "cache_gittins": [POINTER, POINTER],
    "cache_edges": [POINTER],
    "cache_number": [POINTER, INT64, POINTER],
}, {
    "cache_create": POINTER, "cache_free": None, "cache_evicted": INT64, "cache_gittins": None,
    "cache_edges": None, "cache_number": INT64,
})  # fmt: skip


def _library() -> Any:
    if _FAMILY.library is None:
        raise SlipstreamError(
            "cache policies are part of the compiled library, which is not available",
            remedy="install slipstream with a C++ compiler",
        )
    return _FAMILY.library


class CachePolicy:
    """The metadata of a cache: which objects it holds, and which it evicts.

    Objects are numbered from 0, contexts too. Not safe to use from several threads at once.

    Args:
        name: one of `POLICIES`.
        capacity_bytes: of all objects together; at least 1.
        by_bytes: whether to rank objects for the share of bytes, not of requests, that hit.
        seed: of the draw of eviction candidates.

    Raises:
        UnknownNameError: there is no such policy.
        InvalidArgumentError: the capacity is not a positive integer.
        SlipstreamError: the compiled library is missing.
    """

    def __init__(
        self, name: str, capacity_bytes: int, *, by_bytes: bool = False, seed: int = 0
    ) -> None:
        if name not in POLICIES:
            raise UnknownNameError("cache policy", name, POLICIES)
        capacity_bytes = min(as_integer("capacity", capacity_bytes), NEVER)
        self.name = name
        self._library = _library()
        self._handle = self._library.slipstream_cache_create(
            POLICIES.index(name), capacity_bytes, by_bytes, seed
        )
        if not self._handle:
            raise MemoryError("the cache policy could not be allocated")
        weakref.finalize(self, self._library.slipstream_cache_free, self._handle)

    def request(self, number: int, size_bytes: int, context: int = 0) -> tuple[bool, bool]:
        """Request an object; return whether it was cached, and whether it is cached now.

        Raises:
            InvalidArgumentError: the number or size is negative, or the number exceeds 2^31 - 2.
        """
        if not (0 <= number < _MAX_NUMBER and size_bytes >= 0):
            raise InvalidArgumentError("number", f"{number}, {size_bytes} bytes, is out of range")
        outcome = self._library.slipstream_cache_request(self._handle, number, size_bytes, context)
        if outcome < 0:
            raise MemoryError("the cache policy could not be extended")
        return bool(outcome & _CACHED), bool(outcome & _STORED)

    def evicted(self) -> list[int]:
        """Return the objects that the last request evicted."""
        evicted = np.empty(self._library.slipstream_cache_evicted(self._handle, None, 0), np.int32)
        self._library.slipstream_cache_evicted(self._handle, array_pointer(evicted), evicted.size)
        numbers: list[int] = evicted.tolist()
        return numbers

    def simulate(
        self,
        objects: Int32s,
        sizes: Int64s,
        contexts: Int32s | None = None,
        next_request: Int64s | None = None,
    ) -> npt.NDArray[np.bool_]:
        """Request objects sequentially; return which requests hit, bool [N].

        Args:
            objects, sizes, contexts: [N]; sizes in bytes.
            next_request: int64 [N] from `next_requests`; required by ``belady``.

        Raises:
            InvalidArgumentError: columns differ in length, a value is negative, or `next_request`
                is missing.
        """
        if self.name == "belady" and next_request is None:
            raise InvalidArgumentError("next_request", "is required by belady")
        count = len(objects)
        columns = []
        for name, column, kind in (
            ("objects", objects, np.int32), ("sizes", sizes, np.int64),
            ("contexts", contexts, np.int32), ("next_request", next_request, np.int64),
        ):  # fmt: skip
            array = None if column is None else np.ascontiguousarray(column, kind)
            if array is not None and (array.shape != (count,) or array.min(initial=0) < 0):
                what = f"{array.size} values do not fit {count} objects, or one is negative"
                raise InvalidArgumentError(name, what)
            columns.append(array)
        hit = np.zeros(count, np.uint8)
        status = self._library.slipstream_cache_simulate(
            self._handle, count, *map(array_pointer, (*columns, hit))
        )
        if status:
            raise MemoryError("the cache policy could not be extended")
        return hit.view(np.bool_)

    def set_prior(self, context: int, hazard: Float64s, strength: float = 20.0) -> None:
        """Set the expected hazards [64] of a context, which count for `strength` observations.

        Policies that do not learn ignore it.

        Raises:
            InvalidArgumentError: `hazard` has another shape.
        """
        hazard = np.ascontiguousarray(hazard, np.float64)
        if hazard.shape != (BINS,):
            raise InvalidArgumentError("hazard", f"has shape {hazard.shape}, not ({BINS},)")
        self._library.slipstream_cache_prior(self._handle, context, array_pointer(hazard), strength)

    @property
    def followed(self) -> str:
        """The policy that decides at present: that of ``auto``, else its own name."""
        number = self._library.slipstream_cache_followed(self._handle)
        return self.name if number < 0 else POLICIES[number]


def numbered(keys: npt.NDArray[np.uint64]) -> tuple[Int32s, int]:
    """Number distinct keys [N] from 0 in order of appearance; return numbers [N] and count."""
    keys = np.ascontiguousarray(keys, np.uint64)
    numbers = np.empty(keys.size, np.int32)
    count = _library().slipstream_cache_number(
        array_pointer(keys), keys.size, array_pointer(numbers)
    )
    if count < 0:
        raise MemoryError("the keys could not be numbered")
    return numbers, int(count)


def next_requests(objects: Int32s) -> Int64s:
    """Return for each request the position of the object's next one, int64 [N]; `NEVER` if none."""
    order = np.argsort(objects, kind="stable")
    following = np.full(objects.size, NEVER, np.int64)
    again = objects[order][1:] == objects[order][:-1]
    following[order[:-1][again]] = order[1:][again]
    return following


def bin_edges() -> Float64s:
    """Return the edges [65] of the bins of intervals, in requests: three bins per octave."""
    edges = np.empty(BINS + 1)
    _library().slipstream_cache_edges(array_pointer(edges))
    return edges


def gittins(hazard: Float64s) -> Float64s:
    """Return the hit density [64] of an object by age bin, in hits per request of cache space.

    It is ``max_h P(T <= a + h | T > a) / E[min(T - a, h) | T > a]`` for the interval T with
    `hazard` [64].
    """
    rank, hazard = np.empty(BINS), np.ascontiguousarray(hazard, np.float64)
    _library().slipstream_cache_gittins(array_pointer(hazard), array_pointer(rank))
    return rank
