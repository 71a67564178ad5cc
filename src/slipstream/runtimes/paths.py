"""Device paths: how a scene reaches a model on a device, and matrices of such paths.

A path is a preprocessing pipeline with a camera and a codec, and the name of the model or variant.
It is written as its differences from the reference, stage by stage:

    camera:edge,warmth=0.3,sharpen=0.5+codec:jpeg,quality=75+resize:bilinear+model:int8

"""

from __future__ import annotations

import io
import itertools
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import InvalidArgumentError, MissingExtraError, UnknownNameError
from slipstream.runtimes.camera import Camera
from slipstream.runtimes.preprocessing import Pipeline, Stage
from slipstream.runtimes.preprocessing.images import pillow

Format = Literal["png", "jpeg", "webp", "avif", "jpeg2000"]
MODEL = "model"
_SUBSAMPLING = {"444": 0, "422": 1, "420": 2}
# A stage's main setting, which may be written without its name.
_MAIN = {"camera": "demosaic", "codec": "format", "resize": "method", "channels": "colours"}


@dataclass(frozen=True)
class Codec(Stage):
    """Encode an image to a file and decode it again.

    Attributes:
        format: file format; ``png`` is lossless.
        quality: 1 to 100, on the format's scale; for JPEG 2000, the compression is 100 / quality.
        subsampling: chroma subsampling of JPEG.
        decoder: JPEG decoder: ``fast`` uses libjpeg's fast transform and plain upsampling, like the
            image libraries of phones.
    """

    name = "codec"
    family = "image"
    order = 6
    format: Format = "png"
    quality: int = 90
    subsampling: Literal["444", "422", "420"] = "420"
    decoder: Literal["accurate", "fast"] = "accurate"

    def __post_init__(self) -> None:
        if self.format not in get_args(Format):
            raise UnknownNameError("codec", self.format, get_args(Format))
        if not 1 <= self.quality <= 100:
            raise InvalidArgumentError("quality", f"{self.quality} is not between 1 and 100")
        if self.subsampling not in _SUBSAMPLING:
            raise UnknownNameError("subsampling", self.subsampling, _SUBSAMPLING)
        if self.decoder not in ("accurate", "fast"):
            raise UnknownNameError("decoder", self.decoder, ("accurate", "fast"))

    def __call__(self, value: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return value if self.format == "png" else self.decode(self.encode(value))

    def encode(self, pixels: NDArray[np.uint8]) -> bytes:
        """Encode an image uint8 [H, W, 3], or [H, W, 1] in grey.

        Raises:
            MissingExtraError: Pillow is not installed, or was built without this format.
        """
        grey = pixels.shape[2] == 1
        image = pillow().fromarray(pixels[..., 0] if grey else np.ascontiguousarray(pixels))
        options: dict[Format, dict[str, Any]] = {
            "png": {"compress_level": 1},
            "jpeg": {"quality": self.quality, "subsampling": _SUBSAMPLING[self.subsampling]},
            # The effort is set, since its default depends on the library's version.
            "webp": {"quality": self.quality, "method": 2},
            "avif": {"quality": self.quality, "speed": 9},
            "jpeg2000": {"quality_mode": "rates", "quality_layers": [100 / self.quality]},
        }
        file = io.BytesIO()
        try:
            image.save(file, self.format.upper(), **options[self.format])
        except (KeyError, OSError) as error:
            raise MissingExtraError(f"the codec {self.format}", "a fuller Pillow", "vision") from (
                error
            )
        return file.getvalue()

    def decode(self, file: bytes) -> NDArray[np.uint8]:
        """Decode a file to an image uint8 [H, W, C]."""
        image = pillow().open(io.BytesIO(file))
        if self.decoder == "fast" and self.format == "jpeg":
            # Pillow's draft mode, which selects libjpeg's fast transform, at full size.
            image.decoderconfig = (1, 1)
        mode = "L" if image.mode == "L" else "RGB"
        pixels = np.asarray(image.convert(mode))
        return pixels[..., None] if mode == "L" else pixels


@dataclass(frozen=True)
class DevicePath:
    """The processing of a scene on one device.

    Attributes:
        name: name of the device.
        pipeline: stages from the scene to a sample of the model's input.
        model: name of the model, runtime or variant on the device.
    """

    name: str
    pipeline: Pipeline
    model: str = ""

    @property
    def stages(self) -> dict[str, Stage | str]:
        """Every stage, and the model, by kind."""
        return {**{stage.name: stage for stage in self.pipeline.stages}, MODEL: self.model}

    def with_stage(self, kind: str, other: DevicePath) -> DevicePath:
        """Return this path with one kind of stage from `other`."""
        value = other.stages[kind]
        if isinstance(value, str):
            return DevicePath(self.name, self.pipeline, value)
        return DevicePath(self.name, self.pipeline.with_stage(value), self.model)

    @classmethod
    def parse(cls, text: str, base: DevicePath, name: str = "") -> DevicePath:
        """Parse a path from its differences from `base`; ``reference`` has none.

        Raises:
            UnknownNameError: a stage or setting is unknown.
            InvalidArgumentError: a value has the wrong type.
        """
        pipeline, model = base.pipeline, base.model
        if text == "reference":
            text = ""
        for part in filter(None, map(str.strip, text.split("+"))):
            kind, _, settings = part.partition(":")
            if kind == MODEL:
                model = settings
                continue
            stage = base.stages.get(kind)
            if not isinstance(stage, Stage):
                raise UnknownNameError("stage", kind, base.stages, where=f"path '{text}'")
            pipeline = pipeline.with_stage(_changed(stage, settings, f"path '{text}'"))
        return cls(name or text or "reference", pipeline, model)

    def __str__(self) -> str:
        return self.name


def _changed(stage: Stage, text: str, where: str) -> Stage:
    """Return `stage` with the settings of ``main,key=value,...``."""
    current = {field.name: getattr(stage, field.name) for field in fields(stage)}
    settings: dict[str, Any] = {}
    for number, part in enumerate(filter(None, text.split(","))):
        key, equals, value = part.partition("=")
        if not equals:
            if number or stage.name not in _MAIN:
                raise InvalidArgumentError(
                    stage.name, f"'{part}' is not a setting", where=where,
                    remedy=f"pass {stage.name}:key=value, with a key of {', '.join(current)}",
                )  # fmt: skip
            key, value = _MAIN[stage.name], key
        if key not in current:
            raise UnknownNameError(f"setting of {stage.name}", key, current, where=where)
        settings[key] = _value(value.strip(), current[key], f"{stage.name}:{key}", where)
    return stage.changed(**settings)


def _value(text: str, like: Any, setting: str, where: str) -> Any:
    try:
        if isinstance(like, bool):
            return {"yes": True, "true": True, "no": False, "false": False}[text.lower()]
        if isinstance(like, tuple):
            return tuple(float(part) for part in text.split("/"))
        return type(like)(text)
    except (KeyError, ValueError) as error:
        raise InvalidArgumentError(
            setting,
            f"'{text}' is not a valid value",
            where=where,
            remedy=f"pass a value such as {like}",
        ) from error


@dataclass(frozen=True)
class DeviceMatrix:
    """Paths of several devices and their reference.

    Attributes:
        reference: the model's own preprocessing, with a neutral camera and a lossless codec.
        paths: paths of the devices, without the reference.
    """

    reference: DevicePath
    paths: tuple[DevicePath, ...]

    def __post_init__(self) -> None:
        names = [path.name for path in self.paths]
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            raise InvalidArgumentError("paths", f"the name '{repeated}' is used twice")

    def __iter__(self) -> Iterator[DevicePath]:
        return iter(self.paths)

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def varied(self) -> tuple[str, ...]:
        """Kinds of stages in which any path differs from the reference, in their order."""
        stages = self.reference.stages
        return tuple(
            kind
            for kind, value in stages.items()
            if any(p.stages[kind] != value for p in self.paths)
        )

    @classmethod
    def of(cls, pipeline: Pipeline, paths: Mapping[str, str], model: str = "") -> DeviceMatrix:
        """Parse paths by name, each as its differences from a plain `pipeline`."""
        reference = reference_path(pipeline, model)
        device_paths = [DevicePath.parse(text, reference, name) for name, text in paths.items()]
        return cls(reference, tuple(device_paths))

    @classmethod
    def default(cls, pipeline: Pipeline, model: str = "") -> DeviceMatrix:
        """Return sixteen phones: four cameras times four codecs, with three ways to resize."""
        return cls.of(pipeline, dict(_phones()), model)

    @classmethod
    def held_out(cls, pipeline: Pipeline, model: str = "") -> DeviceMatrix:
        """Return seven devices with cameras and codecs that stability training never uses."""
        return cls.of(pipeline, _HELD_OUT, model)

    @classmethod
    def read(cls, file: str | Path, pipeline: Pipeline, model: str = "") -> DeviceMatrix:
        """Read the table ``[paths]`` of a TOML file, which maps names to paths.

        Raises:
            InvalidArgumentError: the file cannot be read, or has no valid table.
            UnknownNameError: a stage or setting is unknown.
        """
        path = Path(file)
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise InvalidArgumentError("paths", f"{path} cannot be read: {error}") from error
        paths = table.get("paths")
        if not isinstance(paths, dict) or not all(isinstance(text, str) for text in paths.values()):
            raise InvalidArgumentError(
                "paths", f"{path} has no table [paths] of strings",
                remedy='add a line per device: phone = "camera:edge+codec:jpeg,quality=75"',
            )  # fmt: skip
        return cls.of(pipeline, paths, model)


def reference_path(pipeline: Pipeline, model: str = "") -> DevicePath:
    """Return `pipeline` with a camera and a codec that leave images unchanged."""
    kinds = [stage.name for stage in pipeline.stages]
    for stage in (Camera(), Codec()):
        if stage.name not in kinds:
            pipeline = pipeline.with_stage(stage)
    return DevicePath("reference", pipeline, model)


_CAMERAS = {
    "neutral": "camera:malvar",
    "vivid": "camera:edge,warmth=0.15,contrast=0.15,saturation=1.1,sharpen=0.3",
    "soft": "camera:malvar,warmth=-0.15,contrast=-0.1,saturation=0.94,denoise=0.35",
    "bright": "camera:bilinear,exposure=0.12,warmth=0.08,noise=0.008,sharpen=0.7",
}
_CODECS = {
    "jpeg 92": "codec:jpeg,quality=92",
    "jpeg 75": "codec:jpeg,quality=75,decoder=fast",
    "webp 75": "codec:webp,quality=75",
    "avif 60": "codec:avif,quality=60",
}
_HELD_OUT = {
    "lossless": "reference",
    "plain, webp 80": "camera:edge+codec:webp,quality=80",
    "contrast, jpeg 2000": "camera:edge,contrast=0.3+codec:jpeg2000,quality=35",
    "warm, webp 40": "camera:edge,warmth=0.2,saturation=1.2+codec:webp,quality=40",
    "dim, avif 45": "camera:edge,exposure=-0.3,sharpen=0.5+codec:avif,quality=45",
    "soft, webp 60": "camera:edge,denoise=0.4,contrast=-0.15+codec:webp,quality=60",
    "fast jpeg 55": "camera:edge+codec:jpeg,quality=55,subsampling=422,decoder=fast",
}
_RESIZERS = ("", "resize:bilinear", "resize:area")


def _phones() -> Iterator[tuple[str, str]]:
    resizers = itertools.cycle(_RESIZERS)
    for (camera, develop), (codec, write) in itertools.product(_CAMERAS.items(), _CODECS.items()):
        yield f"{camera}, {codec}", "+".join(filter(None, (develop, write, next(resizers))))
