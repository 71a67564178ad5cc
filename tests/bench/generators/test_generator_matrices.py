"""Planted structure: visible if not hidden, recoverable if hidden."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components, reverse_cuthill_mckee

from slipstream.errors import InvalidArgumentError
from slipstream_bench.generators import banded, block_sparse


@settings(max_examples=30, deadline=None)
@given(
    grid=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    block=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    density=st.floats(0.01, 1),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_blocks_are_full_and_exactly_as_many_as_stated(
    grid: tuple[int, int], block: tuple[int, int], density: float, shuffle: bool, seed: int
) -> None:
    rows, columns = grid[0] * block[0], grid[1] * block[1]
    planted = block_sparse(rows, columns, block=block, density=density, shuffle=shuffle, seed=seed)
    assert planted.blocks is not None
    full = max(1, round(density * grid[0] * grid[1]))
    assert planted.blocks.sum() == full
    # Cut into blocks differently from the generator.
    tiles = planted.structured.reshape(grid[0], block[0], grid[1], block[1])
    nonzero = np.count_nonzero(tiles, axis=(1, 3))
    assert np.array_equal(nonzero, planted.blocks * block[0] * block[1])
    present = abs(planted.values[planted.values != 0])
    assert present.min() >= 0.5
    assert present.max() <= 1.5


def test_hidden_blocks_can_be_found_from_the_values_alone() -> None:
    planted = block_sparse(128, 96, block=(8, 8), density=0.3, shuffle=True, seed=3)
    assert planted.blocks is not None
    # Rows of one block row have the same support: as many supports as different block rows.
    supports = {row.tobytes() for row in planted.values != 0}
    assert len(supports) == len({row.tobytes() for row in planted.blocks})
    # In the open the same holds within each eight neighbouring rows.
    rows = (planted.structured != 0).reshape(16, 8, 96)
    assert (rows == rows[:, :1]).all()
    assert not np.array_equal(planted.values, planted.structured)


def test_a_band_is_at_its_stated_position() -> None:
    planted = banded(20, below=3, above=1, seed=1)
    rows, columns = np.nonzero(planted.values)
    offsets = columns - rows
    assert (offsets.min(), offsets.max()) == (-3, 1)
    # Dense inside: each diagonal of offset o has 20 - |o| entries.
    assert len(rows) == 20 + 19 + 19 + 18 + 17
    assert np.array_equal(planted.values, planted.structured)


def test_a_hidden_band_is_found_by_reverse_cuthill_mckee() -> None:
    planted = banded(200, below=3, above=3, shuffle=True, seed=2)
    hidden = np.nonzero(planted.values)
    assert abs(hidden[0] - hidden[1]).max() > 100
    graph = csr_matrix(planted.values != 0)
    assert connected_components(graph, directed=False, return_labels=False) == 1
    order = reverse_cuthill_mckee(graph, symmetric_mode=True)
    found = np.nonzero(planted.values[order][:, order])
    # The planted order has bandwidth 3; the heuristic may be a little worse, never better.
    assert 3 <= abs(found[0] - found[1]).max() <= 6
    rows, columns = np.nonzero(planted.structured)
    assert abs(rows - columns).max() == 3


def test_arguments_out_of_range_are_named() -> None:
    with pytest.raises(InvalidArgumentError, match="divide"):
        block_sparse(10, 10, block=(3, 5))
    with pytest.raises(InvalidArgumentError, match="density"):
        block_sparse(16, 16, density=0)
    with pytest.raises(InvalidArgumentError, match="below"):
        banded(4, below=4)
