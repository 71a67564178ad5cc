"""Boxes recovered from the pixels alone."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import ndimage

from slipstream.errors import InvalidArgumentError
from slipstream_bench.generators import shapes


def test_boxes_are_found_again_from_the_pixels() -> None:
    drawings = shapes(100, size=64, most=4, seed=1)
    several = 0
    for image, boxes in zip(drawings.images, drawings.boxes, strict=True):
        # The ground is dark in every channel, every shape bright in one.
        blobs, count = ndimage.label(image.max(axis=2) > 80)
        found = {
            (x.start, y.start, x.stop, y.stop) for y, x in ndimage.find_objects(blobs)
        }  # fmt: skip
        assert found == {tuple(int(edge) for edge in box) for box in boxes}
        assert count == len(boxes)
        several += count > 1
    assert several > 30


def test_each_shape_has_one_colour_and_the_area_of_its_kind() -> None:
    drawings = shapes(300, size=96, most=1, smallest=30, seed=2)
    seen = set()
    for i in range(len(drawings)):
        ((x0, y0, x1, y1),) = drawings.boxes[i]
        inside = drawings.images[i, y0:y1, x0:x1].reshape(-1, 3)
        share = (inside == drawings.colours[i][0]).all(axis=1).mean()
        kind = drawings.classes[drawings.labels[i][0]]
        seen.add(kind)
        # Area over bounding box: pi / 4, 1, 1 / 2; a rim of about a pixel blurs it.
        expected = {"disc": np.pi / 4, "square": 1.0, "triangle": 0.5}[kind]
        assert share == pytest.approx(expected, abs=1.5 / min(x1 - x0, y1 - y0))
    assert seen == set(drawings.classes)


def test_boxes_do_not_touch() -> None:
    drawings = shapes(100, most=5, seed=3)
    for boxes in drawings.boxes:
        for i, (x0, y0, x1, y1) in enumerate(boxes):
            for u0, v0, u1, v1 in boxes[:i]:
                assert x0 > u1 or x1 < u0 or y0 > v1 or y1 < v0
        assert (boxes[:, :2] >= 0).all()
        assert (boxes[:, 2:] <= 64).all()


def test_arguments_out_of_range_are_named() -> None:
    with pytest.raises(InvalidArgumentError, match="smallest"):
        shapes(1, size=16, smallest=9)
    with pytest.raises(InvalidArgumentError, match="count"):
        shapes(0)
