"""Scenes: what stands before every camera, from files, folders and data sets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import InvalidArgumentError
from slipstream.runtimes import Runtime
from slipstream.runtimes.paths import DevicePath, reference_path
from slipstream.runtimes.preprocessing import (
    Crop,
    Decode,
    Pipeline,
    RawInputError,
    Resize,
    image_pipeline,
)
from slipstream.runtimes.samples import read_samples

_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".avif", ".bmp", ".tif", ".tiff", ".heic")
# Sets with a part to train on and one to test with.
SPLIT = ("fashion_mnist", "cifar10_jpeg")
# A scene has this many times the pixels of the model's input in a line, so that what an earlier
# file lost is lost again in shrinking, and not taken for the codec that is looked at.
_FINER = 2
_USUAL = 224


class Scenes(Sequence[NDArray[np.uint8]]):
    """Pictures uint8 [H, W, 3], decoded when they are asked for.

    Args:
        raws: files, their bytes, or pixels.
        labels: class of each, int64 [N]; None where there are none.
        size: files with more pixels than this in their shorter side are shrunk to a square of it.
        classes: names of the classes, for people.
    """

    def __init__(
        self,
        raws: Sequence[Any],
        labels: NDArray[np.int64] | None = None,
        size: int = _FINER * _USUAL,
        classes: Sequence[str] = (),
    ) -> None:
        self.raws, self.labels, self.classes = raws, labels, tuple(classes)
        self._decode, self._square = Decode(), Crop(1.0)
        self._shrink = Resize(size, size, "lanczos")
        self._size = size

    def __len__(self) -> int:
        return len(self.raws)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[one] for one in range(len(self))[index]]
        raw = self.raws[index]
        try:
            picture = self._decode(raw)
        except RawInputError as error:
            where = str(raw) if isinstance(raw, Path) else f"scene {index}"
            raise RawInputError(error.what, where=where, remedy=error.remedy) from error
        if isinstance(raw, np.ndarray) or min(picture.shape[:2]) <= self._size:
            return picture
        return self._shrink(self._square(picture))

    def array(self) -> NDArray[np.uint8]:
        """All of them, [N, H, W, 3].

        Raises:
            InvalidArgumentError: they are not of one size.
        """
        pictures = [self[one] for one in range(len(self))]
        sizes = {one.shape for one in pictures}
        if len(sizes) != 1:
            raise InvalidArgumentError("data", f"scenes of {len(sizes)} sizes", remedy="one size")
        return np.stack(pictures)


def open_scenes(
    source: str | None, model: Runtime, *, size: int = _FINER * _USUAL, limit: int | None = None,
    split: str = "test",
) -> Scenes:  # fmt: skip
    """The scenes that a command names.

    Args:
        source: a folder of pictures, where folders in it are their classes in alphabetical order;
            or what `slipstream.runtimes.samples.read_samples` reads, if it is pictures.
        size: of scenes from files.
        limit: only so many, evenly spread over all.
        split: ``train`` or ``test``, of a data set that has both.

    Raises:
        SlipstreamError: there are no such data, or no pictures.
    """
    scenes = _opened(source, model, size, split)
    if not len(scenes):
        raise InvalidArgumentError(
            "data", f"{source} has no pictures", remedy=f"files as {', '.join(_ENDINGS)}"
        )
    if limit is not None and limit < len(scenes):
        chosen = [n * len(scenes) // limit for n in range(limit)]
        labels = None if scenes.labels is None else scenes.labels[chosen]
        scenes = Scenes([scenes.raws[n] for n in chosen], labels, size, scenes.classes)
    return scenes


def _opened(source: str | None, model: Runtime, size: int, split: str) -> Scenes:
    if source is not None and Path(source).is_dir():
        return _folder(Path(source), size)
    if source is not None and source.endswith(("/", "\\")):
        raise InvalidArgumentError(
            "data", f"there is no folder '{source}'", remedy="check the path"
        )
    if source is not None and "." not in source and ":" not in source:
        from slipstream import data

        options: dict[str, Any] = {"split": split} if source in SPLIT else {}
        if source == "imagenet_sample":
            options["decode"] = False
        got = data.get(source, **options)
        if isinstance(got, data.EncodedImages):
            return Scenes(got.files, got.labels, size, got.classes)
        if isinstance(got, data.Images):
            return Scenes(list(_pictures(got.images)), got.labels, size, got.classes)
    (pixels, *_), labels = read_samples(source, model)
    return Scenes(list(_pictures(pixels)), labels, size)


def _pictures(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    if pixels.dtype != np.uint8 or pixels.ndim not in (3, 4):
        raise InvalidArgumentError(
            "data", f"{pixels.dtype}[{', '.join(map(str, pixels.shape))}] is not pictures",
            remedy="uint8 [N, H, W], [N, H, W, 3], or a folder of files",
        )  # fmt: skip
    return pixels


def _folder(folder: Path, size: int) -> Scenes:
    def pictures(where: Path) -> list[Path]:
        return sorted(one for one in where.iterdir() if one.suffix.lower() in _ENDINGS)

    classes = sorted(one for one in folder.iterdir() if one.is_dir() and pictures(one))
    if not classes:
        return Scenes(pictures(folder), None, size)
    raws = [(file, number) for number, one in enumerate(classes) for file in pictures(one)]
    labels = np.array([number for _, number in raws], np.int64)
    return Scenes([file for file, _ in raws], labels, size, [one.name for one in classes])


def pipeline_for(model: Runtime, changes: str = "") -> Pipeline:
    """Preprocessing for a model: its input's size, layout, type and codes, values in 0..1.

    Args:
        changes: what is otherwise, in the grammar of paths:
            ``crop:share=0.875+scale:low=0,high=1+normalise:mean=0.5,std=0.5``.

    Raises:
        InvalidArgumentError: the model does not take pictures.
        UnknownNameError: a stage or setting that is not known.
    """
    spec = model.inputs[0] if model.inputs else None
    height = width = _USUAL
    layout, dtype, scale, zero, grey = "CHW", "float32", 0.0, 0, False
    if spec is not None:
        if len(spec.shape) != 4:
            raise InvalidArgumentError("MODEL", f"it takes {spec}, which is no picture")
        layout = "HWC" if spec.shape[3] in (1, 3) and spec.shape[1] not in (1, 3) else "CHW"
        rows, columns, channels = (
            (spec.shape[1], spec.shape[2], spec.shape[3])
            if layout == "HWC"
            else (spec.shape[2], spec.shape[3], spec.shape[1])
        )
        height, width, grey = rows or _USUAL, columns or _USUAL, channels == 1
        dtype, scale, zero = spec.dtype, spec.scale, spec.zero_point
    pipeline = image_pipeline(
        (height, width), crop=1.0, layout="HWC" if layout == "HWC" else "CHW", dtype=dtype,
        scale=scale, zero_point=zero, mean=(0.0,), std=(1.0,),
    )  # fmt: skip
    if grey:
        changes = "+".join(filter(None, ("channels:L", changes)))
    return DevicePath.parse(changes, reference_path(pipeline)).pipeline
