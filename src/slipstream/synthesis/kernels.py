"""Compiled programs of the list language: many at once, and the search of all short ones."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import SlipstreamError
from slipstream.native.family import INT32, INT64, POINTER, Family, array_pointer, structure
from slipstream.synthesis.language import MAX_LIST, Value, last_values

MAX_LENGTH = 16
MAX_INPUTS = 32
_TASK = structure(
    "int32_t inputs, examples, is_list; void* numbers, lists, counts, wanted, wanted_counts;"
)
_SEARCH = structure(
    "int64_t max_candidates; double max_seconds; int32_t max_length, extra, capacity; "
    "void* programs, lengths; int64_t candidates, states; int32_t found, complete; double seconds;"
)
FAMILY = Family("synthesis", {
    "synthesis_run": [INT32, POINTER, POINTER, INT64, INT32, POINTER, POINTER, POINTER, INT32],
    "synthesis_enumerate": [INT32, POINTER, POINTER],
})  # fmt: skip


class Task:
    """Inputs of programs, at most 32, and the expected outputs of the first ones."""

    def __init__(self, inputs: Sequence[Sequence[Value]], outputs: Sequence[Value] = ()) -> None:
        self.outputs = list(outputs)
        self.numbers = np.zeros(len(inputs), np.int16)
        self.lists = np.zeros((len(inputs), 2, MAX_LIST), np.int16)
        self.counts = np.zeros((len(inputs), 2), np.int16)
        for row, values in enumerate(inputs):
            self.numbers[row], *lists = last_values(values)
            for at, values_of_list in enumerate(lists):
                self.counts[row, at] = len(values_of_list)
                self.lists[row, at, : len(values_of_list)] = values_of_list
        self.is_list = bool(outputs) and isinstance(outputs[0], list)
        self.wanted = np.zeros((max(len(outputs), 1), MAX_LIST), np.int16)
        self.wanted_counts = np.zeros(max(len(outputs), 1), np.int16)
        for row, output in enumerate(outputs):
            values = output if isinstance(output, list) else [output]
            self.wanted[row, : len(values)] = values
            self.wanted_counts[row] = len(values)
        arrays = self.numbers, self.lists, self.counts, self.wanted, self.wanted_counts
        self.structure = _TASK(len(inputs), len(outputs), self.is_list, *map(array_pointer, arrays))


@dataclass(frozen=True, eq=False)
class Results:
    """Results of programs.

    Attributes:
        valid: whether the program was valid on the task's examples, bool [programs]; on all inputs
            if it has no examples.
        lists: int16 [programs, inputs, 20]; a number is in the first place.
        counts: int16 [programs, inputs]; -1 for a number, -2 where the program is invalid.
    """

    valid: NDArray[np.bool_]
    lists: NDArray[np.int16]
    counts: NDArray[np.int16]

    def value(self, program: int, row: int) -> Value | None:
        """Return a result; None where the program is invalid."""
        count, values = int(self.counts[program, row]), self.lists[program, row]
        if count == -2:
            return None
        return int(values[0]) if count == -1 else [int(v) for v in values[:count]]


@dataclass(frozen=True)
class Found:
    """Result of a search.

    Attributes:
        programs: that meet all examples, shortest first.
        candidates: number of programs that were tried.
        states: number of different states that they reached.
        complete: length up to which all programs were tried.
        seconds: duration.
    """

    programs: tuple[tuple[int, ...], ...]
    candidates: int
    states: int
    complete: int
    seconds: float


def kernel() -> int:
    """Return the fastest kernel.

    Raises:
        SlipstreamError: the package was installed without compiled code.
    """
    number = FAMILY.kernel()
    if number is None:
        raise SlipstreamError(
            "searching programs needs the compiled library, which is not available",
            remedy="install a C++17 compiler, reinstall slipstream and unset SLIPSTREAM_NATIVE",
        )
    return number


def run(
    task: Task, programs: NDArray[np.uint8], *, number: int | None = None, threads: int = 1
) -> Results:
    """Run programs on all inputs.

    Args:
        programs: ids of functions, uint8 [programs, length].
        number: one of ``FAMILY.kernels``; the fastest by default.
    """
    programs = np.ascontiguousarray(programs, np.uint8)
    count, length = programs.shape
    rows = len(task.numbers)
    valid = np.zeros(count, np.bool_)
    lists = np.zeros((count, rows, MAX_LIST), np.int16)
    counts = np.zeros((count, rows), np.int16)
    FAMILY.call(
        "synthesis_run", kernel() if number is None else number, ctypes.byref(task.structure),
        array_pointer(programs), count, length, array_pointer(valid), array_pointer(lists),
        array_pointer(counts), threads,
    )  # fmt: skip
    return Results(valid, lists, counts)


def enumerate_programs(
    task: Task, max_length: int, *, max_candidates: int, max_seconds: float, extra: int = 0,
    capacity: int = 1000,
) -> Found:  # fmt: skip
    """Try all programs up to a length, shortest first, one for each state they reach.

    Args:
        extra: lengths searched beyond the shortest program.
        capacity: maximum number of programs returned.
    """
    programs = np.zeros((capacity, MAX_LENGTH), np.uint8)
    lengths = np.zeros(capacity, np.int32)
    search = _SEARCH(
        max_candidates,
        max_seconds,
        max_length,
        extra,
        capacity,
        array_pointer(programs),
        array_pointer(lengths),
    )
    FAMILY.call("synthesis_enumerate", kernel(), ctypes.byref(task.structure), ctypes.byref(search))
    rows = zip(programs.tolist(), lengths.tolist(), strict=True)
    return Found(
        tuple(tuple(row[:length]) for row, length in list(rows)[: search.found]),
        search.candidates, search.states, search.complete, search.seconds,
    )  # fmt: skip
