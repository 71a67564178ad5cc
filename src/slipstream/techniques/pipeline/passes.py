"""Passes and updates of one pipeline stage, without messages.

With asynchronous schedules, a forward pass computes with weights that lack the last `delay`
updates. Three measures against this:

- T1: the learning rate is divided by ``delay ** (1 - k / rescheduling)`` in update k;
- T2: backward passes compute with weights extrapolated to those of the forward pass, by a moving
  average of each parameter's motion, ``u = w - delay * motion``;
- T3: the first steps drain the pipeline.

Source: Yang et al., "PipeMare", MLSys 2021, arXiv 1910.05124.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from slipstream.cluster.orders import ORDERS, Action, Order
from slipstream.errors import WorkloadError

if TYPE_CHECKING:
    from slipstream.techniques.pipeline.technique import Pipeline


class StageAction(NamedTuple):
    """One action of a stage.

    Attributes:
        number: micro-batch, counted from the start of training; without meaning for an update.
        part: micro-batch within its step; -1 for an update.
    """

    action: Action
    number: int
    part: int


def actions_of(
    order: Order, warmup: int, stage: int, step: int, steps: int | None = None
) -> Iterator[StageAction]:
    """Yield the actions of a stage in one period.

    Args:
        order: after the first `warmup` steps, which drain the pipeline.
        steps: of the training; None if unlimited.
    """
    first = warmup
    if step < warmup:
        order, first = ORDERS["1f1b"](order.stages, order.micro_batches), 0
    for slot in order.slots[stage]:
        own = step - slot.shift
        if own < first or (steps is not None and own >= steps):
            # The pipeline is filling, or draining after the last step.
            continue
        number = own * order.micro_batches + slot.micro_batch
        yield StageAction(slot.action, number, slot.micro_batch)


def need_separate(stages: Sequence[nn.Module]) -> None:
    """Raise a `WorkloadError` if stages share a parameter."""
    owner: dict[nn.Parameter, int] = {}
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            if owner.setdefault(parameter, number) != number:
                raise WorkloadError(
                    f"parameter '{name}' of stage {number + 1} is shared by layers of different "
                    f"stages, {owner[parameter] + 1} and {number + 1}",
                    remedy="use fewer stages, or train without tied weights",
                )


class StagePasses:
    """Forward and backward passes of a stage, and its part of the optimizer's update.

    Args:
        loss: of output and targets, for the last stage; None for others.
        optimizer: of this stage or of the whole model; only this stage's parameters are updated.
        technique: its settings.
        order: the schedule after the warm-up.
        stage: its number.
        returns: whether the previous stage needs the gradient of its output.
        trains: whether a gradient is computed here or earlier.
    """

    def __init__(
        self, module: nn.Module, loss: Any, optimizer: Any, technique: Pipeline, order: Order,
        stage: int, *, returns: bool, trains: bool,
    ) -> None:  # fmt: skip
        self.module, self._loss, self._optimizer = module, loss, optimizer
        self._returns, self._trains = returns, trains
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        own = set(self._parameters)
        self._groups = [
            [p for p in group["params"] if p in own] for group in optimizer.param_groups
        ]
        self._micro_batches = order.micro_batches
        self._delay, self._warmup = order.delay(stage), technique.warmup
        self._rescheduling = technique.rescheduling
        self._weights = _Weights(module, self._parameters)
        if technique.schedule == "pipedream":
            self._weights = _Stash(module, self._parameters)
        elif technique.correction and self._delay:
            first = self._warmup * order.micro_batches
            self._weights = _Extrapolation(
                module, self._parameters, self._delay, technique.correction, first
            )
        self.updates = 0
        self.log: list[tuple[str, int, int]] = []
        """Action, micro-batch and number of updates before it."""
        # By micro-batch: input and output of its forward pass.
        self._held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._split: dict[int, Any] = {}

    @functools.cached_property
    def _overwrites(self) -> bool:
        return any(getattr(layer, "inplace", False) for layer in self.module.modules())

    @property
    def in_flight(self) -> int:
        """Number of micro-batches whose activations are held."""
        return len(self._held)

    def forward(self, number: int, x: torch.Tensor, targets: torch.Tensor | None) -> torch.Tensor:
        """Return the output for a micro-batch, detached; its share of the loss with `targets`."""
        self.log.append((Action.FORWARD.value, number, self.updates))
        if self._returns:
            x = x.requires_grad_()
        out = self._weights.forward(number, x.clone() if self._overwrites else x)
        if targets is not None:
            out = self._loss(out, targets) / self._micro_batches
        self._held[number] = x, out
        return out.detach()

    def backward(
        self, number: int, action: Action, gradient: Callable[[], torch.Tensor | None]
    ) -> torch.Tensor | None:
        """Return the gradient of the stage's input, if this action computes it.

        Args:
            gradient: returns that of the output; called only if it is used.
        """
        self.log.append((action.value, number, self.updates))
        x, out = self._held[number]
        if action is Action.INPUT:
            if not self._returns:
                return None
            received = gradient()
            (sent, *_), self._split[number] = stage_backward_input(
                [out], None if received is None else [received], [x], iter(self._parameters)
            )
            return sent
        del self._held[number]
        if number in self._split:
            stage_backward_weight(iter(self._parameters), self._split.pop(number))
            return None
        if not self._trains:
            return None
        received = gradient()
        with self._weights.for_backward(number):
            out.backward(received)
        return x.grad if self._returns else None

    def update(self) -> None:
        """Update this stage's parameters, at the rate of its delay."""
        factor = self._rate_factor()
        groups = self._optimizer.param_groups
        saved = [dict(group) for group in groups]
        for group, own in zip(groups, self._groups, strict=True):
            group["params"] = own
            if factor != 1.0:
                group["lr"] = group["lr"] * factor
        # Backward passes in flight compute with the current weights on purpose.
        with self._weights.at_update(), _unsafe_preserve_version_counter(tuple(self._parameters)):
            self._optimizer.step()
        for group, before in zip(groups, saved, strict=True):
            group["params"] = before["params"]
            if factor != 1.0:
                group["lr"] = before["lr"]
        for parameter in self._parameters:
            parameter.grad = None
        self.updates += 1

    def _rate_factor(self) -> float:
        done = self.updates - self._warmup
        if done < 0 or done >= self._rescheduling:
            return 1.0
        return float(max(self._delay, 1.0) ** (done / self._rescheduling - 1.0))


class _Weights:
    """The weights of a stage; passes compute with the current ones."""

    def __init__(self, module: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self._module, self._parameters = module, parameters

    def forward(self, number: int, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self._module(x)
        return output

    @contextlib.contextmanager
    def for_backward(self, number: int) -> Iterator[None]:
        """Provide the weights of a backward pass."""
        yield

    @contextlib.contextmanager
    def at_update(self) -> Iterator[None]:
        """Follow an update."""
        yield


class _Stash(_Weights):
    """Versions of a stage's weights, so that a backward pass uses those of its forward pass."""

    def __init__(self, module: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(module, parameters)
        self._names = [name for name, p in module.named_parameters() if p.requires_grad]
        self._used: dict[int, list[torch.Tensor]] = {}
        self._copy()

    def _copy(self) -> None:
        self._current = [p.detach().clone().requires_grad_() for p in self._parameters]

    def forward(self, number: int, x: torch.Tensor) -> torch.Tensor:
        self._used[number] = self._current
        weights = dict(zip(self._names, self._current, strict=True))
        output: torch.Tensor = torch.func.functional_call(self._module, weights, (x,))
        return output

    @contextlib.contextmanager
    def for_backward(self, number: int) -> Iterator[None]:
        yield
        for parameter, copy in zip(self._parameters, self._used.pop(number), strict=True):
            if copy.grad is None:
                continue
            if parameter.grad is None:
                parameter.grad = copy.grad.clone()
            else:
                parameter.grad += copy.grad
            copy.grad = None

    @contextlib.contextmanager
    def at_update(self) -> Iterator[None]:
        yield
        self._copy()


class _Extrapolation(_Weights):
    """Weights extrapolated back to those of a forward pass, in one buffer of the weights' size.

    The buffer holds ``u = w - delay * motion``, where motion is a moving average of updates that
    decays by `correction` over the delay; it is exchanged with the weights for a backward pass.

    Args:
        first: the first micro-batch after the warm-up.
    """

    def __init__(
        self, module: nn.Module, parameters: Sequence[nn.Parameter], delay: float,
        correction: float, first: int,
    ) -> None:  # fmt: skip
        super().__init__(module, parameters)
        self._decay, self._first = correction ** (1.0 / delay), first
        self._gain = delay * (1.0 - self._decay)
        self._earlier = [p.detach().clone() for p in parameters]

    @contextlib.contextmanager
    def for_backward(self, number: int) -> Iterator[None]:
        late = number >= self._first
        if late:
            self._exchange()
        try:
            yield
        finally:
            if late:
                self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        with _unsafe_preserve_version_counter(tuple(self._parameters)):
            for parameter, earlier in zip(self._parameters, self._earlier, strict=True):
                current = parameter.clone()
                parameter.copy_(earlier)
                earlier.copy_(current)

    @contextlib.contextmanager
    def at_update(self) -> Iterator[None]:
        # u' = w' - decay (w - u) - gain (w' - w)
        for parameter, earlier in zip(self._parameters, self._earlier, strict=True):
            earlier.mul_(self._decay).add_(parameter.detach(), alpha=self._gain - self._decay)
        yield
        for parameter, earlier in zip(self._parameters, self._earlier, strict=True):
            earlier.add_(parameter.detach(), alpha=1.0 - self._gain)
