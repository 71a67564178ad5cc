"""Read scenes, the inputs of every camera, from files, folders and data sets."""

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

_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".avif", ".bmp", ".tif", ".tiff", ".heic")
# Data sets with a training and a test split.
SPLIT = ("fashion_mnist", "cifar10_jpeg")
# A scene has this many times the side of the model's input, so that shrinking removes the
# artefacts of the source file, which would otherwise be attributed to the simulated codec.
_SCALE = 2
_DEFAULT_SIZE = 224


class Scenes(Sequence[NDArray[np.uint8]]):
    """Images uint8 [H, W, 3], decoded on access.

    Args:
        raws: files, their bytes, or pixels.
        labels: classes, int64 [N]; None if unknown.
        size: files whose shorter side has more pixels are shrunk to a square of this size.
        classes: display names of the classes.
    """

    def __init__(
        self,
        raws: Sequence[Any],
        labels: NDArray[np.int64] | None = None,
        size: int = _SCALE * _DEFAULT_SIZE,
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
            return [self[scene] for scene in range(len(self))[index]]
        raw = self.raws[index]
        try:
            image = self._decode(raw)
        except RawInputError as error:
            where = str(raw) if isinstance(raw, Path) else f"scene {index}"
            raise RawInputError(error.what, where=where, remedy=error.remedy) from error
        if isinstance(raw, np.ndarray) or min(image.shape[:2]) <= self._size:
            return image
        return self._shrink(self._square(image))

    def array(self) -> NDArray[np.uint8]:
        """Return all scenes, [N, H, W, 3].

        Raises:
            InvalidArgumentError: their sizes differ.
        """
        images = [self[scene] for scene in range(len(self))]
        sizes = {image.shape for image in images}
        if len(sizes) != 1:
            raise InvalidArgumentError(
                "data", f"scenes have {len(sizes)} different sizes", remedy="resize them to one"
            )
        return np.stack(images)


def open_scenes(
    source: str | None, model: Runtime, *, size: int = _SCALE * _DEFAULT_SIZE,
    limit: int | None = None, split: str = "test",
) -> Scenes:  # fmt: skip
    """Open the scenes that a command names.

    Args:
        source: a folder of images, whose subfolders are classes in alphabetical order, or a source
            of images for `slipstream.runtimes.samples.read_samples`.
        size: size of scenes from files, in pixels.
        limit: maximum number, evenly spread over all scenes.
        split: ``train`` or ``test``, for data sets with both.

    Raises:
        SlipstreamError: the source does not exist or has no images.
    """
    scenes = _opened(source, model, size, split)
    if not len(scenes):
        raise InvalidArgumentError(
            "data", f"{source} has no images", remedy=f"pass files with {', '.join(_SUFFIXES)}"
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
        raise InvalidArgumentError("data", f"folder '{source}' not found", remedy="check the path")
    if source is not None and "." not in source and ":" not in source:
        from slipstream import data

        options: dict[str, Any] = {"split": split} if source in SPLIT else {}
        if source == "imagenet_sample":
            options["decode"] = False
        loaded = data.get(source, **options)
        if isinstance(loaded, data.EncodedImages):
            return Scenes(loaded.files, loaded.labels, size, loaded.classes)
        if isinstance(loaded, data.Images):
            return Scenes(list(_checked_images(loaded.images)), loaded.labels, size, loaded.classes)
    (pixels, *_), labels = read_samples(source, model)
    return Scenes(list(_checked_images(pixels)), labels, size)


def _checked_images(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    if pixels.dtype != np.uint8 or pixels.ndim not in (3, 4):
        raise InvalidArgumentError(
            "data", f"{pixels.dtype}[{', '.join(map(str, pixels.shape))}] is not a set of images",
            remedy="pass uint8 [N, H, W] or [N, H, W, 3], or a folder of files",
        )  # fmt: skip
    return pixels


def _folder(folder: Path, size: int) -> Scenes:
    def images(parent: Path) -> list[Path]:
        return sorted(file for file in parent.iterdir() if file.suffix.lower() in _SUFFIXES)

    classes = sorted(child for child in folder.iterdir() if child.is_dir() and images(child))
    if not classes:
        return Scenes(images(folder), None, size)
    raws = [(file, number) for number, child in enumerate(classes) for file in images(child)]
    labels = np.array([number for _, number in raws], np.int64)
    return Scenes([file for file, _ in raws], labels, size, [child.name for child in classes])


def pipeline_for(model: Runtime, changes: str = "") -> Pipeline:
    """Return preprocessing to the size, layout, dtype and codes of a model's input, values in 0..1.

    Args:
        changes: changes as a path spec:
            ``crop:share=0.875+scale:low=0,high=1+normalise:mean=0.5,std=0.5``.

    Raises:
        InvalidArgumentError: the model does not take images.
        UnknownNameError: a stage or setting is unknown.
    """
    spec = model.inputs[0] if model.inputs else None
    height = width = _DEFAULT_SIZE
    layout, dtype, scale, zero, grey = "CHW", "float32", 0.0, 0, False
    if spec is not None:
        if len(spec.shape) != 4:
            raise InvalidArgumentError("MODEL", f"its input {spec} is not an image")
        layout = "HWC" if spec.shape[3] in (1, 3) and spec.shape[1] not in (1, 3) else "CHW"
        rows, columns, channels = (
            (spec.shape[1], spec.shape[2], spec.shape[3])
            if layout == "HWC"
            else (spec.shape[2], spec.shape[3], spec.shape[1])
        )
        height, width, grey = rows or _DEFAULT_SIZE, columns or _DEFAULT_SIZE, channels == 1
        dtype, scale, zero = spec.dtype, spec.scale, spec.zero_point
    pipeline = image_pipeline(
        (height, width), crop=1.0, layout="HWC" if layout == "HWC" else "CHW", dtype=dtype,
        scale=scale, zero_point=zero, mean=(0.0,), std=(1.0,),
    )  # fmt: skip
    if grey:
        changes = "+".join(filter(None, ("channels:L", changes)))
    return DevicePath.parse(changes, reference_path(pipeline)).pipeline
