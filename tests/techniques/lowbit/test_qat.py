"""Quantization-aware training, and the resulting low-bit model."""

from __future__ import annotations

import copy
import functools
import io
import math
from typing import Any

import pytest
import torch
from torch import nn

from slipstream.errors import InvalidArgumentError
from slipstream.native import library
from slipstream.quant import FakeQuantize, calibrate
from slipstream.techniques.lowbit.layer import LowBitLayer
from slipstream.techniques.lowbit.nn import LowBitConv2d, LowBitLinear
from slipstream.techniques.lowbit.qat import (
    QatConv2d,
    added_parameters,
    convert,
    fuse,
    load,
    prepare_training,
    quantise_model,
)
from slipstream_bench.systems.lowbit import digits as bench_digits


@functools.cache
def trained() -> bench_digits.Trained:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return bench_digits.run(3, 3, 0, epochs=(3, 2))
    finally:
        torch.set_num_threads(threads)


def test_three_bits_classify_digits_nearly_as_well_as_float() -> None:
    found = trained()
    assert found.float_ > 97
    assert found.rounded >= found.float_ - 1.5
    assert found.lowbit >= found.float_ - 1.5


def test_low_bit_layers_compute_the_trained_function() -> None:
    found = trained()
    images = bench_digits.Digits.load().test[0]
    with torch.no_grad():
        fake, lowbit = found.fake(images), found.model(images)
    # A sum that rounds differently may cross a step now and then; except for such an
    # image, both are equal up to float32.
    close = torch.isclose(fake, lowbit, rtol=1e-3, atol=1e-3).all(1)
    assert float(close.float().mean()) > 0.97
    assert float((fake.argmax(1) == lowbit.argmax(1)).float().mean()) > 0.99


def test_norms_and_relus_are_part_of_the_layers() -> None:
    model: Any = trained().model
    kinds = [type(module).__name__ for module in model]
    assert "BatchNorm2d" not in kinds
    assert "ReLU" not in kinds
    assert [(model[i].wbits, model[i].abits) for i in (0, 3, 7, 12)] == [
        (8, 8), (3, 3), (3, 3), (8, 8),
    ]  # fmt: skip
    assert model[0].output_codes == model[3].input_codes
    # The second is followed by a maximum over windows, the third by a mean.
    assert model[3].output_codes == model[7].input_codes
    assert model[7].output_codes is None


def test_a_float_model_loads_a_saved_low_bit_one() -> None:
    found = trained()
    file = io.BytesIO()
    torch.save(found.model.state_dict(), file)
    file.seek(0)
    fresh = bench_digits.network().eval()
    load(fresh, torch.load(file, weights_only=True))
    images = bench_digits.Digits.load().test[0]
    with torch.no_grad():
        assert torch.equal(fresh(images), found.model(images))
    other = nn.Sequential(nn.Linear(2, 2))
    file.seek(0)
    with pytest.raises(InvalidArgumentError, match=r"state|model"):
        load(other, torch.load(file, weights_only=True))


class Residual(nn.Module):
    """A depthwise and a grouped convolution, a sum, and a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.twice = nn.Conv2d(8, 8, 1)
        self.relu = nn.ReLU()
        self.last = nn.Conv2d(8, 8, 3)
        self.head = nn.Linear(8, 5)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.norm(self.stem(x)))
        x = x + self.depthwise(x)
        x = self.twice(self.twice(x)) + x
        return self.head(self.last(x).mean((2, 3)))


def residual() -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    return Residual().eval(), torch.randn(4, 3, 10, 10)


def test_eight_bits_after_training_are_nearly_as_good_as_float() -> None:
    model, x = residual()
    expected = model(x).detach()
    names = quantise_model(model, [x], wbits=8, abits=8)
    assert names == ["stem", "depthwise", "twice", "last", "head"]
    assert isinstance(model.depthwise, LowBitConv2d)
    assert isinstance(model.norm, nn.Identity)
    assert isinstance(model.twice, LowBitConv2d)
    assert model.twice.output_codes is None
    error = (model(x) - expected).norm() / expected.norm()
    assert float(error) < 0.03


def test_fusing_changes_only_rounding() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3), nn.ReLU(), nn.MaxPool2d(3), nn.Conv2d(8, 8, 1), nn.Flatten(),
        nn.Linear(32, 4),
    ).eval()  # fmt: skip
    model[1].running_mean.normal_()
    model[1].running_var.uniform_(0.5, 2)
    x = torch.randn(2, 3, 10, 10)
    convert(model, wbits=3, abits=3, edge_bits=3, ranges=calibrate(model, [x]))
    with torch.no_grad():
        plain = copy.deepcopy(model)
        assert fuse(model, lambda: model(x)) == 6
        torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-4)
    codes = [module.output_codes is not None for module in model if isinstance(module, LowBitLayer)]
    assert codes == [True, True, True, False]


def test_a_block_of_mobile_networks_uses_codes_throughout() -> None:
    def block(clip: Any) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), clip(),
            nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8), clip(),
            nn.Conv2d(8, 8, 1),
        ).eval()  # fmt: skip

    class Functional(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.relu6(x)

    # Far beyond 6, so that it matters.
    x = 40 * torch.randn(2, 3, 9, 9)
    made = []
    for clip in (nn.ReLU6, Functional):
        model = block(clip)
        expected = model(x).detach()
        quantise_model(model, [x], wbits=4, abits=4)
        assert isinstance(model[3], LowBitConv2d)
        assert (model[3].wbits, model[3].abits, model[3].groups) == (8, 8, 8)
        assert model[0].output_codes == model[3].input_codes
        assert model[3].output_codes == model[6].input_codes
        fused = clip is nn.ReLU6
        assert isinstance(model[2], nn.Identity) is isinstance(model[5], nn.Identity) is fused
        assert model[3].ceiling == (6.0 if fused else math.inf)
        made.append(model(x))
        assert float((made[-1] - expected).norm() / expected.norm()) < 0.1
        state = io.BytesIO()
        torch.save(model.state_dict(), state)
        state.seek(0)
        twin = block(clip)
        load(twin, torch.load(state, weights_only=True))
        assert torch.equal(twin(x), made[-1])
        assert twin[3].ceiling == model[3].ceiling
    assert torch.equal(*made)


def test_training_keeps_the_same_parameter_objects() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    weights = [module.weight for module in (model[0], model[2], model[4])]
    ranges = calibrate(model, [torch.randn(32, 6)])
    assert prepare_training(model, 2, 3, ranges, except_="4") == ["0", "2"]
    assert all(a is b.weight for a, b in zip(weights, (model[0], model[2], model[4]), strict=True))
    assert type(model[4]) is nn.Linear
    # Scales of weights and inputs of two layers.
    assert len(added_parameters(model)) == 4
    model(torch.randn(3, 6)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    bits = [module.format.bits for module in model.modules() if isinstance(module, FakeQuantize)]
    assert bits == [8, 8, 2, 3]


@pytest.mark.parametrize("scales", ["tensor", "channel", "block32"])
@pytest.mark.parametrize(("wbits", "abits"), [(1, 2), (2, 2), (4, 3), (8, 8)])
def test_each_layer_converts_to_its_original_type(wbits: int, abits: int, scales: str) -> None:
    torch.manual_seed(0)
    for layer, x in (
        (nn.Linear(70, 9), torch.randn(5, 70)),
        (nn.Conv2d(9, 6, 3, stride=2, padding=1, bias=False), torch.randn(2, 9, 8, 8)),
        (nn.Conv2d(9, 9, 7, stride=2, padding=3, groups=9), torch.randn(2, 9, 8, 8)),
    ):
        model = nn.Sequential(layer)
        ranges = calibrate(model, [x])
        prepare_training(model, wbits, abits, ranges, scales=scales, edge_bits=1)
        model.eval()
        with torch.no_grad():
            expected = model(x)
            convert(model)
            torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
        assert isinstance(model[0], (LowBitLinear, LowBitConv2d))


def test_unsupported_models_are_reported() -> None:
    model, x = residual()
    ranges = calibrate(model, [x])
    with pytest.raises(InvalidArgumentError, match=r"model\.eval"):
        convert(model.train(), ranges=ranges)
    model.eval()
    with pytest.raises(InvalidArgumentError, match=r"^model: [^\n]*\n.*prepare_training"):
        convert(model)
    with pytest.raises(InvalidArgumentError, match=r"only=nothing\*.*\btwice\b"):
        convert(model, ranges=ranges, only="nothing*")
    with pytest.raises(InvalidArgumentError, match="bits"):
        prepare_training(model, 9, 3, ranges)
    assert not any(isinstance(module, QatConv2d) for module in model.modules())


def test_weights_are_packed_for_the_rows_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.techniques.lowbit import dispatch

    seen: list[int | None] = []
    choose = dispatch.choose

    def noting(shape: dispatch.Shape, **settings: Any) -> Any:
        seen.append(shape.rows)
        return choose(shape, **settings)

    monkeypatch.setattr(dispatch, "choose", noting)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 40), nn.Linear(40, 9))
    x = torch.randn(2, 3, 8, 8)
    quantise_model(model, [x], wbits=2, abits=2)
    if library() is not None:
        assert list(dict.fromkeys(seen)) == [None, 2 * 36, 2]
    before = model(x)
    codes = [layer.codes() for layer in model if isinstance(layer, LowBitLayer)]
    for rows in (1, 500):
        for layer in model:
            if isinstance(layer, LowBitLayer):
                layer.expect_rows(rows)
        assert torch.equal(model(x), before)
    after = [layer.codes() for layer in model if isinstance(layer, LowBitLayer)]
    assert all(map(torch.equal, codes, after))
