"""Loader of published timings: layers of VGG-16."""

from __future__ import annotations

import json
import re
from pathlib import Path

from slipstream.data._files import read_lines
from slipstream.data._find import find
from slipstream.data.catalogue import Entry
from slipstream.data.errors import CorruptDataError
from slipstream.data.kinds import LayerProfile, ProfiledLayer

_SUM = re.compile(r"SUM\(avg\)\s+(?P<total>[\d.]+)")
_LAYER = re.compile(
    r"(?P<layer>[A-Za-z0-9]+)(?P<settings>\{.*?\})\[(?P<batch>\d+)\]\[?(?P<shape>[\d,]+)\]?"
    r"\s+(?P<total>[\d.]+)\s+(?P<forward>\d+)\s+(?P<backward>\d+)"
)


def profiles(entry: Entry) -> LayerProfile:
    """Load VGG-16 on an NVIDIA A100: forward and backward times of each layer in isolation."""
    path = find(entry) / entry.files[0]
    layers: list[ProfiledLayer] = []
    step_ms: dict[int, float] = {}
    for line in read_lines(entry, path):
        # A sum ends the layers of one batch size.
        total = _SUM.fullmatch(line)
        if total and layers:
            step_ms[layers[-1].batch] = float(total["total"])
        else:
            layers.append(_layer(entry, line, path))
    return LayerProfile(entry.name, "NVIDIA A100", tuple(layers), step_ms)


def _match(pattern: re.Pattern[str], entry: Entry, line: str, path: Path) -> re.Match[str]:
    match = pattern.fullmatch(line)
    if match is None:
        raise CorruptDataError(entry.name, f"unexpected line: {line[:60]}", where=str(path))
    return match


def _layer(entry: Entry, line: str, path: Path) -> ProfiledLayer:
    match = _match(_LAYER, entry, line, path)
    try:
        settings = json.loads(match["settings"])
    except ValueError as error:
        raise CorruptDataError(entry.name, "settings are not JSON", where=str(path)) from error
    return ProfiledLayer(
        match["layer"],
        settings,
        int(match["batch"]),
        tuple(int(length) for length in match["shape"].split(",") if length),
        float(match["total"]),
        int(match["forward"]),
        int(match["backward"]),
    )
