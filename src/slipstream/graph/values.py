"""The columns a graph consists of: tables of equally long arrays, and what their codes mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from slipstream.provenance import Provenance

PROVENANCES = tuple(Provenance)
"""Provenance by the code in `Tasks.provenance`."""
MODULE_RANGE = "module::"
"""What the annotations begin with that slipstream's own hooks open around modules' forwards."""


class Kind(IntEnum):
    """What a task is."""

    HOST = 0
    OP = 1
    LAUNCH = 2
    KERNEL = 3
    COPY = 4
    COMMUNICATION = 5
    WAIT = 6
    COLLECTION = 7


class StepPhase(IntEnum):
    """Which part of a step a task belongs to."""

    OTHER = 0
    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 3


class Dependency(IntEnum):
    """Why one task waits for another (Daydream's five kinds, Lumos's two, and data)."""

    THREAD_ORDER = 0
    STREAM_ORDER = 1
    LAUNCH = 2
    SYNCHRONISATION = 3
    COMMUNICATION = 4
    THREAD_TO_THREAD = 5
    STREAM_TO_STREAM = 6
    DATA = 7


_SHORTEST_STRETCH = 16


def stretches(order: NDArray[np.int64]) -> NDArray[np.int64] | list[slice]:
    """`order` as the stretches of consecutive numbers it consists of, where those are long.

    Copying these is several times as fast as picking one element after the other. What is negative
    stands alone.
    """
    begins = np.flatnonzero((np.diff(order) != 1) | (order[:-1] < 0)) + 1
    if not len(order) or len(begins) * _SHORTEST_STRETCH > len(order):
        return order
    firsts, lasts = order[np.append(0, begins)], order[np.append(begins, len(order)) - 1]
    return [
        slice(first, last + 1) for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True)
    ]


def taken(column: NDArray[Any], order: NDArray[np.int64] | list[slice]) -> NDArray[Any]:
    """The elements of `column` at `order`, as `stretches` gives it: a copy."""
    if not isinstance(order, list):
        return column[order]
    return np.concatenate([column[run.start : run.stop or None] for run in order])


def distinct(numbers: NDArray[Any], below: int) -> NDArray[Any]:
    """Each of `numbers` (0 <= number < `below`) once, in the order in which they come first."""
    first = np.full(below, -1)
    # Of several values for one place the last one stays.
    first[numbers[::-1]] = np.arange(len(numbers))[::-1]
    found: NDArray[Any] = numbers[np.sort(first[first >= 0])]
    return found


@dataclass(frozen=True, eq=False)
class Columns:
    """Base of tables whose columns are arrays of one length; equal where all bytes are.

    Attributes:
        dtypes: of each column, in the order of the table's fields.
    """

    dtypes: ClassVar[Mapping[str, Any]]

    @classmethod
    def of(cls, *columns: ArrayLike) -> Self:
        """The table of anything array-like, copied into the columns' dtypes."""
        table: Callable[..., Self] = cls
        pairs = zip(columns, cls.dtypes.values(), strict=True)
        return table(*(np.array(column, dtype) for column, dtype in pairs))

    @classmethod
    def none(cls) -> Self:
        """No rows."""
        return cls.of(*[()] * len(cls.dtypes))

    def __len__(self) -> int:
        return len(next(iter(self.columns().values())))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, type(self)):
            return NotImplemented
        theirs = other.columns()
        return all(same_bytes(ours, theirs[name]) for name, ours in self.columns().items())

    def columns(self) -> dict[str, NDArray[Any]]:
        """The arrays by name."""
        return {name: getattr(self, name) for name in self.dtypes}

    def take(self, order: NDArray[np.int64]) -> Self:
        """The rows at `order`; a row may be taken more than once."""
        runs = stretches(order)
        return replace(self, **{name: taken(one, runs) for name, one in self.columns().items()})

    def joined(self, *others: Self) -> Self:
        """These rows, and behind them those of `others`."""
        tables = [table.columns() for table in (self, *others)]
        return replace(
            self, **{name: np.concatenate([table[name] for table in tables]) for name in tables[0]}
        )


def same_bytes(one: NDArray[Any], other: NDArray[Any]) -> bool:
    """Whether two columns are of one dtype and equal bit by bit."""
    return one.dtype == other.dtype and one.tobytes() == other.tobytes()


@dataclass(frozen=True, eq=False)
class Tasks(Columns):
    """Columns over the n tasks, in program order within each lane.

    Attributes:
        name, scope, module, source: int32 [n], indices into `Graph.strings`; `scope` is the chain
            of enclosing operators, `module` the qualified name of the innermost module, `source`
            the user's ``file:line`` that called it.
        kind, phase: uint8 [n], `Kind` and `StepPhase`.
        lane, rank: int32 [n].
        call: int32 [n], index into `Graph.calls`; -1 when the operator's arguments are unknown.
        sequence: int64 [n], autograd's number that ties a backward task to its forward; -1: none.
        duration_ns: float64 [n].
        gap_ns: float64 [n], time after the task during which its lane does something untracked:
            Python, the framework's dispatch.
        spread: float64 [n], relative half-width of the middle half of the task's durations.
        provenance: uint8 [n], index into `PROVENANCES`, of `duration_ns`.
    """

    dtypes: ClassVar[Mapping[str, Any]] = {
        "name": np.int32, "scope": np.int32, "module": np.int32, "source": np.int32,
        "kind": np.uint8, "phase": np.uint8, "lane": np.int32, "rank": np.int32, "call": np.int32,
        "sequence": np.int64, "duration_ns": np.float64, "gap_ns": np.float64,
        "spread": np.float64, "provenance": np.uint8,
    }  # fmt: skip

    name: NDArray[np.int32]
    scope: NDArray[np.int32]
    module: NDArray[np.int32]
    source: NDArray[np.int32]
    kind: NDArray[np.uint8]
    phase: NDArray[np.uint8]
    lane: NDArray[np.int32]
    rank: NDArray[np.int32]
    call: NDArray[np.int32]
    sequence: NDArray[np.int64]
    duration_ns: NDArray[np.float64]
    gap_ns: NDArray[np.float64]
    spread: NDArray[np.float64]
    provenance: NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Edges(Columns):
    """Dependencies across lanes (the order within a lane is implied by program order).

    Attributes:
        source, target: int32 [m], task indices.
        kind: uint8 [m], `Dependency`.
        delay_ns: float64 [m].
        lag: uint8 [m], 0, or 1 when the target belongs to the next step.
    """

    dtypes: ClassVar[Mapping[str, Any]] = {
        "source": np.int32, "target": np.int32, "kind": np.uint8, "delay_ns": np.float64,
        "lag": np.uint8,
    }  # fmt: skip

    source: NDArray[np.int32]
    target: NDArray[np.int32]
    kind: NDArray[np.uint8]
    delay_ns: NDArray[np.float64]
    lag: NDArray[np.uint8]


@dataclass(frozen=True)
class Edit:
    """One change made to a graph, for people."""

    technique: str
    what: str
    tasks: int


class StringTable:
    """Interns strings while a graph is made; index 0 is the empty string."""

    def __init__(self, strings: Sequence[str] = ("",)) -> None:
        self._index = {text: number for number, text in enumerate(strings)}

    def add(self, text: str) -> int:
        """The index of `text`, added if new."""
        return self._index.setdefault(text, len(self._index))

    def freeze(self) -> tuple[str, ...]:
        """All strings by index."""
        return tuple(self._index)
