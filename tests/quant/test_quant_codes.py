"""Grids and codes: errors within half a scale, exact zero, shapes of scales."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import InvalidArgumentError
from slipstream.quant import (
    Format,
    Granularity,
    Grid,
    binarize,
    code_weights,
    dequantize,
    grid_of_range,
    grid_of_weights,
    quantize,
    round_stochastic,
)

finite = st.floats(-1e4, 1e4, width=32, allow_subnormal=False)
formats = st.one_of(
    st.builds(Format, st.integers(1, 8)),
    st.builds(Format, st.integers(2, 8), st.just(True), st.booleans()),
)


def tensor(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(st.lists(finite, min_size=1, max_size=40), formats, st.booleans())
@settings(max_examples=200, deadline=None)
def test_quantization_error_is_at_most_half_a_scale(
    numbers: list[float], format: Format, symmetric: bool
) -> None:
    values = torch.tensor(numbers)
    if symmetric and not format.signed:
        values = values.abs()
    grid = grid_of_range(values.min(), values.max(), format, symmetric=symmetric)
    error = (dequantize(quantize(values, grid), grid) - values).abs().max()
    # Plus float32 rounding in products with up to 255 scales.
    assert float(error) <= float(grid.scale) * (0.5 + 2e-4)


@given(finite, finite, formats)
@settings(max_examples=200, deadline=None)
def test_zero_has_an_exact_code(first: float, second: float, format: Format) -> None:
    grid = grid_of_range(min(first, second), max(first, second), format)
    zeros = torch.zeros(3)
    assert torch.equal(dequantize(quantize(zeros, grid), grid), zeros)
    assert format.low <= int(grid.zero) <= format.high


@given(formats)
def test_codes_stay_in_the_format(format: Format) -> None:
    values = torch.cat([tensor((64,)) * 1e30, tensor((64,)), torch.tensor([0.0, -0.0, 3e38])])
    grid = grid_of_range(-1.0, 1.0, format)
    codes = quantize(values, grid)
    assert codes.dtype == format.dtype
    assert format.low <= int(codes.min())
    assert int(codes.max()) <= format.high


@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_round_trip(bits: int) -> None:
    for format in [Format(bits), *([Format(bits, signed=True)] if bits > 1 else [])]:
        grid = grid_of_range(-3.0, 5.0, format)
        codes = torch.arange(format.low, format.high + 1).to(format.dtype)
        assert torch.equal(quantize(dequantize(codes, grid), grid), codes)


def test_a_grid_of_zeros_is_exact() -> None:
    grid = grid_of_weights(torch.zeros(4, 4), Format(4, signed=True), Granularity.of("channel"))
    assert torch.equal(dequantize(quantize(torch.zeros(4, 4), grid), grid), torch.zeros(4, 4))


def test_tiny_ranges_are_not_empty() -> None:
    grid = grid_of_range(1e-38, 1.1e-38, Format(8))
    assert int(quantize(torch.zeros(1), grid)) == int(grid.zero)


@pytest.mark.parametrize(
    ("text", "shape"), [("tensor", ()), ("channel", (6,)), ("block32", (6, 4)), ("block64", (6, 2))]
)
def test_errors_stay_within_each_scale(text: str, shape: tuple[int, ...]) -> None:
    granularity = Granularity.of(text)
    assert str(granularity) == text
    # Magnitudes differ between channels and within them.
    weight = tensor((6, 10, 10)) * torch.logspace(-2, 2, 600).reshape(6, 10, 10)
    grid = grid_of_weights(weight, Format(4, signed=True), granularity)
    assert tuple(grid.scale.shape) == shape
    again = dequantize(quantize(weight, grid), grid)
    scale = granularity.spread(grid.scale, (6, 10, 10))
    assert bool(((again - weight).abs() <= scale * 0.5001).all())


def test_finer_scales_reduce_the_error() -> None:
    weight = tensor((6, 100)) * torch.logspace(-2, 2, 600).reshape(6, 100)
    errors = []
    for text in ("tensor", "channel", "block32"):
        codes, scale = code_weights(weight, 3, Granularity.of(text))
        spread = Granularity.of(text).spread(scale, (6, 100))
        errors.append(float((codes * spread - weight).abs().div(weight.abs()).mean()))
    assert errors[0] > errors[1] > errors[2]


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_least_error_is_below_that_of_the_full_range(bits: int) -> None:
    weight = tensor((8, 512))
    errors = {}
    for method in ("range", "least_error"):
        grid = grid_of_weights(
            weight, Format(bits, signed=True), Granularity.of("channel"), method=method
        )
        errors[method] = (dequantize(quantize(weight, grid), grid) - weight).square().sum(1)
    assert bool((errors["least_error"] <= errors["range"]).all())
    assert float(errors["least_error"].sum()) < 0.9 * float(errors["range"].sum())


def test_binary_weights_have_the_best_scale() -> None:
    weight = tensor((5, 70))
    codes, scale = binarize(weight, Granularity.of("block32"))
    assert set(codes.unique().tolist()) == {-1, 1}
    assert scale.shape == (5, 3)
    # The last block has six weights.
    assert torch.allclose(scale[:, 2], weight[:, 64:].abs().mean(1))
    errors = []
    for factor in (0.98, 1.0, 1.02):
        each = Granularity.of("block32").spread(scale * factor, (5, 70))
        errors.append(float((weight - codes * each).square().sum()))
    assert errors[1] < min(errors[0], errors[2])


def test_stochastic_rounding_has_no_bias() -> None:
    drawn = torch.full((200_000,), 2.3)
    rounded = round_stochastic(drawn, torch.Generator().manual_seed(1))
    assert set(rounded.unique().tolist()) == {2.0, 3.0}
    # Five standard errors.
    assert abs(float(rounded.mean()) - 2.3) < 5 * (0.3 * 0.7 / 200_000) ** 0.5
    again = round_stochastic(drawn, torch.Generator().manual_seed(1))
    assert torch.equal(rounded, again)
    integers = torch.arange(-5.0, 6.0)
    assert torch.equal(round_stochastic(integers), integers)
    grid = grid_of_range(-4.0, 4.0, Format(8))
    codes = quantize(tensor((999,)), grid, rounding="stochastic")
    assert codes.dtype == torch.uint8


def test_ties_go_to_even() -> None:
    grid = Grid(Format(8), torch.tensor(1.0), torch.tensor(0, dtype=torch.int32))
    assert quantize(torch.tensor([0.5, 1.5, 2.5, 3.5]), grid).tolist() == [0, 2, 2, 4]


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (torch.tensor([1.0, float("nan")]), "NaN"),
        (torch.tensor([1.0, float("inf")]), "infinity"),
        (torch.empty(0), "empty"),
        (torch.tensor([1, 2]), "dtype"),
        ([1.0], "list"),
    ],
)
def test_refuses_invalid_values(value: Any, word: str) -> None:
    grid = grid_of_range(-1.0, 1.0, Format(4))
    with pytest.raises(InvalidArgumentError, match=f"values: .*{word}"):
        quantize(value, grid)
    if isinstance(value, torch.Tensor):
        with pytest.raises(InvalidArgumentError, match=f"weight: .*{word}"):
            code_weights(value, 3)
        with pytest.raises(InvalidArgumentError, match=f"weight: .*{word}"):
            code_weights(value, 1)


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: Format(0), "bits"),
        (lambda: Format(9), "bits"),
        (lambda: Format(1, signed=True), "bits"),
        (lambda: Format(4, narrow=True), "narrow"),
        (lambda: Granularity(axis=0, block=16), "block"),
        (lambda: Granularity(block=32), "axis"),
        (lambda: Granularity.of("row"), "scales"),
        (lambda: grid_of_range(1.0, -1.0, Format(4)), "low"),
        (lambda: grid_of_range(-1.0, 1.0, Format(4), symmetric=True), "low"),
        (lambda: grid_of_range(np.nan, 1.0, Format(4)), "low"),
        (lambda: Grid(Format(4), torch.tensor(0.0), torch.tensor(0)), "scale"),
        (lambda: Grid(Format(4), torch.tensor(1.0), torch.tensor(16)), "zero"),
        (lambda: Grid(Format(4), torch.ones(2), torch.zeros(2)), "scale"),
        (lambda: dequantize(torch.ones(2), grid_of_range(0.0, 1.0, Format(4))), "codes"),
        (
            lambda: quantize(
                torch.ones(3, 3),
                grid_of_weights(torch.ones(2, 2), Format(4), Granularity(axis=0)),
            ),
            "grid",
        ),
        (
            lambda: grid_of_weights(torch.ones(2, 2), Format(4), Granularity(axis=2)),
            "axis",
        ),
    ],
)
def test_refuses_invalid_arguments(make: Any, argument: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        make()
    assert caught.value.argument == argument
