"""16-bit gradients: the results of widened rows, without the memory of widened rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.techniques.distributed.adasum import exchange, kernels

LENGTH = 3 * exchange._WIDENED + 5
STARTS = np.array([0, 0, 1, 1000, exchange._WIDENED, exchange._WIDENED, LENGTH - 1, LENGTH, LENGTH])


class LargestWide(TorchDispatchMode):
    """Records the size of the largest float32 tensor that an operator returns."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.dtype == torch.float32:
            self.numbers = max(self.numbers, found.numel())
        return found


@pytest.fixture(params=[torch.bfloat16, torch.float16])
def rows(request: pytest.FixtureRequest) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(LENGTH, generator=generator).to(request.param) for _ in range(3)]


def test_dot_products_equal_those_of_widened_rows(rows: list[torch.Tensor]) -> None:
    expected = kernels.products([row.float() for row in rows], STARTS)
    with LargestWide() as wide:
        found = exchange._products(rows, STARTS)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-9)
    assert 0 < wide.numbers <= exchange._WIDENED


def test_in_place_sums_equal_those_of_widened_rows_bitwise(
    rows: list[torch.Tensor],
) -> None:
    weights = np.random.default_rng(0).normal(size=(len(STARTS) - 1, len(rows)))
    expected = torch.empty(LENGTH)
    kernels.combine([row.float() for row in rows], STARTS, weights, expected)
    with LargestWide() as wide:
        exchange._combined(rows, STARTS, weights, rows[1])
    assert torch.equal(rows[1], expected.to(rows[1].dtype))
    assert 0 < wide.numbers <= exchange._WIDENED


def test_blocks_have_every_element_once_with_its_layer() -> None:
    layer_of = np.full(LENGTH, -1)
    for block, layers, inside in exchange._blocks(STARTS):
        assert inside[0] == 0
        assert inside[-1] == block.stop - block.start
        for layer, begin, end in zip(
            range(layers.start, layers.stop), inside[:-1], inside[1:], strict=True
        ):
            assert (layer_of[block][begin:end] == -1).all()
            layer_of[block][begin:end] = layer
    assert (layer_of == np.repeat(np.arange(len(STARTS) - 1), np.diff(STARTS))).all()
