"""Labelled sounds: tones of known frequency in noise, and words from a speech synthesiser."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import wave
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slipstream.data.errors import CorruptDataError, MissingDataError
from slipstream.data.kinds import Audio
from slipstream.errors import InvalidArgumentError
from slipstream_bench.generators._random import positive, streams

# At most one semitone up or down; neighbouring classes, a major third apart, never overlap.
_JITTER_SEMITONES = 1.0
_STEP_SEMITONES = 4.0
_LOWEST_HZ = 220.0
# The synthesiser needs milliseconds per word.
_TIMEOUT_S = 30
_WORDS = re.compile(r"[A-Za-z][A-Za-z ]*")
_VOICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9+_-]*")


@dataclass(frozen=True)
class Tones:
    """Pure tones in white noise.

    Attributes:
        samples: float32 [N, T]; tone amplitudes are between 0.25 and 1.
        labels: int64 [N]; tones of class c are near 220 Hz times 2^(c / 3).
        frequencies_hz: float64 [N], the exact frequency of each tone.
        snr_db: tone power over noise power, exact in every clip.
        rate_hz: samples per second.
    """

    samples: NDArray[np.float32]
    labels: NDArray[np.int64]
    frequencies_hz: NDArray[np.float64]
    snr_db: float
    rate_hz: int

    def __len__(self) -> int:
        return len(self.samples)


def tones(
    count: int,
    *,
    classes: int = 8,
    seconds: float = 0.25,
    rate_hz: int = 8000,
    snr_db: float = 10.0,
    seed: int = 0,
) -> Tones:
    """Draw clips whose class is the third of an octave of their tone.

    Raises:
        InvalidArgumentError: a size is not positive, or a class exceeds the Nyquist frequency.
    """
    positive(count=count, classes=classes, seconds=seconds, rate_hz=rate_hz)
    highest = _LOWEST_HZ * 2 ** (((classes - 1) * _STEP_SEMITONES + _JITTER_SEMITONES) / 12)
    if highest >= rate_hz / 2:
        raise InvalidArgumentError(
            "classes", f"the highest tone, {highest:.0f} Hz, needs more than {rate_hz} samples/s"
        )
    truth, noise_source = streams(seed, 2)
    labels = truth.integers(0, classes, count)
    semitones = labels * _STEP_SEMITONES + truth.uniform(
        -_JITTER_SEMITONES, _JITTER_SEMITONES, count
    )
    frequencies = _LOWEST_HZ * 2 ** (semitones / 12)
    amplitude = truth.uniform(0.25, 1, count)[:, None]
    phase = truth.uniform(0, 2 * np.pi, count)[:, None]
    time_s = np.arange(max(1, round(seconds * rate_hz))) / rate_hz
    tone = amplitude * np.sin(2 * np.pi * frequencies[:, None] * time_s + phase)
    noise = noise_source.normal(0, 1, tone.shape)
    # Scaled per clip, so that the ratio is exact in each and not only on average.
    power = np.mean(tone**2, axis=1) / np.mean(noise**2, axis=1) / 10 ** (snr_db / 10)
    samples = (tone + noise * np.sqrt(power)[:, None]).astype(np.float32)
    return Tones(samples, labels.astype(np.int64), frequencies, snr_db, rate_hz)


def keywords(
    words: Sequence[str],
    *,
    voices: Sequence[str] = ("en", "en-us", "en+f3", "en+m3"),
    takes: int = 3,
    seed: int = 0,
) -> Audio:
    """Synthesise words with espeak-ng: every word in every voice, `takes` times.

    Takes differ in speed (120 to 200 words per minute) and pitch (30 to 70 of 99).

    Raises:
        InvalidArgumentError: there are no words, a word has characters other than letters and
            blanks, or a voice has other characters than letters, digits, ``+``, ``-`` and ``_``.
        MissingDataError: espeak-ng is not installed.
        CorruptDataError: espeak-ng did not write 16-bit mono sound.
    """
    positive(takes=takes)
    # Words and voices become arguments of a program: none may be read as an option.
    for argument, pattern, texts in (("words", _WORDS, words), ("voices", _VOICE, voices)):
        if not texts:
            raise InvalidArgumentError(argument, "must have at least one")
        for text in texts:
            if pattern.fullmatch(text) is None:
                raise InvalidArgumentError(argument, f"'{text}' has invalid characters")
    program = shutil.which("espeak-ng")
    if program is None:
        raise MissingDataError(
            "keywords", "espeak-ng is not installed", remedy="apt-get install espeak-ng"
        )
    (generator,) = streams(seed, 1)
    samples = []
    labels: list[int] = []
    speakers: list[str] = []
    repetitions: list[int] = []
    rate_hz = 0
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "word.wav"
        for label, word in enumerate(words):
            for voice in voices:
                for take in range(takes):
                    speed, pitch = (
                        int(generator.integers(120, 201)),
                        int(generator.integers(30, 71)),
                    )
                    _speak(program, word, voice, speed, pitch, target)
                    sound, rate_hz = _read(target)
                    samples.append(sound)
                    labels.append(label)
                    speakers.append(voice)
                    repetitions.append(take)
    return Audio(
        "keywords",
        tuple(samples),
        np.array(labels, dtype=np.int64),
        tuple(speakers),
        np.array(repetitions, dtype=np.int64),
        tuple(words),
        rate_hz,
    )


def _speak(program: str, word: str, voice: str, speed: int, pitch: int, target: Path) -> None:
    command = [program, "-v", voice, "-s", str(speed), "-p", str(pitch), "-w", str(target), word]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise CorruptDataError("keywords", f"espeak-ng timed out on '{word}'") from error
    if done.returncode:
        message = done.stderr.decode("utf-8", "replace").strip()
        raise CorruptDataError("keywords", f"espeak-ng failed on '{word}': {message}")


def _read(path: Path) -> tuple[NDArray[np.int16], int]:
    try:
        with wave.open(str(path)) as file:
            if (file.getnchannels(), file.getsampwidth()) != (1, 2):
                raise CorruptDataError("keywords", "not 16-bit mono sound")
            frames = file.readframes(file.getnframes())
            return np.frombuffer(frames, dtype="<i2").astype(np.int16), file.getframerate()
    except (wave.Error, EOFError, OSError, RuntimeError) as error:
        raise CorruptDataError("keywords", f"espeak-ng wrote no WAV: {error}") from error
