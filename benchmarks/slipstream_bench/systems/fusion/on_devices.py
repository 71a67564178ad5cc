"""Regions of models in Triton, without a device: interpreted beside torch, compiled for sm_90.

Called in a process of its own: whether Triton interprets is decided when it is imported.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.techniques.fusion.backend import FusionBackend
from slipstream.techniques.fusion.emit_triton import tiling, triton_source
from slipstream.techniques.fusion.kernels import Kernel, in_cpp, in_triton
from slipstream.techniques.fusion.lowering import Region
from slipstream_bench.systems.fusion.workloads import WORKLOADS

_TYPES = {
    "float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64", "bool": "i1",
    "uint8": "u8", "int64": "i64",
}  # fmt: skip


def workload(name: str, dtype: str) -> tuple[nn.Module, Tensor]:
    """One of `WORKLOADS` in a precision, with its batch."""
    torch.manual_seed(0)
    model, x = WORKLOADS[name]()
    return model.to(getattr(torch, dtype)), x.to(getattr(torch, dtype))


def apart(name: str, dtype: str) -> list[float]:
    """Of each region of a workload: how far its kernel is from its operators, of their size."""
    model, x = workload(name, dtype)
    backend = FusionBackend(tuned=False, make=in_triton)
    call = torch.compile(model, backend=backend, dynamic=False)
    _step(call, x)
    for one in backend.passes:
        one.compare()
    _step(call, x)
    return [distance for one in backend.passes for distance in one.beside.apart.values()]


def _step(call: Callable[[Tensor], Tensor], x: Tensor) -> None:
    made = call(x.detach().requires_grad_())
    # At random: of a gradient that is nearly a row's mean, normalisation leaves but rounding.
    drawn = torch.randn(made.shape, generator=torch.Generator().manual_seed(0))
    made.backward(drawn.to(made.dtype))


def regions_of(model: nn.Module, x: Tensor) -> list[Region]:
    """Those of its forward and backward pass."""
    torch._dynamo.reset()
    some: list[Region] = []

    def make(regions: Sequence[Region]) -> list[Kernel]:
        some.extend(regions)
        return in_cpp(regions)

    _step(torch.compile(model, backend=FusionBackend(tuned=False, make=make), dynamic=False), x)
    return some


def machine_code(regions: Sequence[Region], capability: int = 90) -> list[dict[str, Any]]:
    """What each region's kernel needs, as `side_by_side.triton` tells it; or its ``trouble``."""
    from slipstream.techniques.side_by_side.triton import _child

    needs = []
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        source = triton_source([one.nest for one in regions])
        Path(folder, "regions.py").write_text(source, encoding="utf-8")
        for number, region in enumerate(regions):
            nest = region.nest
            sums = {store.output for store in nest.stores if store.column}
            real = "fp64" if nest.real == "double" else "fp32"
            types = [_TYPES[one.dtype] for one in nest.inputs]
            types += [
                real if n in sums else _TYPES[one.dtype] for n, one in enumerate(nest.outputs)
            ]
            arguments = [{"kind": "array", "type": one, "value": 16} for one in types]
            needs.append(_child.machine_code(
                folder, "regions", f"region_{number}", arguments, capability,
                tiling(nest).num_warps, 3, 0,
            ))  # fmt: skip
    return needs


def compiled(name: str, dtype: str) -> list[dict[str, Any]]:
    """`machine_code` of the regions of a workload."""
    return machine_code(regions_of(*workload(name, dtype)))
