"""Models that ranks of benches train: layers that sleep in place of computing, at no core's cost.

So links and schedules can be judged on a machine with fewer cores than ranks.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn


class Clock:
    """When what a device computes in the background would be ready: slept for, at no core's cost.

    Every layer takes the same time from the layer before on, whatever of it this machine spends
    computing, or waking up late.
    """

    def __init__(self) -> None:
        self._ready = 0.0

    def begin(self) -> None:
        """A pass begins now."""
        self._ready = time.perf_counter()

    def wait(self, seconds: float) -> None:
        """Until the next layer's result would be ready."""
        self._ready += seconds
        time.sleep(max(0.0, self._ready - time.perf_counter()))


class Pause:
    """Every layer takes its time from when it begins, as where layers wait for their weights."""

    def wait(self, seconds: float) -> None:
        """For so long."""
        time.sleep(seconds)


class _Busy(torch.autograd.Function):
    """Passes on what it is given when a device would have it."""

    @staticmethod
    def forward(
        context: Any, x: torch.Tensor, clock: Clock | Pause, forward_s: float, backward_s: float
    ) -> torch.Tensor:
        """Wait, and give `x` back."""
        context.clock, context.backward_s = clock, backward_s
        if forward_s:
            clock.wait(forward_s)
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        """Wait, and pass the gradient on."""
        if context.backward_s:
            context.clock.wait(context.backward_s)
        return gradients[0], None, None, None


def busy(
    x: torch.Tensor, clock: Clock | Pause, forward_s: float, backward_s: float
) -> torch.Tensor:
    """`x`, when a device would have it; and its gradient likewise."""
    made: torch.Tensor = _Busy.apply(x, clock, forward_s, backward_s)
    return made


class _Turn(torch.autograd.Function):
    """Where the forward pass ends and the backward pass begins."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, clock: Clock) -> torch.Tensor:
        """`x` as it is."""
        context.clock = clock
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        """The clock begins anew."""
        context.clock.begin()
        return gradients[0], None


class Sleeping(nn.Module):
    """Linear layers, each of which takes a given time; as long as it computes, where that is 0."""

    def __init__(self, layers: int, width: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])
        self.times = forward_s, backward_s
        self.clock = Clock()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, width] to the same."""
        self.clock.begin()
        for layer in self.layers:
            x = busy(torch.relu(layer(x)), self.clock, *self.times)
        turned: torch.Tensor = _Turn.apply(x, self.clock)
        return turned


class Tied(nn.Module):
    """Tied, frozen and unused parameters, and ones that only odd ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 40)
        self.tied, self.again = nn.Linear(40, 40, bias=False), nn.Linear(40, 40)
        self.again.weight = self.tied.weight
        self.frozen = nn.Linear(40, 40).requires_grad_(False)
        self.never, self.sometimes = nn.Linear(40, 30), nn.Linear(40, 40)

    def forward(self, x: torch.Tensor, odd: bool) -> torch.Tensor:
        """[batch, 24] to [batch, 40]."""
        x = torch.relu(self.frozen(self.again(torch.relu(self.tied(self.first(x))))))
        return self.sometimes(x) if odd else x


def model_of(spec: list[Any]) -> nn.Module:
    """Layers, their width, and seconds of each one's forward and backward besides computing."""
    torch.manual_seed(0)
    layers, width, forward_s, backward_s, _ = spec
    return Sleeping(layers, width, forward_s, backward_s)


def batch_of(spec: list[Any], rank: int) -> torch.Tensor:
    """What a rank trains on: float32 [rows, width]."""
    return torch.randn(spec[4], spec[1], generator=torch.Generator().manual_seed(rank))
