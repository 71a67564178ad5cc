"""Estimate the minimum time of a step from the minimum times of its parts.

On a busy machine hardly any step runs undisturbed, but every part does in some step. Clocks are
read between the layers, forward and backward; each part keeps its minimum over the steps, and the
step is their sum. Runs in the child that runs the steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from slipstream.workload import BuiltWorkload


class Segments:
    """Reads `clock` at the boundaries of the model's layers while the context is active.

    The clock is read before and after a layer's forward, and when the gradient of its output is
    ready. The steps of a compiled or hidden model have only one part.
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
        self._marks.clear()
        self._marks.append(self._clock())

    def end(self) -> NDArray[np.int64]:
        """End the step and return its parts' durations, int64 [parts], in ns."""
        self._marks.append(self._clock())
        return np.diff(np.array(self._marks, np.int64)).astype(np.int64)

    def _mark(self, *arguments: Any) -> None:
        """End a part; `arguments` are those of torch's hooks."""
        self._marks.append(self._clock())

    def _after(self, module: Any, inputs: Any, output: Any) -> None:
        self._mark()
        if getattr(output, "requires_grad", False):
            output.register_hook(self._mark)


class MinimumTime:
    """The minimum time of a step of one size, over turns of several steps each."""

    def __init__(self) -> None:
        # Steps of even and of odd turns: two independent estimates show the error.
        self._halves: list[list[NDArray[np.int64]]] = [[], []]
        self.turns = 0

    def turn(self, steps: list[NDArray[np.int64]]) -> None:
        self._halves[self.turns % 2] += steps
        self.turns += 1

    @property
    def step_ns(self) -> float:
        return _sum_of_minima([*self._halves[0], *self._halves[1]])

    @property
    def spread(self) -> float:
        """Relative difference between odd and even turns; infinite after one turn."""
        if self.turns < 2:
            return float("inf")
        first, second = map(_sum_of_minima, self._halves)
        return abs(first - second) / max(min(first, second), 1.0)


def _sum_of_minima(steps: list[NDArray[np.int64]]) -> float:
    """Sum minima by part if all steps have the same parts; else the minimum of whole steps."""
    if len({len(parts) for parts in steps}) == 1:
        return float(np.min(np.stack(steps), axis=0).sum())
    return float(min(parts.sum() for parts in steps))
