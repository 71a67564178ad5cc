"""Guided search for long programs: a beam of the states that are closest to the outputs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import SlipstreamError
from slipstream.files import read_arrays, replacing
from slipstream.synthesis.examples import Examples
from slipstream.synthesis.fitness import Fitness, Goal, Ints, States
from slipstream.synthesis.kernels import Found, Results, Task, run
from slipstream.synthesis.language import FUNCTIONS, NUMBERS

MAX_CANDIDATES = 3_000_000
_TOGETHER = 512  # states that are continued at a time
_MAX_FOUND = 1000
_MIN_MEASURED = 50_000  # candidates after which the time per candidate is known
_MIX = np.random.default_rng(0).integers(1 << 63, size=(8, 256), dtype=np.uint64) * np.uint64(2)
_MIX += np.uint64(1)


@dataclass
class GuidedSearch:
    """Programs, shortest first, each level limited to the states with the highest fitness.

    The width of a level leaves an equal share of the remaining candidates to all further levels.
    A candidate is a program that was run, also one that reaches a known state.

    Attributes:
        closest: the first program that met the most examples, and how many it met.
        interrupted: whether Ctrl-C ended the search.
        store: file of the last level, from which a search that was killed continues; None for no
            file. It is removed at the end, unless time ran out.
    """

    examples: Examples
    fitness: Fitness
    max_length: int
    max_candidates: int = MAX_CANDIDATES
    max_seconds: float = 60.0
    store: Path | None = None
    closest: tuple[tuple[int, ...], int] = ((), 0)
    interrupted: bool = False
    _found: list[tuple[int, ...]] = field(default_factory=list)
    _candidates: int = 0
    _complete: int = 0

    def run(self) -> Found:
        """Search until a length has programs that meet all examples; Ctrl-C ends the search."""
        self._began = time.perf_counter()
        try:
            if self._search() and self.store is not None:
                self.store.unlink(missing_ok=True)
        except KeyboardInterrupt:
            self.interrupted = True
        found = tuple(self._found[:_MAX_FOUND])
        return Found(found, self._candidates, self._complete, self._elapsed())

    def _elapsed(self) -> float:
        return time.perf_counter() - self._began

    def _search(self) -> bool:
        """Return whether the search ended; otherwise more time would continue it."""
        self._task = Task(self.examples.inputs, self.examples.outputs)
        self._goal = Goal(self.examples.outputs)
        states = start(self.examples)
        seen = _identity(states.hashes)
        if self.store is not None and self.store.exists():
            with suppress(SlipstreamError, LookupError, ValueError):
                states, seen = self._resumed(read_arrays(self.store))
        is_complete = self._complete == states.programs.shape[1]
        for length in range(states.programs.shape[1] + 1, self.max_length + 1):
            self._save(states, seen)
            parts = []
            for at in range(0, len(states.programs), _TOGETHER):
                part = states.rows(slice(at, at + _TOGETHER))
                needed = len(part.programs) * len(FUNCTIONS)
                if self._remaining() < needed or self._elapsed() > self.max_seconds:
                    return self.max_candidates - self._candidates < needed
                parts.append(self._continued(part, seen, length))
            self._complete += is_complete
            scores = np.concatenate([score for _, score in parts])
            if self._found or not len(scores):
                return True
            states = States(*map(np.concatenate, zip(*(new for new, _ in parts), strict=True)))
            found, rows = np.unique(_identity(states.hashes), return_index=True)
            seen = np.union1d(seen, found)
            further = len(FUNCTIONS) * max(1, self.max_length - length)
            width = max(1, self._remaining() // further)
            if len(rows) > width:
                rows = rows[np.argpartition(-scores[rows], width)[:width]]
                is_complete = False
            states = states.rows(rows)
        return True

    def _save(self, states: States, seen: NDArray[np.uint64]) -> None:
        if self.store is None:
            return
        functions, met = self.closest
        counters = np.array([self._candidates, self._complete, met, *functions])
        values = {"seen": seen, "counters": counters, **states._asdict()}
        try:
            self.store.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.store) as path, path.open("wb") as file:
                np.savez(file, seconds=self._elapsed(), **values)
        except OSError:
            self.store = None  # a search need not be resumable

    def _resumed(self, arrays: Mapping[str, NDArray[Any]]) -> tuple[States, NDArray[np.uint64]]:
        states = States(*(arrays[name] for name in States._fields))
        seen, seconds = arrays["seen"], float(arrays["seconds"])
        self._candidates, self._complete, met, *functions = arrays["counters"].tolist()
        self.closest, self._began = (tuple(functions), met), self._began - seconds
        return states, seen

    def _remaining(self) -> int:
        """Return the number of candidates that limit and time allow."""
        remaining = self.max_candidates - self._candidates
        if self._candidates < _MIN_MEASURED:
            return remaining
        rate = self._candidates / self._elapsed()
        return min(remaining, int(rate * (self.max_seconds - self._elapsed())))

    def _continued(
        self, parents: States, seen: NDArray[np.uint64], length: int
    ) -> tuple[States, NDArray[np.float32]]:
        """Run all programs that continue states; return new states and their fitness."""
        count = len(parents.programs)
        functions = np.tile(np.arange(len(FUNCTIONS), dtype=np.uint8), count)
        programs = np.column_stack([parents.programs.repeat(len(FUNCTIONS), 0), functions])
        results = run(self._task, programs)
        self._candidates += len(programs)
        met = self._goal.met(results).sum(1)
        if met.max() > self.closest[1]:
            self.closest = tuple(programs[met.argmax()].tolist()), int(met.max())
        self._found += map(tuple, programs[met == len(self.examples.outputs)].tolist())
        is_last = length == self.max_length or bool(self._found)
        rows = np.flatnonzero(results.valid)[: 0 if is_last else None]
        states = advanced(parents.rows(rows // len(FUNCTIONS)), programs[rows], results, rows)
        found, first = np.unique(_identity(states.hashes), return_index=True)
        places = np.minimum(np.searchsorted(seen, found), len(seen) - 1)
        states = states.rows(first[seen[places] != found])
        if not len(states.programs):
            return states, np.zeros(0, np.float32)
        return states, self.fitness(states, self._goal)


def start(examples: Examples) -> States:
    """Return the state before the first function."""
    numbers, lists, counts, *_ = Task(examples.inputs).arrays
    number, x, y = numbers[None], lists[None, ::2], lists[None, 1::2]
    x_counts, y_counts = counts[None, ::2], counts[None, 1::2]
    single = np.zeros_like(x)
    single[..., 0] = number
    hashes = [hashed(single, np.full_like(number, -1)), hashed(x, x_counts), hashed(y, y_counts)]
    programs = np.zeros((1, 0), np.uint8)
    return States(programs, number, x, x_counts, y, y_counts, np.stack(hashes, 1))


def advanced(
    parents: States, programs: NDArray[np.uint8], results: Results, rows: NDArray[np.intp]
) -> States:
    """Return the states behind one more function, whose results are at `rows`."""
    lists, counts = results.lists[rows], results.counts[rows]
    is_number = programs[:, -1] < NUMBERS
    flat, deep, hashes = is_number[:, None], is_number[:, None, None], hashed(lists, counts)
    old = parents.hashes.T
    new = [np.where(is_number, hashes, old[0]), np.where(is_number, old[1], hashes),
           np.where(is_number, old[2], old[1])]  # fmt: skip
    return States(
        programs, np.where(flat, lists[:, :, 0], parents.numbers),
        np.where(deep, parents.last, lists), np.where(flat, parents.last_counts, counts),
        np.where(deep, parents.before, parents.last),
        np.where(flat, parents.before_counts, parents.last_counts), np.stack(new, 1),
    )  # fmt: skip


def hashed(lists: Ints, counts: Ints) -> NDArray[np.uint64]:
    """Return hashes of rows of values, uint64 [rows]; `lists` is [rows, examples, 20]."""
    words = lists.reshape(len(lists), lists.shape[1] * lists.shape[2]).view(np.uint64)
    words = np.concatenate([words, counts.astype(np.int64).view(np.uint64)], 1) * _MIX[0, 0]
    words ^= words >> np.uint64(32)
    result: NDArray[np.uint64] = words @ _MIX[1:].ravel()[: words.shape[1]]
    return result


def _identity(hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a hash of whole states."""
    mixed = hashes * _MIX[0, 1:4]
    mixed ^= mixed >> np.uint64(29)
    result: NDArray[np.uint64] = mixed @ _MIX[0, 4:7]
    return result
