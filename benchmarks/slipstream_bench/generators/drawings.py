"""Images of geometric shapes with boxes that are exact to the pixel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import InvalidArgumentError
from slipstream_bench.generators._random import positive, streams

_CLASSES = ("disc", "square", "triangle")
# The background is darker than every shape: its channels are at most half of a shape's brightest
# one, so that the pixels alone determine what belongs to a shape.
_DARKEST_SHAPE = 160
_BRIGHTEST_GROUND = 80
# Attempts to place a shape apart from the others before it is omitted.
_TRIES = 20


@dataclass(frozen=True)
class Drawings:
    """Images of shapes and their ground truth.

    Attributes:
        images: uint8 [N, size, size, 3].
        boxes: per image, int64 [k, 4]: x0, y0, x1, y1 in pixels, x1 and y1 exclusive; the tightest
            box around the shape's pixels. Boxes of an image do not touch.
        labels: per image, int64 [k], indices into `classes`.
        colours: per image, uint8 [k, 3], the fill colour of each shape.
    """

    images: NDArray[np.uint8]
    boxes: tuple[NDArray[np.int64], ...]
    labels: tuple[NDArray[np.int64], ...]
    colours: tuple[NDArray[np.uint8], ...]
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.images)


def shapes(
    count: int, *, size: int = 64, most: int = 3, smallest: int = 8, seed: int = 0
) -> Drawings:
    """Draw images with 1 to `most` discs, squares and triangles on a dark, noisy background.

    Args:
        size: width and height in pixels.
        most: maximum number of shapes per image; fewer if there is no space.
        smallest: minimum diameter of a shape in pixels; the maximum is half of `size`.

    Raises:
        InvalidArgumentError: a size is not positive, or `smallest` exceeds half of `size`.
    """
    positive(count=count, size=size, most=most)
    if not 4 <= smallest <= size // 2:
        raise InvalidArgumentError("smallest", f"must be in 4..{size // 2}")
    (generator,) = streams(seed, 1)
    images = generator.integers(0, _BRIGHTEST_GROUND + 1, (count, size, size, 3), dtype=np.uint8)
    boxes, labels, colours = [], [], []
    for image in images:
        placed: list[tuple[int, int, int, int]] = []
        kinds: list[int] = []
        paints: list[NDArray[np.uint8]] = []
        for _ in range(int(generator.integers(1, most + 1))):
            kind = int(generator.integers(len(_CLASSES)))
            mask = _place(kind, size, smallest, placed, generator)
            if mask is None:
                continue
            colour = generator.integers(0, 256, 3, dtype=np.uint8)
            colour[generator.integers(3)] = generator.integers(_DARKEST_SHAPE, 256)
            image[mask] = colour
            placed.append(_box(mask))
            kinds.append(kind)
            paints.append(colour)
        boxes.append(np.array(placed, dtype=np.int64).reshape(-1, 4))
        labels.append(np.array(kinds, dtype=np.int64))
        colours.append(np.array(paints, dtype=np.uint8).reshape(-1, 3))
    return Drawings(images, tuple(boxes), tuple(labels), tuple(colours), _CLASSES)


def _place(
    kind: int,
    size: int,
    smallest: int,
    placed: list[tuple[int, int, int, int]],
    generator: np.random.Generator,
) -> NDArray[np.bool_] | None:
    for _ in range(_TRIES):
        radius = generator.uniform(smallest, size // 2) / 2
        x, y = generator.uniform(radius, size - radius, 2)
        mask = _mask(kind, size, x, y, radius)
        x0, y0, x1, y1 = _box(mask)
        # One free pixel between boxes separates them under any definition of touching.
        if all(x0 > b[2] or x1 < b[0] or y0 > b[3] or y1 < b[1] for b in placed):
            return mask
    return None


def _mask(kind: int, size: int, x: float, y: float, radius: float) -> NDArray[np.bool_]:
    """Return the pixels whose centre is inside the shape, bool [size, size]."""
    centre = np.arange(size) + 0.5
    dx, dy = centre[None, :] - x, centre[:, None] - y
    if _CLASSES[kind] == "disc":
        return np.asarray(dx**2 + dy**2 <= radius**2)
    if _CLASSES[kind] == "square":
        return (abs(dx) <= radius) & (abs(dy) <= radius)
    # Points up; its height equals its base.
    return (dy <= radius) & (abs(dx) <= (dy + radius) / 2)


def _box(mask: NDArray[np.bool_]) -> tuple[int, int, int, int]:
    columns, rows = np.flatnonzero(mask.any(axis=0)), np.flatnonzero(mask.any(axis=1))
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1
