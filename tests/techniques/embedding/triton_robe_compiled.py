"""Run by test_robe_triton.py in a separate process: machine code for an absent device."""

from __future__ import annotations

from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from slipstream.techniques.embedding.kernels import robe_triton as kernels

TYPES = {
    **dict.fromkeys(("array", "made", "weights", "grad", "gradient"), "*fp32"),
    **dict.fromkeys(("ids", "tables", "edges", "columns"), "*i64"),
    **dict.fromkeys(("size", "bags", "width", "block"), "i64"),
    "scale": "fp32",
}


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("kernel", [kernels._forward, kernels._backward, kernels._weights])
def test_machine_code_is_generated(kernel: Any, mode: int) -> None:
    chosen = {"signed": True, "mode": mode, "weighted": mode == 0, "span": 64}
    types = {name: TYPES.get(name, "constexpr") for name in kernel.arg_names}
    constants = {name: value for name, value in chosen.items() if name in types}
    source = ASTSource(fn=kernel, signature=types, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
    assert made.asm["cubin"]
