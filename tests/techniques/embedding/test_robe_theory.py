"""The distribution of the hashes, and of inner products, agrees with theory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.techniques.embedding.kernels import robe_reference as reference
from slipstream_bench.systems.embedding import theory

SIZE, BLOCK = 100_003, 32


def starts(ids: torch.Tensor, table: int = 0) -> torch.Tensor:
    key = reference.table_key(0, table)
    return reference.starts(key, ids[:, None], torch.arange(4)[None], SIZE).flatten()


@pytest.mark.parametrize("stride", [1, 4096])
@pytest.mark.parametrize("first", [0, 2**31])
def test_starts_are_uniform_and_blocks_overlap_by_chance(stride: int, first: int) -> None:
    found = starts(first + torch.arange(50_000) * stride)
    assert 0.0005 <= theory.uniformity(found, SIZE) <= 0.9995
    assert theory.overlaps(found, SIZE, BLOCK) == pytest.approx(1, abs=0.03)


def test_tables_are_hashed_independently() -> None:
    ids = torch.arange(20_000)
    both = torch.cat([starts(ids, 0), starts(ids, 1)])
    assert theory.overlaps(both, SIZE, BLOCK) == pytest.approx(1, abs=0.03)
    assert int((starts(ids, 0) == starts(ids, 1)).sum()) <= 10, "0.8 expected"


def test_the_tests_detect_bad_hashes() -> None:
    bad = torch.arange(200_000) * 7 % (SIZE // 2)
    assert theory.uniformity(bad, SIZE) < 1e-6
    assert theory.overlaps(bad, SIZE, BLOCK) > 1.5


@pytest.mark.parametrize("block", [1, 4, 16, 64])
def test_inner_products_are_unbiased_with_the_variance_of_the_theorem(block: int) -> None:
    x, y = np.random.default_rng(1).standard_normal((2, 64))
    draws = 10_000
    made = theory.estimates(x, y, 256, block, draws)
    expected = theory.variance(x, y, 256, block)
    error = made.std() / np.sqrt(draws)
    assert abs(made.mean() - x @ y) <= 4 * error + 1e-9
    # The variance of heavy-tailed values: its error follows from their fourth moment.
    fourth = float(((made - made.mean()) ** 4).mean())
    assert abs(made.var() - expected) <= 4 * np.sqrt(fourth / draws) + 1e-9
    assert theory.variance(x, y, 256, 64) == pytest.approx(0, abs=1e-9)
