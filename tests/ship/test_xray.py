"""Logs of deployed models: their contents, comparison, and damaged files."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from slipstream.codegen import why_no_compiler
from slipstream.errors import InvalidArgumentError, UnknownNameError
from slipstream.runtimes import ModelError
from slipstream.runtimes import preprocessing as pre
from slipstream.runtimes.taps import open_tap
from slipstream.ship import xray
from slipstream.ship.xray import explaining, statistics
from slipstream.ship.xray.log import Log
from slipstream.ship.xray.statistics import STATISTICS, Array, canonical, measured

PIPELINE = pre.image_pipeline(24, mean=(0.48, 0.45, 0.4), std=(0.2, 0.25, 0.3))


def images(count: int = 6) -> list[Array]:
    """Return smooth colours that differ between directions and channels: uint8 [H, W, 3]."""
    found = []
    for seed in range(count):
        rng = np.random.default_rng(seed)
        y, x = np.mgrid[:50, :70]
        a, b = rng.uniform(1, 3, 2)
        planes = np.stack([a * x, b * y, 128 + 90 * np.sin(x / (5 + seed)) * (y > 20)], -1)
        found.append(np.clip(planes + rng.normal(0, 8, planes.shape), 0, 255).astype(np.uint8))
    return found


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 12, 3, stride=2), nn.ReLU(),
        nn.Conv2d(12, 12, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 5),
    ).eval()  # fmt: skip


@pytest.fixture(scope="module")
def onnx_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("onnx")
    path = tmp_path_factory.mktemp("model") / "net.onnx"
    names: dict[str, Any] = {"input_names": ["x"], "output_names": ["y"]}
    torch.onnx.export(
        network(), (torch.zeros(1, 3, 24, 24),), str(path), dynamo=False, verbose=False,
        dynamic_axes={"x": {0: "N"}, "y": {0: "N"}}, **names,
    )  # fmt: skip
    return path


def recorded(
    path: Path, model: Any, pipeline: pre.Pipeline = PIPELINE, level: Any = "stats", **options: Any
) -> Path:
    with xray.record(path, level, preprocessing=pipeline, **options) as rec:
        for raw in images():
            rec.run(model, pipeline(raw)[None], raw=raw)
    return path


@pytest.mark.parametrize("shape", [(24, 7, 9), (1000,), (3, 5, 5), (17, 1), (5,), (16, 40, 40)])
def test_c_header_and_numpy_agree(shape: tuple[int, ...]) -> None:
    if why_no_compiler():
        pytest.skip("no compiler")
    tensor = np.random.default_rng(0).normal(2, 3, shape).astype(np.float32)
    tensor.flat[3] = np.nan
    ours, plain = measured([tensor]), np.zeros(1, STATISTICS)
    statistics.measure_plain(tensor, plain)
    for name in STATISTICS.names or ():
        a, b = (side[name].astype(np.float64) for side in (ours, plain))
        assert np.allclose(a, b, rtol=1e-3, atol=1e-2), name
    assert ours["nonfinite"] == 1


def test_projections_estimate_a_distance() -> None:
    rng = np.random.default_rng(1)
    ratios = []
    for _ in range(30):
        a = rng.normal(size=(8, 20, 20)).astype(np.float32)
        b = a + 0.1 * rng.normal(size=a.shape).astype(np.float32)
        difference = np.diff(measured([a, b])["projections"].astype(np.float64), axis=0)
        ratios.append(np.sqrt(np.square(difference).sum() / np.square(a - b).sum()))
    assert abs(np.mean(ratios) - 1) < 0.05
    assert np.std(ratios) < 0.25


@pytest.mark.parametrize("level", ["io", "stats", "layers", "full"])
def test_log_contents_depend_on_the_level(level: Any, tmp_path: Path, onnx_file: Path) -> None:
    log = Log.read(recorded(tmp_path / "a.xr", str(onnx_file), level=level))
    frames = list(log.frames())
    assert (log.count, len(frames), log.damage) == (6, 6, "")
    layers = [n for n, layer in enumerate(log.layers) if layer.kind not in ("input", "output")]
    assert len(layers) == 5
    assert bool((frames[2].statistics["elements"][layers] > 0).all()) == (level != "io")
    assert (0 in frames[0].tensors) == (level in ("layers", "full"))
    assert ("raw_bytes" in frames[0].facts) == (level == "full")
    if level == "layers":
        assert np.array_equal(frames[1].tensors[0][0], PIPELINE(images()[1]))


def test_matches_layers_of_torch_and_onnx(tmp_path: Path, onnx_file: Path) -> None:
    ours = recorded(tmp_path / "torch.xr", network())
    theirs = recorded(tmp_path / "onnx.xr", str(onnx_file))
    found = xray.compare(ours, theirs)
    assert found.cause.kind == "equal"
    assert found.coverage == 1.0
    assert len(found.layers) == 5
    assert max(layer.drift for layer in found.layers) < 1e-4
    assert found.flips == 0
    assert not found.failures


@pytest.mark.parametrize(
    ("bug", "stage"),
    [
        (pre.Channels("BGR"), "channels"), (pre.Orient(90), "orient"),
        (pre.Scale(-1.0, 1.0), "scale"),
        (pre.Crop(shape="whole"), "crop"), (pre.Resize(24, 24, "nearest"), "resize"),
    ],
)  # fmt: skip
def test_names_and_fixes_a_preprocessing_bug(
    bug: pre.Stage, stage: str, tmp_path: Path, onnx_file: Path
) -> None:
    wrong = PIPELINE.with_stage(bug)
    edge = recorded(tmp_path / "edge.xr", str(onnx_file), wrong, level="full")
    ref = xray.replay(edge, str(onnx_file), tmp_path / "ref.xr", preprocessing=PIPELINE)
    found = xray.compare(ref, edge)
    assert found.cause.stages == (stage,)
    assert found.cause.pipeline is not None
    assert np.array_equal(found.cause.pipeline(images()[0]), wrong(images()[0]))
    assert found.fix
    assert any("inputs differ" in note for note in found.notes)


def test_names_two_bugs_and_affine_changes(tmp_path: Path) -> None:
    raws = images()
    both = PIPELINE.with_stage(pre.Channels("BGR")).with_stage(pre.Orient(180))

    def cause(samples: list[Array]) -> xray.Cause:
        return xray.explain(
            measured([canonical(sample[None]) for sample in samples]), raws, PIPELINE
        )

    assert set(cause([both(raw) for raw in raws]).stages) == {"channels", "orient"}
    odd = cause([np.float32(1.7) * PIPELINE(raw) + np.float32(0.3) for raw in raws])
    assert odd.kind == "preprocessing"
    assert "times (1.7" in odd.text
    noise = np.random.default_rng(0)
    harmless = cause([PIPELINE(r) + noise.normal(0, 0.005, (3, 24, 24)).astype("f4") for r in raws])
    assert harmless.kind == "harmless"
    strange = cause([noise.normal(0, 1, (3, 24, 24)).astype("f4") for _ in raws])
    assert strange.kind == "unexplained"


@pytest.mark.parametrize(
    "bugs",
    [
        (pre.Channels("BGR"), pre.Orient(180), pre.Scale(-1.0, 1.0)),
        (pre.Channels("BGR"), pre.Orient(90), pre.Crop(shape="whole")),
    ],
)  # fmt: skip
def test_names_three_simultaneous_bugs(bugs: tuple[pre.Stage, ...]) -> None:
    raws, wrong = images(), PIPELINE
    for bug in bugs:
        wrong = wrong.with_stage(bug)
    statistics = measured([canonical(wrong(raw)[None]) for raw in raws])
    found = xray.explain(statistics, raws, PIPELINE)
    assert sorted(found.stages) == sorted(bug.name for bug in bugs), found.text
    assert found.pipeline is not None
    assert np.array_equal(found.pipeline(raws[0]), wrong(raws[0]))


@pytest.mark.parametrize("axes", ["CHW", "HWC"])
def test_a_fix_differs_from_the_faulty_line(axes: Any) -> None:
    raws, right = images(), pre.image_pipeline(24, layout=axes)
    wrong = right.with_stage(pre.Layout(axes, misread=True))
    found = xray.explain(measured([canonical(wrong(raw)[None]) for raw in raws]), raws, right)
    assert found.stages == ("layout",)
    replaced, fix = found.fix.splitlines()
    code = replaced.removeprefix("# instead of: ")
    assert code != fix
    # Each line computes its stage.
    before = dict(right.trace(raws[0]))["normalise"]
    for line, stage in ((code, pre.Layout(axes, misread=True)), (fix, pre.Layout(axes))):
        names = {"x": before}
        exec(line, names)
        assert np.array_equal(names["x"], stage(before))


def test_no_fix_repeats_the_faulty_line() -> None:
    for variation in PIPELINE.variations():
        lines = explaining._fix(variation).splitlines()
        replaced = {line.removeprefix("# instead of: ") for line in lines if line.startswith("#")}
        assert replaced, variation.text
        assert replaced != {line for line in lines if not line.startswith("#")}, variation.text


@pytest.mark.parametrize(
    ("reference", "deployed", "words"),
    [(1, 2, "applied twice"), (2, 1, "twice in the reference"), (0, 1, "both sides"),
     (1, 0, "lacks"), (1, 1, "")],
)  # fmt: skip
def test_notes_a_doubled_or_missing_softmax(
    reference: int, deployed: int, words: str, tmp_path: Path
) -> None:
    for name, count in (("a", reference), ("b", deployed)):
        model = nn.Sequential(network(), *(nn.Softmax(1) for _ in range(count))).eval()
        recorded(tmp_path / f"{name}.xr", model)
    notes = [n for n in xray.compare(tmp_path / "a.xr", tmp_path / "b.xr").notes if "softmax" in n]
    assert len(notes) == bool(words)
    assert all(words in note for note in notes)


def test_explains_from_inputs_without_raw_ones(tmp_path: Path, onnx_file: Path) -> None:
    ref = recorded(tmp_path / "ref.xr", str(onnx_file), level="layers")
    with xray.record(tmp_path / "edge.xr") as rec:
        for raw in images():
            rec.run(str(onnx_file), PIPELINE.with_stage(pre.Channels("BGR"))(raw)[None])
    found = xray.compare(ref, tmp_path / "edge.xr")
    # Means in another order remain as factors per channel.
    assert found.cause.stages == ("channels", "normalise")
    assert any(re.search(r"\braw inputs\b.*\braws=", note) for note in found.notes)


def test_detects_swapped_inputs(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        with xray.record(tmp_path / f"{name}.xr") as rec:
            for seed in range(5):
                rng = np.random.default_rng(seed)
                pair = [rng.normal(size=(1, 9)).astype(np.float32) for _ in range(2)]
                rec.run(np.subtract, *(pair if name == "a" else pair[::-1]))
    # A function declares no inputs before it runs, so both logs name them by number.
    found = xray.compare(tmp_path / "a.xr", tmp_path / "b.xr")
    assert "inputs are swapped" in found.cause.text
    assert found.fix == "inputs = [inputs[n] for n in [1, 0]]"


def planted(place: int) -> nn.Module:
    net = network()
    with torch.no_grad():
        net[place].weight.mul_(1.5)  # type: ignore[union-attr,operator]
    return net


@pytest.mark.parametrize("place", [0, 2, 4, 8])
def test_ranks_the_faulty_layer_first(place: int) -> None:
    inputs = PIPELINE.batch(images())
    found = xray.layer_errors(network(), planted(place), inputs)
    assert found[0].name == str(place)
    assert found[1].introduced < 1e-6
    bisected = xray.bisect(network(), planted(place), inputs)
    assert bisected.reference == 1.0
    assert bisected.after >= 0.995
    assert bisected.keep in ((), (str(place),))


def test_isolates_and_mixes_onnx_layers(onnx_file: Path, tmp_path: Path) -> None:
    import onnx
    from onnx import numpy_helper

    model = onnx.load(str(onnx_file))
    weight = next(w for w in model.graph.initializer if len(w.dims) == 4 and w.dims[0] == 12)
    weight.CopyFrom(numpy_helper.from_array(-2 * numpy_helper.to_array(weight), weight.name))
    onnx.save(model, str(tmp_path / "bad.onnx"))
    inputs = PIPELINE.batch(images())
    found = xray.layer_errors(str(onnx_file), str(tmp_path / "bad.onnx"), inputs)
    assert found[0].introduced > 0.1 > 1e-5 > found[1].introduced
    assert sum(layer.cumulative > 1e-3 for layer in found) > 1
    bisected = xray.bisect(str(onnx_file), str(tmp_path / "bad.onnx"), inputs)
    assert bisected.after == 1.0


def test_isolates_and_mixes_litert_layers(tmp_path: Path) -> None:
    pytest.importorskip("ai_edge_litert")
    from slipstream.data import get, why_absent
    from slipstream.ship.firmware.tflite import read_network
    from slipstream.ship.firmware.writer import write_network

    if why_absent("mlperf_tiny"):
        pytest.skip("no mlperf_tiny")
    paths = get("mlperf_tiny").paths  # type: ignore[attr-defined]
    floats, codes = (paths[f"pretrainedResnet{end}"] for end in ("", "_quant"))
    pixels = np.random.default_rng(0).integers(0, 256, (30, 8, 8, 3))
    inputs = np.kron(pixels, np.ones((1, 4, 4, 1))).astype(np.float32)
    healthy = xray.layer_errors(str(floats), str(codes), inputs)
    assert len(healthy) == 15
    # A wrong scale of the weights of the fifth convolution.
    network = read_network(codes)
    bad = [operator for operator in network.operators if operator.kind == "conv_2d"][4]
    tensors = list(network.tensors)
    weight = tensors[bad.inputs[1]]
    assert weight.quantization is not None
    scales = weight.quantization.scales * np.float32(3)
    tensors[bad.inputs[1]] = replace(
        weight, quantization=replace(weight.quantization, scales=scales)
    )
    (tmp_path / "bad.tflite").write_bytes(write_network(replace(network, tensors=tuple(tensors))))
    bisected = xray.bisect(str(floats), str(tmp_path / "bad.tflite"), inputs, tolerance=0.15)
    assert bisected.ranking[0].name == tensors[bad.outputs[0]].name
    assert bisected.ranking[0].introduced > 5 * bisected.ranking[1].introduced
    assert bisected.keep == (bisected.ranking[0].name,)
    assert bisected.before < bisected.after


def test_latency_names_the_slow_operator() -> None:
    class Slow(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(400):
                y = super().forward(x)
            return y

    net = network()
    slow = Slow(12, 12, 3)
    net[4] = slow
    found = xray.latency(net, PIPELINE.batch(images()), against=network())
    assert [operator.name for operator in found.slow] == ["4"]
    assert any("no fast kernel" in remedy for remedy in found.remedies)


def test_records_litert_and_micro(tmp_path: Path) -> None:

    pytest.importorskip("ai_edge_litert")
    from slipstream.data import get, why_absent

    if why_absent("mlperf_tiny"):
        pytest.skip("no mlperf_tiny")
    path = get("mlperf_tiny").paths["pretrainedResnet_quant"]  # type: ignore[attr-defined]
    x = np.random.default_rng(0).integers(-128, 127, (4, 1, 32, 32, 3)).astype(np.int8)
    from tflite_micro.python.tflite_micro import runtime as micro

    interpreter = micro.Interpreter.from_bytes(path.read_bytes(), arena_size=1 << 20)
    for name, model in (("litert", str(path)), ("micro", interpreter)):
        with xray.record(tmp_path / f"{name}.xr", model=path) as rec:
            for batch in x:
                rec.run(model, batch)
    found = xray.compare(tmp_path / "litert.xr", tmp_path / "micro.xr")
    assert found.coverage == 1.0
    assert max(layer.drift for layer in found.layers) < 0.05


def test_damaged_and_unrelated_logs(tmp_path: Path, onnx_file: Path) -> None:
    whole = recorded(tmp_path / "a.xr", str(onnx_file)).read_bytes()
    cut = tmp_path / "cut.xr"
    cut.write_bytes(whole[: len(whole) * 2 // 3])
    log = Log.read(cut)
    assert 2 <= log.count < 6
    message = rf"\bbyte \d+.*\b{log.count} complete frames\b"
    assert re.search(message, log.damage)
    assert any(re.search(message, note) for note in xray.compare(cut, tmp_path / "a.xr").notes)
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    cut.write_bytes(flipped)
    with pytest.raises(xray.LogError, match="damaged at byte"):
        Log.read(cut)
    for short in (b"", b"PK\3\4", whole[:30]):
        cut.write_bytes(short)
        with pytest.raises(xray.LogError):
            Log.read(cut)
    with xray.record(tmp_path / "other.xr") as rec:
        rec.run(nn.Sequential(nn.Linear(7, 3)), np.ones((1, 7), np.float32))
    with pytest.raises(xray.LogError, match="different models"):
        xray.compare(tmp_path / "a.xr", tmp_path / "other.xr")


def test_nan_and_constant_layers(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self, nan: bool) -> None:
            super().__init__()
            self.nan, self.one, self.two = nan, nn.Identity(), nn.ReLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.two(x * 0 + (2.0 if self.nan else 1.5))
            return x.log().mul(-1).sqrt() if self.nan else x

    for nan in (False, True):
        with xray.record(tmp_path / f"{nan}.xr") as rec:
            for seed in range(5):
                rec.run(_same(Odd, nan), np.full((1, 3, 4, 4), seed, np.float32))
    found = xray.compare(tmp_path / "False.xr", tmp_path / "True.xr")
    (layer,) = found.layers
    assert layer.no_range or layer.rmse == pytest.approx(0.5, rel=0.5)
    with xray.record(tmp_path / "nan.xr") as rec:
        rec.run(nn.Sequential(nn.ReLU()), np.full((1, 8), np.nan, np.float32))
    with xray.record(tmp_path / "fine.xr") as rec:
        rec.run(nn.Sequential(nn.ReLU()), np.ones((1, 8), np.float32))
    found = xray.compare(tmp_path / "fine.xr", tmp_path / "nan.xr")
    assert [str(failure) for failure in found.failures] == ["finite: 0"]


def test_constant_images_are_explained_by_constant_images() -> None:
    pipeline = pre.image_pipeline(24, mean=(0.5,) * 3, std=(0.5,) * 3)
    raws = [np.zeros((50, 70, 3), np.uint8)] * 3
    inputs = measured([canonical(pipeline(raw)[None]) for raw in raws])
    assert not inputs["std"].any()
    assert xray.explain(inputs, raws, pipeline).kind == "equal"


_made: dict[bool, nn.Module] = {}


def _same(kind: Any, nan: bool) -> nn.Module:
    return _made.setdefault(nan, kind(nan))


def test_refuses_invalid_requests(tmp_path: Path, onnx_file: Path) -> None:
    with pytest.raises(UnknownNameError, match="level"):
        xray.record(tmp_path / "a.xr", "everything")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="neither"):
        open_tap(__file__)
    edge = recorded(tmp_path / "edge.xr", str(onnx_file))
    with pytest.raises(xray.LogError, match=r"\bframe 0\b.*\bmodel input\b"):
        xray.replay(edge, str(onnx_file), tmp_path / "ref.xr")
    with pytest.raises(xray.LogError, match="raw input of frame 0 is missing"):
        xray.replay(edge, str(onnx_file), tmp_path / "ref.xr", preprocessing=PIPELINE)
    tap = open_tap(str(onnx_file))
    tap.inputs = [*tap.inputs, replace(tap.inputs[0], shape=(None, None))]
    with pytest.raises(InvalidArgumentError, match="any size"):
        xray.latency(tap)


_C = """
#include <stdio.h>
#include "slipstream_xray.h"
static uint8_t room[32768];
int main(void) {
  slip_xray log;
  int8_t x[6 * 4];
  for (int i = 0; i < 24; ++i) x[i] = (int8_t)(3 * i - 30);
  slip_xray_begin(&log, room, sizeof room, NULL, NULL,
    "{\\"runtime\\":\\"c\\",\\"model\\":\\"m\\",\\"level\\":\\"stats\\",\\"tensors\\":"
    "[{\\"name\\":\\"conv\\",\\"kind\\":\\"CONV_2D\\",\\"shape\\":[1,2,3,4]}]}");
  for (int frame = 0; frame < 3; ++frame) {
    slip_xray_layer_i8(&log, 0, x, 24, 4, 0.5f, 2);
    slip_xray_next(&log);
  }
  slip_xray_finish(&log);
  fwrite(room, 1, log.used, stdout);
  return (int)log.lost;
}
"""


def test_reads_logs_written_on_a_device(tmp_path: Path) -> None:
    if why_no_compiler():
        pytest.skip("no compiler")
    (tmp_path / "slipstream_xray.h").write_text(xray.header())
    (tmp_path / "main.c").write_text(_C)
    flags = ["-std=c99", "-Os", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function"]
    subprocess.run(["cc", *flags, "main.c", "-o", "main", "-lm"], cwd=tmp_path, check=True)
    written = subprocess.run([str(tmp_path / "main")], capture_output=True, check=True).stdout
    (tmp_path / "device.xr").write_bytes(written)
    log = Log.read(tmp_path / "device.xr")
    frames = list(log.frames())
    assert (log.count, len(frames), log.damage) == (3, 3, "")
    codes = (3 * np.arange(24) - 30).reshape(1, 2, 3, 4)
    real = (0.5 * (codes - 2)).astype(np.float32)
    expected = measured([canonical(real, channels_last=True)])[0]
    for name in ("elements", "low", "high", "mean", "std", "projections", "hash"):
        assert np.allclose(frames[2].statistics[0][name], expected[name], rtol=1e-5), name


def test_command_line_from_recording_to_report(tmp_path: Path, onnx_file: Path) -> None:
    from PIL import Image

    folder = tmp_path / "raw"
    folder.mkdir()
    for number, raw in enumerate(images()):
        Image.fromarray(raw).save(folder / f"{number}.png")
    for name, pipeline in (("right", PIPELINE), ("app", PIPELINE.with_stage(pre.Channels("BGR")))):
        (tmp_path / f"{name}.json").write_text(json.dumps(pipeline.to_dict()))

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "slipstream", "xray", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    edge = run(
        "record", str(onnx_file), "--raw", "raw", "--preprocessing", "app.json", "-o", "e.xr"
    )
    assert edge.returncode == 0, edge.stderr
    ref = run(
        "replay", "e.xr", "--model", str(onnx_file), "--preprocessing", "right.json", "-o", "r.xr"
    )
    assert ref.returncode == 0, ref.stderr
    found = run("compare", "r.xr", "e.xr", "--html", "report.html", "--json")
    assert found.returncode == 0, found.stderr
    cause = json.loads(found.stdout)["cause"]
    assert cause["text"] == "channels in the order BGR"
    assert "<svg" in (tmp_path / "report.html").read_text()
    (tmp_path / "hold.py").write_text(
        "from slipstream.ship import xray\n@xray.assertion\ndef tight(layer):\n"
        "    assert layer.drift < 1e-9, layer.drift\n"
    )
    failed = run("compare", "r.xr", "e.xr", "--assertions", "hold.py")
    assert failed.returncode == 1
    assert "tight" in failed.stdout
    (tmp_path / "bad.xr").write_bytes(b"nothing")
    bad = run("compare", "r.xr", "bad.xr")
    assert bad.returncode == 1
    assert re.search(r"\bnot a log\b.*\n.*\bbad\.xr\b", bad.stderr)
    assert "Traceback" not in bad.stderr


def test_a_failing_model_keeps_an_existing_file(tmp_path: Path) -> None:
    def broken(x: Any) -> Any:
        raise ValueError("rank 3, expected 4")

    log, existing = tmp_path / "new.xr", tmp_path / "old.xr"
    existing.write_bytes(b"mine")
    for path in (log, existing):
        with pytest.raises(ModelError, match=r"frame 1, given \[3, 8, 8\]"), xray.record(path) as r:
            r.run(broken, np.zeros((3, 8, 8), np.float32))
    assert not log.exists()
    assert existing.read_bytes() == b"mine"


def test_first_layer_is_not_suspect_if_inputs_differ(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)).eval()
    images = np.random.default_rng(0).normal(size=(6, 1, 3, 12, 12)).astype(np.float32)
    for name, order in (("ref.xr", [0, 1, 2]), ("edge.xr", [2, 1, 0])):
        with xray.record(tmp_path / name) as recorder:
            for image in images:
                recorder.run(model, np.ascontiguousarray(image[:, order]))
    found = xray.compare(tmp_path / "ref.xr", tmp_path / "edge.xr")
    assert found.layers[0].drift > 0.05
    assert found.layers[0].remark == ""


def test_remark_names_the_baseline_of_a_layer(tmp_path: Path) -> None:
    """Equal inputs or layers have no drift to divide by."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)).eval()
    images = np.random.default_rng(0).normal(size=(6, 1, 3, 12, 12)).astype(np.float32)
    for place, remark in ((0, "the inputs agreed"), (2, "the layer before agreed")):
        wrong = copy.deepcopy(model)
        convolution = wrong[place]
        assert isinstance(convolution, nn.Conv2d)
        with torch.no_grad():
            convolution.weight.mul_(4)
        for name, net in (("ref.xr", model), ("edge.xr", wrong)):
            with xray.record(tmp_path / name) as recorder:
                for image in images:
                    recorder.run(net, image)
        found = xray.compare(tmp_path / "ref.xr", tmp_path / "edge.xr")
        odd = [layer for layer in found.layers if layer.remark]
        assert [(layer.name, layer.remark) for layer in odd[:1]] == [(str(place), remark)]
