"""The operator ``slipstream::dropout`` on a CUDA device; imported only where Triton is installed.

Kernels have no annotations: Triton compiles those, too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.codegen.triton_prelude import draw, keep

_BLOCK = 1024


@triton.jit
def _drop(x, y, seed, n, threshold: tl.constexpr, scale: tl.constexpr, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    value = tl.load(x + at, mask=at < n, other=0.0)
    value = value.to(tl.float64) if value.dtype == tl.float64 else value.to(tl.float32)
    factor = draw(seed, at, threshold).to(value.dtype) * scale
    tl.store(y + at, keep(value, factor), mask=at < n)


def drop(x: torch.Tensor, seed: torch.Tensor, threshold: int, scale: float) -> torch.Tensor:
    """What the operator makes of a contiguous `x`, with the seed on the same device."""
    y = torch.empty_like(x)
    if n := x.numel():
        with torch.cuda.device_of(x):
            _drop[(triton.cdiv(n, _BLOCK),)](x, y, seed, n, threshold, scale, _BLOCK)
    return y
