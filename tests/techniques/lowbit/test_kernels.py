"""Every kernel of this CPU equals the 64-bit reference bitwise."""

from __future__ import annotations

import itertools
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from environments import switch_library_off
from slipstream.errors import InvalidArgumentError, UnknownNameError
from slipstream.techniques.lowbit import PackedWeights, linear, matmul, pack_weights
from slipstream.techniques.lowbit.bindings import Kernel, kernels

KERNELS = pytest.mark.parametrize("kernel", kernels(), ids=lambda k: f"{k.scheme}-{k.level}")
PAIRS = list(itertools.product(range(1, 9), range(1, 9)))
SIZES = (1, 3, 17, 64, 127, 512, 4608)


def packed_for(
    kernel: Kernel, weight: torch.Tensor, bits: int, abits: int, zeros: torch.Tensor | int | None
) -> PackedWeights:
    return pack_weights(
        weight,
        bits,
        activation_bits=abits,
        zero_points=zeros,
        scheme=kernel.scheme,
        level=kernel.level,
    )


def integers(shape: tuple[int, int], bits: int, signed: bool, fill: str) -> torch.Tensor:
    lowest = -(2 ** (bits - 1)) if signed else 0
    top = lowest + 2**bits - 1
    dtype = torch.int8 if signed else torch.uint8
    if fill == "random":
        return torch.randint(lowest, top + 1, shape, dtype=dtype)
    return torch.full(shape, top if fill == "max" else lowest, dtype=dtype)


def check(
    kernel: Kernel,
    bits: int,
    abits: int,
    size: tuple[int, int, int],
    signs: tuple[bool, bool],
    zeros: bool,
    fill: str = "random",
) -> None:
    m, n, k = size
    weight = integers((n, k), bits, signs[0], fill)
    a = integers((m, k), abits, signs[1], fill)
    zero_points, activation_zero = 0, 0
    if zeros:
        zero_points = integers((1, n), bits, signs[0], "random")[0]
        activation_zero = int(integers((1, 1), abits, signs[1], "random"))
    packed = packed_for(kernel, weight, bits, abits, zero_points)
    product = matmul(a, packed, activation_zero=activation_zero)
    zeros_by_row = torch.as_tensor(zero_points).long().reshape(-1, 1)
    expected = (a.long() - activation_zero) @ (weight.long() - zeros_by_row).T
    assert torch.equal(product.long(), expected), (bits, abits, size, signs, zeros, fill)


@KERNELS
def test_products_equal_the_reference_for_every_pair_of_widths(kernel: Kernel) -> None:
    torch.manual_seed(0)
    supported = [pair for pair in PAIRS if kernel.supports(*pair)]
    assert supported
    for index, (bits, abits) in enumerate(supported):
        signs = (bool(index & 1), bool(index & 2))
        check(kernel, bits, abits, (1, 17, 64), signs, zeros=bool(index & 4))
        check(kernel, bits, abits, (5, 40, 127), signs, zeros=not index & 4)
        check(kernel, bits, abits, (17, 67, 130), signs, zeros=True)
        for fill in ("max", "min"):
            check(kernel, bits, abits, (13, 19, 300), signs, zeros=True, fill=fill)
            check(kernel, bits, abits, (2, 19, 1100), signs, zeros=True, fill=fill)


@KERNELS
def test_products_equal_the_reference_for_every_size(kernel: Kernel) -> None:
    torch.manual_seed(1)
    widths = [pair for pair in ((1, 1), (2, 2), (3, 3), (4, 8), (7, 7)) if kernel.supports(*pair)]
    sizes = [size for size in itertools.product(SIZES[:5], repeat=3) if size[0] * size[1] < 9000]
    for index, size in enumerate(sizes):
        bits, abits = widths[index % len(widths)]
        check(kernel, bits, abits, size, (False, True), zeros=bool(index & 1))
    for fill in ("max", "random"):
        for bits, abits in widths:
            check(kernel, bits, abits, (10, 33, 4608), (True, False), zeros=False, fill=fill)


@pytest.mark.full
@KERNELS
def test_products_equal_the_reference_over_the_whole_grid(kernel: Kernel) -> None:
    torch.manual_seed(2)
    for bits, abits in PAIRS:
        if not kernel.supports(bits, abits):
            continue
        for size in itertools.product(SIZES, repeat=3):
            # The reference takes a second for 2 * 10^8 products; the omitted parts of the largest
            # sizes differ from the others in nothing that affects a kernel.
            if size[0] * size[1] * size[2] > 3e6 and (bits, abits) not in ((1, 1), (3, 3), (7, 8)):
                continue
            if size[0] * size[1] * size[2] > 3e8:
                continue
            for fill in ("random", "max", "min"):
                check(kernel, bits, abits, size, (False, False), zeros=False, fill=fill)
            check(kernel, bits, abits, size, (True, True), zeros=True)


@KERNELS
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_accepts_strides_and_shapes(kernel: Kernel, data: st.DataObject) -> None:
    pairs = [pair for pair in PAIRS if kernel.supports(*pair)]
    bits, abits = data.draw(st.sampled_from(pairs))
    m, n, k = (data.draw(st.integers(1, 140)) for _ in range(3))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    weight = integers((n, k + 3), bits, True, "random")[:, 1 : k + 1]
    a = integers((m, k + 5), abits, False, "random")[:, 2 : k + 2]
    out = torch.full((m, n + 4), 77, dtype=torch.int32)
    packed = packed_for(kernel, weight, bits, abits, None)
    given_back = matmul(a, packed, out=out[:, 1 : n + 1])
    assert given_back.data_ptr() == out[:, 1:].data_ptr()
    assert torch.equal(out[:, 1 : n + 1].long(), a.long() @ weight.long().T)
    assert bool((out[:, 0] == 77).all())
    assert bool((out[:, n + 1 :] == 77).all())


@KERNELS
def test_two_threads_equal_one(kernel: Kernel) -> None:
    torch.manual_seed(3)
    bits, abits = next(pair for pair in PAIRS if kernel.supports(*pair))
    before = torch.get_num_threads()
    try:
        for m, n, k in ((1, 3000, 1024), (50, 300, 500), (900, 70, 300)):
            weight = integers((n, k), bits, False, "random")
            a = integers((m, k), abits, True, "random")
            packed = packed_for(kernel, weight, bits, abits, None)
            torch.set_num_threads(1)
            single = matmul(a, packed, activation_zero=-1)
            torch.set_num_threads(2)
            assert torch.equal(matmul(a, packed, activation_zero=-1), single)
            assert torch.equal(single.long(), (a.long() + 1) @ weight.long().T)
    finally:
        torch.set_num_threads(before)


@KERNELS
def test_packed_weights_can_be_unpacked_and_used_by_other_kernels(kernel: Kernel) -> None:
    torch.manual_seed(4)
    for bits, abits in [pair for pair in PAIRS if kernel.supports(*pair)][::5]:
        for signed in (False, True):
            weight = integers((19, 70), bits, signed, "random")
            zeros = integers((1, 19), bits, signed, "random")[0]
            packed = packed_for(kernel, weight, bits, abits, zeros)
            assert torch.equal(packed.weights(), weight)
            stored = packed.to_bytes()
            assert len(stored) == 32 + 19 * (-(-70 * bits // 8) + 4)
            again = PackedWeights.from_bytes(stored)
            assert (again.bits, again.activation_bits, again.signed) == (bits, abits, signed)
            assert torch.equal(again.weights(), weight)
            a = integers((3, 70), abits, False, "random")
            assert torch.equal(matmul(a, again), matmul(a, packed))
            assert torch.equal(matmul(a, pickle.loads(pickle.dumps(packed))), matmul(a, packed))


@KERNELS
def test_activations_out_of_range_are_refused_at_any_position(kernel: Kernel) -> None:
    for bits, abits in [pair for pair in PAIRS if kernel.supports(*pair) and pair[1] < 8][::7]:
        packed = packed_for(kernel, integers((20, 200), bits, True, "max"), bits, abits, None)
        for m, row, column in ((1, 0, 199), (120, 97, 3)):
            a = integers((m, 200), abits, False, "max")
            a[row, column] += 1
            with pytest.raises(InvalidArgumentError, match=f"{abits} bits hold 0 to") as caught:
                matmul(a, packed)
            assert caught.value.argument == "a"
            low = integers((m, 200), abits, True, "min")
            low[row, column] -= 1
            with pytest.raises(InvalidArgumentError, match=rf"^a: .*{int(low.min())}\b"):
                matmul(low, packed)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("relu", [False, True])
def test_a_layer_equals_its_steps(signed: bool, relu: bool) -> None:
    torch.manual_seed(5)
    for m, n, k, bits, abits in ((1, 64, 64, 3, 3), (33, 70, 100, 4, 8), (300, 10, 50, 2, 5)):
        weight = integers((n, k), bits, signed, "random")
        packed = pack_weights(weight, bits, activation_bits=abits)
        x = torch.randn(m, k) * 3
        x[0, :3] = torch.tensor([float("inf"), -float("inf"), 1e30])
        step, zero = 0.37, 2 ** (abits - 1)
        scale, bias = torch.rand(n) * 0.1, torch.randn(n)
        top = 2**abits - 1
        rounded = (x / torch.tensor(step)).round().clamp(-zero, top - zero) + zero
        product = matmul(rounded.to(torch.uint8), packed, activation_zero=zero)
        expected = product * scale + bias
        expected = expected.relu() if relu else expected
        y = linear(x, packed, scale, bias, activation_scale=step, activation_zero=zero, relu=relu)
        assert torch.equal(y, expected)
        batched = linear(
            x.view(1, m, k), packed, scale, activation_scale=step, activation_zero=zero
        )
        assert batched.shape == (1, m, n)
        assert torch.equal(batched[0], product * scale)


def test_nan_stays_nan() -> None:
    packed = pack_weights(torch.ones(3, 5, dtype=torch.int8), 2)
    x = torch.ones(4, 5)
    x[2, 4] = float("nan")
    y = linear(x, packed, torch.ones(3), activation_scale=1.0, relu=True)
    assert bool(y[2].isnan().all())
    assert torch.equal(y[[0, 1, 3]], torch.full((3, 3), 5.0))


def test_python_gives_equal_results_without_the_compiled_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(6)
    weight, a = integers((9, 30), 3, True, "random"), integers((4, 30), 5, True, "random")
    zeros = integers((1, 9), 3, True, "random")[0]
    compiled = pack_weights(weight, 3, activation_bits=5, zero_points=zeros)
    x, scale, bias = torch.randn(4, 30), torch.rand(9), torch.randn(9)
    x[1, 1] = float("nan")
    y = linear(x, compiled, scale, bias, activation_scale=0.1, activation_zero=9, relu=True)
    switch_library_off(monkeypatch)
    plain = pack_weights(weight, 3, activation_bits=5, zero_points=zeros)
    assert plain.level == "python"
    product = matmul(a, plain, activation_zero=-3)
    assert torch.equal(product, matmul(a, compiled, activation_zero=-3))
    again = linear(x, plain, scale, bias, activation_scale=0.1, activation_zero=9, relu=True)
    assert torch.equal(again.nan_to_num(-1), y.nan_to_num(-1))
    assert torch.equal(plain.weights(), weight)
    with pytest.raises(InvalidArgumentError, match="5 bits hold -16 to 15"):
        matmul(torch.full((1, 30), 16, dtype=torch.int8), plain)


def test_invalid_weights_name_the_wrong_argument() -> None:
    good = torch.ones(4, 6, dtype=torch.int8)

    def refused(argument: str, match: str, weight: torch.Tensor = good, **more: object) -> None:
        settings = {"bits": 3, **more}
        with pytest.raises(InvalidArgumentError, match=match) as caught:
            pack_weights(weight, **settings)  # type: ignore[arg-type]
        assert caught.value.argument == argument

    refused("weight", "has dtype torch.float32", good.float())
    refused("weight", "has 1 dimensions", good[0])
    refused("weight", r"is empty: its shape is \(0, 6\)", good[:0])
    refused("weight", "is on device 'meta'", good.to("meta"))
    refused("weight", "has values from 1 to 4; 3 bits hold -4 to 3", good.clone().fill_diagonal_(4))
    refused("weight", "3 bits hold 0 to 7", torch.full((2, 2), 8, dtype=torch.uint8))
    refused("weight", "may overflow 32 bits", good[:1].repeat(1, 12000), bits=8)
    refused("bits", "9 is not between 1 and 8", bits=9)
    refused("activation_bits", "0 is not between", activation_bits=0)
    refused("zero_points", "has shape", zero_points=torch.zeros(3, dtype=torch.int32))
    refused("zero_points", "has values from 4", zero_points=4)
    refused("zero_points", "not integers", zero_points=torch.zeros(4))
    refused("rows", "0 is not a positive", rows=0)
    with pytest.raises(UnknownNameError, match="unknown scheme 'fast'"):
        pack_weights(good, 3, scheme="fast")
    with pytest.raises(UnknownNameError, match="'mmx'"):
        pack_weights(good, 3, level="mmx")


def test_invalid_products_name_the_wrong_argument() -> None:
    packed = pack_weights(torch.ones(4, 6, dtype=torch.int8), 3, activation_bits=3)
    good = torch.ones(2, 6, dtype=torch.uint8)

    def refused(argument: str, match: str, a: torch.Tensor = good, **more: object) -> None:
        with pytest.raises(InvalidArgumentError, match=match) as caught:
            matmul(a, packed, **more)  # type: ignore[arg-type]
        assert caught.value.argument == argument

    refused("a", "has dtype torch.float32, not uint8 or int8", good.float())
    refused("a", "has 3 dimensions", good[None])
    refused("a", "has 5 columns, but the packed weights have 6", good[:, :5])
    assert matmul(good[:0], packed).shape == (0, 4)
    refused("a", "is on device 'meta'", good.to("meta"))
    refused("a", "has strides", torch.ones(6, 2, dtype=torch.uint8).T)
    refused("activation_zero", "8 is not within 0 to 7", activation_zero=8)
    refused("activation_zero", "is not within -4 to 3", good.to(torch.int8), activation_zero=4)
    refused("out", r"has shape \(2, 5\)", out=torch.zeros(2, 5, dtype=torch.int32))
    refused("out", "has dtype", out=torch.zeros(2, 4))
    refused("out", "has strides", out=torch.zeros(4, 2, dtype=torch.int32).T)
    refused("out", "has strides", out=torch.zeros(1, 4, dtype=torch.int32).expand(2, 4))
    with pytest.raises(InvalidArgumentError, match="x: has shape"):
        linear(torch.ones(2, 5), packed, torch.ones(4), activation_scale=1.0)
    with pytest.raises(InvalidArgumentError, match="scale: is"):
        linear(torch.ones(2, 6), packed, torch.ones(5), activation_scale=1.0)
    with pytest.raises(InvalidArgumentError, match="activation_scale: nan"):
        linear(torch.ones(2, 6), packed, torch.ones(4), activation_scale=float("nan"))
    for damaged in (b"", packed.to_bytes()[:-1], packed.to_bytes() + b"x"):
        with pytest.raises(InvalidArgumentError, match="data: "):
            PackedWeights.from_bytes(damaged)
