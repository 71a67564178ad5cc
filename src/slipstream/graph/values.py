"""The columns a graph consists of: tables of equally long arrays, and what their codes mean.

Lifetimes of `Allocations` are task ids, not times: when a task moves, what it allocates moves with
it, and the simulation of an edited graph gives the memory of the edited step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, ClassVar, Self, get_args, get_type_hints

import numpy as np
from numpy.typing import ArrayLike, NDArray

from slipstream.errors import GraphError
from slipstream.provenance import Provenance

PROVENANCES = tuple(Provenance)
"""Provenance by the code in `Tasks.provenance`."""
MODULE_RANGE = "module::"
"""What the annotations begin with that slipstream's own hooks open around modules' forwards."""
CLOSURE_RANGE = "slipstream::closure"
"""Annotation of a closure that ``Optimizer.step`` calls: it is not part of the update."""


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
    firsts: NDArray[Any] = numbers[np.sort(first[first >= 0])]
    return firsts


def _item_of(hint: Any) -> Any:
    """The np.int32 of an ``NDArray[np.int32]``.

    To numpy before 2.5 and Python before 3.12 that is an ndarray of a shape and of a
    ``np.dtype[np.int32]``, to later ones an alias of which np.int32 is the only argument.
    """
    last = get_args(hint)[-1]
    return next(iter(get_args(last)), last)


@dataclass(frozen=True, eq=False)
class Columns:
    """Base of tables whose columns are arrays of one length; equal where all bytes are.

    Attributes:
        dtypes: of each column, in the order of the table's fields, as these are annotated.
    """

    dtypes: ClassVar[Mapping[str, Any]]

    def __init_subclass__(cls) -> None:
        hints = get_type_hints(cls)
        cls.dtypes = {name: _item_of(hints[name]) for name in cls.__annotations__}

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

    def check_lengths(self, whose: str) -> None:
        """Raise a `GraphError` where one column is not as long as the first."""
        for name, column in self.columns().items():
            if column.shape != (len(self),):
                raise GraphError(f"{whose} '{name}' has shape {column.shape}, not ({len(self)},)")

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


def check_range(column: NDArray[Any], low: int, high: int, name: str, row: str = "row") -> None:
    """Raise a `GraphError` where a number of `column` is not in [low, high)."""
    bad = np.flatnonzero((column < low) | (column >= high))
    if len(bad):
        raise GraphError(f"{row} {bad[0]}: {name} {column[bad[0]]} is outside [{low}, {high})")


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

    source: NDArray[np.int32]
    target: NDArray[np.int32]
    kind: NDArray[np.uint8]
    delay_ns: NDArray[np.float64]
    lag: NDArray[np.uint8]


@dataclass(frozen=True)
class Edit:
    """One change made to a graph, for people.

    Attributes:
        note: what to know before one decides for it, as a cheaper choice; empty for nothing.
    """

    technique: str
    what: str
    tasks: int
    note: str = ""


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


class Role(IntEnum):
    """What an allocation holds."""

    OTHER = 0
    PARAMETER = 1
    BUFFER = 2
    GRADIENT = 3
    OPTIMIZER = 4
    INPUT = 5
    ACTIVATION = 6
    TEMPORARY = 7


@dataclass(frozen=True, eq=False)
class Allocations(Columns):
    """Columns over the m allocations of a step.

    An allocation that one task both makes and frees is that task's workspace: what it needs while
    it runs, beyond what it leaves behind.

    Attributes:
        nbytes: int64 [m].
        storage: int32 [m], the id in `Graph.operands`; -1 unknown.
        role: uint8 [m], `Role`.
        producer: int32 [m], the task whose start allocates it; -1: it exists before the step.
        release: int32 [m], the task after which it is freed; -1: it outlives the step.
    """

    nbytes: NDArray[np.int64]
    storage: NDArray[np.int32]
    role: NDArray[np.uint8]
    producer: NDArray[np.int32]
    release: NDArray[np.int32]

    def handed_on(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rows of what the step before left and this one frees, each beside what it leaves so.

        The same number of bytes tells: a loop's loss that makes way for the next one's. Two int64
        [pairs], in ascending order of the first.
        """
        others = self.role == Role.OTHER
        left: dict[int, list[int]] = {}
        for row in np.flatnonzero(others & (self.producer >= 0) & (self.release < 0)).tolist():
            left.setdefault(int(self.nbytes[row]), []).append(row)
        pairs = [
            (row, rows.pop(0))
            for row in np.flatnonzero(others & (self.producer < 0) & (self.release >= 0)).tolist()
            if (rows := left.get(int(self.nbytes[row])))
        ]
        before, after = np.array(pairs, np.int64).reshape(-1, 2).T
        return before, after

    def check(self, tasks: int) -> None:
        """Raise a `GraphError` naming the first row that cannot belong to a graph of `tasks`."""
        self.check_lengths("memory's")
        for name, low, high in (
            ("nbytes", 0, _LARGEST_BYTES),
            ("storage", -1, 1 << 31),
            ("role", 0, len(Role)),
            ("producer", -1, tasks),
            ("release", -1, tasks),
        ):
            check_range(getattr(self, name), low, high, name, "allocation")
        if float(self.nbytes.sum(dtype=np.float64)) >= _LARGEST_BYTES:
            raise GraphError("the allocations add up to more than 2^62 bytes")


_LARGEST_BYTES = 1 << 62
