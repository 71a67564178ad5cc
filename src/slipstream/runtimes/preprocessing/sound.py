"""Preprocessing stages for recordings, and the usual pipeline of sound."""

from __future__ import annotations

import io
import math
import struct
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from slipstream.runtimes.preprocessing.cast import Cast
from slipstream.runtimes.preprocessing.pipeline import Array, Pipeline, RawInputError, Stage
from slipstream.runtimes.preprocessing.spectrum import (
    RATES_HZ,
    Arrange,
    Bands,
    Cepstrum,
    Log,
    Spectrum,
    Standardise,
    Window,
)


@dataclass(frozen=True)
class Waveform(Stage):
    """Read a WAV file's bytes, a path, or samples [T] or [T, channels], as float32 [T] in -1..1.

    Attributes:
        rate: output rate in Hz.
        raw_rate: rate in Hz of inputs that are bare samples.
        resample: ``polyphase`` with an anti-aliasing filter; ``linear`` interpolation; ``ignored``:
            treat samples as if they had `rate`.
        mix: use the ``mean`` of the channels, or the ``left`` one.
    """

    name = "waveform"
    family = "audio"
    rate: int = 16_000
    raw_rate: int = 16_000
    resample: Literal["polyphase", "linear", "ignored"] = "polyphase"
    mix: Literal["mean", "left"] = "mean"

    def __call__(self, value: Any) -> Array:
        samples, rate = (value, self.raw_rate) if isinstance(value, np.ndarray) else _wav(value)
        if samples.dtype.kind not in "iuf" or samples.ndim not in (1, 2) or not samples.size:
            raise RawInputError(
                f"samples are {samples.dtype}[{', '.join(map(str, samples.shape))}]",
                remedy="pass [T] or [T, channels] of int16, int32, uint8 or float",
            )
        mono: Array = samples.astype(np.float64)
        if samples.dtype.kind in "iu":
            half = 2.0 ** (8 * samples.dtype.itemsize - 1)
            mono = mono / half - (samples.dtype.kind == "u")
        if mono.ndim == 2:
            mono = mono.mean(1) if self.mix == "mean" else mono[:, 0]
        if rate != self.rate and self.resample == "polyphase":
            from scipy.signal import resample_poly

            common = math.gcd(rate, self.rate)
            mono = resample_poly(mono, self.rate // common, rate // common)
        elif rate != self.rate and self.resample == "linear":
            at = np.arange(len(mono) * self.rate // rate) * (rate / self.rate)
            mono = np.interp(at, np.arange(len(mono)), mono)
        return mono.astype(np.float32)

    def bugs(self) -> Iterator[tuple[str, Stage]]:
        yield "the sample rate is not converted", self.changed(resample="ignored")
        yield "resampled by linear interpolation, without a filter", self.changed(resample="linear")
        yield "only the left channel is used", self.changed(mix="left")
        for rate in RATES_HZ:
            yield f"resampled to {rate} Hz", self.changed(rate=rate)

    def code(self) -> str:
        mixed = "x.mean(1)" if self.mix == "mean" else "x[:, 0]"
        read = (
            "rate, x = scipy.io.wavfile.read(file); x = x / 32768\n"
            f"x = {mixed} if x.ndim == 2 else x"
        )
        if self.resample == "ignored":
            return f"{read}  # at the file's rate"
        if self.resample == "linear":
            at = f"np.arange(len(x) * {self.rate} // rate) * (rate / {self.rate})"
            return f"{read}\nx = np.interp({at}, np.arange(len(x)), x).astype(np.float32)"
        by = f"{self.rate} // common, rate // common"
        return (
            f"{read}\ncommon = math.gcd(rate, {self.rate})\n"
            f"x = scipy.signal.resample_poly(x, {by}).astype(np.float32)"
        )


def _wav(value: Any) -> tuple[Array, int]:
    """Return the samples of a WAV file and their rate."""
    from scipy.io import wavfile

    try:
        content = Path(value).read_bytes() if isinstance(value, (str, Path)) else bytes(value)
        if content[:4] == b"RIFF" and struct.unpack_from("<I", content, 4)[0] + 8 > len(content):
            raise ValueError("the file is truncated")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", wavfile.WavFileWarning)
            rate, samples = wavfile.read(io.BytesIO(content))
    # The reader's exception depends on the position of the damage.
    except (OSError, ValueError, TypeError, KeyError, struct.error, ZeroDivisionError,
            UnboundLocalError) as error:  # fmt: skip
        raise RawInputError(
            f"the recording is not a readable WAV file: {error}",
            remedy="remove the file, or save it again as 16-bit PCM",
        ) from error
    if rate <= 0:
        raise RawInputError(f"the recording's header has a rate of {rate} Hz")
    return samples, int(rate)


@dataclass(frozen=True)
class Signal(Stage):
    """Scale, centre and pre-emphasise samples.

    Attributes:
        units: scale: full scale is 1 (``unit``) or 32768 (``int16``), or the loudest sample is 1
            (``peak``).
        centred: whether to subtract the mean of the recording.
        emphasis: pre-emphasis of high frequencies, x[t] - emphasis * x[t - 1]; 0 for none.
    """

    name = "signal"
    family = "audio"
    order = 10
    optional = True
    units: Literal["unit", "int16", "peak"] = "unit"
    centred: bool = False
    emphasis: float = 0.0

    def __call__(self, value: Array) -> Array:
        x = value - value.mean() if self.centred else value
        if self.units == "peak":
            x = x / max(float(np.abs(x).max()), 1e-9)
        if self.units == "int16":
            x = x * np.float32(32768)
        if self.emphasis:
            x = np.append(x[:1], x[1:] - np.float32(self.emphasis) * x[:-1])
        return x.astype(np.float32)

    def bugs(self) -> Iterator[tuple[str, Stage]]:
        yield "samples have full scale 1", self.changed(units="unit")
        yield "samples are 16-bit codes, not divided by 32768", self.changed(units="int16")
        yield "samples are divided by the loudest one of the recording", self.changed(units="peak")
        without = " not" if self.centred else ""
        yield (
            f"the mean of the recording is{without} subtracted",
            self.changed(centred=not self.centred),
        )
        for emphasis in (0.0, 0.95, 0.97):
            text = f"high frequencies are emphasised by {emphasis:g}" if emphasis else (
                "high frequencies are not emphasised")  # fmt: skip
            yield text, self.changed(emphasis=emphasis)

    def code(self) -> str:
        lines = ["x = x - x.mean()"] if self.centred else []
        lines += {
            "unit": [], "peak": ["x = x / np.abs(x).max()"], "int16": ["x = x * np.float32(32768)"]
        }[self.units]  # fmt: skip
        if self.emphasis:
            lines.append(f"x = np.append(x[:1], x[1:] - np.float32({self.emphasis}) * x[:-1])")
        return "\n".join(lines) or "# samples in -1..1"


@dataclass(frozen=True)
class Length(Stage):
    """Cut or pad recordings to the same number of samples.

    Attributes:
        samples: output length.
        pad: where to add silence to short recordings: ``end``, ``start``, ``both``; or ``repeat``.
        keep: part of long recordings to keep: ``start``, ``centre`` or ``end``.
    """

    name = "length"
    family = "audio"
    order = 20
    samples: int = 16_000
    pad: Literal["end", "start", "both", "repeat"] = "end"
    keep: Literal["start", "centre", "end"] = "start"

    def __call__(self, value: Array) -> Array:
        missing = self.samples - len(value)
        if missing <= 0:
            begin = {"start": 0, "centre": -missing // 2, "end": -missing}[self.keep]
            return value[begin : begin + self.samples]
        if self.pad == "repeat":
            return np.resize(value, self.samples)
        before = {"end": 0, "start": missing, "both": missing // 2}[self.pad]
        return np.pad(value, (before, missing - before))

    def bugs(self) -> Iterator[tuple[str, Stage]]:
        yield "silence is added at the start", self.changed(pad="start")
        yield "silence is added at both ends", self.changed(pad="both")
        yield "silence is added at the end", self.changed(pad="end")
        yield "short recordings are repeated", self.changed(pad="repeat")
        for part in ("start", "centre", "end"):
            yield f"the {part} of long recordings is kept", self.changed(keep=part)

    def code(self) -> str:
        n = self.samples
        cut = {
            "start": f"x = x[:{n}]", "end": f"x = x[-{n}:]",
            "centre": f"at = max(len(x) - {n}, 0) // 2; x = x[at : at + {n}]",
        }[self.keep]  # fmt: skip
        padded = {
            "end": f"x = np.pad(x, (0, {n} - len(x)))",
            "start": f"x = np.pad(x, ({n} - len(x), 0))",
            "both": f"at = ({n} - len(x)) // 2; x = np.pad(x, (at, {n} - len(x) - at))",
            "repeat": f"x = np.resize(x, {n})",
        }[self.pad]  # fmt: skip
        return f"{cut}\n{padded}"


def sound_pipeline(
    rate: int,
    seconds: float = 1.0,
    *,
    frame: int = 400,
    hop: int = 160,
    window: Window = "hann",
    bands: int = 40,
    low: float = 0.0,
    high: float | None = None,
    coefficients: int = 0,
    mean: tuple[float, ...] = (0.0,),
    std: tuple[float, ...] = (1.0,),
    axes: Literal["TF", "FT"] = "TF",
    channel: Literal["none", "first", "last"] = "none",
    dtype: str = "float32",
    scale: float = 0.0,
    zero_point: int = 0,
) -> Pipeline:
    """Build the usual pipeline of sound models: log power in mel bands, or MFCCs.

    Args:
        rate: sample rate in Hz, to which recordings are resampled.
        seconds: length to which recordings are cut or padded.
        frame, hop: samples per frame of the spectrum, and between the starts of frames.
        window: window of a frame.
        bands: number of bands, from `low` to `high` Hz (None for half the rate).
        coefficients: number of cepstral coefficients; 0 for bands.
        mean, std: normalisation of the features, of all or per band.
        axes, channel: layout of a sample.
        dtype, scale, zero_point: type and quantization of the model's input.
    """
    size = 1 << (frame - 1).bit_length()
    return Pipeline((
        Waveform(rate, rate), Signal(), Length(round(rate * seconds)),
        Spectrum(frame, hop, size, window), Bands(bands, low, high or rate / 2, rate),
        Log(), Cepstrum(coefficients), Standardise(mean, std), Arrange(axes, channel),
        Cast(dtype, scale, zero_point),
    ))  # fmt: skip
