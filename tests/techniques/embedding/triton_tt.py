"""Run by test_tt_triton.py in a process of its own: Triton's tensor trains against torch's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

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
def test_rows_and_gradients_are_the_references(shape: Any) -> None:
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
    wanted = torch.autograd.grad(expected, exact, grad.double())
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.cpu(), other, **close)


def test_nothing_in_nothing_out() -> None:
    cores = [core.to(DEVICE).requires_grad_() for core in cores_of(SHAPES[0])]
    made = kernels.rows_of(cores, torch.empty(0, dtype=torch.int64, device=DEVICE))
    assert made.shape == (0, 16)
    made.sum().backward()
    assert not any(core.grad.any() for core in cores if core.grad is not None)


def test_every_id_is_in_one_program() -> None:
    ids = torch.randint(0, 5 * 6 * 7, (300,))
    chunks, order, programs = kernels._chunks(ids, 6, 7, 8)
    seen = []
    for middle, begin, end in chunks.tolist():
        assert 0 <= end - begin <= 8
        own = order[begin:end]
        assert (ids[own] // 7 % 6 == middle).all()
        seen += own.tolist()
    assert sorted(seen) == list(range(300))
    assert programs == len(chunks)


def test_what_a_program_cannot_hold_is_left_to_torch() -> None:
    assert not kernels.runs([torch.empty(3, 1, 4, 256), torch.empty(3, 256, 4, 64), torch.empty(
        3, 64, 4, 1)])  # fmt: skip
    assert not kernels.runs([core.double() for core in cores_of(SHAPES[0])])
