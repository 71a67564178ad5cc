"""Programs: networks lowered to kernel calls, which back ends emit and planners place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from slipstream.ship.firmware.network import Array, Network


@dataclass(frozen=True)
class KernelCall:
    """One kernel call.

    Attributes:
        kernel: the C function.
        sources: the files of `kernels/` that it needs.
        struct: type of its first argument.
        numbers: numeric fields of the struct.
        tables: pointer fields of the struct: int8 or int32 constants of one dimension.
        inputs: indices of the tensors it reads, in the order of its arguments.
        output: index of the tensor it writes.
        scratch: bytes of scratch memory.
        distances: for each input, minimum bytes from the output's start to the input's start, if
            the kernel reads it in the order in which it writes; None if they must be disjoint.
        in_place: whether the output may start where the input does.
        macs: multiply-accumulate operations, padding included.
        operator: index of its operator.
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
    """Steps in execution order.

    Attributes:
        views: for each view (reshape), the tensor whose bytes it shares.
    """

    network: Network
    steps: tuple[KernelCall, ...]
    views: Mapping[int, int] = field(default_factory=dict)

    def root(self, index: int) -> int:
        """Return the tensor whose bytes a tensor shares: itself, unless it is a view."""
        while index in self.views:
            index = self.views[index]
        return index

    @property
    def macs(self) -> int:
        """Multiply-accumulate operations of all steps."""
        return sum(step.macs for step in self.steps)
