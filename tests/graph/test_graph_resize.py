"""Calls with a number of samples that never ran, from two that did."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.graph import Call, TensorSpec
from slipstream.graph.call import Resize

RELU = "aten::relu(Tensor self) -> Tensor"
samples = st.integers(1, 512)


@given(samples, samples, samples, st.integers(0, 64), st.integers(0, 64))
def test_integers_linear_in_the_samples_are_exact(
    recorded: int, other: int, target: int, fixed: int, each: int
) -> None:
    if recorded == other:
        return

    def number(count: int) -> int:
        return fixed + each * count

    if number(recorded) * other**2 == number(other) * recorded**2:
        return
    resize = Resize(recorded, other, target)
    assert resize.number(number(recorded), number(other)) == number(target)


@given(st.integers(2, 64), st.integers(1, 128), st.integers(1, 9))
def test_integers_quadratic_in_the_samples_are_exact(half: int, target: int, each: int) -> None:
    recorded = 2 * half
    found = Resize(recorded, half, target).number(each * recorded**2, each * half**2)
    assert found == each * target**2


def test_integers_equal_to_the_batch_by_coincidence_stay() -> None:
    resize = Resize(32, 16, 64)
    square = TensorSpec("float32", (32, 32), (32, 1))
    assert resize.tensor(square, TensorSpec("float32", (16, 32), (32, 1))).shape == (64, 32)
    assert resize.tensor(square, TensorSpec("float32", (32, 16), (16, 1))) == TensorSpec(
        "float32", (32, 64), (64, 1)
    )
    assert resize.tensor(square, square) == square


def test_exactly_the_batch_dependent_integers_change() -> None:
    schema = "aten::made_up(Tensor[] a, int[] b, int c, float d, bool e, str f) -> Tensor"

    def call(n: int) -> Call:
        spec = TensorSpec("float32", (n * 8, 4), (4, 1))
        return Call(schema, ((spec, spec), (n, -1), n * 128, 1 / n, True, "none"), (spec,))

    found = Resize(32, 16, 48).call(call(32), call(16))
    assert found == Call(
        schema,
        (call(48).arguments[0], (48, -1), 48 * 128, 1 / 32, True, "none"),
        call(48).outputs,
    )


def test_an_unchanged_call_is_the_same_object() -> None:
    call = Call(RELU, (TensorSpec("float32", (2, 3), (3, 1)),))
    assert Resize(4, 2, 8).call(call, Call(RELU, call.arguments)) is call


@pytest.mark.parametrize(
    "other",
    [
        Call("aten::gelu(Tensor self) -> Tensor", (TensorSpec("float32", (2, 3), (3, 1)),)),
        Call(RELU, (TensorSpec("float64", (2, 3), (3, 1)),)),
        Call(RELU, (TensorSpec("float32", (2, 3, 1), (3, 1, 1)),)),
        Call(RELU, (None,)),
        Call(RELU, ()),
    ],
)
def test_forms_that_differ_in_more_than_integers_are_rejected(other: Call) -> None:
    call = Call(RELU, (TensorSpec("float32", (4, 3), (3, 1)),))
    assert Resize(4, 2, 8).call(call, other) is None


def test_an_extent_does_not_become_negative() -> None:
    # One fewer than the samples, as in differences between neighbours.
    assert Resize(8, 4, 1).number(7, 3) == 1
    assert Resize(8, 4, 16).number(-1, -1) == -1
