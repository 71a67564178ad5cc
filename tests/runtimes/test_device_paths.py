"""Cameras, codecs and the grammar of paths."""

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
    """A smooth picture with an edge in it, uint8 [size, size, 3]."""
    y, x = np.mgrid[:size, :size] / size
    picture = np.stack([0.2 + 0.6 * x, 0.3 + 0.5 * y, 0.5 + 0.3 * np.sin(6 * x * y)], -1)
    picture[:, size // 2 :] *= 0.7
    return (255 * picture).astype(np.uint8)


@pytest.mark.parametrize("demosaic", ["bilinear", "malvar", "edge"])
def test_a_faultless_camera_changes_little(demosaic: str) -> None:
    given = scene()
    seen = Camera(demosaic)(given)  # type: ignore[arg-type]
    error = np.abs(seen.astype(float) - given)[4:-4, 4:-4]
    assert np.median(error) <= 1
    assert error.mean() < 3
    flat = np.full((16, 16, 3), (200, 100, 50), np.uint8)
    assert np.abs(Camera(demosaic)(flat).astype(int) - flat).max() <= 1  # type: ignore[arg-type]


def test_each_setting_does_what_it_says() -> None:
    given = scene()
    plain = given.astype(float)
    assert np.array_equal(Camera(seed=3)(given), given)

    def seen(**settings: float) -> np.ndarray:
        return Camera(**settings)(given).astype(float)  # type: ignore[arg-type]

    warm = seen(warmth=0.5) - plain
    assert warm[..., 0].mean() > 5
    assert warm[..., 2].mean() < -5
    assert seen(exposure=-0.5).mean() < plain.mean() - 10
    assert seen(contrast=0.5).std() > plain.std() + 3
    assert np.ptp(seen(saturation=0.0), axis=-1).max() <= 1
    edge = slice(28, 36)
    assert seen(sharpen=2.0)[:, edge].std() > plain[:, edge].std() > seen(denoise=2)[:, edge].std()
    assert np.array_equal(seen(noise=0.05, seed=1), seen(noise=0.05, seed=1))
    assert not np.array_equal(seen(noise=0.05, seed=1), seen(noise=0.05, seed=2))


def test_codecs_lose_what_their_quality_says() -> None:
    given = scene()

    def lost(codec: Codec) -> float:
        return float(np.square(codec(given).astype(float) - given).mean())

    assert lost(Codec()) == 0 == lost(Codec("png"))
    for name in ("jpeg", "webp", "avif", "jpeg2000"):
        good, bad = Codec(name, 95), Codec(name, 10)  # type: ignore[arg-type]
        assert lost(good) < lost(bad)
        assert len(bad.encode(given)) < len(good.encode(given)) < given.nbytes
    assert not np.array_equal(Codec("jpeg", 80)(given), Codec("jpeg", 80, decoder="fast")(given))
    assert Codec("jpeg", 50)(given[..., :1]).shape == (64, 64, 1)


def test_a_path_is_what_it_does_otherwise() -> None:
    base = reference_path(PIPELINE)
    path = DevicePath.parse("codec:jpeg,quality=60+camera:edge,sharpen=0.5+model:int8", base)
    assert path.stages["codec"] == Codec("jpeg", 60)
    assert path.stages["camera"] == Camera("edge", sharpen=0.5)
    assert path.model == "int8"
    assert [one.name for one in path.pipeline.stages][:4] == ["decode", "camera", "codec", "crop"]
    assert base.with_stage("codec", path).stages["codec"] == Codec("jpeg", 60)
    assert path.pipeline(scene()).shape == (3, 32, 32)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("camra:edge", " camera?"),
        ("codec:gif", "'gif'"),
        ("codec:jpeg,qualty=3", " quality?"),
        ("codec:jpeg,quality=high", "'high'"),
        ("codec:jpeg,quality=101", " 1 and 100"),
        ("camera:sharpen=-1", "negative"),
        ("layout:HWC,CHW", "names no setting"),
    ],
)
def test_what_is_no_path_is_named(text: str, says: str) -> None:
    with pytest.raises((UnknownNameError, InvalidArgumentError)) as caught:
        DevicePath.parse(text, reference_path(PIPELINE))
    assert says in str(caught.value)


def test_the_reference_is_the_model_s_own_preprocessing() -> None:
    picture = np.random.default_rng(0).integers(0, 256, (64, 64, 3)).astype(np.uint8)
    matrix = DeviceMatrix.of(PIPELINE, {"jpeg": "codec:jpeg,quality=90"})
    assert np.array_equal(matrix.reference.pipeline(picture), PIPELINE(picture))
    written = Codec("jpeg", 90)(picture)
    assert np.array_equal(matrix.paths[0].pipeline(picture), PIPELINE(written))


def test_matrices_come_from_files(tmp_path: Path) -> None:
    file = tmp_path / "phones.toml"
    file.write_text('[paths]\na = "codec:jpeg,quality=50"\n"b c" = "camera:edge"\n')
    matrix = DeviceMatrix.read(file, PIPELINE)
    assert [one.name for one in matrix] == ["a", "b c"]
    assert matrix.varied == ("camera", "codec")
    file.write_text("[phones]\n")
    with pytest.raises(InvalidArgumentError, match=rf"{re.escape(str(file))}.*\bpaths\b"):
        DeviceMatrix.read(file, PIPELINE)
    file.write_text("a = ")
    with pytest.raises(InvalidArgumentError, match="cannot be read"):
        DeviceMatrix.read(file, PIPELINE)
    with pytest.raises(InvalidArgumentError, match="stands there twice"):
        DeviceMatrix(matrix.reference, (*matrix.paths, matrix.paths[0]))


def test_the_devices_that_are_built_in_all_differ() -> None:
    given = scene()
    for matrix in (DeviceMatrix.default(PIPELINE), DeviceMatrix.held_out(PIPELINE)):
        assert len({one.pipeline(given).tobytes() for one in matrix}) == len(matrix)


def test_grey_is_one_channel() -> None:
    grey = Channels("L")(scene())
    assert grey.shape == (64, 64, 1)
    assert np.array_equal(np.repeat(grey, 3, 2), Channels("grey")(scene()))
