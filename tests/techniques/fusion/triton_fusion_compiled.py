"""Run by test_fusion_triton.py in a separate process: machine code for a device, without one."""

from __future__ import annotations

import pytest
import torch
from test_fusion import Layer
from torch import nn

from slipstream_bench.systems.fusion.on_devices import machine_code, regions_of


class LongRows(nn.Module):
    """Rows longer than a program holds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(x * 2, -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("long", [False, True])
def test_there_is_machine_code_of_every_region(dtype: torch.dtype, long: bool) -> None:
    model, x = (
        (LongRows(), torch.randn(4, 20_001)) if long else (Layer(0.1), torch.randn(4, 64, 64))
    )
    needs = machine_code(regions_of(model.to(dtype), x.to(dtype)))
    assert len(needs) >= (1 if long else 5)
    for need in needs:
        assert need.get("trouble", "") == ""
        assert need["spilled_bytes"] == 0
        assert need["code_bytes"] > 1000
