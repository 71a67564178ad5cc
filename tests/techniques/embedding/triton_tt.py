"""Run by test_tt_triton.py in a separate process: Triton's tensor trains against torch's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from slipstream.errors import InvalidArgumentError
from slipstream.techniques.embedding.kernels import tt as door
from slipstream.techniques.embedding.kernels import tt_reference as reference
from slipstream.techniques.embedding.kernels import tt_triton as kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = (
    ((5, 6, 7), (2, 2, 4), (3, 5)),
    ((5, 4, 7), (4, 4, 4), (16, 32)),
    ((3, 2, 4), (1, 3, 5), (1, 1)),
    ((50, 4), (4, 8), (6,)),
)


def cores_of(shape: Any) -> list[torch.Tensor]:
    p, q, r = shape
    ranks = (1, *r, 1)
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(p[t], ranks[t], q[t], ranks[t + 1], generator=generator) for t in range(len(p))
    ]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s[1])))
def test_rows_and_gradients_equal_the_references(shape: Any) -> None:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, math.prod(shape[0]), (70,), generator=generator)
    ids[::5] = ids[3]
    grad = torch.randn(70, math.prod(shape[1]), generator=generator)
    own = [core.to(DEVICE).requires_grad_() for core in cores_of(shape)]
    exact = [core.double().requires_grad_() for core in cores_of(shape)]
    assert kernels.runs(own)
    made = kernels.rows_of(own, ids.to(DEVICE))
    expected = reference.rows_of(exact, ids)
    close = {"check_dtype": False, "rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(made.cpu(), expected, **close)
    found = torch.autograd.grad(made, own, grad.to(DEVICE))
    gradients = torch.autograd.grad(expected, exact, grad.double())
    for gradient, other in zip(found, gradients, strict=True):
        torch.testing.assert_close(gradient.cpu(), other, **close)


def test_empty_input_gives_empty_output() -> None:
    cores = [core.to(DEVICE).requires_grad_() for core in cores_of(SHAPES[0])]
    made = kernels.rows_of(cores, torch.empty(0, dtype=torch.int64, device=DEVICE))
    assert made.shape == (0, 16)
    made.sum().backward()
    assert not any(core.grad.any() for core in cores if core.grad is not None)


@pytest.mark.parametrize(("shape", "padding", "dtype"), [
    (SHAPES[0], 7, torch.int32), (SHAPES[3], -1, torch.int64),
])  # fmt: skip
def test_sums_of_bags_equal_the_references(shape: Any, padding: int, dtype: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, math.prod(shape[0]), (70,), generator=generator, dtype=dtype)
    ids[::6] = 7
    offsets = torch.tensor([0, 0, 13, 14, 14, 50, 70])
    grad = torch.randn(7, math.prod(shape[1]), generator=generator)
    own = [core.to(DEVICE).requires_grad_() for core in cores_of(shape)]
    exact = [core.double().requires_grad_() for core in cores_of(shape)]
    limit = math.prod(shape[0])
    for begins in (offsets, torch.cat([offsets, torch.tensor([70])])):
        made = kernels.sums_of(own, ids.to(DEVICE), begins.to(DEVICE), 7, padding, limit)
        assert made is not None
        expected = reference.bags_of(exact, None, None, ids, offsets, None, padding, 7, "sum")
        close = {"check_dtype": False, "rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(made.cpu(), expected, **close)
        found = torch.autograd.grad(made, own, grad.to(DEVICE))
        gradients = torch.autograd.grad(expected, exact, grad.double())
        for gradient, other in zip(found, gradients, strict=True):
            torch.testing.assert_close(gradient.cpu(), other, **close)


@pytest.mark.parametrize("bags", [70, 10])
def test_bags_of_equal_size_need_no_offsets(bags: int) -> None:
    ids = torch.randint(0, 5 * 6 * 7, (70,), generator=torch.Generator().manual_seed(4))
    cores = cores_of(SHAPES[0])
    made = kernels.sums_of([c.to(DEVICE) for c in cores], ids.to(DEVICE), None, bags, -1, 210)
    assert made is not None
    expected = reference.bags_of(cores, None, None, ids, None, None, -1, bags, "sum")
    torch.testing.assert_close(made.cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("ids", "offsets"), [
    ([0, 209, 3], [0, 1]), ([0, -1, 3], [0, 1]), ([0, 1, 2], [1, 2]), ([0, 1, 2], [0, 2, 1]),
    ([0, 1, 2], [0, 4]),
])  # fmt: skip
def test_out_of_range_arguments_return_none(ids: list[int], offsets: list[int]) -> None:
    cores = [core.to(DEVICE) for core in cores_of(SHAPES[0])]
    arguments = torch.tensor(ids, device=DEVICE), torch.tensor(offsets, device=DEVICE)
    assert kernels.sums_of(cores, *arguments, len(offsets), -1, 209) is None


def test_bags_computed_in_steps_report_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "on_device", lambda cores: kernels)
    cores = [core.to(DEVICE) for core in cores_of(SHAPES[0])]
    ids, offsets = torch.tensor([3, 209, 0], device=DEVICE), torch.tensor([0, 2], device=DEVICE)

    def bags(ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        how = (None, None, ids, offsets, None, 210, -1, len(offsets), door.MODES.index("sum"))
        return door.in_steps(cores, *how)

    expected = reference.bags_of(cores, None, None, ids, offsets, None, -1, 2, "sum")
    torch.testing.assert_close(bags(ids, offsets), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(IndexError, match=r"\b210\b.*\bplace 0\b"):
        bags(ids.fill_(210), offsets)
    with pytest.raises(InvalidArgumentError, match=r"^offsets"):
        bags(ids[:0], offsets + 1)


def test_ids_are_sorted_by_their_slices() -> None:
    ids = torch.randint(0, 5 * 6 * 7, (300,), generator=torch.Generator().manual_seed(5))
    offsets = torch.tensor([0, 0, 120, 299])
    on_device = ids.to(DEVICE), offsets.to(DEVICE)
    counts, order, bag = (tensor.cpu() for tensor in kernels._order(*on_device, 4, 210, 6, 7))
    middle = ids // 7 % 6
    assert counts.tolist() == [*torch.bincount(middle, minlength=6).tolist(), 0]
    assert sorted(order.tolist()) == list(range(300))
    assert (middle[order.long()].diff() >= 0).all()
    assert bag.tolist() == [1] * 120 + [2] * 179 + [3]


def test_shapes_too_large_for_a_program_use_torch() -> None:
    assert not kernels.runs([torch.empty(3, 1, 4, 256), torch.empty(3, 256, 4, 64), torch.empty(
        3, 64, 4, 1)])  # fmt: skip
    assert not kernels.runs([core.double() for core in cores_of(SHAPES[0])])
