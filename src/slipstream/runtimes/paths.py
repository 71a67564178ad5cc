"""Device paths: the way of a scene to a model on one device, and matrices of such ways.

A path is a pipeline of preprocessing with a camera and a codec in it, and a name of the model or
variant that runs there. It is written as what it does otherwise than the reference, stage by stage:

    camera:edge,warmth=0.3,sharpen=0.5+codec:jpeg,quality=75+resize:bilinear+model:int8

Two devices that give the same bytes are one device; what reads a matrix checks that they differ.
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

Format = Literal["png", "jpeg", "webp", "avif", "jpeg2000"]
MODEL = "model"
_SUBSAMPLING = {"444": 0, "422": 1, "420": 2}
# Written as they are shown, where a stage is named by its most important setting.
_MAIN = {"camera": "demosaic", "codec": "format", "resize": "method", "channels": "colours"}


@dataclass(frozen=True)
class Codec(Stage):
    """A picture written to a file and read again.

    Attributes:
        format: ``png`` loses nothing.
        quality: 1 to 100, as the format means it; of JPEG 2000, 100 / quality is the compression.
        subsampling: of JPEG's colours.
        decoder: of JPEG: ``fast`` takes the short transform and plain upsampling of libjpeg, as
            phones' picture libraries do.
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

    def encode(self, picture: NDArray[np.uint8]) -> bytes:
        """The file of a picture uint8 [H, W, 3], or [H, W, 1] in grey.

        Raises:
            MissingExtraError: Pillow is not installed, or was built without this format.
        """
        grey = picture.shape[2] == 1
        image = _pillow().fromarray(picture[..., 0] if grey else np.ascontiguousarray(picture))
        every: dict[Format, dict[str, Any]] = {
            "png": {"compress_level": 1},
            "jpeg": {"quality": self.quality, "subsampling": _SUBSAMPLING[self.subsampling]},
            # Effort is set, so that another version of the library does not choose another.
            "webp": {"quality": self.quality, "method": 2},
            "avif": {"quality": self.quality, "speed": 9},
            "jpeg2000": {"quality_mode": "rates", "quality_layers": [100 / self.quality]},
        }
        written = io.BytesIO()
        try:
            image.save(written, self.format.upper(), **every[self.format])
        except (KeyError, OSError) as error:
            raise MissingExtraError(f"the codec {self.format}", "a fuller Pillow", "vision") from (
                error
            )
        return written.getvalue()

    def decode(self, file: bytes) -> NDArray[np.uint8]:
        """The picture of a file, uint8 [H, W, C]."""
        image = _pillow().open(io.BytesIO(file))
        if self.decoder == "fast" and self.format == "jpeg":
            # Full size, but libjpeg's fast transform: what Pillow's draft mode asks for.
            image.decoderconfig = (1, 1)
        mode = "L" if image.mode == "L" else "RGB"
        pixels = np.asarray(image.convert(mode))
        return pixels[..., None] if mode == "L" else pixels


def _pillow() -> Any:
    import importlib

    try:
        return importlib.import_module("PIL.Image")
    except ImportError as error:
        raise MissingExtraError("codecs of pictures", "Pillow", "vision") from error


@dataclass(frozen=True)
class DevicePath:
    """What happens to a scene on one device.

    Attributes:
        name: of the device.
        pipeline: from the scene to a sample of the model's input.
        model: name of the model, runtime or variant that runs there.
    """

    name: str
    pipeline: Pipeline
    model: str = ""

    @property
    def stages(self) -> dict[str, Stage | str]:
        """By kind: every stage, and the model."""
        return {**{one.name: one for one in self.pipeline.stages}, MODEL: self.model}

    def with_stage(self, kind: str, other: DevicePath) -> DevicePath:
        """This path, one kind of stage done as `other` does it."""
        value = other.stages[kind]
        if isinstance(value, str):
            return DevicePath(self.name, self.pipeline, value)
        return DevicePath(self.name, self.pipeline.with_stage(value), self.model)

    @classmethod
    def parse(cls, text: str, base: DevicePath, name: str = "") -> DevicePath:
        """The path that `text` describes, by what it does otherwise than `base`.

        ``reference`` does nothing otherwise.

        Raises:
            UnknownNameError: a stage or setting that is not known.
            InvalidArgumentError: a value of the wrong kind.
        """
        pipeline, model = base.pipeline, base.model
        if text == "reference":
            text = ""
        for part in filter(None, (one.strip() for one in text.split("+"))):
            kind, _, settings = part.partition(":")
            if kind == MODEL:
                model = settings
                continue
            given = base.stages.get(kind)
            if not isinstance(given, Stage):
                raise UnknownNameError("stage", kind, base.stages, where=f"path '{text}'")
            pipeline = pipeline.with_stage(_changed(given, settings, f"path '{text}'"))
        return cls(name or text or "reference", pipeline, model)

    def __str__(self) -> str:
        return self.name


def _changed(stage: Stage, text: str, where: str) -> Stage:
    """`stage` with the settings of ``main,key=value,...``."""
    known = {one.name: getattr(stage, one.name) for one in fields(stage)}
    settings: dict[str, Any] = {}
    for number, part in enumerate(filter(None, text.split(","))):
        key, equals, value = part.partition("=")
        if not equals:
            if number or stage.name not in _MAIN:
                raise InvalidArgumentError(
                    stage.name, f"'{part}' names no setting", where=where,
                    remedy=f"{stage.name}:key=value, of {', '.join(known)}",
                )  # fmt: skip
            key, value = _MAIN[stage.name], key
        if key not in known:
            raise UnknownNameError(f"setting of {stage.name}", key, known, where=where)
        settings[key] = _value(value.strip(), known[key], f"{stage.name}:{key}", where)
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
            setting, f"'{text}' is not possible", where=where, remedy=f"such as {like}"
        ) from error


@dataclass(frozen=True)
class DeviceMatrix:
    """Paths of several devices, and the reference they are described against.

    Attributes:
        reference: the model's own preprocessing: no camera, nothing lost in a file.
        paths: the devices, by their names; the reference is not one of them.
    """

    reference: DevicePath
    paths: tuple[DevicePath, ...]

    def __post_init__(self) -> None:
        names = [one.name for one in self.paths]
        double = next((name for name in names if names.count(name) > 1), None)
        if double is not None:
            raise InvalidArgumentError("paths", f"'{double}' stands there twice")

    def __iter__(self) -> Iterator[DevicePath]:
        return iter(self.paths)

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def varied(self) -> tuple[str, ...]:
        """Kinds of stages that some path does otherwise than the reference, in their order."""
        stages = self.reference.stages
        return tuple(
            kind
            for kind, value in stages.items()
            if any(p.stages[kind] != value for p in self.paths)
        )

    @classmethod
    def of(cls, pipeline: Pipeline, paths: Mapping[str, str], model: str = "") -> DeviceMatrix:
        """Paths by name, each described by what it does otherwise than a plain `pipeline`."""
        reference = reference_path(pipeline, model)
        device_paths = [DevicePath.parse(text, reference, name) for name, text in paths.items()]
        return cls(reference, tuple(device_paths))

    @classmethod
    def default(cls, pipeline: Pipeline, model: str = "") -> DeviceMatrix:
        """Sixteen phones: four cameras, four codecs, and among them three ways to resize."""
        return cls.of(pipeline, dict(_phones()), model)

    @classmethod
    def held_out(cls, pipeline: Pipeline, model: str = "") -> DeviceMatrix:
        """Seven devices with cameras and codecs that stability training never draws."""
        return cls.of(pipeline, _HELD_OUT, model)

    @classmethod
    def read(cls, file: str | Path, pipeline: Pipeline, model: str = "") -> DeviceMatrix:
        """The table ``[paths]`` of a TOML file: a path a name.

        Raises:
            InvalidArgumentError: it is no such file.
            UnknownNameError: a stage or setting that is not known.
        """
        path = Path(file)
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise InvalidArgumentError("paths", f"{path} cannot be read: {error}") from error
        paths = table.get("paths")
        if not isinstance(paths, dict) or not all(isinstance(one, str) for one in paths.values()):
            raise InvalidArgumentError(
                "paths", f"{path} has no table of paths",
                remedy='[paths]  then a line a device: phone = "camera:edge+codec:jpeg,quality=75"',
            )  # fmt: skip
        return cls.of(pipeline, paths, model)


def reference_path(pipeline: Pipeline, model: str = "") -> DevicePath:
    """Return `pipeline` with a camera and a codec in it that leave pictures unchanged."""
    kinds = [one.name for one in pipeline.stages]
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
