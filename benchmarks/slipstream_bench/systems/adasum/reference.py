"""Adasum by its definition, in float64: the reference for kernels and ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from slipstream.techniques.distributed.adasum.rule import left_of


def adasum_of(vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return Adasum of tensors of one shape and dtype, one per worker; each a whole layer."""
    return _tree([vector.double() for vector in vectors]).to(vectors[0].dtype)


def _tree(vectors: list[torch.Tensor]) -> torch.Tensor:
    if len(vectors) == 1:
        return vectors[0]
    left = left_of(len(vectors))
    a, b = _tree(vectors[:left]), _tree(vectors[left:])
    # Scale, so that squares neither overflow nor underflow.
    scale = float(max(a.abs().max(), b.abs().max())) if a.numel() else 0.0
    if scale == 0.0 or not np.isfinite(scale):
        return a + b
    a, b = a / scale, b / scale
    ab, aa, bb = float((a * b).sum()), float((a * a).sum()), float((b * b).sum())
    weight_a = 1.0 - ab / (2.0 * aa) if aa > 0.0 else 1.0
    weight_b = 1.0 - ab / (2.0 * bb) if bb > 0.0 else 1.0
    return (weight_a * a + weight_b * b) * scale
