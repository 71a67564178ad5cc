"""The operator ``slipstream::dropout``: random numbers, comparison and scaling in one pass.

``dropout(x, seed, p)`` is a pure function: a seed drops the same elements of any tensor,
whatever the processor, the dtype or the number of threads. Its gradient is therefore the operator
itself with the same seed, and no mask is stored. ``dropout_`` is the in-place variant.

The module `reference` defines the random numbers. All kernels match it bit for bit, and it replaces
them if the compiled library is missing.
"""

from __future__ import annotations

import numpy as np
import torch

from slipstream.codegen.prelude import threshold_and_scale
from slipstream.errors import InvalidArgumentError, MissingExtraError
from slipstream.native import InstructionSet, triton_module
from slipstream.native.family import FLOAT, INT32, INT64, POINTER, UINT32, Family
from slipstream.native.operators import define
from slipstream.techniques.dropout import reference

KERNEL_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""Dtypes that are computed in one pass; other floating-point dtypes take several."""

_SCHEMA = "dropout(Tensor x, Tensor seed, float p) -> Tensor"
_MAX_THRESHOLD = 2**32 - 1


def draw_seed(generator: torch.Generator | None = None) -> torch.Tensor:
    """Draw a seed of 128 random bits, int64 [2], from `generator` or torch's default."""
    return torch.randint(
        -(2**63), 2**63 - 1, (2,), dtype=torch.int64, generator=generator, device="cpu"
    )


_FAMILY = Family("dropout", {
    "dropout": [INT32, INT32, POINTER, POINTER, INT64, POINTER, UINT32, FLOAT, INT32],
})  # fmt: skip


def kernels() -> dict[InstructionSet, int]:
    """Return the kernels that this processor runs, see `Family.kernels`."""
    return _FAMILY.kernels


def run_kernel(
    x: torch.Tensor, y: torch.Tensor, seed: torch.Tensor, p: float, kernel: int | None = None
) -> None:
    """Fill `y` from `x`, both contiguous and of the same dtype, one of `KERNEL_DTYPES`.

    Args:
        kernel: one of `kernels`; the fastest by default.
    """
    best = _FAMILY.kernel()
    if best is None:
        y.copy_(run_reference(x, seed, p))
        return
    threshold, scale = threshold_and_scale(p)
    _FAMILY.call(
        "dropout", best if kernel is None else kernel, KERNEL_DTYPES[x.dtype], x.data_ptr(),
        y.data_ptr(), x.numel(), seed.data_ptr(), threshold, scale, torch.get_num_threads(),
    )  # fmt: skip


def run_reference(x: torch.Tensor, seed: torch.Tensor, p: float) -> torch.Tensor:
    """Compute with numpy what every kernel computes."""
    key, upper = seed.numpy().view(np.uint64).tolist()
    values = x.detach().view(torch.uint16) if x.dtype == torch.bfloat16 else x.detach()
    dropped = reference.drop(values.numpy(), (key, upper), *threshold_and_scale(p))
    return torch.from_numpy(dropped).view(x.dtype)


def _dropout(x: torch.Tensor, seed: torch.Tensor, p: float) -> torch.Tensor:
    """Run ``slipstream::dropout``; the result is contiguous."""
    if not x.is_floating_point():
        raise InvalidArgumentError("x", f"is {x.dtype}; dropout needs floating-point numbers")
    if seed.dtype is not torch.int64 or seed.shape != (2,) or not seed.is_contiguous():
        raise InvalidArgumentError("seed", "must be int64 [2]", remedy="draw_seed() makes one")
    if not 0.0 <= p < 1.0:
        raise InvalidArgumentError("p", f"{p} is not in [0, 1)")
    if x.is_cuda:
        return _on_device(x.contiguous(), seed, p)
    if x.dtype not in KERNEL_DTYPES:
        mask = _dropout(torch.ones(x.shape, dtype=torch.float32), seed, p) != 0
        factor = 1.0 / (1.0 - p) if x.dtype == torch.float64 else float(threshold_and_scale(p)[1])
        return torch.where(mask, x * factor, torch.zeros((), dtype=x.dtype)).contiguous()
    x = x.contiguous()
    y = torch.empty_like(x)
    run_kernel(x, y, seed, p)
    return y


def _on_device(x: torch.Tensor, seed: torch.Tensor, p: float) -> torch.Tensor:
    module = triton_module("slipstream.techniques.dropout._triton")
    if module is None:
        raise MissingExtraError("slipstream::dropout on a CUDA device", "triton", "triton")
    threshold, scale = threshold_and_scale(p)
    factor = 1.0 / (1.0 - p) if x.dtype == torch.float64 else float(scale)
    dropped: torch.Tensor = module.drop(x, seed, threshold, factor)
    return dropped


def _fake(x: torch.Tensor, seed: torch.Tensor, p: float) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


define(_SCHEMA, _dropout, _fake)

dropout = torch.ops.slipstream.dropout.default
