"""Sound pipelines: compared with transformers, damaged files, and variations."""

from __future__ import annotations

import io
import json
import math
from typing import Any

import numpy as np
import pytest
import scipy.fft
import scipy.signal
from numpy.typing import NDArray
from scipy.io import wavfile

from slipstream.errors import InvalidArgumentError
from slipstream.runtimes import preprocessing as pre
from slipstream.ship import xray
from slipstream.ship.xray.statistics import canonical, measured

RATE = 8_000
MFCC = pre.sound_pipeline(
    16_000, 0.5, frame=480, hop=320, bands=20, high=4_000.0, coefficients=8, mean=(-5.0,),
    std=(9.0,), axes="FT", channel="first",
).with_stage(pre.Waveform(16_000, raw_rate=RATE))  # fmt: skip


def voice(seed: int = 0, seconds: float = 0.3) -> NDArray[np.int16]:
    """A fading vowel of falling pitch with noise, int16 [T] at 8 kHz."""
    rng = np.random.default_rng(seed)
    t = np.arange(int(seconds * RATE)) / RATE
    pitch = 2 * np.pi * np.cumsum(140 + 40 * rng.random() - 60 * t) / RATE
    tones = sum(np.sin(k * pitch) / k for k in range(1, 20))
    x = 6_000 * tones * np.exp(-3 * t) + rng.normal(0, 200, len(t)) + 300
    return np.clip(x, -32_768, 32_767).astype(np.int16)


def file_of(samples: NDArray[Any], rate: int = RATE) -> bytes:
    content = io.BytesIO()
    wavfile.write(content, rate, samples)
    return content.getvalue()


@pytest.mark.parametrize("scale", ["mel", "slaney"])
@pytest.mark.parametrize("area", [False, True])
def test_bands_equal_those_of_transformers(scale: Any, area: bool) -> None:
    audio = pytest.importorskip("transformers.audio_utils")
    theirs = audio.mel_filter_bank(
        257, 24, 60.0, 7_000.0, 16_000, norm="slaney" if area else None,
        mel_scale="htk" if scale == "mel" else "slaney",
    )  # fmt: skip
    ours = pre.triangles(pre.Bands(24, 60.0, 7_000.0, 16_000, scale, area), 257)
    assert np.allclose(ours, theirs, atol=1e-5 * theirs.max())


def test_log_spectrogram_equals_that_of_transformers() -> None:
    audio = pytest.importorskip("transformers.audio_utils")
    filters = audio.mel_filter_bank(257, 40, 0.0, 8_000.0, 16_000, mel_scale="htk")
    x = voice(seconds=1.0).astype(np.float32) / 32_768
    theirs = audio.spectrogram(
        x, audio.window_function(400, "hann"), 400, 160, 512, power=2.0, center=False,
        mel_filters=filters, mel_floor=1e-6, log_mel="log",
    )  # fmt: skip
    pipeline = pre.sound_pipeline(16_000, len(x) / 16_000).with_stage(pre.Log(added=False))
    assert np.allclose(pipeline(x).T, theirs, atol=1e-3)


def test_reads_all_sample_formats() -> None:
    x = voice()
    whole = pre.Waveform(RATE)(file_of(x))
    assert np.array_equal(whole, x.astype(np.float32) / 32_768)
    assert np.allclose(pre.Waveform(RATE)(file_of((x // 256 + 128).astype(np.uint8))), whole,
                       atol=1 / 128)  # fmt: skip
    assert np.array_equal(pre.Waveform(RATE)(file_of(x.astype(np.int32) << 16)), whole)
    assert np.array_equal(pre.Waveform(RATE)(file_of(whole)), whole)
    both = np.stack([x, np.zeros_like(x)], 1)
    assert np.allclose(pre.Waveform(RATE)(file_of(both)), whole / 2)
    assert np.array_equal(pre.Waveform(RATE, mix="left")(file_of(both)), whole)
    assert len(pre.Waveform(16_000)(file_of(x))) == 2 * len(x)


@pytest.mark.parametrize(
    "damaged", [b"", b"RIFF", b"not a recording", file_of(voice())[:-100], file_of(voice())[:30]],
    ids=["empty", "only a tag", "text", "cut in samples", "cut in the header"],
)  # fmt: skip
def test_damaged_recording_is_reported(damaged: bytes) -> None:
    with pytest.raises(pre.RawInputError, match="not a readable WAV file"):
        MFCC(damaged)


def test_refuses_invalid_inputs_and_settings() -> None:
    with pytest.raises(pre.RawInputError, match=r"\b10 samples\b.*\bframe of \d+"):
        pre.Spectrum()(np.zeros(10, np.float32))
    with pytest.raises(pre.RawInputError, match=r"samples are float32\[0\]"):
        MFCC(np.zeros(0, np.float32))
    with pytest.raises(InvalidArgumentError, match="do not fit"):
        pre.Spectrum(frame=600)(np.zeros(1_000, np.float32))
    with pytest.raises(InvalidArgumentError, match="no logarithm"):
        pre.Log(floor=0.0)(np.ones(3, np.float32))


def test_variations_round_trip_through_json_and_equal_their_code() -> None:
    content = file_of(voice())
    names: dict[str, Any] = {
        "np": np, "pre": pre, "math": math, "scipy": scipy,
    }  # fmt: skip
    found = list(MFCC.variations())
    assert len({variation.text for variation in found}) == len(found) > 45
    for variation in found:
        assert (
            pre.Pipeline.from_dict(json.loads(json.dumps(variation.pipeline.to_dict())))
            == variation.pipeline
        )
        arranged = variation.pipeline.stages[-2]
        assert isinstance(arranged, pre.Arrange)
        if arranged.misread or variation.stages == ("cast",):
            continue  # code is shown for fixes, never for these mistakes
        if variation.stages == ("standardise",) and "twice" in variation.text:
            continue
        ran = dict(names, file=io.BytesIO(content))
        exec(variation.pipeline.code(), ran)
        assert np.allclose(ran["x"], variation.pipeline(content), atol=1e-3), variation.text


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("waveform", {"resample": "ignored"}), ("signal", {"units": "int16"}),
        ("spectrum", {"window": "rectangular"}), ("bands", {"scale": "linear"}),
        ("log", {"kind": "none"}), ("arrange", {"misread": True}),
    ],
)  # fmt: skip
def test_wrong_stage_is_found_with_its_fix(kind: str, settings: dict[str, Any]) -> None:
    raws = [voice(seed, 0.2 + 0.1 * seed) for seed in range(5)]
    whole = MFCC.completed()
    stage = next(stage for stage in whole.stages if stage.name == kind)
    wrong = whole.with_stage(stage.changed(**settings))
    cause = xray.explain(measured([canonical(wrong(raw)[None]) for raw in raws]), raws, MFCC)
    assert cause.stages == (kind,)
    assert cause.pipeline is not None
    assert all(np.array_equal(cause.pipeline(raw), wrong(raw)) for raw in raws)
    assert cause.fix.endswith(stage.code())
