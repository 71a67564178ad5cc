"""Loaders of published timings: training runs of MLPerf, layers of VGG-16."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

from slipstream.data._files import read_lines
from slipstream.data._find import find
from slipstream.data.catalogue import Entry
from slipstream.data.errors import CorruptDataError
from slipstream.data.kinds import (
    LayerProfile,
    ProfiledLayer,
    TrainingRuns,
    TrainingSteps,
    TrainingTimes,
)

_RUNS = re.compile(
    r"\('(?P<system>[^']+)', '(?P<benchmark>[^']+)'\) n (?P<runs>\d+) min (?P<fastest>[\d.]+) "
    r"med (?P<median>[\d.]+) max (?P<slowest>[\d.]+) olympic-mean (?P<mean>[\d.]+) s .* "
    r"gbs (?P<batch>\d+) evals \[(?P<evaluations>\d+(, \d+)*)\]"
)
_STEPS = re.compile(r"\('(?P<system>[^']+)', '(?P<benchmark>[^']+)'\) (?P<values>\{.*\})")
_SUM = re.compile(r"SUM\(avg\)\s+(?P<total>[\d.]+)")
_LAYER = re.compile(
    r"(?P<layer>[A-Za-z0-9]+)(?P<settings>\{.*?\})\[(?P<batch>\d+)\]\[?(?P<shape>[\d,]+)\]?"
    r"\s+(?P<total>[\d.]+)\s+(?P<forward>\d+)\s+(?P<backward>\d+)"
)


def mlperf_v07(entry: Entry) -> TrainingTimes:
    """Load Google's runs of MLPerf Training v0.7: times to the quality target, and step times."""
    folder = find(entry)
    runs_file, steps_file = (folder / file for file in entry.files)
    return TrainingTimes(
        entry.name,
        tuple(_runs(entry, line, runs_file) for line in read_lines(entry, runs_file)),
        tuple(_steps(entry, line, steps_file) for line in read_lines(entry, steps_file)),
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


def _runs(entry: Entry, line: str, path: Path) -> TrainingRuns:
    match = _match(_RUNS, entry, line, path)
    return TrainingRuns(
        match["system"], match["benchmark"], int(match["runs"]), float(match["fastest"]),
        float(match["median"]), float(match["slowest"]), float(match["mean"]), int(match["batch"]),
        tuple(int(count) for count in match["evaluations"].split(", ")),
    )  # fmt: skip


def _steps(entry: Entry, line: str, path: Path) -> TrainingSteps:
    match = _match(_STEPS, entry, line, path)
    try:
        # literal_eval does not run code.
        values = ast.literal_eval(match["values"])
        step_ms = values.get("step_ms")
        return TrainingSteps(
            match["system"], match["benchmark"], float(values["run_s"]), float(values["train_s"]),
            int(values["blocks"]), float(values["epochs_per_block"]),
            float(values["med_block_ms"]), float(values["first_block_ms"]), int(values["gbs"]),
            int(values["train_samples"]), None if step_ms is None else float(step_ms),
        )  # fmt: skip
    except (ValueError, SyntaxError, KeyError, TypeError, RecursionError) as error:
        raise CorruptDataError(
            entry.name, f"unexpected line: {line[:60]}", where=str(path)
        ) from error


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
