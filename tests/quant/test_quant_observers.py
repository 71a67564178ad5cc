"""Observers and calibration: correct ranges, and unchanged models."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from slipstream.errors import InvalidArgumentError
from slipstream.quant import (
    Format,
    Granularity,
    LeastError,
    MinMax,
    Percentile,
    calibrate,
    dequantize,
    grid_of_range,
    quantize,
)

batches = st.lists(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=20), min_size=1, max_size=6
)


@given(batches)
@example([[524289.0, -0.03125]])  # in float32, the smaller one rounds into the bin above zero
@settings(max_examples=100, deadline=None)
def test_full_ranges_cover_all_values(found: list[list[float]]) -> None:
    everything = torch.tensor(list(itertools.chain.from_iterable(found)))
    for observer in (MinMax(), Percentile(100)):
        for batch in found:
            observer.observe(torch.tensor(batch))
        low, high = observer.range()
        assert float(low) == pytest.approx(float(everything.min()))
        assert float(high) == pytest.approx(float(everything.max()))


def test_percentile_excludes_outliers() -> None:
    observer = Percentile(99)
    values = torch.linspace(-1, 1, 10_001)
    # The wider batch comes later: bins are joined without losing counts.
    observer.observe(values)
    observer.observe(torch.tensor([1000.0]))
    low, high = observer.range()
    # The bin width is then 2048 / 4096.
    assert -1.0 <= float(low) <= -0.5
    assert float(high) <= 1.5
    narrow = Percentile(99)
    narrow.observe(values)
    low, high = narrow.range()
    assert float(low) == pytest.approx(-0.99, abs=1e-3)
    assert float(high) == pytest.approx(0.99, abs=1e-3)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_least_error_is_below_that_of_the_full_range(bits: int) -> None:
    values = torch.randn(50_000, generator=torch.Generator().manual_seed(0))
    format = Format(bits)
    observer = LeastError(format)
    observer.observe(values)
    errors = []
    for low, high in (observer.range(), (values.min(), values.max())):
        grid = grid_of_range(low, high, format)
        errors.append(float((dequantize(quantize(values, grid), grid) - values).square().mean()))
    assert errors[0] < 0.8 * errors[1]


def test_ranges_per_channel() -> None:
    observer = MinMax(Granularity(axis=1))
    observer.observe(torch.arange(24.0).reshape(2, 3, 4))
    low, high = observer.range()
    assert low.tolist() == [0.0, 4.0, 8.0]
    assert high.tolist() == [15.0, 19.0, 23.0]


@pytest.mark.parametrize("make", [MinMax, Percentile, lambda: LeastError(Format(4))])
def test_observers_refuse_invalid_values(make: Any) -> None:
    observer = make()
    with pytest.raises(InvalidArgumentError, match="nothing"):
        observer.range()
    for bad in (torch.tensor([float("nan")]), torch.empty(0), torch.tensor([float("inf")])):
        with pytest.raises(InvalidArgumentError, match="values"):
            observer.observe(bad)


def model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
                         nn.Linear(16, 3))  # fmt: skip


def test_calibration_observes_inputs_and_outputs_and_restores_the_model() -> None:
    net = model()
    net[2].eval()
    inputs = [torch.randn(5, 2, 4, 4) for _ in range(3)]
    before = {name: value.clone() for name, value in net.state_dict().items()}
    found = calibrate(net, inputs, observer=MinMax, outputs=True)
    assert list(found) == ["0", "0:output", "4", "4:output"]
    assert float(found["0"].low) == float(torch.cat(inputs).min())
    assert found["0"].batches == 3
    assert float(found["4"].low) == 0.0
    assert "4:output" in found.table().to_markdown()
    assert [module.training for module in net] == [True, True, False, True, True]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])
    grid = found["4"].grid(Format(3))
    assert int(grid.zero) == 0


def test_calibration_lists_modules_that_never_ran() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    found = calibrate(Half(), [torch.ones(1, 2)])
    assert list(found) == ["used"]
    assert found.missing == ("unused",)


def test_calibration_refuses_invalid_input() -> None:
    with pytest.raises(InvalidArgumentError) as error:
        calibrate(model(), [])
    assert error.value.argument == "batches"
    with pytest.raises(InvalidArgumentError, match="modules"):
        calibrate(nn.ReLU(), [torch.ones(1)])
    net = model()
    with pytest.raises(InvalidArgumentError, match="module 0 holds NaN"):
        calibrate(net, [torch.full((1, 2, 4, 4), float("nan"))])
    assert net.training
    assert not net[0]._forward_pre_hooks
