"""Two interleaved loops leave the results of two separate ones."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from slipstream.codegen import why_no_compiler
from slipstream.techniques.side_by_side.kernels import (
    Loop,
    alone,
    fits,
    gather,
    interleave,
    product,
)

pytestmark = pytest.mark.skipif(why_no_compiler() is not None, reason=str(why_no_compiler()))


@pytest.mark.parametrize(("count", "rows", "inner"), [(500, 30, 24), (3, 120, 280), (64, 5, 520)])
def test_a_gather_interleaved_with_a_matmul(count: int, rows: int, inner: int) -> None:
    torch.manual_seed(count)
    table, ids = torch.randn(100, 40), torch.randint(0, 100, (count,))
    x, weight, bias = torch.randn(rows, inner), torch.randn(64, inner), torch.randn(64)
    taken, made = torch.empty(count, 40), torch.full((rows, 64), torch.nan)
    interleave(gather(table, ids, taken), product(x, weight, bias, made))()
    assert torch.equal(taken, table[ids])
    torch.testing.assert_close(made, linear(x, weight, bias), rtol=1e-4, atol=1e-4)


def test_an_update_in_a_common_loop_equals_a_separate_one() -> None:
    torch.manual_seed(0)
    arrays = [torch.randn(1600) for _ in range(3)]
    twins = [array.clone() for array in arrays]
    settings = torch.tensor([0.01, 0.9, 0.1])
    # Both operands by columns, as in matmuls of gradients.
    x, weight = torch.randn(16, 24).t(), torch.randn(16, 32).t()
    out, other = torch.empty(24, 32), torch.empty(24, 32)
    interleave(Loop("Descent", (*arrays, settings), (1600,)), product(x, weight, None, out))()
    expected = twins[0] - (twins[2] * 0.9 + twins[1] + twins[0] * 0.1) * 0.01
    alone(Loop("Descent", (*twins, settings), (1600,)))()
    alone(product(x, weight, None, other))()
    assert all(torch.equal(array, two) for array, two in zip(arrays, twins, strict=True))
    assert torch.equal(out, other)
    torch.testing.assert_close(out, x @ weight.t())
    torch.testing.assert_close(arrays[0], expected)


def test_loops_that_fit() -> None:
    assert fits(64, 24)
    assert not fits(48, 24)
    assert not fits(64, 20)
