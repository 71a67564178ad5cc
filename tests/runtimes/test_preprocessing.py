"""Image pipelines: stages, unusual files, serialization and variations."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pytest
from PIL import Image

from slipstream.errors import InvalidArgumentError, UnknownNameError
from slipstream.runtimes import preprocessing as pre
from slipstream.runtimes.preprocessing.pipeline import Array


def photo(height: int = 60, width: int = 90, seed: int = 0) -> Array:
    """Asymmetric smooth colours with an edge and different channels, uint8 [H, W, 3]."""
    y, x = np.mgrid[:height, :width].astype(np.float64)
    noise = np.random.default_rng(seed).normal(0, 6, (height, width, 3))
    planes = np.stack([2 * x, 3 * y, 120 + 60 * np.sin(x / 9) * (y > height / 3)], -1)
    return np.clip(planes + noise, 0, 255).astype(np.uint8)


def encoded(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    image.save(file, kind, **options)
    return file.getvalue()


def test_pipeline_equals_preprocessing_by_hand() -> None:
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    pipeline = pre.image_pipeline(32, crop=1.0, method="bilinear", mean=mean, std=std)
    image = photo()
    by_hand = Image.fromarray(image[:, 15:75]).resize((32, 32), Image.Resampling.BILINEAR)
    expected = (np.asarray(by_hand) / 255.0 - mean) / std
    assert np.allclose(pipeline(image), expected.transpose(2, 0, 1), atol=1e-5)
    assert pipeline.batch([image, image]).shape == (2, 3, 32, 32)


@pytest.mark.parametrize("method", ["bilinear", "bicubic", "area", "lanczos"])
def test_resampling_of_floats_equals_pillows(method: Any) -> None:
    image = photo(50, 70)
    ours = pre.Resize(20, 24, method)(image.astype(np.float32))
    pillows = pre.Resize(20, 24, method)(image)
    assert np.abs(np.clip(ours, 0, 255) - pillows).mean() < 0.6


@pytest.mark.parametrize(("method", "mode"), [("bilinear", "bilinear"), ("bicubic", "bicubic")])
@pytest.mark.parametrize("coordinates", ["half_pixel", "corners"])
def test_resampling_without_antialiasing_equals_torchs(
    method: Any, mode: str, coordinates: Any
) -> None:
    import torch

    image = photo(50, 70).astype(np.float32)
    ours = pre.Resize(20, 24, method, False, coordinates)(image)
    tensor = torch.from_numpy(image.transpose(2, 0, 1)[None])
    theirs = torch.nn.functional.interpolate(
        tensor, (20, 24), mode=mode, align_corners=coordinates == "corners"
    )
    assert np.allclose(ours, theirs[0].numpy().transpose(1, 2, 0), atol=0.02)


@pytest.mark.parametrize("coordinates", ["half_pixel", "corners", "asymmetric"])
@pytest.mark.parametrize("method", ["nearest", "bilinear", "bicubic"])
def test_resizing_to_the_same_size_changes_nothing(method: Any, coordinates: Any) -> None:
    image = photo(12, 9).astype(np.float32)
    assert np.allclose(pre.Resize(12, 9, method, False, coordinates)(image), image, atol=1e-3)


def test_mixed_matrix_reads_bt601_as_bt709() -> None:
    def rgb_from_yuv(red: float, blue: float) -> Array:
        """Build the matrix from the weights of red and blue in luminance."""
        green = 1 - red - blue
        to_yuv = np.array([[red, green, blue],
                           np.array([-red, -green, 1 - blue]) / (2 * (1 - blue)),
                           np.array([1 - red, -green, -blue]) / (2 * (1 - red))])  # fmt: skip
        return np.linalg.inv(to_yuv)

    matrix = rgb_from_yuv(0.2126, 0.0722) @ np.linalg.inv(rgb_from_yuv(0.299, 0.114))
    pixels = np.array([[[60, 90, 120], [140, 100, 80], [90, 150, 110]]], np.uint8)
    mixed = pre.Colour(matrix="mixed")(pixels).astype(float)
    assert np.abs(mixed - pixels @ matrix.T).max() <= 0.6


def test_decodes_16_bit_cmyk_alpha_and_grey() -> None:
    decode = pre.Decode()
    grey = np.arange(0, 60000, 1000, dtype=np.uint16).reshape(6, 10)
    wide = encoded(grey)
    assert np.array_equal(decode(wide)[..., 0], np.rint(grey / 257).astype(np.uint8))
    assert (pre.Decode(wide="clip")(wide)[grey > 255] == 255).all()
    image = photo()
    ink = encoded(Image.fromarray(image).convert("CMYK"), "TIFF")
    assert np.abs(decode(ink).astype(int) - image).mean() < 3
    assert np.abs(pre.Decode(cmyk="inverted")(ink).astype(int) - image).mean() > 50
    clear = np.dstack([image, np.zeros_like(image[..., :1])])
    assert (pre.Decode(alpha="white")(encoded(clear)) == 255).all()
    assert np.array_equal(decode(encoded(clear)), image)
    assert np.array_equal(decode(encoded(image[..., 0])), np.repeat(image[..., :1], 3, 2))


def test_exif_orientation_is_applied() -> None:
    image = photo()
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees clockwise
    file = encoded(image, exif=exif)
    assert np.array_equal(pre.Decode()(file), np.rot90(image, 3))
    assert np.array_equal(pre.Decode(exif=False)(file), image)


@pytest.mark.parametrize("cut", [0, 3, 20, 60, 400])
def test_damaged_image_is_reported_by_index(cut: int) -> None:
    whole = encoded(photo(), "JPEG")
    assert len(whole) > 500
    with pytest.raises(pre.RawInputError, match="does not decode") as caught:
        pre.image_pipeline(16).batch([whole, whole[:cut]])
    assert caught.value.where == "raw input 1"


def test_rotation_is_counter_clockwise_after_mirroring() -> None:
    corners = np.array([[0, 1], [2, 3]], np.uint8)[..., None]
    for turn, mirror, expected in (
        (90, False, [1, 3, 0, 2]),
        (180, False, [3, 2, 1, 0]),
        (270, False, [2, 0, 3, 1]),
        (90, True, [0, 2, 1, 3]),
    ):
        assert pre.Orient(turn, mirror)(corners).ravel().tolist() == expected


def test_channels_are_reordered() -> None:
    pixel = np.array([[[10, 20, 30]]], np.uint8)
    for colours, expected in (("BGR", [30, 20, 10]), ("GBR", [20, 30, 10])):
        assert pre.Channels(colours)(pixel).ravel().tolist() == expected


def test_refuses_arrays_that_are_not_pixels() -> None:
    for wrong in (np.zeros((4, 4, 3)), np.zeros((4,), np.uint8), np.zeros((4, 4, 2), np.uint8)):
        with pytest.raises(pre.RawInputError, match="pixels are"):
            pre.Decode()(wrong)


def test_pipeline_round_trips_through_json() -> None:
    pipeline = pre.image_pipeline((24, 32), mean=(0.5, 0.4, 0.3), dtype="int8", scale=0.02)
    text = json.dumps(pipeline.to_dict())
    back = pre.Pipeline.from_dict(json.loads(text))
    assert back == pipeline
    assert back.hash == pipeline.hash
    assert back.hash != pre.image_pipeline(24).hash
    with pytest.raises(UnknownNameError, match="recise"):
        pre.Pipeline.from_dict({"stages": [{"stage": "recise"}]})
    with pytest.raises(InvalidArgumentError, match="sharp"):
        pre.Pipeline.from_dict({"stages": [{"stage": "crop", "sharp": 1}]})
    for stage in (
        {"stage": "crop", "share": "x"},
        {"stage": "resize", "method": "softly"},
        {"stage": "normalise", "times": 10**9},
        {"stage": "cast", "dtype": "text"},
    ):
        with pytest.raises(InvalidArgumentError):
            pre.Pipeline.from_dict({"stages": [stage]})


def test_variations_change_one_stage_and_the_output() -> None:
    pipeline = pre.image_pipeline(24, mean=(0.48, 0.45, 0.4), std=(0.2, 0.25, 0.3))
    image = photo()
    expected = pipeline(image)
    assert np.array_equal(pipeline.completed()(image), expected)
    found = list(pipeline.variations())
    assert len({variation.text for variation in found}) == len(found) > 45
    memo = pre.Memo([image])
    same = []
    for variation in found:
        value = np.asarray(memo(variation.pipeline, 0))
        assert np.array_equal(value, variation.pipeline(image)), variation.text
        assert value.shape == expected.shape, variation.text
        if np.array_equal(value, expected):
            same.append(variation.stages)
    # This image has no EXIF data, 16-bit values, inks or transparency.
    assert set(same) <= {("decode",)}


def test_pairs_change_two_stages() -> None:
    pipeline = pre.image_pipeline(8)
    few = list(pipeline.variations())[:8:3] + list(pipeline.variations())[-3:]
    for pair in pipeline.pairs(few):
        first, second = pair.stages
        assert first != second
        whole = pipeline.completed().stages
        assert sum(a != b for a, b in zip(whole, pair.pipeline.stages, strict=True)) == 2


def test_memo_evicts_and_recomputes() -> None:
    images = [photo(seed=seed) for seed in range(3)]
    memo = pre.Memo(images, max_bytes=20_000)
    pipeline = pre.image_pipeline(16)
    for _ in range(2):
        for index, image in enumerate(images):
            assert np.array_equal(memo(pipeline, index), pipeline(image))


def test_quantized_inputs_are_rounded_and_clipped() -> None:
    cast = pre.Cast("int8", 0.5, 10)
    value = np.array([0.0, 0.26, 1e6, -1e6], np.float32)
    assert cast(value).tolist() == [10, 11, 127, -128]
    assert pre.Cast("int8", 0.5, 10, overflow="wrap")(np.float32([60.0]))[0] == 130 - 256


def test_code_equals_the_pipeline() -> None:
    pipeline = pre.image_pipeline(16, mean=(0.4, 0.5, 0.6), dtype="uint8", scale=0.01, zero_point=9)
    content = encoded(photo())
    names = {"np": np, "Image": Image, "file": io.BytesIO(content)}
    from PIL import ImageOps

    exec(pipeline.code(), names | {"ImageOps": ImageOps}, names)
    assert np.array_equal(names["x"], pipeline(content))
