"""Consecutive modules are found by running them, if nothing else reads the first's output."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from slipstream.surgery import Pair, consecutive_pairs, place

LAYERS, NORMS = (nn.Linear, nn.Conv2d), (nn.BatchNorm1d, nn.BatchNorm2d)


class Two(nn.Module):
    """A layer and a norm; subclasses use them differently."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x))


class Residual(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y + self.norm(y)


class Twice(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(self.norm(self.layer(x))))


class Between(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x).relu())


class Looks(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        assert y.shape[0] == y.size(0)
        return self.norm(y)


class InPlace(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        y += 1
        return self.norm(y)


class Clips(nn.Module):
    """A layer and a ReLU in place, whose output is read afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.relu = nn.Linear(4, 4), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.layer(x))
        return y + y.exp()


class ClipsLate(Clips):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y.exp() + self.relu(y)


def found(model: nn.Module, second: tuple[type[nn.Module], ...] = (*NORMS, nn.ReLU)) -> list[Pair]:
    model.eval()
    return consecutive_pairs(model, lambda: model(torch.randn(3, 4)), LAYERS, second)


@pytest.mark.parametrize(
    ("model", "pairs"),
    [
        (Two(), [Pair("layer", "norm")]),
        (Looks(), [Pair("layer", "norm")]),  # reading a shape does not count
        (Clips(), [Pair("layer", "relu")]),  # an overwritten output belongs to the second module
        (ClipsLate(), []),
        (Residual(), []),
        (InPlace(), []),
        (Between(), []),
        (Twice(), []),
    ],
)
def test_finds_pairs_without_other_readers(model: nn.Module, pairs: list[Pair]) -> None:
    assert found(model) == pairs


def test_removes_its_hooks() -> None:
    model = Two()
    found(model)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_place_replaces_every_reference() -> None:
    shared = nn.ReLU()
    model = nn.Sequential(shared, nn.Sequential(shared, nn.Tanh()))
    place(model, "0", nn.Identity())
    assert not any(isinstance(m, nn.ReLU) for m in model.modules())
    assert isinstance(model.get_submodule("1.0"), nn.Identity)
