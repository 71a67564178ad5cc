"""Run one stage of a model in a process group: the actions of an `Order`, and their messages.

Receives are posted ahead of their use, and sends are awaited steps later, so that messages travel
while the stage computes. Torch's own pipelining runtime has no asynchronous schedule; the split of
the backward pass into gradients of inputs and of weights is torch's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from slipstream.cluster.orders import Action, Order, Slot
from slipstream.errors import CommunicationError, WorkloadError
from slipstream.ranks.launch import RANK_TIMEOUT_S
from slipstream.techniques.distributed.chains import (
    LayerMessage,
    chain,
    layer_messages,
    layer_times,
    shared_batch,
)
from slipstream.workload import BuiltWorkload

# Receives that are posted before they are used, in each direction.
_POSTED = 2
# Steps whose sends may be pending.
_PENDING_STEPS = 3
# Tags repeat after this many micro-batches, far more than are in transit.
_TAGS = 1 << 20
_FORWARD, _BACKWARD, _LOSS = 1, 2, 3


def run_as_stage(built: BuiltWorkload, order: Order, *, stash: bool) -> None:
    """Keep this rank's stage of the model, and let each step run the stage's actions.

    The batch is that of rank 0. Layers are divided so that the slowest stage is as fast as
    possible, as timed on rank 0.

    Args:
        stash: whether backward passes use the weights of their forward passes.

    Raises:
        WorkloadError: the model is not a chain of layers, the batch is not a pair of tensors, or it
            does not make equal micro-batches.
    """
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
    stage = nn.Sequential(*layers[starts[rank] : starts[rank + 1]])
    own = {id(parameter) for parameter in stage.parameters()}
    if any(
        id(parameter) in own
        for number, layer in enumerate(layers)
        if not starts[rank] <= number < starts[rank + 1]
        for parameter in layer.parameters()
    ):
        raise WorkloadError(
            "a parameter is shared by layers of different stages",
            remedy="use fewer stages, or train without tied weights",
        )
    for group in built.optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in own:
                built.optimizer.state.pop(parameter, None)
        group["params"] = [p for p in group["params"] if id(p) in own]
    between = [messages[start - 1] for start in starts[1:-1]]
    runner = Stage(stage, built.loss, built.optimizer, order, xs, ys, between, stash=stash)
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
    """One stage, which runs the slots of its order, one optimizer step at a time."""

    def __init__(
        self, module: nn.Module, loss: Any, optimizer: Any, order: Order,
        inputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor],
        messages: Sequence[LayerMessage], *, stash: bool,
    ) -> None:  # fmt: skip
        self.rank, self.stages = dist.get_rank(), order.stages
        self.module, self.loss, self.optimizer, self.order = module, loss, optimizer, order
        self._inputs, self._targets = inputs, targets
        self._messages = messages
        self._trains = self.is_last or messages[self.rank].trains
        """Whether it has a backward pass."""
        self._returns = self.rank > 0 and messages[self.rank - 1].trains
        """Whether the previous stage waits for a gradient."""
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._step = 0
        self.log: list[tuple[str, int, int]] = []
        """Action, micro-batch and number of updates before it, of the last step."""
        self.updates = 0
        # By micro-batch since the start: input and output of its forward pass.
        self._held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._groups: dict[int, Any] = {}
        self._received: dict[int, deque[tuple[int, Any, torch.Tensor]]] = {
            _FORWARD: deque(), _BACKWARD: deque(), _LOSS: deque()
        }  # fmt: skip
        self._posted = {_FORWARD: 0, _BACKWARD: 0}
        self._sent: deque[list[tuple[Any, int, torch.Tensor]]] = deque()
        self._weights = _Stash(module, self._parameters) if stash else None
        # Tags of other messages of these ranks may be equal.
        self._group = dist.new_group(timeout=timedelta(seconds=RANK_TIMEOUT_S))

    @property
    def is_last(self) -> bool:
        return self.rank == self.stages - 1

    def step(self) -> torch.Tensor:
        """Run one optimizer step; return the loss of the whole batch."""
        self._sent.append([])
        self.log = []
        total = torch.zeros(())
        for slot in self.order.slots[self.rank]:
            step = self._step - slot.shift
            if step < 0:
                # The pipeline is still filling.
                continue
            if slot.action is Action.UPDATE:
                self._update()
                continue
            number = step * self.order.micro_batches + slot.micro_batch
            self.log.append((slot.action.value, number, self.updates))
            if slot.action is Action.FORWARD:
                total += self._forward(number, slot)
            else:
                self._backward(number, slot.action)
        while len(self._sent) > _PENDING_STEPS:
            self._wait_for_oldest()
        self._step += 1
        return self._whole_loss(total)

    def settle(self) -> None:
        """Wait until everything that was sent has arrived."""
        while self._sent:
            self._wait_for_oldest()

    def _forward(self, number: int, slot: Slot) -> torch.Tensor:
        x = self._inputs[slot.micro_batch]
        if self.rank:
            x = self._receive(_FORWARD, self.rank - 1, number).requires_grad_(self._returns)
        out = self.module(x) if self._weights is None else self._weights.forward(number, x)
        if self.is_last:
            out = self.loss(out, self._targets[slot.micro_batch]) / self.order.micro_batches
        else:
            self._send(out.detach(), self.rank + 1, _FORWARD, number)
        self._held[number] = x, out
        return out.detach() if self.is_last else torch.zeros(())

    def _backward(self, number: int, action: Action) -> None:
        x, out = self._held[number]
        if action is Action.INPUT and self._returns:
            gradient: Any = None if self.is_last else [self._gradient(number)]
            (sent, *_), self._groups[number] = stage_backward_input(
                [out], gradient, [x], iter(self._parameters)
            )
            assert sent is not None
            self._send(sent, self.rank - 1, _BACKWARD, number)
        if action is Action.INPUT:
            return
        del self._held[number]
        if number in self._groups:
            stage_backward_weight(iter(self._parameters), self._groups.pop(number))
        elif self._trains:
            out.backward(self._gradient(number))
            if self._weights is not None:
                self._weights.collect(number)
            if self._returns:
                assert x.grad is not None
                self._send(x.grad, self.rank - 1, _BACKWARD, number)

    def _gradient(self, number: int) -> torch.Tensor | None:
        return None if self.is_last else self._receive(_BACKWARD, self.rank + 1, number)

    def _update(self) -> None:
        # Backward passes in flight compute with the current weights on purpose.
        with _unsafe_preserve_version_counter(tuple(self._parameters)):
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.updates += 1
        if self._weights is not None:
            self._weights.renew()

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
        drains = not self.order.max_shift
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
        late = self.stages if self.order.max_shift else 0
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


class _Stash:
    """Versions of a stage's weights, so that a backward pass uses those of its forward pass."""

    def __init__(self, module: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self._module, self._parameters = module, parameters
        self._names = [name for name, p in module.named_parameters() if p.requires_grad]
        self._used: dict[int, list[torch.Tensor]] = {}
        self.renew()

    def renew(self) -> None:
        """Copy the current weights."""
        self._current = [p.detach().clone().requires_grad_() for p in self._parameters]

    def forward(self, number: int, x: torch.Tensor) -> torch.Tensor:
        self._used[number] = self._current
        weights = dict(zip(self._names, self._current, strict=True))
        output: torch.Tensor = torch.func.functional_call(self._module, weights, (x,))
        return output

    def collect(self, number: int) -> None:
        """Add the gradients of a micro-batch to those of the parameters."""
        for parameter, copy in zip(self._parameters, self._used.pop(number), strict=True):
            if copy.grad is None:
                continue
            if parameter.grad is None:
                parameter.grad = copy.grad.clone()
            else:
                parameter.grad += copy.grad
            copy.grad = None
