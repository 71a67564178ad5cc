"""The columns of a graph: tables of equally long arrays, and the meaning of their codes.

Lifetimes of `Allocations` are task ids, not times: allocations move with their task, and the
simulation of an edited graph gives the memory of the edited step.
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
"""Prefix of the annotations that slipstream's hooks open around modules' forwards."""
CLOSURE_RANGE = "slipstream::closure"
"""Annotation of a closure that ``Optimizer.step`` calls: it is not part of the update."""


class Kind(IntEnum):
    """Type of a task."""

    HOST = 0
    OP = 1
    LAUNCH = 2
    KERNEL = 3
    COPY = 4
    COMMUNICATION = 5
    WAIT = 6
    COLLECTION = 7


class StepPhase(IntEnum):
    """Part of a step."""

    OTHER = 0
    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 3


class Dependency(IntEnum):
    """Reason for a task to wait for another (Daydream's five kinds, Lumos's two, and data)."""

    THREAD_ORDER = 0
    STREAM_ORDER = 1
    LAUNCH = 2
    SYNCHRONISATION = 3
    COMMUNICATION = 4
    THREAD_TO_THREAD = 5
    STREAM_TO_STREAM = 6
    DATA = 7


_MIN_MEAN_STRETCH = 16


def stretches(order: NDArray[np.int64]) -> NDArray[np.int64] | list[slice]:
    """Return `order` as slices of consecutive numbers if those are long on average.

    Copying slices is several times as fast as indexing single elements. Each negative number has
    a separate slice.
    """
    begins = np.flatnonzero((np.diff(order) != 1) | (order[:-1] < 0)) + 1
    if not len(order) or len(begins) * _MIN_MEAN_STRETCH > len(order):
        return order
    firsts, lasts = order[np.append(0, begins)], order[np.append(begins, len(order)) - 1]
    return [
        slice(first, last + 1) for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True)
    ]


def take_runs(column: NDArray[Any], order: NDArray[np.int64] | list[slice]) -> NDArray[Any]:
    """Return a copy of the elements of `column` at `order`, as `stretches` returns it."""
    if not isinstance(order, list):
        return column[order]
    return np.concatenate([column[run.start : run.stop or None] for run in order])


def unique_in_order(numbers: NDArray[Any], below: int) -> NDArray[Any]:
    """Return the distinct `numbers` (0 <= number < `below`), in order of first occurrence."""
    first = np.full(below, -1)
    # Reversed, because of several assignments to one index the last one wins.
    first[numbers[::-1]] = np.arange(len(numbers))[::-1]
    firsts: NDArray[Any] = numbers[np.sort(first[first >= 0])]
    return firsts


def _item_of(hint: Any) -> Any:
    """Return the scalar type of an ``NDArray`` annotation.

    Before numpy 2.5 and Python 3.12, ``NDArray[np.int32]`` is an ndarray of a shape and
    ``np.dtype[np.int32]``; later it is an alias whose only argument is np.int32.
    """
    last = get_args(hint)[-1]
    return next(iter(get_args(last)), last)


@dataclass(frozen=True, eq=False)
class Columns:
    """Base of tables whose columns are arrays of equal length; equal if all bytes are.

    Attributes:
        dtypes: the dtype of each column, from the annotations of the fields, in their order.
    """

    dtypes: ClassVar[Mapping[str, Any]]

    def __init_subclass__(cls) -> None:
        hints = get_type_hints(cls)
        cls.dtypes = {name: _item_of(hints[name]) for name in cls.__annotations__}

    @classmethod
    def of(cls, *columns: ArrayLike) -> Self:
        """Return a table of copies of `columns`, converted to the columns' dtypes."""
        table: Callable[..., Self] = cls
        pairs = zip(columns, cls.dtypes.values(), strict=True)
        return table(*(np.array(column, dtype) for column, dtype in pairs))

    @classmethod
    def none(cls) -> Self:
        """Return a table without rows."""
        return cls.of(*[()] * len(cls.dtypes))

    def __len__(self) -> int:
        return len(next(iter(self.columns().values())))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, type(self)):
            return NotImplemented
        theirs = other.columns()
        return all(same_bytes(ours, theirs[name]) for name, ours in self.columns().items())

    def columns(self) -> dict[str, NDArray[Any]]:
        """Return the arrays by name."""
        return {name: getattr(self, name) for name in self.dtypes}

    def check_lengths(self, whose: str) -> None:
        """Raise a `GraphError` if a column is not as long as the first."""
        for name, column in self.columns().items():
            if column.shape != (len(self),):
                raise GraphError(f"{whose} '{name}' has shape {column.shape}, not ({len(self)},)")

    def take(self, order: NDArray[np.int64]) -> Self:
        """Return the rows at `order`, which may repeat."""
        runs = stretches(order)
        columns = self.columns().items()
        return replace(self, **{name: take_runs(column, runs) for name, column in columns})

    def joined(self, *others: Self) -> Self:
        """Return these rows followed by those of `others`."""
        tables = [table.columns() for table in (self, *others)]
        return replace(
            self, **{name: np.concatenate([table[name] for table in tables]) for name in tables[0]}
        )


def check_range(column: NDArray[Any], low: int, high: int, name: str, row: str = "row") -> None:
    """Raise a `GraphError` if a number of `column` is not in [low, high)."""
    bad = np.flatnonzero((column < low) | (column >= high))
    if len(bad):
        raise GraphError(f"{row} {bad[0]}: {name} {column[bad[0]]} is outside [{low}, {high})")


def same_bytes(first: NDArray[Any], second: NDArray[Any]) -> bool:
    """Whether two columns have the same dtype and bytes."""
    return first.dtype == second.dtype and first.tobytes() == second.tobytes()


@dataclass(frozen=True, eq=False)
class Tasks(Columns):
    """Columns over the n tasks, in program order within each lane.

    Attributes:
        name, scope, module, source: int32 [n], indices into `Graph.strings`; `scope` is the chain
            of enclosing operators, `module` the qualified name of the innermost module, `source`
            the user's ``file:line`` that called it.
        kind, phase: uint8 [n], `Kind` and `StepPhase`.
        lane, rank: int32 [n].
        call: int32 [n], index into `Graph.calls`; -1 if the operator's arguments are unknown.
        sequence: int64 [n], autograd's number that links backward to forward tasks; -1 for none.
        duration_ns: float64 [n].
        gap_ns: float64 [n], time after the task in which its lane does untracked work: Python, the
            framework's dispatch.
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
        lag: uint8 [m], 1 if the target belongs to the next step, else 0.
    """

    source: NDArray[np.int32]
    target: NDArray[np.int32]
    kind: NDArray[np.uint8]
    delay_ns: NDArray[np.float64]
    lag: NDArray[np.uint8]


@dataclass(frozen=True)
class Edit:
    """A description of one change to a graph.

    Attributes:
        note: advice for the decision, such as a cheaper alternative; may be empty.
    """

    technique: str
    what: str
    tasks: int
    note: str = ""


class StringTable:
    """Interns strings while a graph is built; index 0 is the empty string."""

    def __init__(self, strings: Sequence[str] = ("",)) -> None:
        self._index = {text: number for number, text in enumerate(strings)}

    def add(self, text: str) -> int:
        """Return the index of `text`, which is added if new."""
        return self._index.setdefault(text, len(self._index))

    def freeze(self) -> tuple[str, ...]:
        """Return all strings by index."""
        return tuple(self._index)


class Role(IntEnum):
    """Purpose of an allocation."""

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

    An allocation that one task both makes and frees is the workspace of that task.

    Attributes:
        nbytes: int64 [m].
        storage: int32 [m], the id in `Graph.operands`; -1 if unknown.
        role: uint8 [m], `Role`.
        producer: int32 [m], the task whose start allocates it; -1 if it exists before the step.
        release: int32 [m], the task after which it is freed; -1 if it outlives the step.
    """

    nbytes: NDArray[np.int64]
    storage: NDArray[np.int32]
    role: NDArray[np.uint8]
    producer: NDArray[np.int32]
    release: NDArray[np.int32]

    def handed_on(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return pairs of an allocation left by the step before and its successor in this step.

        Pairs have the same number of bytes, such as the loss of a loop that is freed once the next
        one exists. Two arrays int64 [pairs], in ascending order of the first.
        """
        others = self.role == Role.OTHER
        remaining: dict[int, list[int]] = {}
        for row in np.flatnonzero(others & (self.producer >= 0) & (self.release < 0)).tolist():
            remaining.setdefault(int(self.nbytes[row]), []).append(row)
        pairs = [
            (row, rows.pop(0))
            for row in np.flatnonzero(others & (self.producer < 0) & (self.release >= 0)).tolist()
            if (rows := remaining.get(int(self.nbytes[row])))
        ]
        before, after = np.array(pairs, np.int64).reshape(-1, 2).T
        return before, after

    def check(self, tasks: int) -> None:
        """Raise a `GraphError` for the first row that is invalid in a graph of `tasks` tasks."""
        self.check_lengths("memory's")
        for name, low, high in (
            ("nbytes", 0, _MAX_BYTES),
            ("storage", -1, 1 << 31),
            ("role", 0, len(Role)),
            ("producer", -1, tasks),
            ("release", -1, tasks),
        ):
            check_range(getattr(self, name), low, high, name, "allocation")
        if float(self.nbytes.sum(dtype=np.float64)) >= _MAX_BYTES:
            raise GraphError("the allocations add up to more than 2^62 bytes")


_MAX_BYTES = 1 << 62
