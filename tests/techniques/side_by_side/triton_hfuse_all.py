"""Run by test_hfuse_triton.py in a separate process, interpreted: every pair of kernels."""

from __future__ import annotations

import itertools

import pytest
from triton_hfuse import checked

from slipstream.techniques.side_by_side.triton import fuse
from slipstream_bench.systems.hfuse.kernels import PROGRAMS, programs


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(PROGRAMS, 2)))
@pytest.mark.parametrize("split", [0, 1])
def test_every_pair_leaves_the_bytes_of_its_kernels(first: str, second: str, split: int) -> None:
    outcome = checked(fuse([programs(first, split), programs(second, 1 - split)]))
    assert (outcome["trouble"], outcome["differing"]) == ("", 0)
