"""The truth bench: its models train, and its cells are judged with their measurement error."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from statistics import NormalDist, fmean, median

import pytest
import torch

from slipstream_bench import models, truth_models
from slipstream_bench.systems import truth
from slipstream_bench.systems.accuracy.cells import Cell


@pytest.mark.parametrize("make", truth_models.FAMILIES)
def test_a_family_takes_a_step(make: Callable[[int], truth_models._TRAINED]) -> None:
    model, (x, target), loss, optimizer = make(2)
    found = loss(model(*x) if isinstance(x, tuple) else model(x), target)
    found.backward()
    optimizer.step()
    assert math.isfinite(found.item())
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_families_differ_from_those_of_other_benches() -> None:
    others = {make.__name__ for make in models.FAMILIES}
    assert not others & {make.__name__ for make in truth_models.FAMILIES}
    assert len(truth_models.FAMILIES) >= 12
    assert len(truth_models.HELD_OUT) >= len(truth_models.FAMILIES) / 3


def test_unmeasured_cells_count_as_unpredicted() -> None:
    good = Cell("a idle", "amp:bf16", 1.02, 0.9, 1.1, 1.0, 0.99, 1.01, memory_error=0.01)
    rows = {row.bar: row for row in truth._judged("idle", [good, Cell("a idle", "x", 1, 1, 1)])}
    assert rows["idle: cells told to 12 %"].value == 50
    assert rows["idle: error of predicted speed-up, median"].value == pytest.approx(2)
    assert rows["idle: error of the tensors' peak, largest"].value == pytest.approx(1)


def test_an_interval_holds_if_it_contains_the_measured_value() -> None:
    wide = Cell("a idle", "amp:bf16", 1.0, 0.95, 1.05, 1.06, 1.0, 1.2)
    rows = {row.bar: row for row in truth._judged("idle", [wide])}
    assert rows["idle: printed 90 % intervals that hold"].value == 0


def test_a_correct_prediction_shows_the_noise_of_the_measurement() -> None:
    generator = random.Random(0)
    predicted, noise = 0.06, 0.04
    reach = NormalDist().inv_cdf(0.95)

    def around(value: float, deviation: float) -> tuple[float, float]:
        return value * math.exp(-reach * deviation), value * math.exp(reach * deviation)

    cells = []
    for _ in range(4000):
        true = math.exp(generator.gauss(0, predicted))
        measured = true * math.exp(generator.gauss(0, noise))
        cells.append(
            Cell("a idle", "x", 1.0, *around(1, predicted), measured, *around(measured, noise))
        )
    best = truth.WithoutError(cells)
    held = [cell.predicted_low <= cell.measured <= cell.predicted_high for cell in cells]
    assert best.held() == pytest.approx(fmean(held), abs=0.02)
    # With the true value only the measurement error remains.
    errors = [abs(math.expm1(generator.gauss(0, noise))) for _ in cells]
    assert best.median() == pytest.approx(100 * median(errors), rel=0.1)
    assert best.within(5) == pytest.approx(fmean(error <= 0.05 for error in errors), abs=0.03)
