"""ONNX Runtime computes the results of the layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from slipstream.errors import InvalidArgumentError
from slipstream.techniques.lowbit.export import to_onnx
from slipstream.techniques.lowbit.nn import LowBitConv2d, LowBitLinear
from slipstream.techniques.lowbit.qat import quantise_model

pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")


def run(path: Path, x: torch.Tensor) -> torch.Tensor:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"input": x.numpy()})[0])


@pytest.mark.parametrize("scales", ["tensor", "channel", "block32", "block64"])
@pytest.mark.parametrize(("wbits", "abits"), [(2, 3), (4, 8), (8, 8)])
def test_onnx_runtime_gives_equal_results(
    tmp_path: Path, wbits: int, abits: int, scales: str
) -> None:
    torch.manual_seed(0)
    layer = LowBitLinear.from_float(nn.Linear(150, 40), wbits, abits, (-1.5, 3.0), scales=scales)
    layer.relu = True
    x = torch.randn(6, 150)
    found = run(to_onnx(layer, tmp_path / "layer.onnx"), x)
    torch.testing.assert_close(found, layer(x), rtol=1e-4, atol=1e-4)


def test_exports_a_whole_network(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Sequential(nn.Linear(20, 70), nn.ReLU()), nn.Dropout(), nn.Linear(70, 64), nn.ReLU(),
        nn.Linear(64, 5),
    )  # fmt: skip
    x = torch.randn(9, 20)
    quantise_model(model, [x], wbits=4, abits=8, except_="4")
    for module in model.modules():
        if isinstance(module, LowBitLinear):
            module.output_codes = None
    found = run(to_onnx(model, tmp_path / "net.onnx"), x)
    torch.testing.assert_close(found, model(x).detach(), rtol=1e-3, atol=1e-3)


def test_layers_without_an_onnx_form_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "no.onnx"
    span = (-1.0, 1.0)
    three = LowBitLinear.from_float(nn.Linear(8, 4), 3, 3, span)
    with pytest.raises(InvalidArgumentError, match=r"^model: .*'0'.*3-bit.*\b2, 4\b.*\b8\b"):
        to_onnx(nn.Sequential(three), path)
    odd = LowBitLinear.from_float(nn.Linear(80, 4), 4, 8, span, scales="block40")
    with pytest.raises(InvalidArgumentError, match="power of two"):
        to_onnx(odd, path)
    with pytest.raises(InvalidArgumentError, match="convolution"):
        to_onnx(LowBitConv2d.from_float(nn.Conv2d(3, 4, 3), 4, 8, span), path)
    with pytest.raises(InvalidArgumentError, match="Tanh"):
        to_onnx(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), path)
    with pytest.raises(InvalidArgumentError, match="no linear layer"):
        to_onnx(nn.Sequential(nn.ReLU()), path)
    assert not path.exists()
