"""Compile variants of a program and time them in a child process.

Variants are timed alternately, in random order, and each keeps its minimum of CPU time: a busy
machine disturbs single calls, and never makes one faster. A kernel that crashes or hangs ends the
child. `slipstream.measure` is for claims: it compares arms that the parent calls, with a verdict;
here kernels of microseconds are called where they may crash.
"""

from __future__ import annotations

import ctypes
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.child import Child
from slipstream.codegen.compiler import compiler
from slipstream.codegen.program import Program
from slipstream.codegen.schedule import Schedule, Tree
from slipstream.codegen.walker import source
from slipstream.errors import SlipstreamError

_FUNCTION = "slipstream.techniques.loops.running:time_variants"
_TYPES = {
    "float32": "float32", "float64": "float64", "int32": "int32", "int64": "int64",
    "bool": "uint8", "uint8": "uint8", "bfloat16": "uint16",
}  # fmt: skip
_PAGE_BYTES = 4096
_SLOW_NS = 100_000_000


@dataclass(frozen=True)
class Timing:
    """CPU time of a variant.

    Attributes:
        ns: minimum over all calls.
        halves: minima over the even and the odd calls; they differ where a busy machine disturbed
            one of them.
        error: maximum difference from the first variant, relative to the largest output.
    """

    ns: float
    halves: tuple[float, float]
    error: float

    @property
    def disagreement(self) -> float:
        """Relative difference of the two halves."""
        return abs(self.halves[0] - self.halves[1]) / self.ns


class Runner(AbstractContextManager["Runner"]):
    """A child process that times variants, started again after a crash.

    Args:
        budget_s: time to spend on the variants of a call.
        timeout_s: time after which a call is stopped.
    """

    def __init__(self, budget_s: float = 1.0, timeout_s: float = 60.0) -> None:
        self.budget_s, self.timeout_s = budget_s, timeout_s
        self._child: Child | None = None

    def time(self, program: Program, schedules: Sequence[Schedule], seed: int = 0) -> list[Timing]:
        """Time variants of a program; the first is the reference for results.

        Raises:
            CompileError: there is no compiler, or it fails.
            ChildError: a kernel crashes, or hangs for longer than the time-out.
        """
        trees = [Tree(program, schedule) for schedule in schedules]
        with tempfile.TemporaryDirectory(prefix="slipstream-loops-") as folder:
            path = Path(folder) / "variants.so"
            compiler().build(source(trees), path)
            return self.time_library(path, program, len(trees), seed)

    def time_library(self, path: Path, program: Program, count: int, seed: int) -> list[Timing]:
        """Time the functions ``loops_0`` ... of a compiled library."""
        if self._child is None:
            self._child = Child("the timer of loops", environment={"OMP_NUM_THREADS": "1"})
        buffers = [[_TYPES[b.dtype], b.elements, b.role] for b in program.buffers]
        try:
            rows = self._child.call(
                _FUNCTION, path=str(path), count=count, buffers=buffers, budget_s=self.budget_s,
                seed=seed, timeout_s=self.timeout_s,
            )  # fmt: skip
        except SlipstreamError:
            self.__exit__()
            raise
        return [Timing(min(a, b), (a, b), error) for a, b, error in rows]

    def __exit__(self, *exception: object) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.close()
            self._child = None


def time_variants(
    path: str, count: int, buffers: Sequence[Any], budget_s: float, seed: int
) -> list[tuple[float, float, float]]:
    """Run in the child: return the minima of two halves, in ns, and the error of each variant."""
    library = ctypes.CDLL(path)
    functions = [getattr(library, f"loops_{n}") for n in range(count)]
    arrays = [_array(kind, elements, seed + n) for n, (kind, elements, *_) in enumerate(buffers)]
    pointers = (ctypes.c_void_p * len(arrays))(*(a.ctypes.data for a in arrays))
    initial = {n: arrays[n].copy() for n, (*_, role) in enumerate(buffers) if role == "inout"}
    results = [n for n, (*_, role) in enumerate(buffers) if role in ("out", "inout")]
    reference: list[np.ndarray[Any, Any]] = []
    errors, first = [], []
    for function in functions:
        for n, values in initial.items():
            arrays[n][:] = values
        begin = time.thread_time_ns()
        function(pointers, None, 1)
        first.append(time.thread_time_ns() - begin)
        if not reference:
            reference = [arrays[n].copy() for n in results]
        errors.append(max(_error(arrays[n], r) for n, r in zip(results, reference, strict=True)))
    # Slow variants are called less often, since they are disturbed less.
    share_ns = budget_s * 1e9 / len(functions)
    rounds = [int(min(15, max(3 if t < _SLOW_NS else 1, share_ns / max(t, 20_000)))) for t in first]
    minima = [[float("inf"), float("inf")] for _ in functions]
    order = list(range(count))
    rng = random.Random(seed)
    for round_ in range(max(rounds)):
        rng.shuffle(order)
        for n in order:
            if round_ < rounds[n] + rounds[n] % 2:
                begin = time.thread_time_ns()
                functions[n](pointers, None, 1)
                elapsed = time.thread_time_ns() - begin
                minima[n][round_ % 2] = min(minima[n][round_ % 2], elapsed)
    # Thousands of libraries would fill the address space.
    close = ctypes.CDLL(None).dlclose
    close.argtypes = [ctypes.c_void_p]
    close(library._handle)
    return [(a, b, e) for (a, b), e in zip(minima, errors, strict=True)]


def _array(kind: str, elements: int, seed: int) -> np.ndarray[Any, Any]:
    """Return a page-aligned array of numbers between 0.5 and 1.5."""
    size = np.dtype(kind).itemsize * elements
    memory = np.zeros(size + _PAGE_BYTES, np.uint8)
    start = -memory.ctypes.data % _PAGE_BYTES
    array = memory[start : start + size].view(kind)
    if kind.startswith("float"):
        array[:] = np.random.default_rng(seed).uniform(0.5, 1.5, elements)
    return array


def _error(value: np.ndarray[Any, Any], reference: np.ndarray[Any, Any]) -> float:
    scale = float(np.abs(reference).max()) or 1.0
    error = float(np.abs(value - reference).max()) / scale
    return error if error == error else float("inf")
