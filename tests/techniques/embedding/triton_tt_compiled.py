"""Run by test_tt_triton.py in a separate process: machine code for an absent device."""

from __future__ import annotations

from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from slipstream.techniques.embedding.kernels import tt_triton as kernels

TENSORS = ("core_1", "core_2", "core_3", "made", "grad", "grad_1", "grad_2", "grad_3")
TYPES = {
    **dict.fromkeys(TENSORS, "*fp32"),
    **dict.fromkeys(("counts", "order", "bag", "rank"), "*i32"),
    **dict.fromkeys(("ids", "offsets", "until"), "*i64"),
    **dict.fromkeys(("p2", "p3", "q1", "q2", "q3", "r1", "r2", "padding"), "i64"),
    **dict.fromkeys(("n", "offset_count", "bags", "rows"), "i64"),
}


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("kernel", [kernels._forward, kernels._backward])
def test_machine_code_is_generated(kernel: Any, pooled: bool) -> None:
    sizes = {"q1_wide": 4, "q2_wide": 4, "r1_wide": 32, "r2_wide": 32, "span": 8, "p2_wide": 256}
    assert compiled(kernel, {**sizes, "pooled": pooled}, num_warps=kernels._WARPS)


def test_machine_code_to_count_and_place_is_generated() -> None:
    for pooled in (False, True):
        assert compiled(kernels._count, {"pooled": pooled, "halvings": 9, "block": 256})
    assert compiled(kernels._place, {"block": 256})


def compiled(kernel: Any, constants: dict[str, Any], **options: int) -> bytes:
    types = {name: TYPES.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=types, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    code: bytes = made.asm["cubin"]
    return code
