"""Loader of recorded speech."""

from __future__ import annotations

import io
import re
import wave
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from slipstream.data._files import members
from slipstream.data._find import find
from slipstream.data.catalogue import Entry
from slipstream.data.errors import CorruptDataError
from slipstream.data.kinds import Audio

_NAME = re.compile(r"(\d)_([a-z]+)_(\d+)\.wav")
_RATE_HZ = 8000
_ALL = "fsdd_all_3000.tar.xz"


def fsdd(entry: Entry, *, all_takes: bool = False) -> Audio:
    """Load spoken digits of six speakers: samples int16 [T] at 8 kHz.

    Recordings are sorted by digit, speaker and take. The usual test split is ``repetitions < 5``.

    Args:
        all_takes: whether to load all 50 takes (3,000 recordings) instead of the first 10 (600).
    """
    folder = find(entry)
    files: Iterable[tuple[str, bytes]]
    if all_takes:
        files = ((path.name, data) for path, data in members(entry.name, folder / _ALL))
    else:
        files = ((path.name, path.read_bytes()) for path in folder.glob("*.wav"))
    takes = []
    for name, content in files:
        match = _NAME.fullmatch(name)
        if match is None:
            raise CorruptDataError(entry.name, f"'{name}' is not named DIGIT_SPEAKER_TAKE.wav")
        takes.append((int(match[1]), match[2], int(match[3]), _samples(entry, name, content)))
    takes.sort(key=lambda take: take[:3])
    return Audio(
        entry.name,
        tuple(take[3] for take in takes),
        np.array([take[0] for take in takes], dtype=np.int64),
        tuple(take[1] for take in takes),
        np.array([take[2] for take in takes], dtype=np.int64),
        tuple(str(digit) for digit in range(10)),
        _RATE_HZ,
    )


def _samples(entry: Entry, name: str, content: bytes) -> NDArray[np.int16]:
    try:
        with wave.open(io.BytesIO(content)) as file:
            form = (file.getnchannels(), file.getsampwidth(), file.getframerate())
            frames = file.readframes(file.getnframes())
    # The wave module raises RuntimeError if a chunk is longer than the file.
    except (wave.Error, EOFError, RuntimeError) as error:
        raise CorruptDataError(entry.name, f"not a WAV file: {error}", where=name) from error
    if form != (1, 2, _RATE_HZ):
        raise CorruptDataError(entry.name, "the recording is not 8 kHz, 16 bit, mono", where=name)
    return np.frombuffer(frames, dtype="<i2").astype(np.int16)
