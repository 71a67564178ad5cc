"""``slipstream bench xray``: preprocessing bugs and bad layers that are named, and the cost.

Inputs are photographs of the ImageNet sample, through two pipelines: floats [3, 224, 224] for a
classifier, and int8 codes [96, 96, 3] for a microcontroller's network; spoken digits, as MFCCs in
int8 codes [49, 10, 1] (the front end of MLPerf Tiny's keyword network); and film reviews, as ids of
word pieces [32].
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slipstream.data import MissingDataError, get
from slipstream.errors import MissingExtraError
from slipstream.runtimes import preprocessing as pre
from slipstream.ship import xray
from slipstream.ship.xray.statistics import Array, canonical, measured
from slipstream_bench.harness import one_thread, paired
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most, not_judged
from slipstream_bench.systems.stability.models import (
    efficientnet_lite0,
    exported,
    imagenet,
    int8_by_onnxruntime,
)

_FRAMES = 6
_IMAGENET = pre.Normalise((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
# Wrong settings of a stage of each kind: (kind, settings).
_OF_IMAGES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("channels", {"colours": "BGR"}), ("channels", {"colours": "grey"}), ("orient", {"turn": 90}),
    ("orient", {"turn": 180}), ("orient", {"mirror": True}), ("scale", {"low": -1.0, "high": 1.0}),
    ("scale", {"low": -0.5, "high": 0.5}), ("crop", {"shape": "whole", "share": 0.875}),
    ("crop", {"shape": "pad", "share": 0.875}), ("resize", {"method": "nearest"}),
    ("resize", {"method": "bilinear", "antialias": False}), ("layout", {"misread": True}),
    ("normalise", {"mean": _IMAGENET.mean, "std": _IMAGENET.std}), ("colour", {"gamma": 2.2}),
)  # fmt: skip
_OF_SOUND: tuple[tuple[str, dict[str, Any]], ...] = (
    ("waveform", {"resample": "ignored"}), ("waveform", {"resample": "linear"}),
    ("signal", {"units": "int16"}), ("signal", {"units": "peak"}), ("signal", {"emphasis": 0.97}),
    ("length", {"pad": "start"}), ("spectrum", {"window": "rectangular"}),
    ("spectrum", {"power": 1}), ("bands", {"scale": "linear"}), ("bands", {"high": 8_000.0}),
    ("log", {"kind": "none"}),
    ("log", {"kind": "log10"}), ("cepstrum", {"orthogonal": False}), ("arrange", {"misread": True}),
)  # fmt: skip
_OF_TEXT: tuple[tuple[str, dict[str, Any]], ...] = (
    ("read", {"encoding": "latin-1"}), ("read", {"encoding": "ascii"}),
    ("casing", {"case": "keep"}), ("casing", {"accents": True}),
    ("split", {"marks": "attached"}), ("split", {"marks": "dropped"}),
    ("vocabulary", {"offset": 1}), ("vocabulary", {"alphabetical": True}),
    ("vocabulary", {"pieces": False}), ("sequence", {"first": -1, "last": -1}),
    ("sequence", {"side": "start"}), ("sequence", {"pad": 1}), ("sequence", {"keep": "end"}),
    ("sequence", {"late": True}),
)  # fmt: skip
_SINGLE, _PAIRS = "14 single bugs of 4 models, named first", "40 random pairs of bugs, named first"
_CLEAN, _LAYER = "causes named in clean runs", "a planted bad layer, ranked first"
_FLOAT = "accuracy short of float's, a few layers of int8 EfficientNet-Lite0 in float"
_IO = "recording inputs and outputs over plain"
_COST, _SIZE, _SPEED = "recording over plain", "log of an image, stats", "100 frames x 94 layers"


@dataclass(frozen=True)
class _App:
    """A model's preprocessing, its inputs, and its bugs."""

    name: str
    pipeline: pre.Pipeline
    raws: Sequence[Any]
    bugs: tuple[tuple[str, dict[str, Any]], ...]

    def wrong(self, kind: str, settings: dict[str, Any]) -> pre.Pipeline:
        """Return its pipeline with one changed stage."""
        whole = self.pipeline.completed()
        stage = next(candidate for candidate in whole.stages if candidate.name == kind)
        return whole.with_stage(stage.changed(**settings))

    def seen(self, pipeline: pre.Pipeline) -> Array:
        return measured([canonical(pipeline(raw)[None]) for raw in self.raws])

    def named(self, wrong: pre.Pipeline) -> bool:
        """Return whether the explanation reproduces the bug's effect bit for bit, or finds none."""
        seen = self.seen(wrong)
        found = xray.explain(seen, self.raws, self.pipeline)
        if found.pipeline is None or not found.fix:
            return False
        return bool((self.seen(found.pipeline)["hash"] == seen["hash"]).all())


def _apps(photographs: Sequence[bytes]) -> list[_App]:
    """Return four models' preprocessing.

    Raises:
        MissingDataError: recordings or sentences are not on this machine.
    """
    classifier = pre.image_pipeline(
        224, value_range=(0.0, 255.0), mean=(127.0,) * 3, std=(128.0,) * 3
    )
    codes = pre.image_pipeline(
        96, crop=1.0, method="bilinear", layout="HWC", dtype="int8", scale=1 / 255, zero_point=-128
    )
    spoken = get("fsdd").samples
    keywords = pre.sound_pipeline(
        16_000, frame=480, hop=320, low=20.0, high=4_000.0, coefficients=10, channel="last",
        dtype="int8", scale=0.58, zero_point=83,
    ).with_stage(pre.Waveform(16_000, raw_rate=8_000))  # fmt: skip
    reviews = get("sst", limit=2_000)
    said = [tree.sentence for tree in reviews.train]
    # Non-ASCII characters, and texts that are too long and too short: otherwise some bugs have no
    # effect.
    chosen = sorted(said, key=lambda text: (text.isascii(), -len(text)))[:3]
    chosen += sorted(said, key=len)[len(said) // 20 :][:3]
    vocabulary = pre.vocabulary_of(said, 2_000)
    images = photographs[:_FRAMES]
    return [
        _App("classifier", classifier, images, _OF_IMAGES),
        _App("int8 network", codes, images, _OF_IMAGES),
        _App("keywords", keywords, spoken[:: len(spoken) // _FRAMES][:_FRAMES], _OF_SOUND),
        _App("sentences", pre.text_pipeline(vocabulary, 32), chosen, _OF_TEXT),
    ]


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows. Quick: fewer pairs, clean runs and planted layers."""
    try:
        photographs = get("imagenet_sample", decode=False, limit=120).files
        apps = _apps(photographs)
    except MissingDataError as error:
        yield not_judged(_SINGLE, "%", "100", error.what)
        return
    yield from _causes(options, apps)
    if options.wants(_CLEAN):
        options.progress(_CLEAN)
        yield _clean(options, apps, photographs)
    if options.wants(_LAYER):
        yield _planted(options)
    if options.wants(_FLOAT, 240.0):
        yield _float_set(options)
    yield from _costs(options)


def _causes(options: BenchOptions, apps: Sequence[_App]) -> Iterator[Bar]:
    if options.wants(_SINGLE):
        missed = []
        for app in apps:
            for number, bug in enumerate(app.bugs):
                options.progress(f"{app.name}: bug {number + 1} of {len(app.bugs)}")
                if not app.named(app.wrong(*bug)):
                    missed.append(f"{app.name}: {bug}")
        count = sum(len(app.bugs) for app in apps)
        value = 100 * (count - len(missed)) / count
        detail = "; ".join(missed)[:200] or ", ".join(app.name for app in apps)
        yield at_least(_SINGLE, value, 100, "%", n=count, detail=detail)
    if options.wants(_PAIRS):
        rng = np.random.default_rng(0)
        count, missed = 40 if options.full else 8, []
        for number in range(count):
            options.progress(f"pair {number + 1} of {count}")
            app = apps[number % len(apps)]
            chosen = _pair(app, rng)
            if not app.named(chosen.pipeline):
                missed.append(f"{app.name}: {chosen.text}")
        value = 100 * (count - len(missed)) / count
        yield at_least(_PAIRS, value, 90, "%", n=count, detail="; ".join(missed)[:200])


def _pair(app: _App, rng: np.random.Generator) -> pre.Variation:
    """Draw two changed stages, each of which changes these inputs, but not their size."""
    right = app.seen(app.pipeline)
    singles = list(app.pipeline.variations())
    while True:
        first, second = (singles[n] for n in rng.choice(len(singles), 2, replace=False))
        both = list(app.pipeline.pairs([first, second]))
        if not both:
            continue
        results = [app.seen(variation.pipeline) for variation in (first, second, both[0])]
        sizes = all((result["elements"] == right["elements"]).all() for result in results)
        changed = all((result["hash"] != right["hash"]).any() for result in results)
        if sizes and changed:
            return both[0]


def _clean(options: BenchOptions, apps: Sequence[_App], photographs: Sequence[bytes]) -> Bar:
    rng = np.random.default_rng(1)
    count, named = 200 if options.full else 20, 0
    spoken = get("fsdd").samples
    for number in range(count):
        sound = number % 4 == 3
        app, raws = (apps[2], spoken) if sound else (apps[0], photographs)
        some = [raws[n] for n in rng.choice(len(raws), _FRAMES, replace=False)]
        samples = [
            _torch_spectrum(app.pipeline, raw) if sound else _other(app.pipeline, raw, number % 4)
            for raw in some
        ]
        seen = measured([canonical(sample[None]) for sample in samples])
        kind = xray.explain(seen, some, app.pipeline).kind
        named += kind in ("preprocessing", "unexplained")
    detail = "torch's resize, bf16, float32 in another order, torch's Fourier transform in float32"
    return at_most(_CLEAN, 100 * named / count, 1, "%", n=count, detail=detail)


def _torch_spectrum(pipeline: pre.Pipeline, raw: Array) -> Array:
    """Compute cepstral coefficients from a spectrum by torch, in float32."""
    at = next(n for n, stage in enumerate(pipeline.stages) if isinstance(stage, pre.Spectrum))
    spectrum = pipeline.stages[at]
    assert isinstance(spectrum, pre.Spectrum)
    x = torch.from_numpy(pre.Pipeline(pipeline.stages[:at])(raw))
    frames = x.unfold(0, spectrum.frame, spectrum.hop) * torch.hann_window(spectrum.frame)
    power = torch.fft.rfft(frames, spectrum.size).abs().square().numpy()
    return pre.Pipeline(pipeline.stages[at + 1 :])(power)


def _other(pipeline: pre.Pipeline, raw: bytes, kind: int) -> Array:
    """Return the correct input, by another library, in another precision, or in another order."""
    if kind == 1:
        return np.asarray(torch.from_numpy(pipeline(raw)).bfloat16().float().numpy())
    traced = pipeline.trace(raw)
    image = traced["resize"].astype(np.float32)
    if kind == 0:
        cropped = torch.from_numpy(traced["crop"].transpose(2, 0, 1)[None].copy()).float()
        size = image.shape[:2]
        resized = torch.nn.functional.interpolate(cropped, size, mode="bicubic", antialias=True)
        image = resized.clamp(0, 255).round()[0].numpy().transpose(1, 2, 0)
    return np.ascontiguousarray(
        (image * np.float32(1 / 128) - np.float32(127 / 128)).transpose(2, 0, 1)
    )


def _network(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    layers: list[torch.nn.Module] = []
    for number in range(20):
        layers += [torch.nn.Conv2d(3 if not number else 12, 12, 3, padding=1), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers).eval()


def _planted(options: BenchOptions) -> Bar:
    """Multiply weights of one layer by 4, in networks whose other weights are rounded to 8 bits."""
    options.progress(_LAYER)
    count = 100 if options.full else 20
    first = by_sum = 0
    inputs = np.random.default_rng(0).normal(size=(3, 3, 24, 24)).astype(np.float32)
    for number in range(count):
        seed, place = divmod(number, 20)
        reference, deployed = _network(seed), _network(seed)
        with torch.no_grad():
            for layer in deployed:
                if isinstance(layer, torch.nn.Conv2d):
                    scale = layer.weight.abs().max() / 127
                    layer.weight.copy_((layer.weight / scale).round() * scale)
            deployed[2 * place].weight.mul_(4)  # type: ignore[operator]
        found = xray.layer_errors(reference, deployed, inputs)
        expected = {str(2 * place), str(2 * place + 1)}
        first += found[0].name in expected
        by_sum += max(found, key=lambda layer: layer.cumulative).name in expected
    detail = f"by cumulative drift {100 * by_sum / count:.0f} %"
    return at_least(_LAYER, 100 * first / count, 95, "%", n=count, detail=detail)


def _float_set(options: BenchOptions) -> Bar:
    """Keep at most 15 % of the layers in float, in at most 12 evaluations of accuracy."""
    if not options.full:
        return not_judged(_FLOAT, "points", "<= 0.5", "two hundred photographs: needs --full")
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            imagenet(250) as (_, scenes, pipeline),
        ):
            samples = pipeline.batch([scenes[n] for n in range(len(scenes))])
            judged = np.arange(len(samples)) % 5 > 0
            path = exported(efficientnet_lite0(), Path(folder) / "net.onnx")
            deployed = int8_by_onnxruntime(path, samples[~judged])
            assert scenes.labels is not None
            found = xray.bisect(
                str(path), str(deployed), samples[judged], scenes.labels[judged],
                report=options.progress,
            )  # fmt: skip
    except (MissingDataError, MissingExtraError) as error:
        return not_judged(_FLOAT, "points", "<= 0.5", error.what)
    share = len(found.keep or ()) / len(found.ranking)
    short = 100 * (found.reference - found.after)
    detail = (
        f"{len(found.keep or ())} of {len(found.ranking)} layers, {found.evaluations} evaluations; "
        f"float {found.reference:.1%}, int8 {found.before:.1%}, mixed {found.after:.1%}"
    )
    few = found.keep is not None and share <= 0.15 and found.evaluations <= 12
    return Bar(
        _FLOAT, short, "points", "<= 0.5", few and short <= 0.5, int(judged.sum()), detail, 0.5
    )


def _costs(options: BenchOptions) -> Iterator[Bar]:
    with tempfile.TemporaryDirectory() as folder:
        if any(options.wants(bar) for bar in (_COST, _IO, _SIZE)):
            yield from _overhead(Path(folder))
        if options.wants(_SPEED):
            wide = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(94)]).eval()
            for name in ("a.xr", "b.xr"):
                with xray.record(Path(folder) / name) as recorder:
                    for seed in range(100):
                        x = np.random.default_rng(seed).normal(size=(1, 64)).astype(np.float32)
                        recorder.run(wide, x)
            began = time.process_time()
            found = xray.compare(Path(folder) / "a.xr", Path(folder) / "b.xr")
            taken = time.process_time() - began
            detail = f"{len(found.layers)} layers matched; CPU seconds"
            yield at_most(_SPEED, taken, 5, "s", detail=detail)


def _overhead(folder: Path) -> Iterator[Bar]:
    try:
        path = exported(efficientnet_lite0(), folder / "net.onnx")
    except MissingExtraError as error:
        yield not_judged(_COST, "x", "<= 2", error.what)
        return
    x = np.random.default_rng(0).normal(size=(1, 3, 224, 224)).astype(np.float32)
    plain, every = xray.record(folder / "none.xr", "none"), xray.record(folder / "stats.xr")
    ends = xray.record(folder / "io.xr", "io")
    model = str(path)
    with one_thread():
        taken = paired({
            "stats": lambda: every.run(model, x), "plain": lambda: plain.run(model, x),
            "io": lambda: ends.run(model, x),
        }, blocks=20)  # fmt: skip
    every.close()
    ends.close()
    yield taken.ratio("stats", "plain").at_most(
        _COST, 2.0, detail="EfficientNet-Lite0, ONNX Runtime"
    )
    yield taken.ratio("io", "plain").at_most(_IO, 1.05, detail="EfficientNet-Lite0, ONNX Runtime")
    size = (folder / "stats.xr").stat().st_size / every.frames / 1000
    yield at_most(_SIZE, size, 150, "kB", n=every.frames, detail="EfficientNet-Lite0, 224x224")
