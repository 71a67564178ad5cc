"""The operations around a matmul: compiled and Python forms are bitwise equal."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from environments import switch_library_off
from slipstream.errors import InvalidArgumentError
from slipstream.quant import Format, Grid
from slipstream.quant import quantize as quantize_to
from slipstream.techniques.lowbit import convolve as door
from slipstream.techniques.lowbit import matmul, pack_weights
from slipstream.techniques.lowbit.bindings import lowbit_library
from slipstream.techniques.lowbit.coded import pooled_size
from slipstream.techniques.lowbit.convolve import (
    Codes,
    Epilogue,
    Outcome,
    Prepared,
    max_pool,
    patches,
    quantise,
    reference_finish,
    reference_max_pool,
    reference_patches,
    reference_quantise,
)
from slipstream.techniques.lowbit.windows import Convolution


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@st.composite
def codes(draw: Any) -> Codes:
    bits = draw(st.integers(1, 8))
    scale = draw(st.floats(2.0**-20, 2.0**20, width=32))
    return Codes(bits, scale, draw(st.integers(0, 2**bits - 1)))


floats = st.one_of(
    st.floats(width=32, allow_nan=False),
    st.sampled_from([0.5, 1.5, 2.5, -0.5, math.inf, -math.inf, 3e38, -0.0]),
)


@given(st.lists(floats, min_size=1, max_size=70), codes())
@settings(max_examples=150, deadline=None)
def test_codes_are_bitwise_equal(numbers: list[float], to: Codes) -> None:
    x = torch.tensor(numbers)
    made, whole = quantise(x, to)
    expected, _ = reference_quantise(x, to)
    assert whole
    assert torch.equal(made, expected)
    if bool(x.isfinite().all()) and to.scale >= 1e-30:
        grid = Grid(Format(to.bits), torch.tensor(to.scale), torch.tensor(to.zero))
        assert torch.equal(made, quantize_to(x, grid))


def test_nan_is_reported() -> None:
    x = torch.ones(100)
    x[77] = math.nan
    for function in (quantise, reference_quantise):
        assert function(x, Codes(4, 0.1))[1] is False


@st.composite
def convolutions(draw: Any) -> Convolution:
    two = st.tuples
    kernel = draw(two(st.integers(1, 5), st.integers(1, 5)))
    dilation = draw(two(st.integers(1, 3), st.integers(1, 3)))
    padding = draw(two(st.integers(0, 4), st.integers(0, 4)))
    size = [
        max(draw(st.integers(1, 9)), (k - 1) * d + 1 - 2 * p)
        for k, d, p in zip(kernel, dilation, padding, strict=True)
    ]
    image = (draw(st.integers(1, 3)), size[0], size[1], draw(st.integers(1, 20)))
    stride = draw(two(st.integers(1, 3), st.integers(1, 3)))
    return Convolution(image, kernel, stride, padding, dilation)


@given(convolutions(), st.integers(0, 255), st.data())
@settings(max_examples=150, deadline=None)
def test_patches_are_bitwise_equal(shape: Convolution, outside: int, data: Any) -> None:
    image = torch.randint(0, 256, shape.image, dtype=torch.uint8, generator=generator(0))
    expected = reference_patches(image, shape, outside)
    assert torch.equal(patches(image, shape, outside), expected)
    first = data.draw(st.integers(0, shape.rows - 1))
    last = data.draw(st.integers(first + 1, shape.rows))
    assert torch.equal(patches(image, shape, outside, first, last), expected[first:last])


@pytest.mark.parametrize("kernel", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("stride", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("padding", [(0, 0), (1, 0), (0, 1)])
def test_patches_equal_the_image_if_every_pixel_sees_only_itself(
    kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int]
) -> None:
    shape = Convolution((2, 5, 4, 3), kernel, stride, padding)
    image = torch.randint(0, 256, shape.image, dtype=torch.uint8, generator=generator(0))
    identical = torch.equal(reference_patches(image, shape, 0), image.flatten(0, 2))
    assert shape.pointwise is identical


def assert_same(made: Outcome, expected: Outcome) -> None:
    for value, other in zip(made, expected, strict=True):
        assert (value is None) == (other is None)
        assert value is None or other is None or torch.equal(value, other)


@given(convolutions(), st.booleans())
@settings(max_examples=80, deadline=None)
def test_maxima_over_windows_are_bitwise_equal(shape: Convolution, up: bool) -> None:
    padding = tuple(min(p, k // 2) for p, k in zip(shape.padding, shape.kernel, strict=True))
    shape = dataclasses.replace(shape, padding=padding)
    if min(shape.out_size) < 1:
        return
    image = torch.randint(0, 256, shape.image, dtype=torch.uint8, generator=generator(0))
    # Windows that extend beyond the image count, too, if they begin within it.
    like = torch.empty((1, 1, *shape.image[1:3]), device="meta")
    window = (shape.kernel, shape.stride, padding, shape.dilation, up)
    high, wide = torch.nn.functional.max_pool2d(like, *window).shape[2:]
    up_size = (high, wide)
    assert pooled_size(shape, up) == up_size
    made, expected = max_pool(image, shape, up_size), reference_max_pool(image, shape, up_size)
    assert torch.equal(made, expected)


def finish(
    products: torch.Tensor, epilogue: Epilogue, added: torch.Tensor | None = None
) -> Outcome:
    """Return the epilogue of compiled layers on their products, in a separate call."""
    bound = lowbit_library()
    assert bound is not None
    columns = epilogue.scale.shape[0]
    rows = products.shape[0]
    out = door._empty((rows, columns), epilogue)
    status = bound.slipstream_finish(
        door._has_avx2(),
        ctypes.byref(door._epilogue(epilogue)),
        products.data_ptr(),
        products.stride(0),
        rows,
        columns,
        ctypes.byref(door._result(out, added)),
    )
    door._check(status)
    return out


@given(st.integers(1, 40), st.integers(1, 40), st.booleans(), st.booleans(), st.booleans(),
       st.none() | codes(), st.booleans(), st.booleans(), st.sampled_from([6.0, 0.5, math.inf]),
       st.integers(0, 9))  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_epilogues_are_bitwise_equal(
    rows: int, columns: int, bias: bool, relu: bool, binary: bool, to: Codes | None, both: bool,
    sums: bool, ceiling: float, seed: int,
) -> None:  # fmt: skip
    g = generator(seed)
    products = torch.randint(
        -(2**28), 2**28, (rows, columns + binary), dtype=torch.int32, generator=g
    )
    scale = torch.rand(columns, generator=g) * 1e-5
    epilogue = Epilogue(
        scale, torch.randn(columns, generator=g) if bias else None, relu, binary, to, both, ceiling
    )
    added = torch.randn(rows, columns, generator=g) if sums else None
    made = finish(products, epilogue, added)
    assert_same(made, reference_finish(products, epilogue, added))
    assert made.floats is None or float(made.floats.max()) <= ceiling


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("to", [None, Codes(3, 0.3, 2)])
@given(convolutions(), st.integers(1, 30), st.integers(0, 7))
@settings(max_examples=40, deadline=None)
def test_a_whole_layer_equals_its_parts(
    binary: bool, to: Codes | None, shape: Convolution, n: int, zero: int
) -> None:
    g = generator(1)
    image = torch.randint(0, 8, shape.image, dtype=torch.uint8, generator=g)
    bits = 1 if binary else 3
    weight = torch.randint(0, 2**bits, (n, shape.columns), dtype=torch.uint8, generator=g)
    if binary:
        weight = torch.cat([weight, torch.ones_like(weight[:1])])
    packed = pack_weights(weight, bits, activation_bits=3, zero_points=None if binary else 4)
    bias = torch.randn(n, generator=g)
    epilogue = Epilogue(torch.rand(n, generator=g), bias, True, binary, to, both=zero % 2 == 0)
    whole = (shape.image[0], *shape.out_size, n)
    added = torch.randn(whole, generator=g) if zero % 3 == 0 else None
    made = Prepared(packed, shape, epilogue, zero)(image, added)
    products = matmul(reference_patches(image, shape, zero), packed, activation_zero=zero)
    expected = reference_finish(products, epilogue, None if added is None else added.reshape(-1, n))
    assert_same(
        made, Outcome(*(None if value is None else value.reshape(whole) for value in expected))
    )


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("bits", [1, 3, 8])
@pytest.mark.parametrize("to", [None, Codes(3, 0.3, 2)])
@given(convolutions(), st.integers(1, 70), st.integers(0, 7))
@settings(max_examples=20, deadline=None)
def test_a_depthwise_layer_equals_torchs_on_the_codes(
    threads: int, bits: int, to: Codes | None, shape: Convolution, n: int, zero: int
) -> None:
    g = generator(5)
    shape = dataclasses.replace(shape, image=(*shape.image[:3], n), depthwise=True)
    abits = 8 if bits == 8 else 3
    image = torch.randint(0, 2**abits, shape.image, dtype=torch.uint8, generator=g)
    low, high = (0, 2) if bits == 1 else (-(2 ** (bits - 1)), 2 ** (bits - 1))
    weight = torch.randint(low, high, (n, shape.columns), generator=g)
    stored = torch.cat([weight, torch.ones_like(weight[:1])]) if bits == 1 else weight
    packed = pack_weights(
        stored.to(torch.uint8 if bits == 1 else torch.int8), bits, activation_bits=abits
    )
    signed = 2 * weight - 1 if bits == 1 else weight
    high_padding, wide_padding = shape.padding
    padded = torch.nn.functional.pad(
        image.permute(0, 3, 1, 2).double() - zero,
        (wide_padding, wide_padding, high_padding, high_padding),
    )
    sums = torch.nn.functional.conv2d(
        padded, signed.double().view(n, 1, *shape.kernel), stride=shape.stride,
        dilation=shape.dilation, groups=n,
    )  # fmt: skip
    products = sums.permute(0, 2, 3, 1).reshape(shape.rows, n).to(torch.int32)
    epilogue = Epilogue(
        torch.rand(n, generator=g), torch.randn(n, generator=g), True, bits == 1, to,
        both=zero % 2 == 0, ceiling=40.0,
    )  # fmt: skip
    whole = (shape.image[0], *shape.out_size, n)
    added = torch.randn(whole, generator=g) if zero % 3 == 0 else None
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        made = Prepared(packed, shape, epilogue, zero)(image, added)
    finally:
        torch.set_num_threads(before)
    expected = reference_finish(
        products, dataclasses.replace(epilogue, binary=False),
        None if added is None else added.reshape(-1, n),
    )  # fmt: skip
    assert_same(
        made, Outcome(*(None if value is None else value.reshape(whole) for value in expected))
    )


def test_many_blocks_equal_one_layer() -> None:
    g = generator(2)
    shape = Convolution((2, 60, 50, 64), (3, 3), padding=(1, 1))
    image = torch.randint(0, 8, shape.image, dtype=torch.uint8, generator=g)
    weight = torch.randint(-4, 4, (40, shape.columns), dtype=torch.int8, generator=g)
    packed = pack_weights(weight, 3, activation_bits=3)
    epilogue = Epilogue(torch.rand(40, generator=g))
    products = matmul(patches(image, shape, 3), packed, activation_zero=3)
    made, _ = Prepared(packed, shape, epilogue, 3)(image)
    expected, _ = finish(products, epilogue)
    assert made is not None
    assert expected is not None
    assert torch.equal(made.reshape(-1, 40), expected)


def test_codes_out_of_range_are_refused() -> None:
    shape = Convolution((1, 4, 4, 8))
    packed = pack_weights(torch.ones(2, 8, dtype=torch.int8), 2, activation_bits=3)
    with pytest.raises(InvalidArgumentError, match="above 7"):
        Prepared(packed, shape, Epilogue(torch.ones(2)))(
            torch.full(shape.image, 9, dtype=torch.uint8)
        )
    by_channel = dataclasses.replace(shape, depthwise=True)
    weights = pack_weights(torch.ones(8, 1, dtype=torch.int8), 2, activation_bits=3)
    with pytest.raises(InvalidArgumentError, match="above 7"):
        Prepared(weights, by_channel, Epilogue(torch.ones(8)))(
            torch.full(shape.image, 9, dtype=torch.uint8)
        )
    with pytest.raises(InvalidArgumentError, match="8 channels, the weights are for 3"):
        Prepared(
            pack_weights(torch.ones(3, 1, dtype=torch.int8), 2), by_channel, Epilogue(torch.ones(3))
        )
    for bad in [(0, 1.0, 0), (9, 1.0, 0), (3, 0.0, 0), (3, math.inf, 0), (3, 1.0, 8)]:
        with pytest.raises(InvalidArgumentError):
            Codes(*bad)


def test_results_are_equal_without_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    g = generator(3)
    shape = Convolution((1, 7, 6, 5), (3, 2), (2, 1), (1, 2))
    image = torch.randint(0, 16, shape.image, dtype=torch.uint8, generator=g)
    weight = torch.randint(-4, 4, (6, shape.columns), dtype=torch.int8, generator=g)
    epilogue = Epilogue(torch.rand(6, generator=g), codes=Codes(4, 0.5, 3))

    window = Convolution(shape.image, (3, 3), (2, 2), (1, 1))

    by_channel = dataclasses.replace(shape, depthwise=True)

    def layer() -> tuple[Outcome, Outcome, torch.Tensor]:
        packed = pack_weights(weight, 3, activation_bits=4)
        made = Prepared(packed, shape, epilogue, 3)(image)
        few = pack_weights(weight[:5, : by_channel.columns], 3, activation_bits=4)
        fewer = dataclasses.replace(epilogue, scale=epilogue.scale[:5])
        depthwise = Prepared(few, by_channel, fewer, 3)(image)
        return made, depthwise, max_pool(image, window, window.out_size)

    compiled = layer()
    switch_library_off(monkeypatch)
    by_torch = layer()
    assert_same(by_torch[0], compiled[0])
    assert_same(by_torch[1], compiled[1])
    assert torch.equal(by_torch[2], compiled[2])
