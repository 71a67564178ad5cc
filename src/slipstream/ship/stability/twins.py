"""Twins: scenes as another device would deliver them, for stability training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import InvalidArgumentError, UnknownNameError
from slipstream.runtimes.camera import Camera
from slipstream.runtimes.paths import Codec, DevicePath, Format
from slipstream.runtimes.preprocessing import Pipeline

Pixels = NDArray[np.uint8]
Samples = NDArray[np.float32]
# Scenes that share one drawn camera: developing a batch is faster than single scenes.
_SCENES_PER_CAMERA = 16


class Twins(ABC):
    """A generator of twins.

    Attributes:
        name: name on the command line.
    """

    name: ClassVar[str] = ""

    @abstractmethod
    def __call__(
        self, scenes: Pixels, places: NDArray[np.int64], rng: np.random.Generator,
        pipeline: Pipeline,
    ) -> Samples:  # fmt: skip
        """Return samples [N, ...] of the model's input, of twins of `scenes` uint8 [N, H, W, 3].

        Args:
            places: indices of the scenes in the data set, int64 [N].
        """


@dataclass(frozen=True)
class IdenticalTwins(Twins):
    """The scenes themselves, for a fine-tune whose second branch is an int8 copy of the model."""

    name: ClassVar[str] = "same"

    def __call__(
        self, scenes: Pixels, places: NDArray[np.int64], rng: np.random.Generator,
        pipeline: Pipeline,
    ) -> Samples:  # fmt: skip
        return samples_of(scenes, pipeline)


@dataclass(frozen=True)
class Gaussian(Twins):
    """Gaussian noise of standard deviation `sigma` on the model's input."""

    name: ClassVar[str] = "gaussian"
    sigma: float = 0.05

    def __call__(
        self, scenes: Pixels, places: NDArray[np.int64], rng: np.random.Generator,
        pipeline: Pipeline,
    ) -> Samples:  # fmt: skip
        samples = pipeline.batch(list(scenes))
        noise = rng.standard_normal(samples.shape, np.float32)
        return np.asarray(samples + np.float32(self.sigma) * noise, np.float32)


@dataclass(frozen=True)
class Distortion(Twins):
    """A random camera per batch and codec per scene: tone, colours, sharpness, compression.

    Attributes:
        strength: scale of the camera's distortions; 1 is about the difference between phones, 0
            leaves only the codec.
        formats: file formats, one drawn per scene.
        quality: lowest and highest quality of the file.
    """

    name: ClassVar[str] = "distortion"
    strength: float = 1.0
    formats: tuple[Format, ...] = ("jpeg",)
    quality: tuple[int, int] = (25, 95)

    def __call__(
        self, scenes: Pixels, places: NDArray[np.int64], rng: np.random.Generator,
        pipeline: Pipeline,
    ) -> Samples:  # fmt: skip
        images = np.concatenate(
            [self._camera(rng).develop(scenes[at : at + _SCENES_PER_CAMERA])
             for at in range(0, len(scenes), _SCENES_PER_CAMERA)]
        )  # fmt: skip
        return pipeline.batch([self._codec(rng)(image) for image in images])

    def _camera(self, rng: np.random.Generator) -> Camera:
        s = self.strength

        def up_to(maximum: float) -> float:
            # Often 0: most phones have little of each distortion.
            return float(s * maximum * rng.beta(1, 2)) if rng.random() < 0.5 else 0.0

        return Camera(
            "malvar" if rng.random() < 0.5 else "bilinear",
            warmth=float(s * 0.25 * rng.standard_normal()),
            exposure=float(s * 0.3 * rng.standard_normal()),
            contrast=float(s * 0.35 * rng.standard_normal()),
            saturation=float(np.exp(s * 0.25 * rng.standard_normal())),
            denoise=up_to(1.0),
            sharpen=up_to(1.5),
            noise=up_to(0.06),
            seed=int(rng.integers(1 << 31)),
        )

    def _codec(self, rng: np.random.Generator) -> Codec:
        return Codec(
            self.formats[int(rng.integers(len(self.formats)))],
            int(rng.integers(self.quality[0], self.quality[1] + 1)),
            "420" if rng.random() < 0.5 else "444",
        )


@dataclass(frozen=True)
class TwoImages(Twins):
    """The same scenes through a second device, for some or all of them.

    Attributes:
        path: path of the second device.
        having: share of scenes with a second image; the others are their own twins.
    """

    name: ClassVar[str] = "two_images"
    path: DevicePath | None = None
    having: float = 1.0
    _seen: dict[int, Samples] = field(default_factory=dict, repr=False, compare=False)

    def __call__(
        self, scenes: Pixels, places: NDArray[np.int64], rng: np.random.Generator,
        pipeline: Pipeline,
    ) -> Samples:  # fmt: skip
        if self.path is None:
            raise InvalidArgumentError("twins", "two_images needs the path of a second device")
        samples = []
        for scene, place in zip(scenes, places.tolist(), strict=True):
            if place not in self._seen:
                # A fixed, evenly spread choice: the same in every epoch.
                paired = int((place + 1) * self.having) > int(place * self.having)
                self._seen[place] = (self.path.pipeline if paired else pipeline)(scene)
            samples.append(self._seen[place])
        return np.stack(samples)


class Repeated(Twins):
    """Cache of a generator's first `draws` twins of each of `count` scenes, drawn from again later.

    Twins are stored in half precision, which distinguishes all levels of an image.
    """

    def __init__(self, twins: Twins, draws: int, count: int) -> None:
        self._twins, self._draws = twins, draws
        self._visits = np.zeros(count, np.int64)
        self._cache: NDArray[np.float16] | None = None

    def __call__(
        self, scenes: Pixels, places: NDArray[np.int64], rng: np.random.Generator,
        pipeline: Pipeline,
    ) -> Samples:  # fmt: skip
        visits = self._visits[places]
        self._visits[places] += 1
        if self._cache is None or visits.min() < self._draws:
            samples = self._twins(scenes, places, rng, pipeline)
            if self._cache is None:
                shape = (self._draws, len(self._visits), *samples.shape[1:])
                self._cache = np.empty(shape, np.float16)
            self._cache[np.minimum(visits, self._draws - 1), places] = samples
            return samples
        chosen = self._cache[rng.integers(self._draws, size=len(places)), places]
        return chosen.astype(np.float32)


GENERATORS: Mapping[str, type[Twins]] = {
    twins.name: twins for twins in (IdenticalTwins, Gaussian, Distortion, TwoImages)
}


def twins_named(name: str) -> Twins:
    """Return a generator with default settings; raise UnknownNameError for an unknown name."""
    if name not in GENERATORS:
        raise UnknownNameError("generator of twins", name, GENERATORS)
    return GENERATORS[name]()


def samples_of(scenes: Sequence[Pixels] | Pixels, pipeline: Pipeline) -> Samples:
    """Return samples of the model's input, float32 [N, ...]."""
    return pipeline.batch(list(scenes))
