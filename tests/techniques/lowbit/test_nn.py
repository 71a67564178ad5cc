"""Low-bit layers against exact products of the same codes."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from torch import nn

from slipstream.errors import InvalidArgumentError
from slipstream.quant import Format, Granularity, code_weights, dequantize, grid_of_range, quantize
from slipstream.techniques.lowbit.coded import CodedTensor
from slipstream.techniques.lowbit.layer import as_rows, why_unsupported
from slipstream.techniques.lowbit.nn import LowBitConv2d, LowBitLinear

RANGE = (-1.5, 2.5)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rounded(x: torch.Tensor, bits: int) -> torch.Tensor:
    grid = grid_of_range(*RANGE, Format(bits))
    return dequantize(quantize(x, grid), grid)


def rounded_rows(rows: torch.Tensor, bits: int, scales: str) -> torch.Tensor:
    granularity = Granularity.of(scales)
    codes, scale = code_weights(rows, bits, granularity)
    return codes * granularity.spread(scale, tuple(rows.shape))


def assert_close(made: torch.Tensor, expected: torch.Tensor) -> None:
    assert made.shape == expected.shape
    # Sums of float32 in another order.
    torch.testing.assert_close(made, expected, rtol=1e-5, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("scales", ["tensor", "channel", "block32"])
@pytest.mark.parametrize(("wbits", "abits"), [(1, 1), (1, 8), (2, 3), (3, 3), (5, 4), (8, 8)])
def test_a_linear_layer_equals_the_float_one_on_rounded_values(
    wbits: int, abits: int, scales: str
) -> None:
    torch.manual_seed(0)
    module = nn.Linear(75, 33, bias=scales != "tensor")
    layer = LowBitLinear.from_float(module, wbits, abits, RANGE, scales=scales)
    x = randn(2, 5, 75)
    weight = rounded_rows(module.weight.detach(), wbits, scales)
    expected = nn.functional.linear(rounded(x, abits), weight, module.bias).detach()
    assert_close(layer(x), expected)
    assert torch.equal(layer.codes(), code_weights(module.weight, wbits, layer.granularity)[0])


CONVOLUTIONS: list[dict[str, Any]] = [
    {"kernel_size": 3, "padding": 1},
    {"kernel_size": 1},
    {"kernel_size": 1, "stride": 2},
    {"kernel_size": (3, 2), "stride": (2, 1), "padding": (0, 2), "dilation": (1, 2)},
    {"kernel_size": 5, "padding": "same", "bias": False},
    {"kernel_size": 2, "padding": "valid"},
]


@pytest.mark.parametrize("scales", ["channel", "block32"])
@pytest.mark.parametrize(("wbits", "abits"), [(1, 2), (3, 3), (8, 8)])
@pytest.mark.parametrize("settings", CONVOLUTIONS, ids=str)
def test_a_convolution_equals_the_float_one_on_rounded_values(
    settings: dict[str, Any], wbits: int, abits: int, scales: str
) -> None:
    torch.manual_seed(0)
    module = nn.Conv2d(7, 12, **settings)
    layer = LowBitConv2d.from_float(module, wbits, abits, RANGE, scales=scales)
    x = randn(2, 7, 11, 9)
    rows = rounded_rows(as_rows(module.weight.detach()), wbits, scales)
    n, channels, high, wide = module.weight.shape
    twin = copy.deepcopy(module)
    twin.weight.data = rows.reshape(n, high, wide, channels).permute(0, 3, 1, 2).contiguous()
    expected = twin(rounded(x, abits)).detach()
    made = layer(x)
    assert_close(made, expected)
    assert torch.equal(layer(x.contiguous(memory_format=torch.channels_last)), made)
    assert torch.equal(layer(x[1]), made[1])


@pytest.mark.parametrize("kind", ["linear", "conv", "blocks", "binary"])
def test_it_is_saved_compactly_and_loaded_without_pickle(kind: str) -> None:
    layer, empty, x = _one(kind)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    empty.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(empty(x), layer(x))
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    twice = copy.deepcopy(layer)
    twice.scale.mul_(2)
    assert not torch.equal(twice(x), layer(x))


def test_a_checkpoint_has_few_bits_per_weight() -> None:
    module = nn.Linear(512, 256)
    for bits in (1, 3, 8):
        file = io.BytesIO()
        torch.save(LowBitLinear.from_float(module, bits, 8, RANGE).state_dict(), file)
        assert len(file.getvalue()) <= (bits / 32 + 0.03) * 4 * module.weight.numel()


def _one(kind: str) -> tuple[Any, Any, torch.Tensor]:
    torch.manual_seed(1)
    if kind == "conv":
        settings: dict[str, Any] = {"kernel_size": 3, "stride": 2, "padding": 1}
        made = LowBitConv2d.from_float(nn.Conv2d(5, 6, **settings), 3, 4, RANGE)
        made.relu = True
        return made, LowBitConv2d(5, 6, **settings, wbits=3, abits=4), randn(1, 5, 8, 8)
    bits, scales = (1, "channel") if kind == "binary" else (3, "channel")
    if kind == "blocks":
        scales = "block32"
    made_ = LowBitLinear.from_float(nn.Linear(70, 9), bits, 4, RANGE, scales=scales)
    return made_, LowBitLinear(70, 9, wbits=bits, abits=4, scales=scales), randn(3, 70)


def test_intermediate_codes_change_nothing() -> None:
    torch.manual_seed(0)
    first = LowBitConv2d.from_float(nn.Conv2d(4, 40, 3), 3, 3, RANGE)
    for second in (
        LowBitConv2d.from_float(nn.Conv2d(40, 8, 3, padding=1), 3, 4, RANGE),
        LowBitConv2d.from_float(nn.Conv2d(40, 8, 1), 3, 4, RANGE),
        LowBitConv2d.from_float(nn.Conv2d(40, 8, 1), 1, 4, RANGE),
        LowBitConv2d.from_float(nn.Conv2d(40, 8, 1), 2, 4, RANGE, scales="block32"),
    ):
        x = randn(1, 4, 9, 9)
        for relu in (False, True):
            first.relu, first.output_codes = relu, None
            expected = second(first(x))
            first.output_codes = second.input_codes
            between = first(x)
            assert isinstance(between, CodedTensor)
            assert between.of == second.input_codes
            assert torch.equal(second(between), expected)


def test_a_following_scale_and_shift_become_part_of_it() -> None:
    for scales in ("channel", "block32"):
        layer = LowBitLinear.from_float(nn.Linear(70, 6), 3, 3, RANGE, scales=scales)
        x, factor, addend = randn(4, 70), randn(6, seed=1), randn(6, seed=2)
        expected = layer(x) * factor + addend
        layer.multiply_add(factor, addend)
        assert_close(layer(x), expected)
        layer.relu = True
        with pytest.raises(InvalidArgumentError, match="already"):
            layer.multiply_add(factor, addend)


@pytest.mark.parametrize("kind", ["linear", "conv", "binary", "blocks"])
def test_nan_stays_nan(kind: str) -> None:
    layer, _, x = _one(kind)
    x = torch.cat([x, x])
    x[0].view(-1)[0] = math.nan
    made = layer(x)
    assert bool(made[0].isnan().any())
    assert not bool(made[-1].isnan().any())
    x[0].view(-1)[0] = math.inf
    assert bool(layer(x).isfinite().all())


def test_invalid_input_is_named() -> None:
    layer = LowBitLinear.from_float(nn.Linear(8, 4), 3, 3, RANGE)
    layer.train()
    conv = LowBitConv2d.from_float(nn.Conv2d(3, 4, 3), 3, 3, RANGE)
    cases: list[tuple[Any, torch.Tensor, str]] = [
        (layer, torch.ones(2, 9), "last dimension must be 8"),
        (layer, torch.ones(2, 8).to(torch.complex64), "complex64"),
        (layer, torch.ones(0, 9), "last dimension must be 8"),
        (layer, torch.ones(2, 8, requires_grad=True), "gradient"),
        (layer, torch.ones(2, 8, device="meta"), "meta"),
        (layer, torch.full((2, 8), 8, dtype=torch.uint8), "above 7"),
        (conv, torch.ones(1, 4, 8, 8), "instead of"),
        (conv, torch.ones(1, 3, 2, 8), "smaller than the kernel"),
    ]
    for module, x, words in cases:
        with pytest.raises(InvalidArgumentError, match=words):
            module(x)


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: LowBitLinear(8, 4, wbits=9), "wbits"),
        (lambda: LowBitLinear(8, 4, abits=0), "abits"),
        (lambda: LowBitLinear(0, 4), "in_features"),
        (lambda: LowBitLinear(8, 4, scales="row"), "scales"),
        (lambda: LowBitConv2d(3, 4, 0), "kernel_size"),
        (lambda: LowBitConv2d(3, 4, 3, padding=-1), "padding"),
        (lambda: LowBitConv2d.from_float(nn.Conv2d(4, 8, 3, groups=4), 3, 3, RANGE), "module"),
        (lambda: LowBitConv2d(4, 8, 3, groups=4), "groups"),
        (lambda: LowBitLinear.from_float(nn.Linear(2, 2), 3, 3, (0.0, math.nan)), "high"),
        (lambda: LowBitLinear(8, 4)(torch.ones(1, 8)), "layer"),
    ],
)
def test_invalid_settings_are_named(make: Any, argument: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        make()
    assert caught.value.argument == argument


def test_foreign_states_are_refused() -> None:
    state = LowBitLinear.from_float(nn.Linear(8, 4), 3, 3, RANGE).state_dict()
    for other in (LowBitLinear(8, 4, wbits=2), LowBitLinear(8, 5), LowBitLinear(8, 4, abits=4)):
        with pytest.raises((InvalidArgumentError, RuntimeError)):
            other.load_state_dict(state)


def test_layers_that_stay_in_float_have_a_reason() -> None:
    assert "grouped" in str(why_unsupported(nn.Conv2d(4, 8, 3, groups=2)))
    assert "grouped" in str(why_unsupported(nn.Conv2d(4, 8, 3, groups=4)))
    assert why_unsupported(nn.Conv2d(4, 4, 3, groups=4)) is None
    assert "reflect" in str(why_unsupported(nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")))
    assert "one side" in str(why_unsupported(nn.Conv2d(4, 4, 2, padding="same")))
    assert "LSTM" in str(why_unsupported(nn.LSTM(2, 2)))
    assert why_unsupported(nn.Conv2d(4, 4, 3)) is None
