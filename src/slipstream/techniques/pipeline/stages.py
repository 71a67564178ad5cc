"""Run one stage of a model in a process group: the actions of an `Order`, and their messages.

Receives are posted ahead of their use, and sends are awaited steps later, so that messages travel
while the stage computes. Torch's own pipelining runtime has no asynchronous schedule; the split of
the backward pass into gradients of inputs and of weights is torch's.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from slipstream.cluster.orders import Action
from slipstream.errors import CommunicationError, WorkloadError
from slipstream.ranks.launch import RANK_TIMEOUT_S
from slipstream.techniques.distributed.chains import (
    LayerMessage,
    chain,
    layer_messages,
    layer_times,
    shared_batch,
)
from slipstream.techniques.pipeline.passes import StagePasses, actions_of, need_separate
from slipstream.workload import BuiltWorkload

if TYPE_CHECKING:
    from slipstream.techniques.pipeline.technique import Pipeline

# Receives that are posted before they are used, in each direction.
_POSTED = 2
# Steps whose sends may be pending.
_PENDING_STEPS = 3
# Tags repeat after this many micro-batches, far more than are in transit.
_TAGS = 1 << 20
_FORWARD, _BACKWARD, _LOSS = 1, 2, 3


def run_as_stage(built: BuiltWorkload, technique: Pipeline) -> None:
    """Keep this rank's stage of the model, and let each step run the stage's actions.

    The batch is that of rank 0. Layers are divided so that the slowest stage is as fast as
    possible, as timed on rank 0.

    Raises:
        WorkloadError: the model is not a chain of layers, the batch is not a pair of tensors, or it
            does not make equal micro-batches.
    """
    order = technique.order
    layers = [layer for _, layer in chain(built.model, "pipeline")]
    inputs, targets = shared_batch(built, "pipeline")
    if len(inputs) % order.micro_batches or len(layers) < order.stages:
        raise WorkloadError(
            f"{len(inputs)} samples and {len(layers)} layers do not make {order.micro_batches} "
            f"equal micro-batches and {order.stages} stages",
            remedy="use fewer micro-batches or stages",
        )
    xs, ys = (part.chunk(order.micro_batches) for part in (inputs, targets))
    messages = layer_messages(layers, xs[0])
    starts = _starts(layers, xs[0], order.stages)
    rank = dist.get_rank()
    stages = [nn.Sequential(*layers[a:b]) for a, b in itertools.pairwise(starts)]
    stage = stages[rank]
    need_separate(stages)
    own = {id(parameter) for parameter in stage.parameters()}
    for group in built.optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in own:
                built.optimizer.state.pop(parameter, None)
        group["params"] = [p for p in group["params"] if id(p) in own]
    between = [messages[start - 1] for start in starts[1:-1]]
    runner = Stage(stages, built.loss, built.optimizer, technique, xs, ys, between)
    built.model, built.step, built.settle = stage, runner.step, runner.settle
    # The ranks share the samples of a step.
    each, remainder = divmod(built.samples_before, order.stages)
    built.samples = each + (rank < remainder)


def _starts(layers: Sequence[nn.Module], x: torch.Tensor, stages: int) -> list[int]:
    """Return the first layer of every stage, then the number of layers; equal on all ranks."""
    starts = torch.zeros(stages + 1, dtype=torch.int64)
    if dist.get_rank() == 0:
        starts[:] = torch.tensor(_divide(layer_times(layers, x), stages))
    dist.broadcast(starts, 0)
    return [int(start) for start in starts]


def _divide(times: Sequence[float], stages: int) -> list[int]:
    """Return the bounds of consecutive groups whose slowest is fastest."""
    count = len(times)
    until = [sum(times[:n]) for n in range(count + 1)]
    best: dict[int, tuple[float, list[int]]] = {n: (until[n], [0, n]) for n in range(1, count + 1)}
    for size in range(2, stages + 1):
        best = {
            n: min(
                (max(best[m][0], until[n] - until[m]), [*best[m][1], n]) for m in range(size - 1, n)
            )
            for n in range(size, count + 1)
        }
    return best[count][1]


class Stage:
    """One stage in a process group, which runs one optimizer step at a time."""

    def __init__(
        self, stages: Sequence[nn.Module], loss: Any, optimizer: Any, technique: Pipeline,
        inputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor],
        messages: Sequence[LayerMessage],
    ) -> None:  # fmt: skip
        self.rank, self.stages = dist.get_rank(), len(stages)
        self.order, self._warmup = technique.order, technique.warmup
        self._inputs, self._targets = inputs, targets
        self._messages = messages
        self.passes = StagePasses(
            stages[self.rank], loss, optimizer, technique, self.order, self.rank,
            # Whether the previous stage waits for a gradient.
            returns=self.rank > 0 and messages[self.rank - 1].trains,
            trains=self.is_last or messages[self.rank].trains,
        )  # fmt: skip
        self._step = 0
        self._received: dict[int, deque[tuple[int, Any, torch.Tensor]]] = {
            _FORWARD: deque(), _BACKWARD: deque(), _LOSS: deque()
        }  # fmt: skip
        self._posted = {_FORWARD: 0, _BACKWARD: 0}
        self._sent: deque[list[tuple[Any, int, torch.Tensor]]] = deque()
        # Tags of other messages of these ranks may be equal.
        self._group = dist.new_group(timeout=timedelta(seconds=RANK_TIMEOUT_S))

    @property
    def is_last(self) -> bool:
        return self.rank == self.stages - 1

    @property
    def log(self) -> list[tuple[str, int, int]]:
        """Action, micro-batch and number of updates before it, of the last step."""
        return self.passes.log

    def step(self) -> torch.Tensor:
        """Run one optimizer step; return the loss of the whole batch."""
        self._sent.append([])
        self.passes.log = []
        total = torch.zeros(())
        for action, number, part in actions_of(self.order, self._warmup, self.rank, self._step):
            if action is Action.UPDATE:
                self.passes.update()
            elif action is Action.FORWARD:
                total += self._forward(number, part)
            else:
                gradient = self.passes.backward(
                    number, action, functools.partial(self._gradient, number)
                )
                if gradient is not None:
                    self._send(gradient, self.rank - 1, _BACKWARD, number)
        while len(self._sent) > _PENDING_STEPS:
            self._wait_for_oldest()
        self._step += 1
        return self._whole_loss(total)

    def settle(self) -> None:
        """Wait until everything that any stage sent has arrived; all stages call this."""
        while self._sent:
            self._wait_for_oldest()
        # A stage must not end while others send what it does not use.
        dist.barrier(self._group)

    def _forward(self, number: int, part: int) -> torch.Tensor:
        x = self._receive(_FORWARD, self.rank - 1, number) if self.rank else self._inputs[part]
        out = self.passes.forward(number, x, self._targets[part] if self.is_last else None)
        if self.is_last:
            return out
        self._send(out, self.rank + 1, _FORWARD, number)
        return torch.zeros(())

    def _gradient(self, number: int) -> torch.Tensor | None:
        return None if self.is_last else self._receive(_BACKWARD, self.rank + 1, number)

    # ---- messages -----------------------------------------------------------------------------

    def _send(self, tensor: torch.Tensor, peer: int, kind: int, number: int) -> None:
        data = tensor.contiguous()
        work = dist.isend(data, peer, tag=kind * _TAGS + number % _TAGS, group=self._group)
        self._sent[-1].append((work, peer, data))

    def _receive(self, kind: int, peer: int, number: int) -> torch.Tensor:
        """Return the tensor of a micro-batch; neighbours send in the order of this rank's slots."""
        queue = self._received[kind]
        shape, dtype, _ = self._messages[self.rank - (kind == _FORWARD)]
        # A pipeline that drains has nothing in transit after its step.
        drains = not self.order.max_shift or self._step < self._warmup
        limit = (self._step + 1) * self.order.micro_batches if drains else number + _POSTED + 1
        while len(queue) <= _POSTED and self._posted[kind] < limit:
            following = self._posted[kind]
            buffer = torch.empty(shape, dtype=dtype)
            work = dist.irecv(buffer, peer, tag=kind * _TAGS + following % _TAGS, group=self._group)
            queue.append((following, work, buffer))
            self._posted[kind] += 1
        posted, work, buffer = queue.popleft()
        assert posted == number
        self._wait(work, peer)
        return buffer

    def _whole_loss(self, total: torch.Tensor) -> torch.Tensor:
        """Return the last stage's loss, on other stages of an asynchronous pipeline an older one.

        There the loss of the same step would have to be waited for.
        """
        queue, number = self._received[_LOSS], self._step - 1
        if self.stages == 1:
            return total
        if self.is_last:
            for peer in range(self.rank):
                self._send(total, peer, _LOSS, number)
            return total
        buffer = torch.zeros(())
        work = dist.irecv(
            buffer, self.stages - 1, tag=_LOSS * _TAGS + number % _TAGS, group=self._group
        )
        queue.append((number, work, buffer))
        late = self.stages if self.order.max_shift and number >= self._warmup else 0
        while queue and queue[0][0] <= max(number - late, 0):
            _, work, self._loss = queue.popleft()
            self._wait(work, self.stages - 1)
        return self._loss

    def _wait_for_oldest(self) -> None:
        for work, peer, _ in self._sent.popleft():
            self._wait(work, peer)

    def _wait(self, work: Any, peer: int) -> None:
        """Wait for a message.

        Raises:
            CommunicationError: the other stage ended, or did not answer in time.
        """
        try:
            work.wait()
        except RuntimeError as error:
            reason = (str(error).strip().splitlines() or [""])[0]
            raise CommunicationError(
                f"stage {self.rank + 1} of {self.stages} lost stage {peer + 1} (rank {peer}) in "
                f"step {self._step}: {reason}",
                remedy="look at the output of that rank",
            ) from error
