"""Preprocessing stages for images."""

from __future__ import annotations

import functools
import importlib
import io
import itertools
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from slipstream.errors import InvalidArgumentError, MissingExtraError
from slipstream.runtimes.preprocessing.cast import Cast
from slipstream.runtimes.preprocessing.pipeline import Array, Pipeline, RawInputError, Stage

# Exceptions that Pillow raises on damaged files.
_DAMAGED = (OSError, ValueError, SyntaxError, struct.error, IndexError, KeyError, TypeError)
_IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
Method = Literal["nearest", "bilinear", "bicubic", "area", "lanczos"]
Coordinates = Literal["half_pixel", "corners", "asymmetric"]


def pillow(module: str = "Image") -> Any:
    """Import a module of Pillow.

    Raises:
        MissingExtraError: Pillow is not installed.
    """
    try:
        # By name, since Pillow is an extra that mypy need not find.
        return importlib.import_module(f"PIL.{module}")
    except ImportError as error:
        raise MissingExtraError("decoding and encoding images", "Pillow", "vision") from error


@dataclass(frozen=True)
class Decode(Stage):
    """Decode a file's bytes, a path or pixels to uint8 RGB [H, W, 3], ignoring colour profiles.

    Attributes:
        exif: whether to apply the EXIF orientation.
        wide: scale 16-bit grey to 8 bits, or clip it at 255 like a plain conversion; Pillow always
            takes the high byte of 16-bit colour.
        cmyk: convert CMYK to RGB, or invert its inks first.
        alpha: drop transparency, or composite it over white or black.
    """

    name = "decode"
    family = "image"
    exif: bool = True
    wide: Literal["scale", "clip"] = "scale"
    cmyk: Literal["convert", "inverted"] = "convert"
    alpha: Literal["drop", "white", "black"] = "drop"

    def __call__(self, value: Any) -> Array:
        if isinstance(value, np.ndarray):
            return self._pixels(value)
        image = pillow()
        try:
            if isinstance(value, (str, Path)):
                value = Path(value).read_bytes()
            with image.open(io.BytesIO(value)) as opened:
                opened.load()
                if self.exif:
                    opened = pillow("ImageOps").exif_transpose(opened)
                return self._rgb(image, opened)
        except (*_DAMAGED, image.DecompressionBombError) as error:
            raise RawInputError(
                f"the image does not decode: {error}",
                remedy="remove the file, or save it again",
            ) from error

    def _rgb(self, image: Any, opened: Any) -> Array:
        if opened.mode.startswith("I"):
            return self._pixels(np.clip(np.asarray(opened), 0, 65535).astype(np.uint16))
        if opened.mode == "CMYK" and self.cmyk == "inverted":
            opened = image.fromarray(255 - np.asarray(opened), mode="CMYK")
        if self.alpha != "drop" and (
            opened.mode in ("RGBA", "LA", "PA") or opened.info.get("transparency")
        ):
            opened = opened.convert("RGBA")
            background = image.new("RGBA", opened.size, self.alpha)
            opened = image.alpha_composite(background, opened)
        return np.array(opened.convert("RGB"), dtype=np.uint8)

    def _pixels(self, pixels: Array) -> Array:
        if pixels.dtype == np.uint16:
            wide = pixels.astype(np.uint32)
            scaled = (
                (wide * 255 + 32767) // 65535 if self.wide == "scale" else np.minimum(wide, 255)
            )
            pixels = scaled.astype(np.uint8)
        if pixels.ndim == 2:
            pixels = pixels[..., None]
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] not in (1, 3, 4):
            raise RawInputError(
                f"pixels are {pixels.dtype}[{', '.join(map(str, pixels.shape))}]",
                remedy="pass uint8 or uint16 [H, W], [H, W, 3] in RGB, or [H, W, 4] with alpha",
            )
        return np.repeat(pixels, 3, 2) if pixels.shape[2] == 1 else pixels[..., :3]

    def bugs(self) -> Iterator[tuple[str, Stage]]:
        if self.exif:
            yield "the EXIF orientation is ignored", self.changed(exif=False)
        yield "16-bit grey is clipped at 255", self.changed(wide="clip")
        yield "CMYK is read with inverted inks", self.changed(cmyk="inverted")
        for alpha in ("white", "black", "drop"):
            yield f"transparency: {alpha}", self.changed(alpha=alpha)

    def code(self) -> str:
        opened = "Image.open(file)"
        opened = f"ImageOps.exif_transpose({opened})" if self.exif else opened
        return f'image = np.asarray({opened}.convert("RGB"))'


@dataclass(frozen=True)
class Crop(Stage):
    """Select the part of an image that is used.

    Attributes:
        share: side of the square relative to the image's shorter side.
        shape: a ``square``; the ``whole`` image, which is stretched later; ``pad``: the whole image
            padded with grey (letterbox).
        anchor: position of the square.
    """

    name = "crop"
    family = "image"
    order = 10
    share: float = 0.875
    shape: Literal["square", "whole", "pad"] = "square"
    anchor: Literal["centre", "corner"] = "centre"

    def __call__(self, value: Array) -> Array:
        height, width = value.shape[:2]
        if self.shape == "whole":
            return value
        if self.shape == "pad":
            side = max(height, width)
            padded = np.full((side, side, value.shape[2]), 114, value.dtype)
            top, left = (side - height) // 2, (side - width) // 2
            padded[top : top + height, left : left + width] = value
            return padded
        side = max(round(min(height, width) * self.share), 1)
        top, left = (height - side) // 2, (width - side) // 2
        if self.anchor == "corner":
            top = left = 0
        return value[top : top + side, left : left + side]

    def bugs(self) -> Iterator[tuple[str, Stage]]:
        yield "stretched instead of cropped", Crop(shape="whole")
        yield "padded to a square instead of cropped", Crop(shape="pad")
        for share in (1.0, 0.875, 0.8):
            if self.shape != "square" or share != self.share:
                yield f"cropped to {share:g} of the shorter side", Crop(share)
        if self.shape == "square":
            yield "cropped at the upper left corner", self.changed(anchor="corner")

    def code(self) -> str:
        if self.shape == "whole":
            return "# the whole image, stretched"
        if self.shape == "pad":
            return "image = pad_to_square(image, fill=114)"
        at = "(h - s) // 2, (w - s) // 2" if self.anchor == "centre" else "0, 0"
        return (
            f"h, w = image.shape[:2]; s = round(min(h, w) * {self.share:g}); top, left = {at}; "
            "image = image[top : top + s, left : left + s]"
        )


@dataclass(frozen=True)
class Resize(Stage):
    """Resize to a size in pixels.

    Attributes:
        height, width: output size.
        method: interpolation kernel; ``area`` averages the covered pixels.
        antialias: whether the kernel widens when the image shrinks.
        coordinates: position of pixel centres: ``half_pixel`` in current libraries; ``corners``
            aligns the corner pixels; ``asymmetric`` was TensorFlow's first version.
    """

    name = "resize"
    family = "image"
    order = 20
    height: int = 224
    width: int = 224
    method: Method = "bilinear"
    antialias: bool = True
    coordinates: Coordinates = "half_pixel"

    def __call__(self, value: Array) -> Array:
        plain = self.coordinates == "half_pixel" and (
            self.antialias or self.method in ("nearest", "area", "lanczos")
        )
        if plain and value.dtype == np.uint8:
            image = pillow()
            method = image.Resampling[{"area": "BOX"}.get(self.method, self.method.upper())]
            grey = value.shape[2] == 1
            opened = image.fromarray(value[..., 0] if grey else np.ascontiguousarray(value))
            resized: Array = np.asarray(opened.resize((self.width, self.height), method))
            return np.atleast_3d(resized)
        rows = _weights(value.shape[0], self.height, self.method, self.antialias, self.coordinates)
        columns = _weights(
            value.shape[1], self.width, self.method, self.antialias, self.coordinates
        )
        floats: Array = np.tensordot(rows, value.astype(np.float32), axes=(1, 0))
        floats = np.tensordot(floats, columns, axes=(1, 1)).transpose(0, 2, 1)
        if value.dtype != np.uint8:
            return floats
        return np.clip(np.rint(floats), 0, 255).astype(np.uint8)

    def bugs(self) -> Iterator[tuple[str, Stage]]:
        for method in ("nearest", "bilinear", "bicubic", "area", "lanczos"):
            if method != self.method:
                yield f"resized by {method}", self.changed(method=method, antialias=True)
        for method in ("bilinear", "bicubic"):
            plain = self.changed(method=method, antialias=False)
            yield f"resized by {method} without antialiasing", plain
        for coordinates in ("corners", "asymmetric"):
            for method in ("bilinear", "nearest"):
                other = self.changed(method=method, antialias=False, coordinates=coordinates)
                yield f"resized by {method} with {coordinates} coordinates", other

    def code(self) -> str:
        method = {"area": "BOX"}.get(self.method, self.method.upper())
        comment = "" if self.antialias and self.coordinates == "half_pixel" else (
            f"  # antialias={self.antialias}, coordinates={self.coordinates}"
        )  # fmt: skip
        size = f"({self.width}, {self.height})"
        return (
            f"image = np.asarray(Image.fromarray(image).resize({size}, Image.Resampling.{method}))"
            + comment
        )


@functools.lru_cache(maxsize=256)
def _weights(
    source: int, target: int, method: Method, antialias: bool, coordinates: Coordinates
) -> Array:
    """Return the weights of source pixels in each target pixel of a line, float32 [target, source].

    The cubic kernel's parameter is -0.5 with antialiasing (Pillow), else -0.75 (OpenCV, torch).
    """
    steps = np.arange(target, dtype=np.float64)
    scale = source / target
    if coordinates == "corners":
        centres = steps * ((source - 1) / max(target - 1, 1))
    else:
        centres = steps * scale if coordinates == "asymmetric" else (steps + 0.5) * scale - 0.5
    if method == "nearest":
        half = coordinates == "half_pixel"
        nearest = np.floor((steps + 0.5) * scale) if half else np.floor(
            centres + (0.5 if coordinates == "corners" else 0.0)
        )  # fmt: skip
        one_hot = np.zeros((target, source), np.float32)
        one_hot[np.arange(target), np.clip(nearest, 0, source - 1).astype(int)] = 1.0
        return one_hot
    stretch = max(scale, 1.0) if antialias else 1.0
    radius = {"bilinear": 1.0, "bicubic": 2.0, "area": 0.5, "lanczos": 3.0}[method] * stretch
    weights = np.zeros((target, source), np.float64)
    for step, centre in enumerate(centres):
        near = np.arange(int(np.floor(centre - radius)), int(np.ceil(centre + radius)) + 1)
        weight = _kernel(method, (near - centre) / stretch, -0.5 if antialias else -0.75)
        np.add.at(weights[step], np.clip(near, 0, source - 1), weight)
    return np.asarray(weights / weights.sum(1, keepdims=True), np.float32)


def _kernel(method: Method, x: Array, a: float) -> Array:
    if method == "area":
        return ((x > -0.5) & (x <= 0.5)).astype(np.float64)
    x = np.abs(x)
    if method == "bilinear":
        return np.asarray(np.maximum(1 - x, 0))
    if method == "lanczos":
        return np.where(x < 3, np.sinc(x) * np.sinc(x / 3), 0)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = a * (((x - 5) * x + 8) * x - 4)
    return np.where(x <= 1, near, np.where(x < 2, far, 0))


@dataclass(frozen=True)
class Colour(Stage):
    """Colour conversions of cameras and video decoders on values 0..255.

    Attributes:
        levels: ``full``; ``limited``: black 16 and white 235, not expanded; ``expanded``: full
            levels treated as limited ones.
        gamma: exponent of values in 0..1; 2.2 gives approximately linear light.
        matrix: ``mixed`` for YUV written by BT.601 and read by BT.709.
    """

    name = "colour"
    family = "image"
    order = 30
    optional = True
    levels: Literal["full", "limited", "expanded"] = "full"
    gamma: float = 1.0
    matrix: Literal["same", "mixed"] = "same"

    _TO_YUV: ClassVar[Array] = np.array(
        [[0.299, 0.587, 0.114], [-0.168736, -0.331264, 0.5], [0.5, -0.418688, -0.081312]],
        np.float32,
    )
    _BY_709: ClassVar[Array] = np.array(
        [[1, 0, 1.5748], [1, -0.187324, -0.468124], [1, 1.8556, 0]], np.float32
    )

    def __call__(self, value: Array) -> Array:
        if self == Colour():
            return value
        floats: Array = value.astype(np.float32)
        if self.matrix == "mixed":
            floats = floats @ (self._BY_709 @ self._TO_YUV).T
        if self.levels == "limited":
            floats = floats * np.float32(219 / 255) + 16
        elif self.levels == "expanded":
            floats = (floats - 16) * np.float32(255 / 219)
        if self.gamma != 1:
            floats = 255 * (np.clip(floats, 0, 255) / 255) ** np.float32(self.gamma)
        return np.clip(np.rint(floats), 0, 255).astype(np.uint8)

    def bugs(self) -> Iterator[tuple[str, Stage]]:
        yield "limited levels (16 to 235) are not expanded", self.changed(levels="limited")
        yield "full levels are expanded as if they were limited", self.changed(levels="expanded")
        yield "gamma is undone (linear light)", self.changed(gamma=2.2)
        yield "gamma is applied twice", self.changed(gamma=1 / 2.2)
        yield "BT.601 YUV is read as BT.709", self.changed(matrix="mixed")

    def code(self) -> str:
        return "# values 0..255 of the file" if self == Colour() else super().code()


@dataclass(frozen=True)
class Orient(Stage):
    """One of the eight orientations of an image.

    Attributes:
        turn: rotation in degrees counter-clockwise: 0, 90, 180, 270.
        mirror: whether to flip left and right before the rotation.
    """

    name = "orient"
    family = "image"
    order = 40
    optional = True
    turn: int = 0
    mirror: bool = False

    def __call__(self, value: Array) -> Array:
        if self.turn % 90:
            raise InvalidArgumentError("turn", f"{self.turn} is not 0, 90, 180 or 270")
        return np.rot90(value[:, ::-1] if self.mirror else value, self.turn // 90)

    def bugs(self) -> Iterator[tuple[str, Stage]]:
        for turn, mirror in itertools.product((0, 90, 180, 270), (False, True)):
            words = ["mirrored"] * mirror + [f"rotated by {turn} degrees"] * bool(turn)
            text = " and ".join(words) or "not rotated"
            yield (
                {(180, True): "upside down (flipped)"}.get((turn, mirror), text),
                Orient(turn, mirror),
            )

    def code(self) -> str:
        if self == Orient():
            return "# not rotated, not mirrored"
        mirrored = "image[:, ::-1]" if self.mirror else "image"
        return f"image = np.rot90({mirrored}, {self.turn // 90})"


@dataclass(frozen=True)
class Channels(Stage):
    """Reorder colours; ``grey`` repeats luminance three times, ``L`` has it once."""

    name = "channels"
    family = "image"
    order = 50
    optional = True
    colours: str = "RGB"

    def __call__(self, value: Array) -> Array:
        if self.colours == "RGB":
            return value
        if self.colours in ("grey", "L"):
            grey: Array = np.rint(value @ np.array([0.299, 0.587, 0.114], np.float32))
            return np.repeat(grey[..., None], 1 + 2 * (self.colours == "grey"), 2).astype(
                value.dtype
            )
        if sorted(self.colours) != ["B", "G", "R"]:
            raise InvalidArgumentError("colours", f"'{self.colours}' is not an order of R, G, B")
        return value[..., ["RGB".index(colour) for colour in self.colours]]

    def bugs(self) -> Iterator[tuple[str, Stage]]:
        for colours in map("".join, itertools.permutations("RGB")):
            yield f"channels in the order {colours}", Channels(colours)
        yield "grey instead of colour", Channels("grey")

    def code(self) -> str:
        if self.colours == "grey":
            return 'image = np.asarray(Image.fromarray(image).convert("L").convert("RGB"))'
        if self.colours == "L":
            return 'image = np.asarray(Image.fromarray(image).convert("L"))[..., None]'
        order = ["RGB".index(colour) for colour in self.colours]
        return f"image = image[..., {order}]  # {self.colours}"


@dataclass(frozen=True)
class Scale(Stage):
    """Map values 0..255 linearly to float32 `low`..`high`, `times` times."""

    name = "scale"
    family = "image"
    order = 60
    optional = True
    low: float = 0.0
    high: float = 255.0
    times: int = 1

    def __call__(self, value: Array) -> Array:
        floats = value.astype(np.float32)
        for _ in range(self.times):
            if (self.low, self.high) != (0, 255):
                floats = floats * np.float32((self.high - self.low) / 255) + np.float32(self.low)
        return floats

    def bugs(self) -> Iterator[tuple[str, Stage]]:
        for low, high in ((0, 1), (-1, 1), (0, 255), (-128, 127), (-0.5, 0.5)):
            yield f"values in {low:g}..{high:g}", Scale(float(low), float(high))
        yield "the value range is mapped twice", self.changed(times=2)

    def code(self) -> str:
        factor = f"{(self.high - self.low) / 255:.9g}"
        return f"x = image.astype(np.float32) * {factor} + {self.low:g}"


@dataclass(frozen=True)
class Normalise(Stage):
    """Compute (x - mean) / std per channel, the last axis, `times` times."""

    name = "normalise"
    order = 70
    family = "image"
    optional = True
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    times: int = 1

    def __call__(self, value: Array) -> Array:
        floats: Array = value.astype(np.float32)
        mean, std = np.asarray(self.mean, np.float32), np.asarray(self.std, np.float32)
        for _ in range(self.times):
            floats = (floats - mean) / std
        return floats

    def bugs(self) -> Iterator[tuple[str, Stage]]:
        mean, std = self.mean, self.std
        ones, zeros = (1.0,) * len(std), (0.0,) * len(mean)
        large = max(map(abs, mean)) > 3 or max(std) > 3
        unit = 255.0 if large else 1.0

        def scaled(text: str, mean: tuple[float, ...], std: tuple[float, ...]) -> tuple[str, Stage]:
            mean, std = (tuple(unit * v for v in part) for part in (mean, std))
            return text, Normalise(mean, std)

        yield "mean and deviation are not applied", Normalise(zeros, ones)
        yield "the mean is not subtracted", Normalise(zeros, std)
        yield "values are not divided by the deviation", Normalise(mean, ones)
        yield "mean and deviation are applied twice", self.changed(times=2)
        yield "mean and deviation in the reverse order", Normalise(mean[::-1], std[::-1])
        yield scaled("ImageNet's mean and deviation", *_IMAGENET)
        if large:
            yield "ImageNet's mean and deviation for values in 0..1", Normalise(*_IMAGENET)
        yield scaled("mean and deviation of 0.5", (0.5,), (0.5,))
        factor = 1 / 255 if large else 255.0
        yield (
            f"mean and deviation {factor:.3g} times as large",
            Normalise(tuple(factor * v for v in mean), tuple(factor * v for v in std)),
        )
        if mean != std:
            yield "mean and deviation are swapped", Normalise(std, tuple(v or 1.0 for v in mean))

    def code(self) -> str:
        return f"x = (x - np.float32({self.mean})) / np.float32({self.std})"


@dataclass(frozen=True)
class Layout(Stage):
    """Transpose [H, W, C] to the model's layout; `misread` reinterprets the other layout's data."""

    name = "layout"
    family = "image"
    order = 80
    optional = True
    axes: Literal["HWC", "CHW"] = "HWC"
    misread: bool = False

    def __call__(self, value: Array) -> Array:
        height, width, channels = value.shape
        if self.axes == "CHW":
            if self.misread:
                return value.reshape(channels, height, width)
            return value.transpose(2, 0, 1)
        if self.misread:
            return value.transpose(2, 0, 1).reshape(height, width, channels)
        return value

    def bugs(self) -> Iterator[tuple[str, Stage]]:
        other = {"HWC": "CHW", "CHW": "HWC"}[self.axes]
        yield f"data of the layout {other} is read as {self.axes}", self.changed(misread=True)

    def code(self) -> str:
        if self.misread:
            flat = "x" if self.axes == "CHW" else "x.transpose(2, 0, 1)"
            shape = "x.shape[2], *x.shape[:2]" if self.axes == "CHW" else "x.shape"
            return f"x = {flat}.reshape({shape})"
        return "x = x.transpose(2, 0, 1)" if self.axes == "CHW" else "# stays [H, W, C]"


def image_pipeline(
    size: int | tuple[int, int],
    *,
    crop: float | None = 0.875,
    method: Method = "bicubic",
    value_range: tuple[float, float] = (0.0, 1.0),
    mean: tuple[float, ...] = (0.0, 0.0, 0.0),
    std: tuple[float, ...] = (1.0, 1.0, 1.0),
    layout: Literal["HWC", "CHW"] = "CHW",
    dtype: str = "float32",
    scale: float = 0.0,
    zero_point: int = 0,
) -> Pipeline:
    """Build the usual pipeline of image classifiers.

    Args:
        size: side of a square, or (height, width), in pixels.
        crop: side of the central square relative to the shorter side; None to stretch the image.
        method: method of resizing, with antialiasing.
        value_range: values to which 0 and 255 are mapped, before `mean` and `std` are applied.
        layout: layout of a sample.
        dtype, scale, zero_point: type and quantization of the model's input.
    """
    height, width = (size, size) if isinstance(size, int) else size
    return Pipeline((
        Decode(),
        Crop(shape="whole") if crop is None else Crop(crop),
        Resize(height, width, method),
        Channels(),
        Scale(*value_range),
        Normalise(mean, std),
        Layout(layout),
        Cast(dtype, scale, zero_point),
    ))  # fmt: skip
