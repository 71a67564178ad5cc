"""`Allocations`: the storage a step allocates and frees, tied to the tasks that do so.

Lifetimes are task ids, not times: when a task moves, what it allocates moves with it, and the
simulation of an edited graph gives the memory of the edited step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import GraphError
from slipstream.graph.values import Columns


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

    dtypes: ClassVar[Mapping[str, Any]] = {
        "nbytes": np.int64, "storage": np.int32, "role": np.uint8, "producer": np.int32,
        "release": np.int32,
    }  # fmt: skip

    nbytes: NDArray[np.int64]
    storage: NDArray[np.int32]
    role: NDArray[np.uint8]
    producer: NDArray[np.int32]
    release: NDArray[np.int32]

    def check(self, tasks: int) -> None:
        """Raise a `GraphError` naming the first row that cannot belong to a graph of `tasks`."""
        for name, column in self.columns().items():
            if column.shape != (len(self),):
                raise GraphError(f"memory's '{name}' has shape {column.shape}, not ({len(self)},)")
        for name, low, high in (
            ("nbytes", 0, _LARGEST_BYTES),
            ("storage", -1, 1 << 31),
            ("role", 0, len(Role)),
            ("producer", -1, tasks),
            ("release", -1, tasks),
        ):
            column = getattr(self, name)
            bad = np.flatnonzero((column < low) | (column >= high))
            if len(bad):
                raise GraphError(
                    f"allocation {bad[0]}: {name} {column[bad[0]]} is outside [{low}, {high})"
                )
        if float(self.nbytes.sum(dtype=np.float64)) >= _LARGEST_BYTES:
            raise GraphError("the allocations add up to more than 2^62 bytes")


_LARGEST_BYTES = 1 << 62
