"""Rows of ``slipstream bench micro`` on accuracy: networks trained here, as int8 firmware."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from slipstream.data import MissingDataError, get
from slipstream.errors import MissingExtraError
from slipstream.runtimes import preprocessing as pre
from slipstream.ship import ToolchainError
from slipstream.ship.export import quantize_model, write_network
from slipstream.ship.firmware import (
    Port,
    export_firmware,
    read_firmware,
    run_here,
    verify_firmware,
)
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most, not_judged
from slipstream_bench.systems.micro.models import DSCNN

_UNHEARD = 2


@dataclass(frozen=True)
class _Task:
    """A trained network in eval mode, and unseen images and classes."""

    model: nn.Module
    calibration: torch.Tensor
    images: torch.Tensor
    classes: torch.Tensor


def _trained(
    model: nn.Module, images: torch.Tensor, classes: torch.Tensor, held_back: int, epochs: int
) -> _Task:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        seen, of_seen = images[held_back:], classes[held_back:]
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        model.train()
        for _ in range(epochs):
            for batch in torch.randperm(len(seen)).split(64):
                optimizer.zero_grad()
                # Models end with a softmax: the loss takes its logarithm.
                chances = model(seen[batch]).clamp_min(1e-7)
                nn.functional.nll_loss(chances.log(), of_seen[batch]).backward()
                optimizer.step()
    return _Task(model.eval(), seen[:128], images[:held_back], classes[:held_back])


def _digits() -> _Task:
    """Train a small separable CNN on the 1,797 digits of scikit-learn."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    images = torch.tensor(found.images[order] / 16, dtype=torch.float32)[:, None]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10), nn.Softmax(1),
        )  # fmt: skip
    classes = torch.tensor(found.target[order], dtype=torch.int64)
    return _trained(model, images, classes, 450, 12)


def _words() -> _Task:
    """Train the keyword spotter on ten spoken digits (3,000 recordings of 49 frames, 10 MFCCs).

    Two other speakers are the test set.
    """
    audio = get("fsdd", all_takes=True)
    spectrum = pre.sound_pipeline(
        audio.rate_hz, frame=240, hop=160, low=20.0, high=4_000.0, coefficients=10
    )
    features = np.stack([spectrum(samples) for samples in audio.samples])
    unheard = np.isin(audio.speakers, sorted(set(audio.speakers))[:_UNHEARD])
    features = (features - features[~unheard].mean((0, 1))) / features[~unheard].std((0, 1))
    order = np.random.default_rng(0).permutation(len(features))
    order = order[np.argsort(~unheard[order], kind="stable")]
    images = torch.tensor(features[order], dtype=torch.float32)[:, None]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = DSCNN()
    return _trained(model, images, torch.tensor(audio.labels[order]), int(unheard.sum()), 6)


_TASKS: dict[str, Callable[[], _Task]] = {"digits CNN": _digits, "DS-CNN": _words}
_task = functools.cache(lambda name: _TASKS[name]())


def _codes(images: torch.Tensor, port: Port) -> list[list[np.ndarray]]:
    """Convert images for firmware: int8, NHWC, one at a time."""
    real = np.round(images.numpy() / np.float32(port.scale)) + port.zero_point
    codes = np.clip(real, -128, 127).astype(np.int8).transpose(0, 2, 3, 1)
    return [[np.ascontiguousarray(image[None])] for image in codes]


def trained_bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield accuracy lost and noise added by int8, and bytes that differ from LiteRT."""
    for name in _TASKS:
        rows = (
            f"{name}, trained: accuracy lost as firmware",
            f"{name}, trained: outputs against float",
            f"{name}, trained: output bytes that differ from LiteRT",
        )
        if not any(options.wants(bar, 60) for bar in rows):
            continue
        options.progress(rows[0])
        try:
            yield from (bar for bar in _accuracy(name, rows) if options.wants(bar.bar))
        except (MissingDataError, MissingExtraError, ToolchainError) as error:
            yield from (not_judged(bar, "", "", error.what) for bar in rows)


def _accuracy(name: str, rows: tuple[str, str, str]) -> Iterator[Bar]:
    task = _task(name)
    model = write_network(quantize_model(task.model, [task.calibration], name="trained"))
    firmware = export_firmware(model, name="trained")
    codes = _codes(task.images, firmware.interface.inputs[0])
    port = firmware.interface.outputs[0]
    with tempfile.TemporaryDirectory() as folder:
        firmware.write(Path(folder) / "fw")
        ran = run_here(firmware.sources, firmware.interface, codes, Path(folder) / "run")
        litert = verify_firmware(
            read_firmware(Path(folder) / "fw"), against="litert", inputs=codes, emulate=False
        ).places[0]
    flat = np.concatenate([outputs[0].reshape(1, -1) for outputs in ran.outputs])
    ours = (flat.astype(np.float32) - port.zero_point) * port.scale
    with torch.no_grad():
        expected = task.model(task.images).numpy()
    classes = task.classes.numpy()
    before, after = ((scores.argmax(1) == classes).mean() for scores in (expected, ours))
    noise = float(((ours - expected) ** 2).sum() / (expected**2).sum())
    count = len(classes)
    yield at_most(
        rows[0], 100 * float(before - after), 1.0, "points", n=count,
        detail=f"float {before:.2%}, int8 {after:.2%}",
    )  # fmt: skip
    yield at_least(rows[1], -10 * float(np.log10(noise)), 20, "dB", n=count, detail="all outputs")
    yield at_most(
        rows[2], litert.differing, 0, "bytes", n=count,
        detail=f"of {litert.compared:,}, on inputs it was not calibrated on",
    )  # fmt: skip
