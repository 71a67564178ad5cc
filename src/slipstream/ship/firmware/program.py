"""A network as calls of kernels: what back ends print or run, and planners place.

A step is one call. What it needs in memory, what it may share with its input, and the constants it
reads are part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from slipstream.ship.firmware.network import Array, Network


@dataclass(frozen=True)
class Step:
    """One call of a kernel.

    Attributes:
        kernel: the C function.
        sources: the files of `kernels/` that it needs.
        struct: type of its first argument.
        numbers: the struct's fields that are numbers.
        tables: its fields that point at constants: int8 or int32, one dimension.
        inputs: indices of the tensors it reads, in the order of its arguments.
        output: index of the tensor it writes.
        scratch: bytes it needs while it runs.
        distances: by input, how many bytes above the output's start the input may begin: the
            kernel reads it in the order in which it writes. None: they have to be disjoint.
        in_place: the output may begin where the input does.
        macs: multiplications that are added up, padding included.
        operator: index of the operator it is made from.
    """

    kernel: str
    sources: tuple[str, ...]
    struct: str
    numbers: Mapping[str, int]
    tables: Mapping[str, Array]
    inputs: tuple[int, ...]
    output: int
    scratch: int = 0
    distances: tuple[int | None, ...] = ()
    in_place: bool = False
    macs: int = 0
    operator: int = 0


@dataclass(frozen=True)
class Program:
    """Steps in the order they run in.

    Attributes:
        views: by tensor, the tensor in whose bytes it lies (reshapes).
    """

    network: Network
    steps: tuple[Step, ...]
    views: Mapping[int, int] = field(default_factory=dict)

    def root(self, index: int) -> int:
        """The tensor in whose bytes a tensor lies: itself, unless it is a view."""
        while index in self.views:
            index = self.views[index]
        return index

    @property
    def macs(self) -> int:
        """Multiplications that are added up, of all steps."""
        return sum(step.macs for step in self.steps)
