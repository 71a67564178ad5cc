"""Every runtime returns the model's own outputs, for any number of samples."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream import runtimes
from slipstream.errors import InvalidArgumentError
from slipstream.runtimes import ModelError, OverloadedError, TensorSpec, fit
from slipstream.runtimes.python import CallableRuntime, TorchRuntime
from slipstream.runtimes.taps import open_tap

SIZES = (1, 3, 8)
SOURCE = """\
import torch

def make(width=6):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Dropout(0.5))
    return model, (torch.randn(8, 4), torch.arange(8)), torch.nn.functional.cross_entropy

def two(x, y):
    return x + y, x - y
"""


def inputs(samples: int) -> np.ndarray:
    return np.random.default_rng(samples).standard_normal((samples, 4)).astype(np.float32)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "served.py"
    path.write_text(SOURCE)
    return path


def reference(x: np.ndarray, width: int = 6) -> np.ndarray:
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, width)
    with torch.no_grad():
        return layer(torch.from_numpy(x)).numpy()


@pytest.mark.parametrize("samples", SIZES)
def test_torch_runs_the_module_in_evaluation_mode(file: Path, samples: int) -> None:
    with runtimes.load(f"{file}:make", arguments={"width": 5}) as model:
        (output,) = model.run([inputs(samples)])
        assert [str(spec) for spec in model.inputs] == ["input_0 float32[N, 4]"]
        assert model.outputs[0].shape == (None, 5)
    np.testing.assert_allclose(output, reference(inputs(samples), 5), rtol=1e-6)


@pytest.mark.parametrize("fixed", [False, True])
def test_onnx_equals_torch_also_with_a_fixed_batch(tmp_path: Path, fixed: bool) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 6)
    path = tmp_path / "layer.onnx"
    axes = None if fixed else {"x": {0: "n"}, "y": {0: "n"}}
    torch.onnx.export(
        layer, (torch.zeros(2, 4),), path, input_names=["x"], output_names=["y"],
        dynamic_axes=axes, dynamo=False,
    )  # fmt: skip
    with runtimes.load(str(path)) as model:
        assert model.fixed_batch == (2 if fixed else None)
        for samples in SIZES:
            (output,) = model.run([inputs(samples)])
            np.testing.assert_allclose(output, reference(inputs(samples)), rtol=1e-5, atol=1e-6)


def test_onnx_runtime_writes_no_device_id(tmp_path: Path) -> None:
    path, home = tmp_path / "layer.onnx", tmp_path / "home"
    home.mkdir()
    torch.onnx.export(torch.nn.Linear(4, 6), (torch.zeros(2, 4),), path, dynamo=False)
    variables = {"ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME"}
    environment = {name: value for name, value in os.environ.items() if name not in variables}
    for load in ("runtimes.load", "runtimes.taps.open_tap"):
        program = f"from slipstream import runtimes; import slipstream.runtimes.taps; {load}"
        subprocess.run(
            [sys.executable, "-c", f"{program}({str(path)!r})"],
            env={**environment, "HOME": str(home)},
            check=True,
        )
    assert list(home.iterdir()) == []


def test_litert_batch_equals_its_samples(shared_data: Path) -> None:
    path = shared_data / "mlperf_tiny" / "pretrainedResnet_quant.tflite"
    with runtimes.load(str(path)) as model:
        spec = model.inputs[0]
        assert (spec.dtype, spec.shape, spec.scale, spec.zero_point) == (
            "int8", (None, 32, 32, 3), 1.0, -128,
        )  # fmt: skip
        images = np.random.default_rng(0).integers(-128, 128, (5, 32, 32, 3)).astype(np.int8)
        (batch,) = model.run([images])
        samples = [model.run([images[n : n + 1]])[0] for n in range(5)]
    np.testing.assert_array_equal(batch, np.concatenate(samples))


def test_function_has_several_inputs_and_outputs(file: Path) -> None:
    model = runtimes.load(f"{file}:two")
    total, difference = model.run([np.full((3, 2), 5), np.full((3, 2), 2)])
    assert (model.kind, total[0, 0], difference[0, 0]) == ("callable", 7, 3)


def test_refuses_a_wrong_number_of_answers() -> None:
    with pytest.raises(ModelError, match="was given 4 samples and answered 3"):
        CallableRuntime("short", lambda x: x[1:]).run([inputs(4)])


def test_served_model_returns_the_same_bytes(file: Path) -> None:
    with (
        runtimes.load(f"{file}:make") as model,
        runtimes.serving(model, port=0) as server,
        runtimes.load(server.address) as remote,
    ):
        assert remote.inputs == model.inputs
        assert (model.concurrent, remote.concurrent) == (False, True)
        for samples in SIZES:
            assert remote.run([inputs(samples)])[0].tobytes() == (
                model.run([inputs(samples)])[0].tobytes()
            )


def test_overloaded_server_refuses_some_requests_and_serves_the_rest() -> None:
    import threading
    import time

    def slow(x: np.ndarray) -> np.ndarray:
        time.sleep(0.05)
        return x

    model = CallableRuntime("slow", slow)
    model.inputs = model.outputs = (TensorSpec("x", "float32", (None, 4)),)
    answers: list[object] = []
    with (
        runtimes.serving(model, port=0, waiting=2, deadline_s=10.0) as server,
        runtimes.load(server.address) as remote,
    ):

        def ask() -> None:
            began = time.monotonic()
            try:
                answers.append(remote.run([inputs(1)])[0])
            except OverloadedError:
                answers.append(time.monotonic() - began)

        threads = [threading.Thread(target=ask) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        refused = [answer for answer in answers if isinstance(answer, float)]
        assert (server.answered, server.refused) == (12 - len(refused), len(refused))
    assert 1 <= len(refused) <= 10
    assert len(answers) == 12


def test_refuses_sources_that_are_not_models() -> None:
    with pytest.raises(InvalidArgumentError, match=r"model\.onnx"):
        runtimes.load("model.bin")
    with pytest.raises(ModelError, match="no file"):
        runtimes.load("missing.onnx")


def test_fit_transposes_scales_and_quantizes() -> None:
    images = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)
    planar = fit(images, TensorSpec("x", "float32", (None, 3, 4, 5)), (-1.0, 1.0))
    expected = images.transpose(0, 3, 1, 2) / 127.5 - 1
    np.testing.assert_allclose(planar, expected, atol=1e-6)
    codes = fit(images, TensorSpec("x", "int8", (None, 4, 5, 3), 0.5, -128))
    np.testing.assert_array_equal(codes, np.clip(images * 2.0 - 128, -128, 127))
    with pytest.raises(InvalidArgumentError, match=r"\[4, 5, 3\].*\b7\b"):
        fit(images, TensorSpec("x", "float32", (None, 7)))


def test_a_torch_runtime_is_tapped_by_layer() -> None:
    module, x = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()), torch.randn(2, 4)
    tap = open_tap(TorchRuntime("net", module, x))
    outputs, recorded = tap.run([x.numpy()])
    assert [layer.name for layer in tap.layers] == ["0", "1"]
    assert recorded[1] is not None
    np.testing.assert_array_equal(outputs[0], recorded[1])
