"""Models that ranks of benches train: layers that sleep instead of computing.

So links and schedules can be measured on a machine with fewer cores than ranks.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn


class Clock:
    """Time at which a device's background computation would be ready; waiting uses no core.

    Every layer ends a fixed time after the previous layer, even if this machine computes or wakes
    up late.
    """

    def __init__(self) -> None:
        self._ready = 0.0

    def begin(self) -> None:
        """Begin a pass now."""
        self._ready = time.perf_counter()

    def wait(self, seconds: float) -> None:
        """Wait until the next layer's result would be ready."""
        self._ready += seconds
        time.sleep(max(0.0, self._ready - time.perf_counter()))


class Pause:
    """A clock whose layers take their time from their own start, as if they wait for weights."""

    def wait(self, seconds: float) -> None:
        """Sleep for this time."""
        time.sleep(seconds)


class _Busy(torch.autograd.Function):
    """Identity that waits until a device would have computed its value."""

    @staticmethod
    def forward(
        context: Any, x: torch.Tensor, clock: Clock | Pause, forward_s: float, backward_s: float
    ) -> torch.Tensor:
        """Wait, and return a copy of `x`."""
        context.clock, context.backward_s = clock, backward_s
        if forward_s:
            clock.wait(forward_s)
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        """Wait, and return the gradient."""
        if context.backward_s:
            context.clock.wait(context.backward_s)
        return gradients[0], None, None, None


def busy(
    x: torch.Tensor, clock: Clock | Pause, forward_s: float, backward_s: float
) -> torch.Tensor:
    """Return `x` when a device would have computed it, and delay its gradient likewise."""
    delayed: torch.Tensor = _Busy.apply(x, clock, forward_s, backward_s)
    return delayed


class _Turn(torch.autograd.Function):
    """Identity at the end of the forward pass and the start of the backward pass."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, clock: Clock) -> torch.Tensor:
        """Return a view of `x`."""
        context.clock = clock
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        """Restart the clock."""
        context.clock.begin()
        return gradients[0], None


class Sleeping(nn.Module):
    """Linear layers that each take a fixed time; their computing time if it is 0."""

    def __init__(self, layers: int, width: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])
        self.times = forward_s, backward_s
        self.clock = Clock()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [batch, width] to the same shape."""
        self.clock.begin()
        for layer in self.layers:
            x = busy(torch.relu(layer(x)), self.clock, *self.times)
        turned: torch.Tensor = _Turn.apply(x, self.clock)
        return turned


class Tied(nn.Module):
    """A model with tied, frozen and unused parameters, and some that only odd ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 40)
        self.tied, self.again = nn.Linear(40, 40, bias=False), nn.Linear(40, 40)
        self.again.weight = self.tied.weight
        self.frozen = nn.Linear(40, 40).requires_grad_(False)
        self.never, self.sometimes = nn.Linear(40, 30), nn.Linear(40, 40)

    def forward(self, x: torch.Tensor, odd: bool) -> torch.Tensor:
        """Map [batch, 24] to [batch, 40]."""
        x = torch.relu(self.frozen(self.again(torch.relu(self.tied(self.first(x))))))
        return self.sometimes(x) if odd else x


def model_of(spec: list[Any]) -> nn.Module:
    """Build a model from layers, their width, and seconds added to each one's passes."""
    torch.manual_seed(0)
    layers, width, forward_s, backward_s, _ = spec
    return Sleeping(layers, width, forward_s, backward_s)


def batch_of(spec: list[Any], rank: int) -> torch.Tensor:
    """Return the batch of a rank, float32 [rows, width]."""
    return torch.randn(spec[4], spec[1], generator=torch.Generator().manual_seed(rank))
