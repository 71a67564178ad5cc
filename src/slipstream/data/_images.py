"""Loaders of image sets."""

from __future__ import annotations

import gzip
import importlib
import io
import math
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.data._files import check_positive, members, read_text
from slipstream.data._find import find
from slipstream.data.catalogue import Entry
from slipstream.data.errors import CorruptDataError
from slipstream.data.kinds import EncodedImages, Images
from slipstream.errors import InvalidArgumentError, MissingExtraError

_GARMENTS = (
    "T-shirt/top", "trouser", "pullover", "dress", "coat",
    "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
# An IDX header: two zero bytes, the type (8: unsigned byte), the number of dimensions.
_IDX_UNSIGNED_BYTE = 0x08
# Twenty times the largest IDX file of a data set.
_MAX_IDX_BYTES = 1 << 30
# ImageNet evaluation crops the central 224 of an image whose shorter side is 256.
_CROP_SHARE = 224 / 256

# Exceptions that Pillow raises for damaged files.
_DAMAGED = (OSError, ValueError, SyntaxError, struct.error, IndexError, KeyError)


def fashion_mnist(entry: Entry, *, split: str = "train", limit: int | None = None) -> Images:
    """Load clothing: images uint8 [N, 28, 28], labels 0 to 9; 60,000 train, 10,000 test images.

    Args:
        split: ``"train"`` or ``"test"``.
        limit: maximum number of images, from the start of the file, which mixes the classes.
    """
    _check_split(split)
    check_positive(limit=limit)
    folder = find(entry)
    part = {"train": "train", "test": "t10k"}[split]
    images = read_idx(entry.name, folder / f"{part}-images-idx3-ubyte.gz", 3, limit)
    labels = read_idx(entry.name, folder / f"{part}-labels-idx1-ubyte.gz", 1, limit)
    if len(images) != len(labels):
        raise CorruptDataError(entry.name, f"{len(images)} images but {len(labels)} labels")
    return Images(entry.name, images, labels.astype(np.int64), _GARMENTS)


def read_idx(name: str, path: Path, dimensions: int, limit: int | None) -> NDArray[np.uint8]:
    """Read an array of unsigned bytes from a gzipped IDX file, the first axis cut to `limit`.

    Raises:
        CorruptDataError: the file has another type or number of dimensions, or is truncated.
    """
    try:
        with gzip.open(path) as file:
            head = file.read(4 + 4 * dimensions)
            if len(head) < 4 + 4 * dimensions:
                raise CorruptDataError(name, "truncated IDX header", where=str(path))
            zero, kind, depth, *shape = struct.unpack(f">HBB{dimensions}I", head)
            if zero != 0 or kind != _IDX_UNSIGNED_BYTE or depth != dimensions:
                raise CorruptDataError(name, "unexpected IDX header", where=str(path))
            if limit is not None:
                shape[0] = min(shape[0], limit)
            size = math.prod(shape)
            if size > _MAX_IDX_BYTES:
                raise CorruptDataError(name, "the IDX header declares over 1 GiB", where=str(path))
            content = file.read(size)
    except (OSError, EOFError, zlib.error) as error:
        raise CorruptDataError(name, f"damaged gzip: {error}", where=str(path)) from error
    if len(content) != size:
        raise CorruptDataError(name, "fewer bytes than its header declares", where=str(path))
    return np.frombuffer(content, dtype=np.uint8).reshape(shape).copy()


def cifar10_jpeg(
    entry: Entry, *, split: str = "train", limit_per_class: int | None = None, decode: bool = True
) -> Images | EncodedImages:
    """Load CIFAR-10 re-encoded as JPEG: images uint8 [N, 32, 32, 3], sorted by class.

    JPEG loses detail, so a model trained on the original has lower accuracy here (a ResNet-8 about
    74 %). Cite results on this set as CIFAR-10-JPEG.

    Args:
        split: ``"train"`` (50,000) or ``"test"`` (10,000).
        limit_per_class: maximum number of images per class.
        decode: whether to decode the files; False returns `EncodedImages` and needs no decoder.
    """
    _check_split(split)
    check_positive(limit_per_class=limit_per_class)
    to_array = _decoder(entry) if decode else None

    def selected(path: PurePosixPath) -> bool:
        return (
            len(path.parts) == 3
            and path.parts[0] == split
            and path.suffix == ".jpg"
            and path.stem.isdecimal()
            and (limit_per_class is None or int(path.stem) < limit_per_class)
        )

    images = sorted(members(entry.name, find(entry) / entry.files[0], selected))
    classes = tuple(sorted({path.parts[1] for path, _ in images}))
    number = {label: i for i, label in enumerate(classes)}
    labels = np.array([number[path.parts[1]] for path, _ in images], dtype=np.int64)
    files = tuple(content for _, content in images)
    if to_array is None:
        return EncodedImages(entry.name, files, labels, classes)
    return Images(entry.name, _stack(entry, files, to_array), labels, classes)


def imagenet_sample(
    entry: Entry, *, size: int = 224, limit: int | None = None, decode: bool = True
) -> Images | EncodedImages:
    """Load one photograph of every second ImageNet class: images uint8 [N, size, size, 3].

    The central crop of 224/256 of the shorter side is resized (bicubic), as in ImageNet evaluation.
    `classes` has all 1,000 synset ids, so that labels match a model's outputs.

    Args:
        size: side of the square images, in pixels.
        limit: maximum number of images, evenly spread over the classes.
        decode: whether to decode the files; False returns `EncodedImages` in the original sizes.
    """
    check_positive(size=size, limit=limit)
    to_array = _decoder(entry, size) if decode else None
    folder = find(entry)
    paths = sorted(folder.glob("*.JPEG"))
    if limit is not None and limit < len(paths):
        paths = [paths[i * len(paths) // limit] for i in range(limit)]
    if not paths:
        raise CorruptDataError(entry.name, "the folder contains no images", where=str(folder))
    classes = tuple(read_text(entry, folder / "synsets.txt", "ascii").split())
    number = {synset: i for i, synset in enumerate(classes)}
    synsets = [path.name.split("_", 1)[0] for path in paths]
    for path, synset in zip(paths, synsets, strict=True):
        if synset not in number:
            raise CorruptDataError(entry.name, "the class of an image is unknown", where=str(path))
    labels = np.array([number[synset] for synset in synsets], dtype=np.int64)
    files = tuple(path.read_bytes() for path in paths)
    if to_array is None:
        return EncodedImages(entry.name, files, labels, classes)
    return Images(entry.name, _stack(entry, files, to_array), labels, classes)


def _check_split(split: str) -> None:
    if split not in ("train", "test"):
        raise InvalidArgumentError("split", f"'{split}' is not train or test")


def _stack(
    entry: Entry, files: Sequence[bytes], to_array: Callable[[bytes], NDArray[np.uint8]]
) -> NDArray[np.uint8]:
    decoded = [to_array(file) for file in files]
    if not decoded or len({image.shape for image in decoded}) > 1:
        raise CorruptDataError(entry.name, "there are no images, or images of different sizes")
    return np.stack(decoded)


def _decoder(entry: Entry, size: int | None = None) -> Callable[[bytes], NDArray[np.uint8]]:
    """Return a decoder of JPEG to RGB uint8 [H, W, 3]; `size` crops and resizes to a square."""
    try:
        # Imported by name, because Pillow is optional and its types are not needed.
        pillow: Any = importlib.import_module("PIL.Image")
    except ImportError as error:
        raise MissingExtraError(f"decoding '{entry.name}'", "Pillow", "vision") from error

    def to_array(content: bytes) -> NDArray[np.uint8]:
        try:
            with pillow.open(io.BytesIO(content), formats=("JPEG",)) as opened:
                image = opened.convert("RGB")
        except (*_DAMAGED, pillow.DecompressionBombError) as error:
            raise CorruptDataError(entry.name, f"a JPEG does not decode: {error}") from error
        if size is not None:
            side = min(image.size) * _CROP_SHARE
            left, top = (image.width - side) / 2, (image.height - side) / 2
            # Crop and resize in one step, without a full-size copy.
            image = image.resize(
                (size, size), pillow.Resampling.BICUBIC, (left, top, left + side, top + side)
            )
        return np.array(image, dtype=np.uint8)

    return to_array
