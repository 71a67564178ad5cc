"""All stages of a pipeline in one process, with the weight versions of separate ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slipstream.cluster.orders import Action, Order
from slipstream.errors import InvalidArgumentError, WorkloadError
from slipstream.technique import parse
from slipstream.techniques.distributed.chains import layer_messages
from slipstream.techniques.pipeline.passes import (
    StageAction,
    StagePasses,
    actions_of,
    need_separate,
)
from slipstream.techniques.pipeline.technique import Pipeline


@dataclass(frozen=True)
class PipelineHistory:
    """Losses and actions of a simulated pipeline.

    Attributes:
        losses: by step, the mean over its micro-batches.
        log: by stage, each action, its micro-batch and the number of updates before it.
        in_flight: by stage, the maximum number of micro-batches whose activations it held.
    """

    losses: list[float]
    log: list[list[tuple[str, int, int]]]
    in_flight: list[int]


def simulate(
    stages: Sequence[nn.Module],
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    loss: Any,
    optimizer: torch.optim.Optimizer,
    technique: str | Pipeline,
    *,
    order: Order | None = None,
) -> PipelineHistory:
    """Train as the stages of a pipeline would, in this process; the pipeline drains at the end.

    Losses, weights and weight versions are those of `technique` on as many devices, without their
    speed. A learning rate that changes while `batches` are read takes effect.

    Args:
        stages: modules whose inputs and outputs are single tensors, in order of the forward pass;
            trained in place.
        batches: inputs and targets of each step.
        loss: mean loss of an output and targets.
        optimizer: of the parameters of all stages.
        technique: for example ``"pipeline:4,micro_batches=1,schedule=async"``.
        order: overrides the slots of the schedule, for example with lockstep delays.

    Raises:
        InvalidArgumentError: `technique` is not a pipeline or has another number of stages, or
            `order` never ends.
        WorkloadError: a batch is not two tensors that make equal micro-batches, a stage returns no
            tensor, or stages share parameters.
    """
    if isinstance(technique, str):
        parsed, *others = parse(technique)
        if others or not isinstance(parsed, Pipeline):
            raise InvalidArgumentError(
                "technique", f"'{technique}' is not a pipeline", remedy="for example pipeline:4"
            )
        technique = parsed
    order = technique.order if order is None else order
    if len(stages) != order.stages:
        raise InvalidArgumentError(
            "stages", f"there are {len(stages)}, but the schedule has {order.stages}"
        )
    need_separate(stages)
    run = _Simulation(stages, loss, optimizer, technique, order)
    step = 0
    for step, batch in enumerate(batches, 1):
        lengths = {len(part) if isinstance(part, torch.Tensor) else None for part in batch}
        if len(batch) != 2 or len(lengths) != 1 or None in lengths:
            raise WorkloadError(
                f"batch {step} is not two tensors of equal length", remedy="pass inputs and targets"
            )
        (samples,) = lengths
        if not samples or samples % order.micro_batches:
            raise WorkloadError(
                f"{samples} samples do not make {order.micro_batches} equal micro-batches",
                remedy="drop the last batch, or use fewer micro-batches",
            )
        parts = [part.chunk(order.micro_batches) for part in batch]
        if step == 1:
            layer_messages(stages, parts[0][0])
        run.period(step - 1, None, *parts)
    for late in range(order.max_shift):
        run.period(step + late, step)
    return PipelineHistory(run.losses[:step], [stage.log for stage in run.passes], run.in_flight)


class _Simulation:
    def __init__(
        self, stages: Sequence[nn.Module], loss: Any, optimizer: Any, technique: Pipeline,
        order: Order,
    ) -> None:  # fmt: skip
        self._order, self._warmup = order, technique.warmup
        trains = [any(p.requires_grad for p in stage.parameters()) for stage in stages]
        self.passes = [
            StagePasses(
                stage, loss, optimizer, technique, order, number,
                returns=any(trains[:number]), trains=any(trains[: number + 1]),
            )
            for number, stage in enumerate(stages)
        ]  # fmt: skip
        self.losses: list[float] = []
        self.in_flight = [0] * len(stages)
        # By stage that sends and micro-batch.
        self._outputs: dict[tuple[int, int], torch.Tensor] = {}
        self._gradients: dict[tuple[int, int], torch.Tensor | None] = {}

    def period(self, step: int, steps: int | None, inputs: Any = (), targets: Any = ()) -> None:
        """Run the actions of all stages in one period, in an order that their data permit."""
        self.losses.append(0.0)
        queues = [
            deque(actions_of(self._order, self._warmup, stage, step, steps))
            for stage in range(len(self.passes))
        ]
        while remaining := sum(map(len, queues)):
            for stage, queue in enumerate(queues):
                while queue and self._run(stage, queue[0], inputs, targets):
                    queue.popleft()
            if remaining == sum(map(len, queues)):
                raise InvalidArgumentError(
                    "order", "its stages wait for each other", remedy="change the order of slots"
                )

    def _run(self, stage: int, todo: StageAction, inputs: Any, targets: Any) -> bool:
        """Run an action; return False if its data are not available yet."""
        action, number, part = todo
        passes, last = self.passes[stage], stage == len(self.passes) - 1
        if action is Action.UPDATE:
            passes.update()
        elif action is Action.FORWARD:
            if stage and (stage - 1, number) not in self._outputs:
                return False
            x = self._outputs.pop((stage - 1, number)) if stage else inputs[part]
            out = passes.forward(number, x, targets[part] if last else None)
            if last:
                self.losses[-1] += float(out)
            else:
                self._outputs[stage, number] = out
            self.in_flight[stage] = max(self.in_flight[stage], passes.in_flight)
        else:
            if not last and (stage + 1, number) not in self._gradients:
                return False
            sent = passes.backward(number, action, lambda: self._gradients.get((stage + 1, number)))
            if action is not Action.INPUT:
                self._gradients.pop((stage + 1, number), None)
            if stage and action is not Action.WEIGHT:
                self._gradients[stage, number] = sent
        return True
