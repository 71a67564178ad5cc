"""The least time of a step from the least times of its parts.

On a busy machine hardly any step runs undisturbed, but each part of it does in some step. So clocks
are put between the layers, in both directions; each part keeps its minimum over the steps, and the
step is their sum. It runs in the child that runs the steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from slipstream.workload import BuiltWorkload


class Segments:
    """Within it, layers of the model read `clock` where they begin and end, and where the gradient
    of their output is there.

    A model that is compiled, or hidden, has no such places: then its steps have one part.
    """

    def __init__(self, built: BuiltWorkload, clock: Callable[[], int]) -> None:
        self._built = built
        self._clock = clock
        self._marks: list[int] = []
        self._handles: list[Any] = []

    def __enter__(self) -> Segments:
        from slipstream.capture.compiling import compiled_already

        model = self._built.model
        if model is not None and not compiled_already(model):
            for module in model.modules():
                if next(module.children(), None) is None:
                    self._handles.append(module.register_forward_pre_hook(self._mark))
                    self._handles.append(module.register_forward_hook(self._after))
        optimizer = self._built.optimizer
        if hasattr(optimizer, "register_step_pre_hook"):
            self._handles.append(optimizer.register_step_pre_hook(self._mark))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def begin(self) -> None:
        """A step begins."""
        self._marks.clear()
        self._marks.append(self._clock())

    def end(self) -> NDArray[np.int64]:
        """Nanoseconds of each part of the step that ends."""
        self._marks.append(self._clock())
        return np.diff(np.array(self._marks, np.int64)).astype(np.int64)

    def _mark(self, *told: Any) -> None:
        """A part ends: whatever torch tells its hooks."""
        self._marks.append(self._clock())

    def _after(self, module: Any, inputs: Any, output: Any) -> None:
        self._mark()
        if getattr(output, "requires_grad", False):
            output.register_hook(self._mark)


class Least:
    """The least time of a step of one kind, over turns of several steps each."""

    def __init__(self) -> None:
        # Of every other turn, so that two independent answers say how good one is.
        self._halves: list[list[NDArray[np.int64]]] = [[], []]
        self.turns = 0

    def turn(self, steps: list[NDArray[np.int64]]) -> None:
        """Add the parts of the steps of one turn."""
        self._halves[self.turns % 2] += steps
        self.turns += 1

    @property
    def step_ns(self) -> float:
        """Of a whole step."""
        return _sum_of_minima([*self._halves[0], *self._halves[1]])

    @property
    def spread(self) -> float:
        """By how much the answers of odd and of even turns differ, relative; infinite of one."""
        if self.turns < 2:
            return float("inf")
        one, other = map(_sum_of_minima, self._halves)
        return abs(one - other) / max(min(one, other), 1.0)


def _sum_of_minima(steps: list[NDArray[np.int64]]) -> float:
    """Part by part where all steps have the same parts; else of whole steps."""
    if len({len(parts) for parts in steps}) == 1:
        return float(np.min(np.stack(steps), axis=0).sum())
    return float(min(parts.sum() for parts in steps))
