"""Preprocessing stages for features of sound: spectrum, bands, logarithm, cepstrum."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from slipstream.errors import InvalidArgumentError
from slipstream.runtimes.preprocessing.pipeline import Array, RawInputError, Stage

Window = Literal["hann", "hann_symmetric", "hamming", "blackman", "rectangular"]
RATES_HZ = (8_000, 11_025, 16_000, 22_050, 44_100, 48_000)
"""Common sample rates, which are easily mistaken for each other."""


@dataclass(frozen=True)
class Spectrum(Stage):
    """Compute the spectrum of each frame, float32 [frames, size / 2 + 1].

    Attributes:
        frame, hop: samples per frame, and between the starts of frames.
        size: length of the Fourier transform; frames are padded with zeros.
        window: window of a frame; periodic except ``hann_symmetric``.
        power: 2 for power, 1 for magnitude.
    """

    name = "spectrum"
    family = "audio"
    order = 30
    frame: int = 400
    hop: int = 160
    size: int = 512
    window: Window = "hann"
    power: int = 2

    def __call__(self, value: Array) -> Array:
        if not 0 < self.frame <= self.size or self.hop < 1:
            raise InvalidArgumentError(
                "frame",
                f"frames of {self.frame} samples with a hop of {self.hop} do not fit a transform "
                f"of {self.size}",
            )
        if len(value) < self.frame:
            raise RawInputError(
                f"the recording has {len(value)} samples, fewer than a frame of {self.frame}",
                remedy="add the stage Length, which pads recordings",
            )
        frames = np.lib.stride_tricks.sliding_window_view(value, self.frame)[:: self.hop]
        magnitudes = np.abs(np.fft.rfft(frames * _window(self.window, self.frame), self.size))
        return np.asarray(magnitudes**self.power, np.float32)

    def bugs(self) -> Iterator[tuple[str, Stage]]:
        for window in ("hann", "hann_symmetric", "hamming", "blackman", "rectangular"):
            yield f"the window is {window.replace('_', ', ')}", self.changed(window=window)
        other = "magnitude instead of power" if self.power == 2 else "power instead of magnitude"
        yield other, self.changed(power=3 - self.power)
        # The number of frames stays the same if the last window is slightly shorter or longer.
        for frame in (self.hop, self.frame // 2, self.size):
            yield f"frames of {frame} samples", self.changed(frame=frame)

    def code(self) -> str:
        name, periodic = _scipy_window(self.window)
        option = "" if periodic else ", fftbins=False"
        window = f'scipy.signal.get_window("{name}", {self.frame}{option})'
        return (
            f"frames = np.lib.stride_tricks.sliding_window_view(x, {self.frame})[::{self.hop}]\n"
            f"x = np.abs(np.fft.rfft(frames * {window}, {self.size})) ** {self.power}"
        )


@functools.lru_cache(maxsize=64)
def _window(kind: Window, count: int) -> Array:
    from scipy.signal import get_window

    name, periodic = _scipy_window(kind)
    return np.asarray(get_window(name, count, fftbins=periodic))


def _scipy_window(kind: Window) -> tuple[str, bool]:
    """Return SciPy's name of a window, and whether it is periodic."""
    return kind.removesuffix("_symmetric"), not kind.endswith("_symmetric")


@dataclass(frozen=True)
class Bands(Stage):
    """Sum a spectrum in overlapping triangular bands, float32 [frames, count].

    Attributes:
        count: number of bands.
        low, high: start of the first and end of the last band in Hz.
        rate: sample rate in Hz.
        scale: frequency scale of equally wide bands: ``mel`` (2595 log10(1 + f / 700)), ``slaney``
            (linear below 1 kHz, logarithmic above), ``linear``.
        area: whether triangles have area 1 in Hz instead of height 1.
    """

    name = "bands"
    family = "audio"
    order = 40
    count: int = 40
    low: float = 0.0
    high: float = 8_000.0
    rate: int = 16_000
    scale: Literal["mel", "slaney", "linear"] = "mel"
    area: bool = False

    def __call__(self, value: Array) -> Array:
        return np.asarray(value @ triangles(self, value.shape[1]), np.float32)

    def bugs(self) -> Iterator[tuple[str, Stage]]:
        for scale in ("mel", "slaney", "linear"):
            yield f"bands are equally wide on the scale {scale}", self.changed(scale=scale)
        heights = "the height 1" if self.area else "the area 1"
        yield f"triangles have {heights}", self.changed(area=not self.area)
        for rate in RATES_HZ:
            yield f"bands are those of a sample rate of {rate} Hz", self.changed(rate=rate)
        for high in (3_800.0, 4_000.0, 7_600.0, 8_000.0):
            yield f"bands end at {high:g} Hz", self.changed(high=high)
        for low in (0.0, 20.0, 64.0, 125.0):
            yield f"bands begin at {low:g} Hz", self.changed(low=low)

    def code(self) -> str:
        return f"x = x @ pre.triangles(pre.{self!r}, x.shape[1])"


@functools.lru_cache(maxsize=256)
def triangles(bands: Bands, bins: int) -> Array:
    """Return the weights of spectrum bins in each band, float32 [bins, count]."""
    if not 0 <= bands.low < bands.high or bands.count < 1:
        raise InvalidArgumentError(
            "bands", f"{bands.count} bands from {bands.low:g} to {bands.high:g} Hz do not exist"
        )
    low, high = _to_scale(bands.scale, np.array([bands.low, bands.high]))
    corners = _to_hertz(bands.scale, np.linspace(low, high, bands.count + 2))
    hertz = np.linspace(0, bands.rate / 2, bins)[:, None]
    up = (hertz - corners[:-2]) / (corners[1:-1] - corners[:-2])
    down = (corners[2:] - hertz) / (corners[2:] - corners[1:-1])
    weights = np.maximum(np.minimum(up, down), 0)
    return np.asarray(
        weights * (2 / (corners[2:] - corners[:-2])) if bands.area else weights, np.float32
    )


# Slaney's scale (Auditory Toolbox, 1998): 200/3 Hz per step up to 1 kHz, then 27 steps per factor
# of 6.4.
_STEP_HZ, _BREAK_HZ, _LOG_STEP = 200 / 3, 1000.0, np.log(6.4) / 27


def _to_scale(scale: str, hertz: Array) -> Array:
    if scale == "mel":
        return np.asarray(2595 * np.log10(1 + hertz / 700))
    if scale == "slaney":
        above = _BREAK_HZ / _STEP_HZ + np.log(np.maximum(hertz, 1) / _BREAK_HZ) / _LOG_STEP
        return np.where(hertz < _BREAK_HZ, hertz / _STEP_HZ, above)
    return hertz


def _to_hertz(scale: str, steps: Array) -> Array:
    if scale == "mel":
        return np.asarray(700 * (10 ** (steps / 2595) - 1))
    if scale == "slaney":
        first = _BREAK_HZ / _STEP_HZ
        above = _BREAK_HZ * np.exp(_LOG_STEP * np.maximum(steps - first, 0))
        return np.where(steps < first, steps * _STEP_HZ, above)
    return steps


@dataclass(frozen=True)
class Log(Stage):
    """Take the logarithm of power.

    Attributes:
        kind: ``natural``, ``log10``, ``decibel``, ``log1p`` or ``none``.
        floor: value that is added to the power if `added`, or its minimum.
    """

    name = "log"
    family = "audio"
    order = 50
    kind: Literal["natural", "log10", "decibel", "log1p", "none"] = "natural"
    floor: float = 1e-6
    added: bool = True

    def __call__(self, value: Array) -> Array:
        if self.kind in ("none", "log1p"):
            return value if self.kind == "none" else np.log1p(value)
        if self.floor <= 0:
            raise InvalidArgumentError("floor", f"{self.floor} has no logarithm")
        floor = np.float32(self.floor)
        positive = value + floor if self.added else np.maximum(value, floor)
        factor = {"natural": 1.0, "log10": 1 / np.log(10), "decibel": 10 / np.log(10)}[self.kind]
        return np.asarray(np.log(positive) * np.float32(factor), np.float32)

    def bugs(self) -> Iterator[tuple[str, Stage]]:
        for kind, text in (
            ("none", "no logarithm is taken"), ("natural", "the logarithm is natural"),
            ("log10", "the logarithm is to base 10"), ("decibel", "loudness is in decibels"),
            ("log1p", "the logarithm is that of 1 + power"),
        ):  # fmt: skip
            yield text, self.changed(kind=kind)
        for floor in (1e-10, 1e-8, 1e-6, 1e-5, 1e-3, 1.0):
            yield f"the logarithm's floor is {floor:g}", self.changed(floor=floor)
        other = "the smallest power, not added" if self.added else "added to the power"
        yield f"the logarithm's floor is {other}", self.changed(added=not self.added)

    def code(self) -> str:
        if self.kind == "none":
            return "# power, without a logarithm"
        if self.kind == "log1p":
            return "x = np.log1p(x)"
        floored = f"x + {self.floor!r}" if self.added else f"np.maximum(x, {self.floor!r})"
        return {
            "natural": f"x = np.log({floored})", "log10": f"x = np.log10({floored})",
            "decibel": f"x = 10 * np.log10({floored})",
        }[self.kind]  # fmt: skip


@dataclass(frozen=True)
class Cepstrum(Stage):
    """Cosine transform of each frame's bands (MFCCs for mel bands), float32 [frames, count].

    Attributes:
        count: number of coefficients; 0 for no transform.
        orthogonal: whether the transform is orthonormal; otherwise twice the plain sum.
        first: whether to include coefficient 0, the loudness; otherwise 1 to `count`.
    """

    name = "cepstrum"
    family = "audio"
    order = 60
    optional = True
    count: int = 0
    orthogonal: bool = True
    first: bool = True

    def __call__(self, value: Array) -> Array:
        if not self.count:
            return value
        from scipy.fft import dct

        begin = 0 if self.first else 1
        coefficients = dct(value, 2, norm="ortho" if self.orthogonal else None)
        return np.asarray(coefficients[:, begin : begin + self.count], np.float32)

    def bugs(self) -> Iterator[tuple[str, Stage]]:
        if self.count:
            scaled = "not " if self.orthogonal else ""
            yield (
                f"the cosine transform is {scaled}orthogonal",
                self.changed(orthogonal=not self.orthogonal),
            )
            text = "omitted" if self.first else "included"
            yield f"the coefficient of loudness is {text}", self.changed(first=not self.first)

    def code(self) -> str:
        if not self.count:
            return "# bands, no cosine transform"
        begin, norm = 0 if self.first else 1, '"ortho"' if self.orthogonal else "None"
        return f"x = scipy.fft.dct(x, 2, norm={norm})[:, {begin} : {begin + self.count}]"


@dataclass(frozen=True)
class Standardise(Stage):
    """Compute (x - mean) / std, `times` times.

    Attributes:
        mean, std: ``fixed`` values, of all features or per band.
        over: use ``fixed`` values, or those of this ``recording`` or of each ``band`` of it.
    """

    name = "standardise"
    family = "audio"
    order = 70
    optional = True
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    over: Literal["fixed", "recording", "band"] = "fixed"
    times: int = 1

    def __call__(self, value: Array) -> Array:
        x: Array = value.astype(np.float32)
        mean, std = np.asarray(self.mean, np.float32), np.asarray(self.std, np.float32)
        for _ in range(self.times):
            if self.over == "fixed":
                x = (x - mean) / std
            else:
                axis = None if self.over == "recording" else 0
                x = (x - x.mean(axis)) / (x.std(axis) + np.float32(1e-6))
        return np.asarray(x, np.float32)

    def bugs(self) -> Iterator[tuple[str, Stage]]:
        for over in ("recording", "band"):
            text = f"mean and deviation are those of each {over}"
            yield text, self.changed(over=over, times=1)
        zeros, ones = (0.0,) * len(self.mean), (1.0,) * len(self.std)
        yield "mean and deviation are not applied", Standardise(zeros, ones)
        if self.over == "fixed" and (self.mean, self.std) != (zeros, ones):
            yield "the mean is not subtracted", self.changed(mean=zeros)
            yield "values are not divided by the deviation", self.changed(std=ones)
            yield "mean and deviation are applied twice", self.changed(times=2)
            variance = tuple(v * v for v in self.std)
            yield "values are divided by the variance", self.changed(std=variance)
            swapped = tuple(v or 1.0 for v in self.mean)
            yield "mean and deviation are swapped", self.changed(mean=self.std, std=swapped)

    def code(self) -> str:
        if self.over == "fixed":
            return f"x = (x - np.float32({self.mean})) / np.float32({self.std})"
        axis = "" if self.over == "recording" else "0"
        return f"x = (x - x.mean({axis})) / (x.std({axis}) + 1e-6)"


@dataclass(frozen=True)
class Arrange(Stage):
    """Transpose [frames, bands] to the model's layout, with an optional channel axis.

    Attributes:
        axes: ``TF``: frames first; ``FT``: bands first.
        channel: position of the channel axis.
        misread: whether data of the other layout is reinterpreted as this one.
    """

    name = "arrange"
    family = "audio"
    order = 80
    axes: Literal["TF", "FT"] = "TF"
    channel: Literal["none", "first", "last"] = "none"
    misread: bool = False

    def __call__(self, value: Array) -> Array:
        frames, bands = value.shape
        actual = self.axes if not self.misread else self.axes[::-1]
        data = np.ascontiguousarray(value if actual == "TF" else value.T)
        data = data.reshape((frames, bands) if self.axes == "TF" else (bands, frames))
        return {"none": data, "first": data[None], "last": data[..., None]}[self.channel]

    def bugs(self) -> Iterator[tuple[str, Stage]]:
        order = "bands first" if self.axes == "TF" else "frames first"
        yield f"data with {order} is read in the other order", self.changed(misread=True)

    def code(self) -> str:
        transposed = "x" if self.axes == "TF" else "x.T"
        axis = {"none": "", "first": "[None]", "last": "[..., None]"}[self.channel]
        return f"x = {transposed}{axis}"
