"""The predicted bytes of an operator are those that loops over its elements load and store."""

from __future__ import annotations

import pytest
import torch

from slipstream_bench.systems.movement.counted import Case, Counted, cases
from slipstream_bench.systems.movement.layers import traced_layer


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_bytes_equal_those_of_counted_loops(case: Case) -> None:
    _, outputs = case.call()
    assert case.counted_bytes(outputs) is not None, "the loops compute something else"
    assert case.agrees()


def test_an_element_counts_once_even_if_loaded_repeatedly() -> None:
    array = Counted(torch.zeros(1, 4).expand(3, 4))
    for index in array:
        array[index]
    assert array.nbytes == 4 * 4


def test_a_small_layer_needs_less_in_regions_and_least_if_recomputed() -> None:
    layer = traced_layer(2, 16, 32, 2)
    moved = sum(row.moved_bytes for row in layer.rows(fused=False))
    needed = sum(row.needed_bytes for row in layer.rows(fused=True))
    bits = sum(row.needed_bytes for row in layer.with_mask_bits().rows(fused=True))
    assert bits < needed < moved
