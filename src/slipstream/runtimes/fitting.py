"""Samples as data sets have them, in the form a model takes: layout, range, dtype, codes.

What this does is named, so that a path of another device can be held against it: nothing is
resized and no colours change; whoever needs that names a function of theirs.
"""

from __future__ import annotations

import math

import numpy as np

from slipstream.errors import InvalidArgumentError
from slipstream.runtimes.runtime import Array, TensorSpec


def fit(
    samples: Array, spec: TensorSpec | None, value_range: tuple[float, float] | None = None
) -> Array:
    """`samples` as a model with this input takes them, C-contiguous.

    In this order: images of uint8 0..255 are mapped linearly to `value_range` if one is given;
    channels move from last to first, or a channel of size 1 appears, where the model's shape says
    so; numbers become codes where its input is quantised, else its dtype.

    Args:
        samples: [N, ...].
        spec: the model's input; None where it says nothing: then only `value_range` is applied.
        value_range: what 0 and 255 become; None leaves values as they are.

    Raises:
        InvalidArgumentError: a sample has another number of elements than the model takes.
    """
    if value_range is not None:
        low, high = value_range
        scale = (high - low) / (255.0 if samples.dtype == np.uint8 else 1.0)
        samples = (samples * np.float32(scale) + np.float32(low)).astype(np.float32)
    if spec is None:
        return np.ascontiguousarray(samples)
    samples = _laid_out(samples, spec)
    dtype = np.dtype(spec.dtype)
    if spec.scale and dtype.kind in "iu":
        limits = np.iinfo(dtype)
        codes = np.round(samples / spec.scale) + spec.zero_point
        samples = np.clip(codes, limits.min, limits.max)
    return np.ascontiguousarray(samples, dtype=dtype)


def _laid_out(samples: Array, spec: TensorSpec) -> Array:
    wanted, given = spec.shape[1:], samples.shape[1:]
    if agree(given, wanted):
        return samples
    if samples.ndim == 4 and agree((given[2], *given[:2]), wanted):
        return samples.transpose(0, 3, 1, 2)
    sizes = [size for size in wanted if size is not None]
    if None not in wanted and math.prod(sizes) == math.prod(given):
        return samples.reshape(len(samples), *sizes)
    raise InvalidArgumentError(
        "data",
        f"a sample has the shape {list(given)}, and the model takes {spec}",
        remedy="name a function that prepares them: --data file.py:function",
    )


def agree(shape: tuple[int, ...], pattern: tuple[int | None, ...]) -> bool:
    """Whether a shape fits a pattern, in which None matches any size."""
    return len(shape) == len(pattern) and all(
        expected is None or size == expected for size, expected in zip(shape, pattern, strict=True)
    )
