"""The last stage of a pipeline: conversion to the model's dtype, with quantization."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from slipstream.errors import InvalidArgumentError
from slipstream.runtimes.preprocessing.pipeline import Array, Stage


@dataclass(frozen=True)
class Cast(Stage):
    """Convert to the model's dtype; quantize if it is quantized, real = scale (code - zero_point).

    Attributes:
        dtype: NumPy's name of the type.
        scale, zero_point: quantization of the model's input; scale 0 without quantization.
        rounding: rounding of codes; ``truncate`` cuts floats to integers.
        overflow: whether codes outside the dtype are clipped or wrap around.
    """

    name = "cast"
    order = 90
    dtype: str = "float32"
    scale: float = 0.0
    zero_point: int = 0
    rounding: Literal["nearest", "truncate"] = "nearest"
    overflow: Literal["clip", "wrap"] = "clip"

    def __post_init__(self) -> None:
        try:
            numeric = np.dtype(self.dtype).kind in "biuf"
        except TypeError:
            numeric = False
        if not numeric:
            raise InvalidArgumentError("cast", f"'{self.dtype:.40}' is not a numeric dtype")

    def __call__(self, value: Array) -> Array:
        dtype = np.dtype(self.dtype)
        if self.scale:
            value = value / np.float32(self.scale) + self.zero_point
        if self.rounding == "truncate":
            value = np.trunc(value)
        if dtype.kind not in "iu" or value.dtype.kind in "iu":
            return value.astype(dtype)
        value = np.rint(value)
        if self.overflow == "clip":
            limits = np.iinfo(dtype)
            return np.clip(value, limits.min, limits.max).astype(dtype)
        return value.astype(np.int64).astype(dtype)

    def bugs(self) -> Iterator[tuple[str, Stage]]:
        yield "values are truncated to integers", self.changed(rounding="truncate")
        if self.scale:
            yield "the zero point is missing", self.changed(zero_point=0)
            for shift in (128, -128):
                yield (
                    f"codes are {shift:+d} off (signed and unsigned mixed up)",
                    self.changed(zero_point=self.zero_point + shift),
                )
            yield "codes wrap around instead of being clipped", self.changed(overflow="wrap")

    def code(self) -> str:
        if not self.scale:
            return f"x = x.astype(np.{self.dtype})"
        limits = np.iinfo(np.dtype(self.dtype))
        return (
            f"x = np.clip(np.rint(x / {self.scale!r} + {self.zero_point}), {limits.min}, "
            f"{limits.max}).astype(np.{self.dtype})"
        )
