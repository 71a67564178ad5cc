"""Shapes of convolutions and pooling windows."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Convolution:
    """Shape of a two-dimensional convolution over NHWC images.

    Attributes:
        image: images, height, width, channels.
        kernel, stride, padding, dilation: height and width each.
        depthwise: whether each output channel reads only the input channel of the same index.
    """

    image: tuple[int, int, int, int]
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    depthwise: bool = field(default=False, kw_only=True)

    @functools.cached_property
    def out_size(self) -> tuple[int, int]:
        """Height and width of the output."""
        sizes = [
            (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
            for size, kernel, stride, padding, dilation in zip(
                self.image[1:3], self.kernel, self.stride, self.padding, self.dilation, strict=True
            )
        ]
        return sizes[0], sizes[1]

    @functools.cached_property
    def rows(self) -> int:
        """Number of output pixels of all images."""
        return self.image[0] * math.prod(self.out_size)

    @property
    def columns(self) -> int:
        """Number of codes that are summed to each output element."""
        return math.prod(self.kernel) * (1 if self.depthwise else self.image[3])

    @property
    def pointwise(self) -> bool:
        """Whether each output pixel reads only the input pixel at its position."""
        window = (self.kernel, self.stride, self.padding)
        return window == ((1, 1), (1, 1), (0, 0)) and not self.depthwise


def pair(value: Any) -> tuple[int, int]:
    """Return (height, width) from a number for both, or a sequence of one or two."""
    numbers = (
        [int(number) for number in value] if isinstance(value, (list, tuple)) else [int(value)]
    )
    return numbers[0], numbers[-1]
