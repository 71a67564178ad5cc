"""A model that takes a while: what is served."""

from __future__ import annotations

import torch


def make(width: int = 1024) -> tuple[torch.nn.Module, torch.Tensor]:
    """A perceptron of three layers over 8 numbers, and a batch of one."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(
        torch.nn.Linear(8, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU(),
        torch.nn.Linear(width, 4),
    )  # fmt: skip
    return layers.eval(), torch.zeros(1, 8)
