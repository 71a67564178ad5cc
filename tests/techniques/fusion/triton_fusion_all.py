"""Run by test_fusion_triton.py in a separate process, interpreted: all of the bench's models."""

from __future__ import annotations

import pytest
import torch

from slipstream_bench.systems.fusion.on_devices import apart
from slipstream_bench.systems.fusion.workloads import WORKLOADS


@pytest.mark.parametrize(("dtype", "close"), [("float32", 1e-5), ("bfloat16", 0.02)])
@pytest.mark.parametrize("name", WORKLOADS)
def test_every_region_is_its_operators(name: str, dtype: str, close: float) -> None:
    torch._dynamo.reset()
    distances = apart(name, dtype)
    assert len(distances) >= 2
    assert max(distances) < close
