"""Run by test_sparse_triton.py in a separate process: machine code for an absent device."""

from __future__ import annotations

from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from slipstream.sparse import _triton as kernels
from slipstream.sparse.metrics import ADDITIVE, Exact, Options, plan_of

INDICES = dict.fromkeys(("starts", "a_starts", "b_starts", "pairs"), "*i64")
COLUMNS = dict.fromkeys(("columns", "a_columns", "b_columns"), "*i32")
SIZES = dict.fromkeys(("queries", "rows", "width", "stride", "steps"), "i64")


def machine_code(kernel: Any, numbers: str, chosen: dict[str, int]) -> bytes:
    """Compile for compute capability 9.0."""
    types = dict.fromkeys(kernel.arg_names, f"*{numbers}")
    types |= {**INDICES, **COLUMNS, **SIZES, "cancelled": "*i8"}
    types |= dict.fromkeys(chosen, "constexpr")
    if kernel is kernels.again:
        types["constants"] = "*fp64"
    source = ASTSource(
        fn=kernel, signature={name: types[name] for name in kernel.arg_names}, constexprs=chosen
    )
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    code: bytes = made.asm["cubin"]
    return code


@pytest.mark.parametrize("metric", ["cosine", "minkowski", "jensenshannon", "kl", "braycurtis"])
def test_machine_code_is_generated(metric: str) -> None:
    assert metric in ADDITIVE
    plan = plan_of(metric, Options(p=3), 60, non_negative=metric == "kl")
    numbers = "fp64" if metric == "kl" else "fp32"
    ends = {"finish": int(plan.finish), "root": int(plan.root), "chunk": 32}
    ops = {"channels": len(plan.ops), "op": int(plan.ops[0]), "op2": int(plan.ops[-1])}
    assert machine_code(kernels.distances, numbers, {**ops, **ends, "tile": 32})
    assert plan.exact is not Exact.NEVER
    assert machine_code(kernels.again, numbers, {**ends, "exact": int(plan.exact)})
