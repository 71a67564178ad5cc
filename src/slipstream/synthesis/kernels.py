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
    "void* programs, lengths; int64_t candidates; int32_t found, complete; double seconds;"
)
FAMILY = Family("synthesis", {
    "synthesis_run": [INT32, POINTER, POINTER, INT64, INT32, POINTER, POINTER, POINTER, INT32],
    "synthesis_enumerate": [INT32, POINTER, POINTER],
})  # fmt: skip


class Task:
    """Inputs of programs, at most 32, and the expected outputs of the first ones."""

    def __init__(self, inputs: Sequence[Sequence[Value]], outputs: Sequence[Value] = ()) -> None:
        self.inputs = len(inputs)
        numbers, *lists = zip(*map(last_values, inputs), strict=True)
        rows = [values for pair in zip(*lists, strict=True) for values in pair]
        expected = [output if isinstance(output, list) else [output] for output in outputs]
        self.arrays = np.array(numbers, np.int16), *padded(rows), *padded(expected)
        is_list = bool(outputs) and isinstance(outputs[0], list)
        pointers = map(array_pointer, self.arrays)
        self.structure = _TASK(len(inputs), len(outputs), is_list, *pointers)


def padded(rows: Sequence[list[int]]) -> tuple[NDArray[np.int16], NDArray[np.int16]]:
    """Return lists, int16 [lists, 20], and their lengths."""
    lists = np.zeros((len(rows), MAX_LIST), np.int16)
    for row, values in enumerate(rows):
        lists[row, : len(values)] = values
    return lists, np.array([len(values) for values in rows], np.int16)


@dataclass(frozen=True, eq=False)
class Results:
    """Results of programs.

    Attributes:
        valid: whether they are valid on the task's examples, bool [programs].
        lists: int16 [programs, inputs, 20]; a number is in the first place.
        counts: int16 [programs, inputs]; -1 for a number, -2 where the program is invalid.
    """

    valid: NDArray[np.bool_]
    lists: NDArray[np.int16]
    counts: NDArray[np.int16]

    def value(self, program: int, row: int) -> Value | None:
        """Return a result; None where the program is invalid."""
        count, values = int(self.counts[program, row]), self.lists[program, row].tolist()
        return None if count == -2 else int(values[0]) if count == -1 else values[:count]


@dataclass(frozen=True)
class Found:
    """Programs that meet all examples, shortest first; all up to length `complete` were tried."""

    programs: tuple[tuple[int, ...], ...]
    candidates: int
    complete: int
    seconds: float


def kernel() -> int:
    """Return the fastest kernel; raise a `SlipstreamError` without compiled code."""
    if (number := FAMILY.kernel()) is None:
        what = "searching programs needs the compiled library, which is not available"
        remedy = "install a C++17 compiler, reinstall slipstream and unset SLIPSTREAM_NATIVE"
        raise SlipstreamError(what, remedy=remedy)
    return number


def run(task: Task, programs: NDArray[np.uint8], *, number: int | None = None) -> Results:
    """Run programs, uint8 [programs, length], on all inputs; `number` is a kernel's."""
    programs = np.ascontiguousarray(programs, np.uint8)
    count, length = programs.shape
    lists = np.zeros((count, task.inputs, MAX_LIST), np.int16)
    results = Results(np.zeros(count, np.bool_), lists, np.zeros(lists.shape[:2], np.int16))
    FAMILY.call(
        "synthesis_run", kernel() if number is None else number, ctypes.byref(task.structure),
        array_pointer(programs), count, length, *map(array_pointer, vars(results).values()), 1,
    )  # fmt: skip
    return results


def find_programs(
    task: Task, max_length: int, *, max_candidates: int, max_seconds: float, extra: int = 0,
    capacity: int = 1000,
) -> Found:  # fmt: skip
    """Try all programs up to a length, shortest first, one for each state they reach.

    Args:
        extra: lengths searched beyond the shortest program; at most `capacity` are returned.
    """
    programs, lengths = np.zeros((capacity, MAX_LENGTH), np.uint8), np.zeros(capacity, np.int32)
    search = _SEARCH(
        max_candidates, max_seconds, max_length, extra, capacity, array_pointer(programs),
        array_pointer(lengths),
    )  # fmt: skip
    task_and_search = ctypes.byref(task.structure), ctypes.byref(search)
    FAMILY.call("synthesis_enumerate", kernel(), *task_and_search)
    rows = [programs[n, : lengths[n]].tolist() for n in range(search.found)]
    return Found(tuple(map(tuple, rows)), search.candidates, search.complete, search.seconds)
