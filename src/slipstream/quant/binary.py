"""Binary weights: a sign and one scale for many.

Source: Rastegari et al., "XNOR-Net: ImageNet Classification Using Binary Convolutional Neural
Networks", ECCV 2016: the mean of the absolute weights is the scale of least squared error.
"""

from __future__ import annotations

from typing import Any

from slipstream.quant._check import real_numbers
from slipstream.quant.format import Granularity


def binarize(weight: Any, granularity: Granularity | None = None) -> tuple[Any, Any]:
    """`weight` (float, any shape) as signs and scales: int8 of its shape, -1 or 1; float32 scales.

    A weight of zero counts as positive.

    Raises:
        InvalidArgumentError: the weight is empty, or holds NaN or infinity.
    """
    import torch

    weight = real_numbers("weight", weight)
    signs = torch.where(weight >= 0, 1, -1).to(torch.int8)
    return signs, mean_size(weight, granularity or Granularity())


def mean_size(weight: Any, granularity: Granularity) -> Any:
    """The mean absolute value behind each scale, of `Granularity.scales_shape`."""
    import torch

    shape = granularity.scales_shape(tuple(weight.shape))
    size = weight.abs()
    if granularity.axis is None:
        return size.mean()
    rows = size.movedim(granularity.axis, 0).reshape(shape[0], -1)
    if granularity.block is None:
        return rows.mean(1)
    counts = torch.full((shape[1],), float(granularity.block), device=weight.device)
    counts[-1] -= shape[1] * granularity.block - rows.shape[1]
    return granularity.sums(size) / counts
