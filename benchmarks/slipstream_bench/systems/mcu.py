"""``slipstream bench mcu``: networks for microcontrollers, predicted, searched and converted.

Data are the spoken digits of `fsdd`: MFCCs of 49 frames, and two speakers that are not in the
training data. DS-CNN-M has 172 channels in 4 separable blocks (Zhang et al., arXiv 1711.07128).
Costs of networks are counted, so that they are the same on every machine.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import nn

from slipstream.data import MissingDataError, get
from slipstream.nas import Footprint, Supernet, derive_space, search_for_board
from slipstream.nas.board_search import (
    Data,
    int8_accuracy,
    limits_of,
    nearest_fit,
    train_classifier,
)
from slipstream.runtimes import preprocessing as pre
from slipstream.ship import DoesNotFitError
from slipstream.ship.boards import Board
from slipstream.ship.export import quantize_model, write_network
from slipstream.ship.firmware import export_firmware, forecast
from slipstream_bench.harness import one_thread, times_s
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most, not_judged

_INPUT = (1, 49, 10)
_BOARD = Board("stm32f446re", "cortex-m4", 128 << 10, 512 << 10, 180e6)
_RATE_CANDIDATES = 200_000
_EPOCHS, _QUICK_EPOCHS = 24, 6
_MAX_MINUTES = 15


def ds_cnn(channels: int = 172, blocks: int = 4, stride: tuple[int, int] = (2, 1)) -> nn.Module:
    """Return a seeded DS-CNN, by default DS-CNN-M; padding is TensorFlow's SAME."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers: list[nn.Module] = [
            nn.ZeroPad2d((1, 3 - stride[1], 4, 5)),
            nn.Conv2d(1, channels, (10, 4), stride, bias=False), nn.BatchNorm2d(channels),
            nn.ReLU(),
        ]  # fmt: skip
        for block in range(blocks):
            step = 2 if block == 0 and stride[1] == 1 else 1
            layers += [
                nn.Conv2d(channels, channels, 3, step, 1, groups=channels, bias=False),
                nn.BatchNorm2d(channels), nn.ReLU(),
                nn.Conv2d(channels, channels, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(),
            ]  # fmt: skip
        return nn.Sequential(
            *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(channels, 10)
        )


class _Gated(nn.Module):
    """Residual bottlenecks with gates, as in MobileNetV3."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(1, 24, 3, 2, 1), nn.Linear(24, 10)
        self.blocks = nn.Sequential(*(_Bottleneck() for _ in range(3)))

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.blocks(torch.relu(self.stem(x))).mean((2, 3)))


class _Bottleneck(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = (nn.Conv2d(24, 48, 1), nn.Conv2d(48, 48, 1),
                                         nn.Conv2d(48, 24, 1))  # fmt: skip
        self.middle = nn.Conv2d(48, 48, 5, 1, 2, groups=48)

    def forward(self, x: torch.Tensor) -> Any:
        y = torch.relu(self.middle(torch.relu(self.up(x))))
        y = y * torch.sigmoid(self.gate(y.mean((2, 3), keepdim=True)))
        return x + self.down(y)


class _Joined(nn.Module):
    """Two branches that are concatenated, then pooled and flattened."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 24, 3, 1, 1), nn.Conv2d(1, 16, 5, 1, 2)
        self.last, self.pool, self.head = nn.Conv2d(40, 32, 1), nn.MaxPool2d(4), nn.Linear(768, 10)

    def forward(self, x: torch.Tensor) -> Any:
        y = torch.cat([torch.relu(self.a(x)), torch.relu(self.b(x))], 1)
        return self.head(self.pool(torch.relu(self.last(y))).flatten(1))


_KINDS: Mapping[str, Callable[[], nn.Module]] = {
    "DS-CNN": lambda: ds_cnn(64, 4, (2, 2)), "gated residual": _Gated, "concatenation": _Joined
}  # fmt: skip


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows. Quick: 12 networks, 4 boards, no trainings; full: 60, 20, three seeds."""
    with one_thread():
        yield from _exact_rows(options)
        yield from _rate_row(options)
        yield from _refusal_row(options)
        yield from _law_rows(options)
        if options.full or options.only:
            try:
                yield from _board_rows(options)
                yield from _headline_rows(options)
            except MissingDataError as error:
                yield not_judged("spoken digits: operations of DS-CNN-M", "x", ">= 3", error.what)


@functools.cache
def _footprint(name: str, device: str = "cortex-m4") -> Footprint:
    inputs = torch.randn(8, *_INPUT, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    net = Supernet(derive_space(_KINDS[name]().eval(), inputs, channel_multiple=4))
    return Footprint(net, inputs, device=device)


def _exact_rows(options: BenchOptions) -> Iterator[Bar]:
    """Compare predictions with converted networks, exported with their own calibration."""
    rows = {
        "RAM predicted, worst error": 0.0, "RAM of many at once above that of the firmware": 0.0,
        "flash predicted, worst error": 1.0, "instructions predicted, worst error": 1.0,
        "multiply-accumulates that differ": 0.0,
    }  # fmt: skip
    if not any(options.wants(bar, 60) for bar in rows):
        return
    options.progress(next(iter(rows)))
    per_kind = 20 if options.full else 4
    found, equal = [], 0
    for name in _KINDS:
        footprint = _footprint(name)
        columns = footprint.space.sample_columns(per_kind, np.random.default_rng(0))
        many = footprint.predict_many(columns)
        inputs = torch.randn(8, *_INPUT, generator=torch.Generator().manual_seed(0))
        for n in range(per_kind):
            config = {path: int(column[n]) for path, column in columns.items()}
            predicted = footprint.predict(config)
            model = write_network(quantize_model(footprint.net.export(config), [inputs]))
            actual = forecast(export_firmware(model))
            macs = actual.firmware.program.macs
            equal += many.ram[n] == actual.ram
            found.append((
                predicted.ram / actual.ram - 1, max(0.0, many.ram[n] / actual.ram - 1),
                many.flash[n] / actual.flash - 1, many.instructions[n] / actual.instructions - 1,
                float(many.macs[n] != macs),
            ))  # fmt: skip
    worst = np.abs(found).max(0)
    worst[4] = np.sum(found, 0)[4] / 100
    details = ("", f"{equal} of {len(found)} are equal", "", "", "")
    for (bar, most), value, detail in zip(rows.items(), worst.tolist(), details, strict=True):
        if options.wants(bar):
            yield at_most(bar, 100 * value, most, "%", n=len(found), detail=detail)


def _rate_row(options: BenchOptions) -> Iterator[Bar]:
    bar = "candidates predicted per second"
    if options.wants(bar, 15):
        options.progress(bar)
        footprint = _footprint("DS-CNN")
        columns = footprint.space.sample_columns(_RATE_CANDIDATES, np.random.default_rng(0))
        footprint.predict_many(columns)
        seconds = min(times_s(lambda: footprint.predict_many(columns), 3))
        yield at_least(bar, _RATE_CANDIDATES / seconds / 1e3, 200, "k/s", n=3)


def _refusal_row(options: BenchOptions) -> Iterator[Bar]:
    bar = "seconds to name the nearest change that fits"
    if options.wants(bar, 15):
        options.progress(bar)
        footprint = _footprint("DS-CNN")
        began = time.process_time()
        limits = {"instructions": 0.3 * footprint.predict({}, plan_s=0.0).instructions}
        config = nearest_fit(footprint, limits)
        assert config is not None
        yield at_most(bar, time.process_time() - began, 2.0, "s", detail="CPU time, once traced")


def _law_rows(options: BenchOptions) -> Iterator[Bar]:
    """Compare instructions with a law that is linear in multiply-accumulates, as in MicroNets."""
    bar = "instructions: median error of a law linear in multiply-accumulates over ours"
    if options.wants(bar, 15):
        options.progress(bar)
        footprint = _footprint("DS-CNN")
        many = footprint.predict_many(footprint.space.sample_columns(500, np.random.default_rng(0)))
        macs = np.stack([many.macs, np.ones_like(many.macs)], 1).astype(float)
        line = macs @ np.linalg.lstsq(macs, many.instructions.astype(float), rcond=None)[0]
        error = float(np.median(np.abs(line / many.instructions - 1)))
        rank = float(spearmanr(many.macs, many.instructions).statistic)
        yield Bar(
            bar, 100 * error, "%", "reported", None, 500,
            detail=f"`bench micro` has our own error; rank correlation {rank:.3f}",
        )  # fmt: skip


@functools.cache
def _words(seed: int) -> tuple[Data, Data, Data]:
    """Return training, validation and test data; the test speakers are in neither other."""
    audio = get("fsdd", all_takes=True)
    spectrum = pre.sound_pipeline(
        audio.rate_hz, frame=240, hop=160, low=20.0, high=4_000.0, coefficients=10
    )
    features = np.stack([spectrum(samples) for samples in audio.samples])
    speakers = np.array(audio.speakers)
    test = np.isin(speakers, sorted(set(audio.speakers))[2 * seed : 2 * seed + 2])
    valid = ~test & (audio.repetitions % 10 == 0)
    rest = ~test & ~valid
    features = (features - features[rest].mean((0, 1))) / features[rest].std((0, 1))
    images = torch.tensor(features, dtype=torch.float32)[:, None]
    labels = torch.tensor(audio.labels)
    train, held_back, unheard = ((images[mask], labels[mask]) for mask in (rest, valid, test))
    return train, held_back, unheard


def _shifted(x: torch.Tensor) -> torch.Tensor:
    return torch.roll(x, int(torch.randint(-4, 8, ())), 2) + 0.1 * torch.randn_like(x)


def _board_rows(options: BenchOptions) -> Iterator[Bar]:
    """Search for random boards with few trainings, and convert the results."""
    count = 20 if options.full else 4
    rows = ("random boards: results that fit after conversion", "trainings of networks that do not"
            " fit")  # fmt: skip
    if not any(options.wants(bar, 60 * count) for bar in rows):
        return
    rng = np.random.default_rng(0)
    train, valid = ((images[:256], labels[:256]) for images, labels in _words(0)[:2])
    fit = trained = misfits = refused = 0
    for number in range(count):
        options.progress(f"{rows[0]}, {number + 1} of {count}")
        board = Board("random", "cortex-m4", int(rng.integers(8, 48)) << 10,
                      int(rng.integers(24, 128)) << 10, 100e6)  # fmt: skip
        limit_ms = float(rng.uniform(40, 300))
        try:
            found = search_for_board(
                ds_cnn(96), train, valid, board=board, latency_ms=limit_ms, budget="2", epochs=1,
                seed=number,
            )  # fmt: skip
        except DoesNotFitError:
            refused += 1
            continue
        fit += found.fit.fits
        limits = limits_of(board, limit_ms)
        for trial in found.study.trials:
            if "accuracy" in trial.values:
                trained += 1
                misfits += any(trial.values[name] > limit for name, limit in limits.items())
    searched = count - refused
    if options.wants(rows[0]):
        yield at_least(
            rows[0], fit, searched, f"of {searched}", n=count,
            detail=f"{refused} boards were refused before any training",
        )  # fmt: skip
    if options.wants(rows[1]):
        yield at_most(rows[1], misfits, 0, "", n=trained)


def _headline_rows(options: BenchOptions) -> Iterator[Bar]:
    """Search spoken digits for a third of DS-CNN-M's operations."""
    seeds = 3 if options.full else 1
    epochs = _EPOCHS if options.full else _QUICK_EPOCHS
    rows = (
        "spoken digits: operations of DS-CNN-M over those of the network found",
        "spoken digits: accuracy over DS-CNN-M's", "spoken digits: CPU minutes of a search",
        "spoken digits: accuracy over random networks that fit", "accuracy lost as int8",
    )  # fmt: skip
    if not any(options.wants(bar, 600 * seeds) for bar in rows):
        return
    found = []
    for seed in range(seeds):
        options.progress(f"{rows[0]}, seed {seed}")
        found.append(_headline(seed, epochs, "26" if options.full else "6"))
    ratio, gained, minutes, lucky, lost = np.array(found).T
    means = ", ".join(f"{100 * value:+.1f}" for value in gained)
    limit = "latency of DS-CNN-M / 2.5 at most; / 3.3 in the first version of this row"
    results = (
        at_least(rows[0], float(ratio.min()), 3, "x", n=seeds, detail=limit),
        at_least(rows[1], 100 * float(gained.mean()), 0, "points", n=seeds, detail=means),
        at_most(rows[2], float(minutes.max()), _MAX_MINUTES, "min", n=seeds),
        at_least(rows[3], 100 * float(np.median(lucky)), 1, "points", n=seeds, detail="median"),
        at_most(rows[4], 100 * float(lost.max()), 1, "points", n=seeds),
    )
    yield from (bar for bar in results if options.wants(bar.bar))


def _headline(seed: int, epochs: int, trials: str) -> tuple[float, ...]:
    """Return the ratio of operations, accuracy gained, minutes, gain over luck, and int8's loss."""
    train, valid, test = _words(seed)
    whole = ds_cnn()
    train_classifier(whole, train, epochs, seed=seed, augment=_shifted)
    net = Supernet(derive_space(ds_cnn(), train[0][:2], channel_multiple=4))
    footprint = Footprint(net, train[0][:128])
    full = footprint.predict({}, plan_s=0.0)
    limit_ms = _BOARD.latency_ms(full.instructions) / 2.5
    began = time.process_time()
    found = search_for_board(
        ds_cnn(), train, valid, board=_BOARD, latency_ms=limit_ms, budget=trials, epochs=epochs,
        augment=_shifted, seed=seed,
    )  # fmt: skip
    minutes = (time.process_time() - began) / 60
    macs = found.fit.forecast.firmware.program.macs
    random = _random(footprint, macs, seed)
    train_classifier(random, train, epochs, seed=seed, augment=_shifted)
    ours = int8_accuracy(found.module, test)
    return (
        full.firmware.program.macs / macs, ours - int8_accuracy(whole, test), minutes,
        ours - int8_accuracy(random, test), _float_accuracy(found.module, test) - ours,
    )  # fmt: skip


def _random(footprint: Footprint, macs: int, seed: int) -> Any:
    """Return a random network with nearly this many operations."""
    columns = footprint.space.sample_columns(4096, np.random.default_rng(seed))
    at = int(np.argmin(np.abs(footprint.predict_many(columns).macs - macs)))
    return footprint.net.export({path: int(column[at]) for path, column in columns.items()})


def _float_accuracy(module: nn.Module, data: Data) -> float:
    with torch.no_grad():
        return float((module.eval()(data[0]).argmax(1) == data[1]).float().mean())
