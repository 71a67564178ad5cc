"""The operator ``slipstream::dropout`` on a CUDA device; imported only if Triton is installed.

Kernels are not annotated, because Triton compiles annotations too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slipstream.codegen.triton_prelude import draw, keep

_BLOCK = 1024


@triton.jit
def _drop(x, y, seed, n, threshold: tl.constexpr, scale: tl.constexpr, block: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    value = tl.load(x + offset, mask=offset < n, other=0.0)
    value = value.to(tl.float64) if value.dtype == tl.float64 else value.to(tl.float32)
    factor = draw(seed, offset, threshold).to(value.dtype) * scale
    tl.store(y + offset, keep(value, factor), mask=offset < n)


def drop(x: torch.Tensor, seed: torch.Tensor, threshold: int, scale: float) -> torch.Tensor:
    """Drop elements of a contiguous `x`; the seed is on the same device."""
    y = torch.empty_like(x)
    if n := x.numel():
        with torch.cuda.device_of(x):
            _drop[(triton.cdiv(n, _BLOCK),)](x, y, seed, n, threshold, scale, _BLOCK)
    return y
