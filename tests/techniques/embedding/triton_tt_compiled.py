"""Run by test_tt_triton.py in a process of its own: machine code for a device, without one."""

from __future__ import annotations

from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from slipstream.techniques.embedding.kernels import tt_triton as kernels

TENSORS = ("one", "two", "three", "made", "grad", "one_grad", "two_grad", "three_grad")
TYPES = {
    **dict.fromkeys(TENSORS, "*fp32"),
    **dict.fromkeys(("chunks", "order", "ids"), "*i64"),
    **dict.fromkeys(("p2", "p3", "q1", "q2", "q3", "r1", "r2"), "i64"),
}


@pytest.mark.parametrize("kernel", [kernels._forward, kernels._backward])
def test_there_is_machine_code(kernel: Any) -> None:
    sizes = {"q1_wide": 4, "q2_wide": 4, "r1_wide": 32, "r2_wide": 32, "span": 8}
    types = {name: TYPES.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=types, constexprs=sizes)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert made.asm["cubin"]
