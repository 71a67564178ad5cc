"""Regions of models in Triton, without a device: interpreted, and compiled for sm_90.

Call these in a separate process: Triton decides on import whether it interprets.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.codegen.rows_kernels import triton_kernels
from slipstream.codegen.rows_triton import tiling, triton_source
from slipstream.techniques.fusion.backend import FusionBackend
from slipstream.techniques.fusion.lowering import Region
from slipstream_bench.systems.fusion.workloads import WORKLOADS

_TYPES = {
    "float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64", "bool": "i1",
    "uint8": "u8", "int64": "i64",
}  # fmt: skip


def workload(name: str, dtype: str) -> tuple[nn.Module, Tensor]:
    """Return one of `WORKLOADS` in a precision, with its batch."""
    torch.manual_seed(0)
    model, x = WORKLOADS[name]()
    return model.to(getattr(torch, dtype)), x.to(getattr(torch, dtype))


def apart(name: str, dtype: str) -> list[float]:
    """Return the distance of each region's kernel from its operators, relative to their size."""
    model, x = workload(name, dtype)
    backend = FusionBackend(tuned=False, make=triton_kernels)
    call = torch.compile(model, backend=backend, dynamic=False)
    _step(call, x)
    for traced in backend.passes:
        traced.compare()
    _step(call, x)
    return [
        distance for traced in backend.passes for distance in traced.comparison.differences.values()
    ]


def _step(call: Callable[[Tensor], Tensor], x: Tensor) -> None:
    output = call(x.detach().requires_grad_())
    # Random: normalisation leaves only rounding of a gradient that is nearly its row's mean.
    gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
    output.backward(gradient.to(output.dtype))


def regions_of(model: nn.Module, x: Tensor) -> list[Region]:
    """Return the regions of a model's forward and backward pass."""
    torch._dynamo.reset()
    backend = FusionBackend(tuned=False)
    _step(torch.compile(model, backend=backend, dynamic=False), x)
    return [region for traced in backend.passes for region in traced.planned.regions]


def machine_code(regions: Sequence[Region], capability: int = 90) -> list[dict[str, Any]]:
    """Return resources of each region's kernel, as `side_by_side.triton` does, or ``trouble``."""
    from slipstream.techniques.side_by_side.triton import _child

    needs = []
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        source = triton_source([region.nest for region in regions])
        Path(folder, "regions.py").write_text(source, encoding="utf-8")
        for number, region in enumerate(regions):
            nest = region.nest
            sums = {store.output for store in nest.stores if store.column}
            real = "fp64" if nest.real == "double" else "fp32"
            types = [_TYPES[tensor.dtype] for tensor in nest.inputs]
            types += [
                real if n in sums else _TYPES[tensor.dtype] for n, tensor in enumerate(nest.outputs)
            ]
            arguments = [{"kind": "array", "type": name, "value": 16} for name in types]
            needs.append(_child.machine_code(
                folder, "regions", f"region_{number}", arguments, capability,
                tiling(nest).num_warps, 3, 0,
            ))  # fmt: skip
    return needs


def compiled(name: str, dtype: str) -> list[dict[str, Any]]:
    """Return `machine_code` of the regions of a workload."""
    return machine_code(regions_of(*workload(name, dtype)))
