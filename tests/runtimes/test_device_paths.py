"""Cameras, codecs and the parsing of device paths."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from slipstream.errors import InvalidArgumentError, UnknownNameError
from slipstream.runtimes.camera import Camera
from slipstream.runtimes.paths import Codec, DeviceMatrix, DevicePath, reference_path
from slipstream.runtimes.preprocessing import Channels, image_pipeline

PIPELINE = image_pipeline(32, crop=1.0)


def scene(size: int = 64) -> np.ndarray:
    """A smooth image with an edge, uint8 [size, size, 3]."""
    y, x = np.mgrid[:size, :size] / size
    image = np.stack([0.2 + 0.6 * x, 0.3 + 0.5 * y, 0.5 + 0.3 * np.sin(6 * x * y)], -1)
    image[:, size // 2 :] *= 0.7
    return (255 * image).astype(np.uint8)


@pytest.mark.parametrize("demosaic", ["bilinear", "malvar", "edge"])
def test_neutral_camera_changes_little(demosaic: str) -> None:
    image = scene()
    developed = Camera(demosaic)(image)  # type: ignore[arg-type]
    error = np.abs(developed.astype(float) - image)[4:-4, 4:-4]
    assert np.median(error) <= 1
    assert error.mean() < 3
    flat = np.full((16, 16, 3), (200, 100, 50), np.uint8)
    assert np.abs(Camera(demosaic)(flat).astype(int) - flat).max() <= 1  # type: ignore[arg-type]


def test_each_camera_setting_has_its_effect() -> None:
    image = scene()
    plain = image.astype(float)
    assert np.array_equal(Camera(seed=3)(image), image)

    def developed(**settings: float) -> np.ndarray:
        return Camera(**settings)(image).astype(float)  # type: ignore[arg-type]

    warm = developed(warmth=0.5) - plain
    assert warm[..., 0].mean() > 5
    assert warm[..., 2].mean() < -5
    assert developed(exposure=-0.5).mean() < plain.mean() - 10
    assert developed(contrast=0.5).std() > plain.std() + 3
    assert np.ptp(developed(saturation=0.0), axis=-1).max() <= 1
    edge = slice(28, 36)
    assert (
        developed(sharpen=2.0)[:, edge].std()
        > plain[:, edge].std()
        > developed(denoise=2)[:, edge].std()
    )
    assert np.array_equal(developed(noise=0.05, seed=1), developed(noise=0.05, seed=1))
    assert not np.array_equal(developed(noise=0.05, seed=1), developed(noise=0.05, seed=2))


def test_denoising_spreads_a_dot_around_its_place() -> None:
    image = np.full((33, 33, 3), 40, np.uint8)
    image[16, 16] = 255
    light = Camera(denoise=1.0)(image)[..., 1].astype(int)
    assert np.unravel_index(light.argmax(), light.shape) == (16, 16)
    assert light[16, 16] > light[16, 17] > light[16, 18] >= 40


def test_lower_quality_loses_more() -> None:
    image = scene()

    def loss(codec: Codec) -> float:
        return float(np.square(codec(image).astype(float) - image).mean())

    assert loss(Codec()) == 0 == loss(Codec("png"))
    for name in ("jpeg", "webp", "avif", "jpeg2000"):
        good, bad = Codec(name, 95), Codec(name, 10)  # type: ignore[arg-type]
        assert loss(good) < loss(bad)
        assert len(bad.encode(image)) < len(good.encode(image)) < image.nbytes
    assert not np.array_equal(Codec("jpeg", 80)(image), Codec("jpeg", 80, decoder="fast")(image))
    assert Codec("jpeg", 50)(image[..., :1]).shape == (64, 64, 1)


def test_path_is_parsed_as_differences_from_the_reference() -> None:
    base = reference_path(PIPELINE)
    path = DevicePath.parse("codec:jpeg,quality=60+camera:edge,sharpen=0.5+model:int8", base)
    assert path.stages["codec"] == Codec("jpeg", 60)
    assert path.stages["camera"] == Camera("edge", sharpen=0.5)
    assert path.model == "int8"
    assert [stage.name for stage in path.pipeline.stages][:4] == [
        "decode",
        "camera",
        "codec",
        "crop",
    ]
    assert base.with_stage("codec", path).stages["codec"] == Codec("jpeg", 60)
    assert path.pipeline(scene()).shape == (3, 32, 32)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("camra:edge", " camera?"),
        ("codec:gif", "'gif'"),
        ("codec:jpeg,qualty=3", " quality?"),
        ("codec:jpeg,quality=high", "'high'"),
        ("codec:jpeg,quality=101", " 1 and 100"),
        ("camera:sharpen=-1", "negative"),
        ("layout:HWC,CHW", "is not a setting"),
    ],
)
def test_refuses_invalid_paths(text: str, message: str) -> None:
    with pytest.raises((UnknownNameError, InvalidArgumentError)) as caught:
        DevicePath.parse(text, reference_path(PIPELINE))
    assert message in str(caught.value)


def test_reference_is_the_models_own_preprocessing() -> None:
    image = np.random.default_rng(0).integers(0, 256, (64, 64, 3)).astype(np.uint8)
    matrix = DeviceMatrix.of(PIPELINE, {"jpeg": "codec:jpeg,quality=90"})
    assert np.array_equal(matrix.reference.pipeline(image), PIPELINE(image))
    decoded = Codec("jpeg", 90)(image)
    assert np.array_equal(matrix.paths[0].pipeline(image), PIPELINE(decoded))


def test_matrix_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "phones.toml"
    file.write_text('[paths]\na = "codec:jpeg,quality=50"\n"b c" = "camera:edge"\n')
    matrix = DeviceMatrix.read(file, PIPELINE)
    assert [path.name for path in matrix] == ["a", "b c"]
    assert matrix.varied == ("camera", "codec")
    file.write_text("[phones]\n")
    with pytest.raises(InvalidArgumentError, match=rf"{re.escape(str(file))}.*\bpaths\b"):
        DeviceMatrix.read(file, PIPELINE)
    file.write_text("a = ")
    with pytest.raises(InvalidArgumentError, match="cannot be read"):
        DeviceMatrix.read(file, PIPELINE)
    with pytest.raises(InvalidArgumentError, match="used twice"):
        DeviceMatrix(matrix.reference, (*matrix.paths, matrix.paths[0]))


def test_built_in_devices_differ() -> None:
    image = scene()
    for matrix in (DeviceMatrix.default(PIPELINE), DeviceMatrix.held_out(PIPELINE)):
        assert len({path.pipeline(image).tobytes() for path in matrix}) == len(matrix)


def test_grey_has_one_channel() -> None:
    grey = Channels("L")(scene())
    assert grey.shape == (64, 64, 1)
    assert np.array_equal(np.repeat(grey, 3, 2), Channels("grey")(scene()))
