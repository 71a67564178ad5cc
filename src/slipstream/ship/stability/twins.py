"""Twins: the same scene as another device would give it, for training that both get one answer."""

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
# Scenes that share one drawn camera: developing many at once is quicker than one by one.
_ALIKE = 16


class Twins(ABC):
    """A generator of twins.

    Attributes:
        name: in the grammar.
    """

    name: ClassVar[str] = ""

    @abstractmethod
    def __call__(
        self, scenes: Pixels, places: NDArray[np.int64], rng: np.random.Generator,
        pipeline: Pipeline,
    ) -> Samples:  # fmt: skip
        """Samples of the model's input, [N, ...], of twins of `scenes` uint8 [N, H, W, 3].

        Args:
            places: of the scenes in the data set, int64 [N].
        """


@dataclass(frozen=True)
class Same(Twins):
    """Scenes themselves: for a fine-tune whose second branch is an int8 copy of the model."""

    name: ClassVar[str] = "same"

    def __call__(
        self, scenes: Pixels, places: NDArray[np.int64], rng: np.random.Generator,
        pipeline: Pipeline,
    ) -> Samples:  # fmt: skip
        return samples_of(scenes, pipeline)


@dataclass(frozen=True)
class Gaussian(Twins):
    """Noise on every value of the model's input, of standard deviation `sigma`."""

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
    """A camera and a codec drawn anew for every batch: tone, colours, sharpness, compression.

    Attributes:
        strength: of all of it; 1 is about what phones differ by, 0 leaves only the codec.
        formats: of the file, one drawn for each scene.
        quality: lowest and highest of the file.
    """

    name: ClassVar[str] = "distortion"
    strength: float = 1.0
    formats: tuple[Format, ...] = ("jpeg",)
    quality: tuple[int, int] = (25, 95)

    def __call__(
        self, scenes: Pixels, places: NDArray[np.int64], rng: np.random.Generator,
        pipeline: Pipeline,
    ) -> Samples:  # fmt: skip
        pictures = np.concatenate(
            [self._camera(rng).develop(scenes[at : at + _ALIKE])
             for at in range(0, len(scenes), _ALIKE)]
        )  # fmt: skip
        return pipeline.batch([self._codec(rng)(one) for one in pictures])

    def _camera(self, rng: np.random.Generator) -> Camera:
        s = self.strength

        def up_to(most: float) -> float:
            # Often little: phones are mostly good.
            return float(s * most * rng.beta(1, 2)) if rng.random() < 0.5 else 0.0

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
    """The same scenes through a second device, whose pictures are there for some or all of them.

    Attributes:
        path: of the second device.
        having: share of the scenes that there is a second picture of; the others are their own
            twins.
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
                # A fixed choice of places, evenly spread: the same in every epoch.
                there = int((place + 1) * self.having) > int(place * self.having)
                self._seen[place] = (self.path.pipeline if there else pipeline)(scene)
            samples.append(self._seen[place])
        return np.stack(samples)


class Repeated(Twins):
    """The first so many twins that a generator draws of a scene, and then these again.

    Args:
        twins: the generator.
        draws: twins that are kept of each of `count` scenes, in half precision: it tells all levels
            of a picture apart.
    """

    def __init__(self, twins: Twins, draws: int, count: int) -> None:
        self._twins, self._draws = twins, draws
        self._visits = np.zeros(count, np.int64)
        self._kept: NDArray[np.float16] | None = None

    def __call__(
        self, scenes: Pixels, places: NDArray[np.int64], rng: np.random.Generator,
        pipeline: Pipeline,
    ) -> Samples:  # fmt: skip
        visits = self._visits[places]
        self._visits[places] += 1
        if self._kept is None or visits.min() < self._draws:
            samples = self._twins(scenes, places, rng, pipeline)
            if self._kept is None:
                shape = (self._draws, len(self._visits), *samples.shape[1:])
                self._kept = np.empty(shape, np.float16)
            self._kept[np.minimum(visits, self._draws - 1), places] = samples
            return samples
        chosen = self._kept[rng.integers(self._draws, size=len(places)), places]
        return chosen.astype(np.float32)


GENERATORS: Mapping[str, type[Twins]] = {
    one.name: one for one in (Same, Gaussian, Distortion, TwoImages)
}


def twins_named(name: str) -> Twins:
    """A generator with its default settings.

    Raises:
        UnknownNameError: no such generator.
    """
    if name not in GENERATORS:
        raise UnknownNameError("generator of twins", name, GENERATORS)
    return GENERATORS[name]()


def samples_of(scenes: Sequence[Pixels] | Pixels, pipeline: Pipeline) -> Samples:
    """Samples of the model's input of whole scenes, float32 [N, ...]."""
    return pipeline.batch(list(scenes))
