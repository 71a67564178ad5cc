"""Convert samples of data sets to a model's input: layout, value range, dtype and quantization.

Samples are never resized, and colours never changed: write a function for that.
"""

from __future__ import annotations

import math

import numpy as np

from slipstream.errors import InvalidArgumentError
from slipstream.runtimes.runtime import Array, TensorSpec


def fit(
    samples: Array, spec: TensorSpec | None, value_range: tuple[float, float] | None = None
) -> Array:
    """Convert `samples` to a model's input, C-contiguous.

    In this order: map uint8 0..255 (floats 0..1) linearly to `value_range`; move channels from last
    to first, or add an axis of size 1, to match the model's shape; quantize, or convert the dtype.

    Args:
        samples: [N, ...].
        spec: the model's input; None if unknown: then only `value_range` is applied.
        value_range: values to which the range is mapped; None to keep values.

    Raises:
        InvalidArgumentError: the shape of a sample does not match the model's.
    """
    if value_range is not None:
        low, high = value_range
        scale = (high - low) / (255.0 if samples.dtype == np.uint8 else 1.0)
        samples = (samples * np.float32(scale) + np.float32(low)).astype(np.float32)
    if spec is None:
        return np.ascontiguousarray(samples)
    samples = _reshape(samples, spec)
    dtype = np.dtype(spec.dtype)
    if spec.scale and dtype.kind in "iu":
        limits = np.iinfo(dtype)
        codes = np.round(samples / spec.scale) + spec.zero_point
        samples = np.clip(codes, limits.min, limits.max)
    return np.ascontiguousarray(samples, dtype=dtype)


def _reshape(samples: Array, spec: TensorSpec) -> Array:
    target, shape = spec.shape[1:], samples.shape[1:]
    if agree(shape, target):
        return samples
    if samples.ndim == 4 and agree((shape[2], *shape[:2]), target):
        return samples.transpose(0, 3, 1, 2)
    sizes = [size for size in target if size is not None]
    if None not in target and math.prod(sizes) == math.prod(shape):
        return samples.reshape(len(samples), *sizes)
    raise InvalidArgumentError(
        "data",
        f"a sample has the shape {list(shape)}; the model takes {spec}",
        remedy="pass a function that prepares samples: --data file.py:function",
    )


def agree(shape: tuple[int, ...], pattern: tuple[int | None, ...]) -> bool:
    """Whether a shape matches a pattern, in which None matches any size."""
    return len(shape) == len(pattern) and all(
        expected is None or size == expected for size, expected in zip(shape, pattern, strict=True)
    )
