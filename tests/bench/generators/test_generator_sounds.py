"""Tones have the labelled frequency and noise; words come from espeak-ng."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from slipstream.data import CorruptDataError, MissingDataError
from slipstream.errors import InvalidArgumentError
from slipstream_bench.generators import keywords, tones


def test_the_spectrum_peaks_at_the_stated_frequency() -> None:
    clips = tones(200, snr_db=10, seed=1)
    length = clips.samples.shape[1]
    padded = 16 * length
    spectrum = abs(np.fft.rfft(clips.samples * np.hanning(length), padded, axis=1))
    peak_hz = spectrum.argmax(axis=1) * clips.rate_hz / padded
    # The resolution of a clip of 0.25 s is 4 Hz; the peak of a clean tone is much more precise.
    assert abs(peak_hz - clips.frequencies_hz).max() < 1.0


def test_labels_follow_from_frequencies() -> None:
    clips = tones(500, classes=10, seed=2)
    third = 3 * np.log2(clips.frequencies_hz / 220)
    assert np.array_equal(np.rint(third).astype(np.int64), clips.labels)
    assert set(clips.labels) == set(range(10))


@pytest.mark.parametrize("snr_db", [-5.0, 0.0, 20.0])
def test_the_noise_is_as_loud_as_stated(snr_db: float) -> None:
    clips = tones(50, snr_db=snr_db, seconds=1.0, seed=3)
    time_s = np.arange(clips.samples.shape[1]) / clips.rate_hz
    for samples, hertz in zip(clips.samples, clips.frequencies_hz, strict=True):
        # Project on sine and cosine of the stated frequency; the residual is noise.
        basis = np.stack([np.sin(2 * np.pi * hertz * time_s), np.cos(2 * np.pi * hertz * time_s)])
        fit = np.linalg.lstsq(basis.T, samples, rcond=None)[0] @ basis
        ratio = 10 * np.log10(np.mean(fit**2) / np.mean((samples - fit) ** 2))
        # The noise's share along the tone has a standard deviation of 1 / sqrt(T * ratio) of its
        # amplitude; in decibels, four of them.
        error = 4 * 20 / np.log(10) / (len(time_s) * 10 ** (snr_db / 10)) ** 0.5
        assert ratio == pytest.approx(snr_db, abs=error)


def test_tones_above_half_the_rate_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="samples/s"):
        tones(1, classes=20)


def test_seeds_repeat() -> None:
    assert np.array_equal(tones(3, seed=4).samples, tones(3, seed=4).samples)
    assert not np.array_equal(tones(3, seed=4).samples, tones(3, seed=5).samples)


def test_words_need_espeak(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDataError, match="apt-get install espeak-ng"):
        keywords(["yes"])


@pytest.mark.parametrize("word", ["--stdout", "-f/etc/passwd", "yes; no", "", "a\nb"])
def test_a_word_cannot_be_passed_as_an_option(word: str) -> None:
    with pytest.raises(InvalidArgumentError, match="words"):
        keywords([word])
    with pytest.raises(InvalidArgumentError, match="voices"):
        keywords(["yes"], voices=[word])


def test_a_failing_synthesiser_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "espeak-ng"
    for script in ("echo no such voice >&2; exit 1", "exit 0", 'echo x > "$8"'):
        program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        with pytest.raises(CorruptDataError, match=r"no such voice|no WAV"):
            keywords(["yes"])


def test_words_are_spoken_in_every_voice(require: Callable[[str, bool, str], None]) -> None:
    require("espeak", shutil.which("espeak-ng") is not None, "apt-get install espeak-ng")
    spoken = keywords(["yes", "stop now"], voices=["en", "en+f3"], takes=2, seed=1)
    assert spoken.labels.tolist() == [0] * 4 + [1] * 4
    assert spoken.speakers == ("en", "en", "en+f3", "en+f3") * 2
    assert spoken.repetitions.tolist() == [0, 1] * 4
    assert spoken.classes == ("yes", "stop now")
    for samples in spoken.samples:
        assert samples.dtype == np.int16
        # Speech: longer than a fifth of a second, and not silence.
        assert len(samples) > spoken.rate_hz / 5
        assert abs(samples.astype(np.int64)).max() > 1000
    # Two words last longer than one.
    lengths = [len(samples) for samples in spoken.samples]
    assert sum(lengths[4:]) > sum(lengths[:4])
    again = keywords(["yes", "stop now"], voices=["en", "en+f3"], takes=2, seed=1)
    assert all(np.array_equal(a, b) for a, b in zip(spoken.samples, again.samples, strict=True))
