"""Run by test_robe_triton.py in a separate process: Triton's kernels against the CPU's."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from slipstream.techniques.embedding.kernels import robe as door
from slipstream.techniques.embedding.kernels import robe_triton as kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = list(itertools.product(("sum", "mean", "max"), (1, 8, 40), (True,)))
CASES.append(("sum", 24, False))


def described(*tables: tuple[int, int, int]) -> torch.Tensor:
    return torch.tensor([[door.table_key(3, t), *table] for t, table in enumerate(tables)])


def on_device(how: tuple[Any, ...]) -> tuple[Any, ...]:
    """Move ids, offsets and weights to the device; the tables' description stays on the CPU."""
    return tuple(
        x.to(DEVICE) if isinstance(x, torch.Tensor) and place < 3 else x
        for place, x in enumerate(how)
    )


def bags(mode: str, block: int, sign: bool) -> tuple[Any, ...]:
    """Two tables of 24 and 17 columns, bags of none to five ids, with some padding."""
    generator = torch.Generator().manual_seed(block)
    sizes = torch.randint(0, 6, (8,), generator=generator)
    ids = torch.randint(0, 9, (int(sizes.sum()),), generator=generator)
    offsets = torch.cumsum(sizes, 0) - sizes
    weights = torch.rand(len(ids), generator=generator) if mode == "sum" else None
    tables = described((10, 24, 3), (2**40, 17, -1))
    return ids, offsets, weights, tables, 4, 41, block, sign, door.MODES.index(mode)


@pytest.mark.parametrize(("mode", "block", "sign"), CASES)
def test_bags_and_gradients_equal_the_cpus(mode: str, block: int, sign: bool) -> None:
    how = bags(mode, block, sign)
    array = torch.randn(101, generator=torch.Generator().manual_seed(1))
    expected = door.robe(array, *how)
    made = kernels.forward(array.to(DEVICE), *on_device(how))
    torch.testing.assert_close(made.cpu(), expected)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    reference = expected if mode == "max" else None
    found = kernels.backward(
        grad.to(DEVICE), array.to(DEVICE), made if mode == "max" else None, *on_device(how),
        scale=0.5,
    )  # fmt: skip
    torch.testing.assert_close(found.cpu(), door.robe_gradient(grad, array, reference, *how, 0.5))
    if mode == "sum":
        found = kernels.weight_gradient(grad.to(DEVICE), array.to(DEVICE), *on_device(how))
        torch.testing.assert_close(found.cpu(), door.robe_weights(grad, array, *how))


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_positions_equal_the_cpus_exactly(kind: torch.dtype) -> None:
    large = [2**31 + 5, 2**45 - 1] if kind is torch.int64 else [2**31 - 1]
    ids = torch.tensor([0, 1, 77, *large], dtype=kind)
    for dim, block, size in ((100, 32, 5003), (24, 64, 64), (70, 70, 1000)):
        how = (ids, None, None, described((2**45, dim, -1)), len(ids), dim, block, True, 0)
        array = torch.randn(size)
        made = kernels.forward(array.to(DEVICE), *on_device(how))
        assert torch.equal(made.cpu(), door.robe(array, *how))


def test_empty_input_gives_empty_output() -> None:
    none = torch.empty(0, dtype=torch.int64)
    how = (none, None, None, described((5, 4, -1)), 0, 4, 2, True, 0)
    array = torch.randn(9, device=DEVICE)
    assert kernels.forward(array, *on_device(how)).shape == (0, 4)
    grad = torch.empty(0, 4, device=DEVICE)
    assert not kernels.backward(grad, array, None, *on_device(how), scale=1.0).any()
