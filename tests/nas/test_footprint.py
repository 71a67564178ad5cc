"""Flash, RAM and instructions of sub-networks equal those of their exported firmware."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from slipstream.nas import Footprint, Supernet, derive_space
from slipstream.ship.export import quantize_model, write_network
from slipstream.ship.firmware import export_firmware, forecast


def separable(i: int, o: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(i, i, 3, padding=1, groups=i), nn.BatchNorm2d(i), nn.ReLU(),
        nn.Conv2d(i, o, 1), nn.BatchNorm2d(o), nn.ReLU(),
    )  # fmt: skip


def head(i: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(i, 4)]


def ds_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, (10, 4), (2, 2), (4, 1)), nn.ReLU(), separable(16, 24), separable(24, 16),
        *head(16), nn.Softmax(1),
    )  # fmt: skip


class Residual(nn.Module):
    """Inverted bottleneck with a gate, or a sum with an activation behind it."""

    def __init__(self, channels: int, *, gate: bool = False, after: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Conv2d(channels, 24, 1), nn.Conv2d(24, channels, 5, padding=2)
        self.gate = nn.Conv2d(24, 24, 1) if gate else None
        self.after = after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.up(x))
        if self.gate is not None:
            y = y * torch.sigmoid(self.gate(y.mean((2, 3), keepdim=True)))
        y = x + self.down(y)
        return torch.relu(y) if self.after else y


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 12, 3, padding=1), nn.Conv2d(1, 8, 3, padding=1)
        self.last = nn.Conv2d(20, 16, 1)
        self.head = nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 15, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.cat([torch.relu(self.a(x)), torch.relu(self.b(x))], 1)
        return self.head(self.last(y))


def residual(**options: bool) -> nn.Module:
    blocks = nn.Sequential(Residual(16, **options), Residual(16, **options))
    return nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), blocks, *head(16))


def large_kernels() -> nn.Module:
    """Depthwise layers whose kernels of size 5 and 3 have different code on a processor."""
    layers = [
        nn.Sequential(nn.Conv2d(8, 8, 5, padding=2, groups=8), nn.ReLU(), nn.Conv2d(8, 8, 1))
        for _ in range(2)
    ]
    return nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), *layers, *head(8))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int]]] = {
    "ds_cnn": (ds_cnn, (20, 10)), "gated": (lambda: residual(gate=True), (12, 12)),
    "activated": (lambda: residual(after=True), (12, 12)), "joined": (Joined, (10, 6)),
    "large_kernels": (large_kernels, (12, 12)),
}  # fmt: skip


@functools.cache
def footprint(name: str) -> tuple[torch.Tensor, Footprint]:
    torch.manual_seed(0)
    make, size = MODELS[name]
    model, inputs = make().eval(), torch.randn(4, 1, *size)
    return inputs, Footprint(Supernet(derive_space(model, inputs, channel_multiple=4)), inputs)


@pytest.mark.parametrize("name", MODELS)
def test_predictions_equal_the_converted_subnets(name: str) -> None:
    inputs, found = footprint(name)
    assert {leaf.path for leaf in found.space.leaves} == set(found.net.space.choices)
    columns = found.space.sample_columns(4, np.random.default_rng(0))
    many = found.predict_many(columns)
    for number in range(4):
        config = {path: int(column[number]) for path, column in columns.items()}
        predicted = found.predict(config)
        model = write_network(quantize_model(found.net.export(config), [inputs]))
        firmware = export_firmware(model)
        actual = forecast(firmware)
        assert (predicted.flash, predicted.ram) == (actual.flash, actual.ram)
        # Whether a channel takes the short form of rescaling depends on its scale.
        assert predicted.instructions == pytest.approx(actual.instructions, rel=0.01)
        assert many.flash[number] == predicted.flash
        assert many.instructions[number] == predicted.instructions
        assert many.macs[number] == firmware.program.macs
        bound = firmware.arena.plan.bound + actual.stack
        assert (
            many.ram[number] == bound if firmware.arena.plan.optimal else many.ram[number] <= bound
        )


def test_left_out_names_have_their_largest_choice() -> None:
    _, found = footprint("ds_cnn")
    width = next(iter(found.net.space.choices))
    many = found.predict_many({width: [found.net.space.full[width]]})
    assert many.flash[0] == found.predict({}).flash
