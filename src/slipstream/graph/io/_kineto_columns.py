"""The events of a Kineto trace as columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Category(IntEnum):
    """What an event is."""

    OP = 0
    RUNTIME = 1
    KERNEL = 2
    MEMCPY = 3
    MEMSET = 4
    SYNC = 5
    ANNOTATION = 6
    PYTHON = 7
    COLLECTION = 8


# Kineto's words, lower case, of now and of earlier versions.
CATEGORIES = {
    "cpu_op": Category.OP, "operator": Category.OP,
    "cuda_runtime": Category.RUNTIME, "cuda_driver": Category.RUNTIME,
    "runtime": Category.RUNTIME, "privateuse1_runtime": Category.RUNTIME,
    "kernel": Category.KERNEL,
    "gpu_memcpy": Category.MEMCPY, "memcpy": Category.MEMCPY,
    "gpu_memset": Category.MEMSET, "memset": Category.MEMSET,
    "cuda_sync": Category.SYNC,
    "user_annotation": Category.ANNOTATION,
    "python_function": Category.PYTHON,
    "python_gc": Category.COLLECTION,
}  # fmt: skip
DEVICE = (Category.KERNEL, Category.MEMCPY, Category.MEMSET)
HOST = (Category.OP, Category.RUNTIME, Category.COLLECTION)


@dataclass(frozen=True)
class Columns:
    """The n complete events of a trace, in the file's order.

    Attributes:
        texts: the distinct names.
        name: int32 [n], index into `texts`.
        category: int8 [n], `Category`.
        start, end: float64 [n], ns from the first event, whole numbers.
        thread: int32 [n], index into `threads`.
        threads: (process, thread) as the trace names them.
        correlation: int64 [n], ties a runtime call to what it launched or how it waited.
        device, stream: int64 [n], of device and synchronisation events.
        record_stream, record: int64 [n], of synchronisation events: the stream of the event that
            is waited for, and the correlation of the call that recorded it.
        sequence: int64 [n], of operators: autograd's sequence number. Each thread counts its own.
        forward_thread: int64 [n], of backward operators: the thread that the forward one ran on,
            index into `threads`; -1 in forward, and where all forward operators ran on one.
        launch: int64 [n, 4], of kernels: blocks, threads of each, registers of each thread, bytes
            of shared memory of each block; 0 where the trace does not tell.
    """

    texts: tuple[str, ...]
    name: NDArray[np.int32]
    category: NDArray[np.int8]
    start: Floats
    end: Floats
    thread: NDArray[np.int32]
    threads: tuple[tuple[str, str], ...]
    correlation: Ints
    device: Ints
    stream: Ints
    record_stream: Ints
    record: Ints
    sequence: Ints
    forward_thread: Ints
    launch: Ints

    def text(self, row: int) -> str:
        """The name of an event."""
        return self.texts[int(self.name[row])]

    def named(self, *names: str) -> NDArray[np.bool_]:
        """bool [n]; events that have one of `names`."""
        codes = [code for code, text in enumerate(self.texts) if text in names]
        return np.isin(self.name, codes)

    def named_like(self, accept: Callable[[str], bool]) -> NDArray[np.bool_]:
        """bool [n]; events whose name `accept`s."""
        found = np.fromiter((accept(text) for text in self.texts), np.bool_, len(self.texts))
        return found[self.name]

    @cached_property
    def is_task(self) -> NDArray[np.bool_]:
        """bool [n]; whether the event is work of a host or a device."""
        return self.is_host | self.is_device

    @cached_property
    def is_host(self) -> NDArray[np.bool_]:
        """bool [n]; operators and runtime calls."""
        return np.isin(self.category, HOST)

    @cached_property
    def is_device(self) -> NDArray[np.bool_]:
        """bool [n]; kernels and copies."""
        return np.isin(self.category, DEVICE)

    @cached_property
    def saved_key(self) -> Ints:
        """int64 [n]; equal for a forward operator and its backward one; -1 for others."""
        several = bool((self.forward_thread >= 0).any())
        thread = np.where(self.forward_thread >= 0, self.forward_thread, self.thread)
        key = self.sequence * (len(self.threads) if several else 1) + (thread if several else 0)
        return np.where(self.sequence >= 0, key, -1)

    @cached_property
    def runtime_by_correlation(self) -> tuple[Ints, Ints]:
        """Correlations of runtime calls, ascending, and their rows."""
        rows = np.flatnonzero((self.category == Category.RUNTIME) & (self.correlation >= 0))
        rows = rows[np.argsort(self.correlation[rows], kind="stable")]
        return self.correlation[rows], rows

    def runtime_row(self, correlation: Ints) -> Ints:
        """int64, as `correlation`: the row of the runtime call of that correlation, -1: none."""
        known, rows = self.runtime_by_correlation
        if not known.size:
            return np.full(len(correlation), -1, np.int64)
        at = np.minimum(np.searchsorted(known, correlation), known.size - 1)
        return np.where((known[at] == correlation) & (correlation >= 0), rows[at], -1)

    def with_times(self, start: Floats, end: Floats) -> Columns:
        """The same events at other times."""
        return replace(self, start=start, end=end)
