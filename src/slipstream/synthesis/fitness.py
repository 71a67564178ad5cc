"""Learned fitness of programs by their values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.synthesis.kernels import Results, padded
from slipstream.synthesis.language import HIGH, LOW, MAX_LIST, Value

Ints = NDArray[np.int16]
Floats = NDArray[np.float32]
_VALUES = HIGH - LOW + 1


class States(NamedTuple):
    """Values that later functions of programs read, on all examples.

    Attributes:
        programs: uint8 [states, length].
        numbers: int16 [states, examples].
        last, last_counts: int16 [states, examples, 20] and [states, examples].
        before, before_counts: the list before, likewise.
        hashes: of the numbers and both lists, uint64 [states, 3].
    """

    programs: NDArray[np.uint8]
    numbers: Ints
    last: Ints
    last_counts: Ints
    before: Ints
    before_counts: Ints
    hashes: NDArray[np.uint64]

    def rows(self, rows: Any) -> States:
        """Return some of the states."""
        return States(*(values[rows] for values in self))


class Goal:
    """Expected outputs, with the positions of every value in each of them."""

    def __init__(self, outputs: Sequence[Value]) -> None:
        self.is_list = isinstance(outputs[0], list)
        rows = [output if isinstance(output, list) else [output] for output in outputs]
        self.values, self.counts = padded(rows)
        self.table = np.zeros((len(rows), _VALUES), np.uint32)
        for example, row in enumerate(rows):
            for at, value in enumerate(row):
                self.table[example, value - LOW] |= np.uint32(1 << at)

    def met(self, results: Results) -> NDArray[np.bool_]:
        """Return whether results are as expected, bool [programs, examples]."""
        counts = self.counts if self.is_list else -1
        equal: NDArray[np.bool_] = (results.lists == self.values).all(2)
        equal &= (results.counts == counts) & results.valid[:, None]
        return equal

    def positions(self, lists: Ints) -> NDArray[np.uint32]:
        """Return where values occur in the outputs, as bits; `lists` is [20, examples, lists]."""
        starts = np.arange(len(self.table), dtype=np.int32)[:, None] * _VALUES - LOW
        return self.table.ravel().take(lists + starts)


Fitness = Callable[[States, Goal], Floats]
"""Score states, float32 [states]: higher is closer to the goal."""


def distances(found: NDArray[np.uint32], counts: Ints, goal: Goal) -> NDArray[np.int32]:
    """Return edit distances, [examples, lists], one element of all lists at a time.

    Source: Hyyrö, "A Bit-Vector Algorithm for Computing Levenshtein and Damerau Edit Distances",
    2003, after Myers, 1999.
    """
    size = goal.counts.astype(np.uint32)[:, None]
    bit, top = np.uint32(1), np.maximum(size, 1) - np.uint32(1)
    up, down = np.zeros_like(found[0]) + (bit << size) - bit, np.zeros_like(found[0])
    distance = np.zeros(found[0].shape, np.int32) + goal.counts[:, None]
    for at in range(int(counts.max(initial=0))):
        equal = found[at]
        same = (((equal & up) + up) ^ up) | equal | down
        right, left = down | ~(same | up), same & up
        change = (right >> top & bit).view(np.int32) - (left >> top & bit).view(np.int32)
        distance += change * (counts > at)
        right, left = right << bit | bit, left << bit
        up, down = left | ~(same | right), right & same
    return np.where(goal.counts[:, None] == 0, counts, distance)


def learned(states: States, goal: Goal) -> Floats:
    """Score by a network that was trained to recognize the states on the way to a goal."""
    network = _networks()
    values = features(states, goal)
    kind = "list" if goal.is_list else "number"
    for layer in range(3):
        values = values @ network[f"{kind}.{layer}.weight"] + network[f"{kind}.{layer}.bias"]
        values = np.maximum(values, 0) if layer < 2 else values
    return values[:, 0]


@functools.cache
def _networks() -> Mapping[str, Floats]:
    with files("slipstream.synthesis").joinpath("fitness.npz").open("rb") as file:
        return {name: np.asarray(value, np.float32) for name, value in np.load(file).items()}


def features(states: States, goal: Goal) -> Floats:
    """Return the mean and minimum over examples of comparisons with the goal, [states, 2 n]."""
    lists = np.concatenate([states.last, states.before])
    counts = np.concatenate([states.last_counts, states.before_counts])
    hashes = states.hashes[:, 1:].T.ravel()
    _, first, place = np.unique(hashes, return_index=True, return_inverse=True)
    kind = _list_features if goal.is_list else _number_features
    x = np.ascontiguousarray(lists[first].transpose(2, 1, 0))
    traits = _pooled(kind(x, counts[first].T, goal))[place.reshape(2, -1)]
    n, size = states.numbers.T.astype(np.int32), states.last_counts.T
    expected = goal.counts if goal.is_list else goal.values[:, 0]
    off = _log(n - expected[:, None])
    number = [_log(n), off, np.abs(off), off == 0, (n >= 0) & (n < size), n == 0,
              goal.positions(n[None].astype(np.int16))[0] != 0]  # fmt: skip
    return np.concatenate([*traits, _pooled(number)], 1)


def _pooled(rows: Sequence[NDArray[Any]]) -> Floats:
    result = np.empty((2 * len(rows), rows[0].shape[1]), np.float32)
    for at, row in enumerate(rows):
        row = row.astype(np.float32)
        result[2 * at], result[2 * at + 1] = row.mean(0), row.min(0)
    return np.ascontiguousarray(result.T)


def _log(values: NDArray[Any]) -> Floats:
    values = values.astype(np.float32)
    return np.asarray(np.sign(values) * np.log1p(np.abs(values)) / 6, np.float32)


def _statistics(x: Ints, counts: Ints) -> list[NDArray[Any]]:
    """Return maximum, minimum, sum, first, last; shares that are positive, negative, odd, rise."""
    real = np.arange(len(x))[:, None, None] < counts
    some, size = counts > 0, np.maximum(counts, 1).astype(np.float32)
    rises = ((x[1:] >= x[:-1]) & real[1:]).sum(0, dtype=np.int16)
    last = np.take_along_axis(x, np.maximum(counts, 1)[None].astype(np.intp) - 1, 0)[0]
    parts = [test.sum(0, dtype=np.int16) for test in (x > 0, x < 0, (x & 1) == 1)]
    return [
        np.where(real, x, LOW - 1).max(0) * some, np.where(real, x, HIGH + 1).min(0) * some,
        x.sum(0, dtype=np.int16), x[0], last, *(part / size for part in [*parts, rises]),
    ]  # fmt: skip


def _list_features(x: Ints, counts: Ints, goal: Goal) -> list[NDArray[Any]]:
    goal_x, goal_counts = goal.values.T[:, :, None], goal.counts[:, None]
    real = np.arange(MAX_LIST)[:, None, None] < counts
    both = real & (np.arange(MAX_LIST)[:, None, None] < goal_counts)
    size, goal_size = np.maximum(counts, 1), np.maximum(goal_counts, 1).astype(np.float32)
    found = goal.positions(x)
    negated = np.where(real, goal.positions(np.minimum(-x, HIGH)), np.uint32(0))
    distance = distances(found, counts, goal)
    found = np.where(real, found, np.uint32(0))
    covered = [_bits(np.bitwise_or.reduce(bits, 0)) / goal_size for bits in (found, negated)]
    shared = np.maximum(both.sum(0, dtype=np.int16), 1).astype(np.float32)
    off = np.where(both, x - goal_x, 0).astype(np.float32)
    mean = off.sum(0) / shared
    spread = np.sqrt(np.maximum(np.square(off).sum(0) / shared - mean * mean, 0))
    steps = (x[1:] == goal_x[1:] - goal_x[:-1]) & both[1:]
    own, expected = _statistics(x, counts), _statistics(goal_x, goal_counts)
    ends: list[NDArray[Any]] = [goal_counts / MAX_LIST, *map(_log, expected[:2]), expected[8]]
    pairs = list(zip(own, expected, strict=True))
    return [
        counts / MAX_LIST, (counts - goal_counts) / 10, np.abs(counts - goal_counts) / 10,
        counts == goal_counts, distance / MAX_LIST, distance / np.maximum(size, goal_size),
        distance == 0, ((off == 0) & both).sum(0, dtype=np.int16) / goal_size,
        (found != 0).sum(0, dtype=np.int16) / size.astype(np.float32), *covered, _log(mean),
        _log(spread), steps.sum(0, dtype=np.int16) / goal_size,
        *(_log(value - other) for value, other in pairs[:3]),
        *(value == other for value, other in pairs[:5]),
        *(value - other for value, other in pairs[5:]), *own[7:], _log(own[0]), _log(own[1]),
        *(value + 0 * counts for value in ends),
    ]  # fmt: skip


def _number_features(x: Ints, counts: Ints, goal: Goal) -> list[NDArray[Any]]:
    target = goal.values[:, :1].astype(np.int32)
    real = np.arange(MAX_LIST)[:, None, None] < counts
    near = np.where(real, np.abs(x - target), _VALUES).min(0)
    own = _statistics(x, counts)
    size = np.maximum(counts, 1).astype(np.float32)
    amounts = [counts, *(np.rint(share * size) for share in own[5:8])]
    off = [_log(value - target) for value in own[:5]]
    return [
        counts / MAX_LIST, *(amount == target for amount in amounts),
        counts - amounts[3] == target, *(value == 0 for value in off), near == 0,
        _log(np.minimum(near, 300)), *off, *map(np.abs, off), _log(counts - target), *own[5:],
        _log(own[0]), _log(own[1]), _log(target) + 0 * counts,
        ((target >= 0) & (target <= MAX_LIST)) + 0 * counts, target > own[1], target < own[0],
    ]  # fmt: skip


def _bits(values: NDArray[np.uint32]) -> Floats:
    low, high = np.uint32(1023), np.uint32(10)
    return np.asarray(_BITS[values & low] + _BITS[values >> high], np.float32)


_BITS = np.array([n.bit_count() for n in range(1024)], np.float32)
