"""Scans distinguish left from right, at any length, and are differentiable."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import InvalidArgumentError
from slipstream.techniques.scan import exclusive_scan, linear_recurrence
from slipstream.techniques.scan.affine import dense_recurrence
from slipstream.techniques.scan.kernels import run_diagonal


@settings(max_examples=40, deadline=None)
@given(st.text(max_size=70), st.none() | st.integers(0, 7))
def test_an_exclusive_scan_gives_the_prefixes(text: str, levels: int | None) -> None:
    found = exclusive_scan(list(text), lambda a, b: a + b, "", levels)
    assert found == [text[:end] for end in range(len(text))]


def test_the_tree_takes_two_rounds_per_level() -> None:
    def operate(element: Any, other: Any) -> Any:
        return element[0] + other[0], max(element[1], other[1]) + 1

    for count in (1, 2, 3, 7, 8, 9, 31, 1000, 1023, 1025):
        found = exclusive_scan([((i,), 0) for i in range(count)], operate, ((), 0))
        assert max(depth for _, depth in found) <= 2 * count.bit_length()
        assert found[-1][0] == tuple(range(count - 1))


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 8, 9, 31, 257])
@pytest.mark.parametrize("levels", [None, 0, 1, 3, 20])
def test_a_tree_of_matrices_equals_the_loop(steps: int, levels: int | None) -> None:
    torch.manual_seed(steps)
    a = torch.randn(steps, 2, 4, 4, dtype=torch.float64) / 3
    b = torch.randn(steps, 2, 4, dtype=torch.float64)
    h, expected = torch.zeros(2, 4, dtype=torch.float64), []
    for t in range(steps):
        h = (a[t] @ h[..., None])[..., 0] + b[t]
        expected.append(h)
    found = dense_recurrence(a, b, levels)
    assert float((found - torch.stack(expected)).norm() / torch.stack(expected).norm()) <= 1e-12


@pytest.mark.parametrize("structure", ["dense", "diag", "block"])
@pytest.mark.parametrize("reverse", [False, True])
def test_recurrences_are_differentiable(structure: Any, reverse: bool) -> None:
    shape = (7, 2, 2, 3) if structure == "block" else (7, 2, 3)
    make: Any = {"dtype": torch.float64, "requires_grad": True}
    b, h0 = torch.randn(shape, **make), torch.randn(shape[1:], **make)
    a = torch.randn(shape if structure == "diag" else (*shape, 3), **make)

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        return linear_recurrence(*tensors, reverse=reverse, structure=structure)

    assert torch.autograd.gradcheck(run, (a, b, h0))


def test_mismatched_shapes_are_named() -> None:
    with pytest.raises(InvalidArgumentError, match="does not match"):
        linear_recurrence(torch.zeros(4, 3), torch.zeros(4, 3))
    with pytest.raises(InvalidArgumentError, match="without a step"):
        linear_recurrence(torch.zeros(0, 3, 3), torch.zeros(0, 3))
    with pytest.raises(InvalidArgumentError, match="not one of"):
        linear_recurrence(torch.zeros(4, 3), torch.zeros(4, 3), structure="csr")  # type: ignore
    for shape in ((4,), (4, 3, 2), (4, 0)):
        with pytest.raises(InvalidArgumentError, match="is not"):
            run_diagonal(torch.zeros(shape), torch.zeros(shape), torch.zeros(shape[1:]), False)
