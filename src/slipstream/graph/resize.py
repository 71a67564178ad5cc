"""The calls of a step at a number of samples that was never run, from two that were.

The operators of a step hardly ever depend on how many samples it takes; the numbers they are
called with do, and nearly all of them linearly: extents, strides, sizes given to views, counts
that losses divide by. Two recorded forms of a call fix both coefficients, so that nothing has to
be guessed from a shape in which the batch and a layer happen to be equally wide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from slipstream.graph.call import Argument, Call, TensorSpec


class _OtherFormError(Exception):
    """The two forms of a call are not of one kind."""


@dataclass(frozen=True)
class Resize:
    """From forms of a call in steps of `recorded` and of `other` samples to that with `wanted`.

    `recorded` and `other` differ.
    """

    recorded: int
    other: int
    wanted: int

    @property
    def factor(self) -> float:
        """How many times as many samples."""
        return self.wanted / self.recorded

    def number(self, recorded: int, other: int) -> int:
        """What is `recorded` and `other` in the two steps, in the wanted one.

        Linear, but for what goes with the square: samples compared with one another.
        """
        squares = recorded * self.other**2 == other * self.recorded**2
        if recorded and squares and recorded != other:
            return round(recorded * self.factor**2)
        slope = (recorded - other) / (self.recorded - self.other)
        found = round(recorded + slope * (self.wanted - self.recorded))
        # Fewer samples than fit through both points: an extent of nothing cannot be run.
        return found if min(recorded, other) < 0 else max(found, min(recorded, other, 1))

    def tensor(self, recorded: TensorSpec, other: TensorSpec) -> TensorSpec:
        """The tensor in the wanted step; as recorded where the two differ in kind."""
        try:
            return self._tensor(recorded, other)
        except _OtherFormError:
            return recorded

    def call(self, recorded: Call, other: Call) -> Call | None:
        """The call in the wanted step; None where its two forms differ in more than numbers."""
        if recorded.op != other.op:
            return None
        try:
            arguments = self._each(recorded.arguments, other.arguments)
            outputs = self._each(recorded.outputs, other.outputs)
        except _OtherFormError:
            return None
        if arguments == recorded.arguments and outputs == recorded.outputs:
            return recorded
        return Call(recorded.op, arguments, outputs)

    def _each(self, recorded: Sequence[Any], other: Sequence[Any]) -> tuple[Any, ...]:
        if len(recorded) != len(other):
            raise _OtherFormError
        return tuple(self._argument(*pair) for pair in zip(recorded, other, strict=True))

    def _argument(self, recorded: Argument, other: Argument) -> Argument:
        if isinstance(recorded, (list, tuple)) and isinstance(other, (list, tuple)):
            return self._each(recorded, other)
        if isinstance(recorded, TensorSpec) and isinstance(other, TensorSpec):
            return self._tensor(recorded, other)
        if type(recorded) is not type(other) or isinstance(recorded, TensorSpec):
            raise _OtherFormError
        if isinstance(recorded, int) and not isinstance(recorded, bool):
            return self.number(recorded, other)
        # Fractions (one over the number of samples) and flags decide no size.
        return recorded

    def _tensor(self, recorded: TensorSpec, other: TensorSpec) -> TensorSpec:
        if recorded.dtype != other.dtype:
            raise _OtherFormError
        return replace(
            recorded,
            shape=self._each(recorded.shape, other.shape),
            strides=self._each(recorded.strides, other.strides),
        )
