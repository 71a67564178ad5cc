"""Every compiled encoder on this machine equals the numpy one bitwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.errors import SlipstreamError
from slipstream.techniques.distributed.compression import kernels

LEVELS = [*kernels.kernels(), None]
SIZES = (1, 15, 16, 17, 33, 255, 256, 1000)


@pytest.fixture(params=LEVELS, ids=str)
def level(request: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One level at a time; None is numpy."""
    kernel = None if request.param is None else kernels.kernels()[request.param]
    monkeypatch.setattr(kernels, "_kernel", lambda: kernel)
    return request.param


@contextmanager
def in_numpy() -> Iterator[None]:
    """Return the numpy encoders."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_kernel", lambda: None)
        yield


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Compare bitwise."""
    return ours.numpy().tobytes() == theirs.numpy().tobytes()


def _numbers(count: int, seed: int) -> Any:
    drawn = np.random.default_rng(seed)
    scale = 10.0 ** drawn.integers(-6, 3, count)
    return (drawn.standard_normal(count) * scale).astype(np.float32)


def _pair(count: int) -> tuple[Any, Any]:
    gradient, residual = _numbers(count, count), _numbers(count, count + 1)
    gradient[::7] = 0.0
    residual[::7] = 0.0
    return gradient, residual


@pytest.mark.parametrize("bits", [1, 4, 8])
@pytest.mark.parametrize("size", SIZES)
def test_blocks(level: Any, bits: int, size: int) -> None:
    gradient, residual = _pair(size)
    blocks = kernels.Blocks.of([(0, size)], 4096, bits)

    def run() -> list[torch.Tensor]:
        scales, codes = torch.zeros(1), torch.zeros(blocks.nbytes, dtype=torch.uint8)
        updated, out = torch.from_numpy(residual.copy()), torch.full((size,), 3.0)
        blocks.encode(torch.from_numpy(gradient), updated, scales, codes)
        blocks.decode(scales, codes, out, 0.5, add=False)
        added = out.clone()
        blocks.decode(scales, codes, added, 0.5, add=True)
        return [scales, codes, updated, out, added]

    found = run()
    with in_numpy():
        expected = run()
    assert all(map(same, found, expected))
    assert torch.equal(found[-1], 2 * found[-2])


@pytest.mark.parametrize("bits", [1, 4, 8])
def test_sent_and_retained_parts_sum_to_the_input(level: Any, bits: int) -> None:
    gradient, residual = _pair(1000)
    blocks = kernels.Blocks.of([(0, 300), (300, 700)], 256, bits)
    scales, codes = torch.zeros(len(blocks)), torch.zeros(blocks.nbytes, dtype=torch.uint8)
    updated, out = torch.from_numpy(residual.copy()), torch.zeros(1000)
    blocks.encode(torch.from_numpy(gradient), updated, scales, codes)
    blocks.decode(scales, codes, out, 1.0, add=False)
    total = gradient.astype(np.float64) + residual
    assert np.allclose(out.double() + updated.double(), total, rtol=1e-5, atol=1e-4)
    assert len(blocks) == 5


def test_a_block_of_zeros_contributes_exactly_zero(level: Any) -> None:
    for bits in (1, 4, 8):
        blocks = kernels.Blocks.of([(0, 100)], 4096, bits)
        scales, codes = torch.ones(1), torch.zeros(blocks.nbytes, dtype=torch.uint8)
        updated, out = torch.zeros(100), torch.ones(100)
        blocks.encode(torch.zeros(100), updated, scales, codes)
        blocks.decode(scales, codes, out, 1.0, add=False)
        assert not updated.any()
        assert not out.any()


@pytest.mark.parametrize("count", [1, 40, 5000, 70000])
@pytest.mark.parametrize("ties", [False, True], ids=["unlike", "ties"])
def test_top(level: Any, count: int, ties: bool) -> None:
    gradient, residual = _pair(count)
    if ties:
        gradient, residual = np.round(gradient), np.zeros_like(residual)
    for k in {1, max(1, count // 100), count}:
        indices, values = torch.zeros(k, dtype=torch.int32), torch.zeros(k)
        expected = torch.from_numpy(residual.copy())
        with in_numpy():
            kernels.top(torch.from_numpy(gradient), expected, indices, values)
        found, made = torch.zeros(k, dtype=torch.int32), torch.zeros(k)
        updated = torch.from_numpy(residual.copy())
        kernels.top(torch.from_numpy(gradient), updated, found, made)
        assert same(found, indices)
        assert same(made, values)
        assert same(updated, expected)
        out = torch.zeros(count)
        kernels.scatter(found, made, out, 1.0)
        assert np.array_equal(out.numpy() + updated.numpy(), gradient + residual)


def test_an_index_out_of_range_is_refused(level: Any) -> None:
    for index in (-1, 4):
        with pytest.raises(SlipstreamError):
            kernels.scatter(
                torch.tensor([index], dtype=torch.int32), torch.ones(1), torch.zeros(4), 1.0
            )


@pytest.mark.parametrize("shape", [(1, 1), (5, 17), (16, 16), (37, 100)])
@pytest.mark.parametrize("rank", [1, 2, 4, 7])
def test_low_rank(level: Any, shape: tuple[int, int], rank: int) -> None:
    rows, columns = shape
    gradient, residual = _numbers(rows * columns, 1), _numbers(rows * columns, 2)
    gradient, residual = gradient.reshape(shape), residual.reshape(shape)
    q = np.random.default_rng(3).standard_normal((rank, columns)).astype(np.float32)

    def run() -> list[torch.Tensor]:
        updated, out = torch.from_numpy(residual.copy()), torch.zeros(shape)
        left, right = torch.zeros(rank, rows), torch.zeros(rank, columns)
        kernels.project(torch.from_numpy(gradient), updated, torch.from_numpy(q), left)
        found = [updated.clone(), left.clone()]
        kernels.orthonormalise(left)
        kernels.project_back(updated, left, right)
        kernels.reconstruct(left, right, updated, out)
        return [*found, left, right, updated, out]

    found = run()
    with in_numpy():
        expected = run()
    assert all(map(same, found[:3], expected[:3]))
    # The sign of zeros may differ.
    assert torch.equal(found[3], expected[3])
    assert same(found[4], expected[4])
    assert torch.equal(found[5], expected[5])


def test_orthonormal_rows(level: Any) -> None:
    p = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    p[3] = 2.0 * p[1]
    kernels.orthonormalise(p)
    unit = torch.eye(5)
    unit[3, 3] = 0.0
    assert torch.allclose(p @ p.T, unit, atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2e30])
def test_finite(level: Any, bad: float) -> None:
    x = torch.from_numpy(_numbers(1003, 0))
    assert kernels.finite(x)
    for at in (0, 500, 1002):
        spoiled = x.clone()
        spoiled[at] = bad
        assert not kernels.finite(spoiled)
    assert kernels.finite(torch.zeros(0))
