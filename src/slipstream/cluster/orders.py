"""Orders of the micro-batches of a pipeline: what each stage runs, one optimizer step at a time.

An asynchronous pipeline is the step retimed: a slot may belong to a micro-batch of an earlier step.
Its delays, weight versions and stored activations follow from the slots.

Sources: Huang et al., "GPipe", NeurIPS 2019 (1811.06965); Narayanan et al., "PipeDream", SOSP 2019
(1806.03377); Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024 (2401.10241), whose ZB1P is
`zero_bubble_order`; Yang et al., "PipeMare", MLSys 2021 (1910.05124), for asynchronous versions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from slipstream.errors import InvalidArgumentError


class Action(StrEnum):
    """Work of a slot; values are those of torch's schedules where torch has the action."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"
    UPDATE = "U"


class Slot(NamedTuple):
    """One action of a stage.

    Attributes:
        micro_batch: number within its step; -1 for an update.
        shift: by how many steps the action runs later than the first forward pass of its step.
    """

    action: Action
    micro_batch: int = -1
    shift: int = 0


@dataclass(frozen=True)
class Order:
    """The slots of every stage in one period of a steady pipeline.

    Attributes:
        micro_batches: per optimizer step.
        slots: by stage; every stage runs its slots in this order, then repeats them.

    Raises:
        InvalidArgumentError: there are no stages or micro-batches, an action is missing or
            duplicated, or a micro-batch is used before its forward pass.
    """

    micro_batches: int
    slots: tuple[tuple[Slot, ...], ...]

    def __post_init__(self) -> None:
        if self.micro_batches < 1:
            raise InvalidArgumentError(
                "micro_batches", f"{self.micro_batches} is less than 1", remedy="pass 1 or more"
            )
        if not self.slots:
            raise InvalidArgumentError("slots", "there are no stages")
        for stage, row in enumerate(self.slots):
            self._check(stage, row)

    def _check(self, stage: int, row: tuple[Slot, ...]) -> None:
        each = range(self.micro_batches)
        actions = {slot.action for slot in row} - {Action.UPDATE}
        split = Action.INPUT in actions
        backward = (Action.INPUT, Action.WEIGHT) if split else (Action.BACKWARD,)
        needed = [(action, m) for action in (Action.FORWARD, *backward) for m in each]
        found = [(slot.action, slot.micro_batch) for slot in row]
        if sorted(found) != sorted([*needed, (Action.UPDATE, -1)]):
            wrong = sorted(set(found).symmetric_difference([*needed, (Action.UPDATE, -1)]))
            what = f"{wrong[0][0]} of micro-batch {wrong[0][1]}" if wrong else "an action"
            raise InvalidArgumentError(
                "slots", f"stage {stage} does not run {what} exactly once per step"
            )
        for m in each:
            times = [self._times[stage][action, m] for action in (Action.FORWARD, *backward)]
            if times != sorted(times) or min(times) < (0, 0):
                raise InvalidArgumentError(
                    "slots", f"stage {stage} uses micro-batch {m} before its forward pass"
                )

    @property
    def stages(self) -> int:
        return len(self.slots)

    @property
    def max_shift(self) -> int:
        """Number of steps after which the pipeline is steady; 0 if it drains in every step."""
        return max(slot.shift for row in self.slots for slot in row)

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of inputs and of weights are separate actions."""
        return any(slot.action is Action.INPUT for slot in self.slots[0])

    @cached_property
    def _times(self) -> tuple[dict[tuple[Action, int], tuple[int, int]], ...]:
        """The step, relative to its own, and the position of each action, by stage."""
        return tuple(
            {slot[:2]: (slot.shift, position) for position, slot in enumerate(row)}
            for row in self.slots
        )

    def shift(self, stage: int, action: Action, micro_batch: int = -1) -> int:
        """Return by how many steps the action runs later than the first forward pass."""
        return self._times[stage][action, micro_batch][0]

    def version(self, stage: int, micro_batch: int, action: Action = Action.FORWARD) -> int:
        """Return how many updates of the stage precede an action.

        Args:
            micro_batch: counted from the start of training, over all steps.
            action: FORWARD, BACKWARD, INPUT or WEIGHT.
        """
        step, number = divmod(micro_batch, self.micro_batches)
        shift, position = self._times[stage][action, number]
        late, update = self._times[stage][Action.UPDATE, -1]
        return max(0, step + shift - late + (update < position))

    def delay(self, stage: int) -> float:
        """Return how many updates a forward pass lags behind a synchronous step, on average."""
        first = (self.max_shift + 1) * self.micro_batches
        numbers = range(first, first + self.micro_batches)
        lags = [m // self.micro_batches - self.version(stage, m) for m in numbers]
        return sum(lags) / self.micro_batches

    def in_flight(self, stage: int) -> int:
        """Return the maximum number of micro-batches whose activations the stage holds."""
        last = Action.WEIGHT if self.splits_backward else Action.BACKWARD
        ends = (self.shift(stage, last, m) for m in range(self.micro_batches))
        held = sum(ends)
        most = held
        for slot in self.slots[stage]:
            held += (slot.action is Action.FORWARD) - (slot.action is last)
            most = max(most, held)
        return most

    def stashed_versions(self, stage: int) -> int:
        """Return how many versions of its weights a stage holds to reuse those of forward passes.

        As PipeDream does; the current version counts.
        """
        last = Action.WEIGHT if self.splits_backward else Action.BACKWARD
        first = (self.max_shift + 1) * self.micro_batches
        return 1 + max(
            self.version(stage, m, last) - self.version(stage, m)
            for m in range(first, first + self.micro_batches)
        )


def _steps(actions: Iterator[Slot]) -> tuple[Slot, ...]:
    return (*actions, Slot(Action.UPDATE))


def gpipe_order(stages: int, micro_batches: int) -> Order:
    """Run all forward passes, then all backward passes."""
    numbers = range(micro_batches)
    row = _steps(Slot(action, m) for action in (Action.FORWARD, Action.BACKWARD) for m in numbers)
    return Order(micro_batches, (row,) * stages)


def one_f_one_b_order(stages: int, micro_batches: int) -> Order:
    """Alternate forward and backward passes once the last stage can start backwards."""

    def actions(stage: int) -> Iterator[Slot]:
        ahead = min(stages - 1 - stage, micro_batches)
        for m in range(micro_batches + ahead):
            if m < micro_batches:
                yield Slot(Action.FORWARD, m)
            if m >= ahead:
                yield Slot(Action.BACKWARD, m - ahead)

    return Order(micro_batches, tuple(_steps(actions(stage)) for stage in range(stages)))


def zero_bubble_order(stages: int, micro_batches: int) -> Order:
    """Fill bubbles with the gradients of weights, which no other stage waits for (ZB1P)."""

    def actions(stage: int) -> Iterator[Slot]:
        ahead = min(stages - 1 - stage, micro_batches)
        for m in range(micro_batches + ahead):
            if m < micro_batches:
                yield Slot(Action.FORWARD, m)
            if m >= ahead:
                yield Slot(Action.INPUT, m - ahead)
                if m - ahead >= stage:
                    yield Slot(Action.WEIGHT, m - ahead - stage)
        for m in range(max(micro_batches - stage, 0), micro_batches):
            yield Slot(Action.WEIGHT, m)

    return Order(micro_batches, tuple(_steps(actions(stage)) for stage in range(stages)))


def asynchronous_order(
    stages: int, micro_batches: int, delay: Callable[[int], int] | None = None
) -> Order:
    """Alternate forward and backward passes without ever draining the pipeline.

    Args:
        delay: number of micro-batches by which the backward pass of a stage follows its forward
            pass; by default the smallest, ``stages - 1 - stage``. Lockstep, in which all stages run
            one forward and one backward pass per tick, has ``2 * (stages - 1 - stage)``.
    """

    def actions(stage: int) -> Iterator[Slot]:
        late = stages - 1 - stage if delay is None else delay(stage)
        for m in range(micro_batches):
            yield Slot(Action.FORWARD, m)
            number = (m - late) % micro_batches
            shift = math.ceil((late - m) / micro_batches)
            yield Slot(Action.BACKWARD, number, shift)
            if number == micro_batches - 1:
                yield Slot(Action.UPDATE, -1, shift)

    return Order(micro_batches, tuple(tuple(actions(stage)) for stage in range(stages)))


ORDERS: dict[str, Callable[[int, int], Order]] = {
    "gpipe": gpipe_order,
    "1f1b": one_f_one_b_order,
    "zero_bubble": zero_bubble_order,
    "pipedream": asynchronous_order,
    "async": asynchronous_order,
}
"""Orders by name of the schedule. ``pipedream`` and ``async`` differ only in the weights of a
backward pass: those of its forward pass, or the current ones."""
