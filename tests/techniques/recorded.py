"""Small real steps, recorded once per test session."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from slipstream.capture import CaptureSettings, capture
from slipstream.graph import Graph
from slipstream.workload import Built, build_from


def mlp() -> Any:
    """Three linear layers with AdamW."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 4))
    batch = (torch.randn(8, 16), torch.randint(0, 4, (8,)))
    return model, batch, cross_entropy, torch.optim.AdamW(model.parameters(), lr=1e-2)


def images() -> Any:
    """Convolution, norm, pooling and a linear head on small images."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(16, 4),
    )  # fmt: skip
    batch = (torch.randn(4, 3, 16, 16), torch.randint(0, 4, (4,)))
    return model, batch, cross_entropy, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def inference() -> Any:
    """A linear layer, no optimizer."""
    return nn.Linear(8, 8), torch.randn(4, 8)


def build(make: Callable[[], Any], *techniques: Any) -> Built:
    """The workload `make` returns, from a fixed seed."""
    torch.manual_seed(0)
    return build_from(make(), techniques, 0, make.__name__)


@functools.cache
def graph_of(make: Callable[[], Any]) -> Graph:
    """One recorded step."""
    return record(build(make))


def record(built: Built) -> Graph:
    """The graph of one step of `built`."""
    running = capture(CaptureSettings(warmup=1, steps=3, threads=1))(built)
    value = None
    while True:
        try:
            running.send(value)
        except StopIteration as end:
            return end.value
        value = built.step()
