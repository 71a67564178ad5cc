"""Tensors of codes behave like their values, and layers pass them on invisibly."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from slipstream.errors import InvalidArgumentError
from slipstream.quant import calibrate
from slipstream.techniques.lowbit import cost
from slipstream.techniques.lowbit.coded import CodedTensor, DeferredOutput, HeldTensor
from slipstream.techniques.lowbit.convolve import Codes, quantise
from slipstream.techniques.lowbit.handover import hand_over
from slipstream.techniques.lowbit.layer import AfterSum, LowBitLayer
from slipstream.techniques.lowbit.nn import LowBitConv2d
from slipstream.techniques.lowbit.qat import convert, fuse, load

OF = Codes(4, 0.25, 5)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Images in channels-last order, a few steps around 0."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else made


def coded(x: torch.Tensor, **settings: Any) -> CodedTensor:
    return CodedTensor(quantise(x, OF)[0], OF, **settings)


def codes_of(x: torch.Tensor) -> torch.Tensor:
    return quantise(x.contiguous(), OF)[0]


THROUGH: dict[str, Callable[[Any], Any]] = {
    "relu": torch.relu,
    "relu in place": lambda x: functional.relu(x, inplace=True),
    "relu6": functional.relu6,
    "held within others in place": lambda x: functional.hardtanh(x, -0.3, 0.8, inplace=True),
    "window": lambda x: functional.max_pool2d(x, 3, 2, 1),
    "window, sizes rounded up": lambda x: nn.MaxPool2d((3, 2), ceil_mode=True)(x),
    "window with gaps": lambda x: torch.max_pool2d(x, 2, dilation=2),
    "both": lambda x: functional.max_pool2d(x, 2).relu(),
    "joined": lambda x: torch.cat([x, functional.max_pool2d(x, 3, 1, 1), x], 1),
    "joined rows": lambda x: torch.cat([x, x], 2),
    "flat": lambda x: torch.flatten(x, 1),
}


@pytest.mark.parametrize("name", THROUGH)
def test_rounding_before_equals_rounding_after(name: str) -> None:
    x = numbers(2, 5, 9, 7)
    made = THROUGH[name](coded(x))
    assert isinstance(made, CodedTensor)
    expected = THROUGH[name](x.clone())
    assert made.shape == expected.shape
    assert torch.equal(made.codes, codes_of(expected).reshape(expected.shape))


OTHERS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: x + 1,
    "mean": lambda x: x.mean((2, 3)),
    "window with places": lambda x: functional.max_pool2d(x, 2, return_indices=True)[1],
    "convolution": lambda x: functional.conv2d(x, torch.ones(3, 5, 2, 2)),
    "an item": lambda x: x[0, 1],
    "joined with another": lambda x: torch.cat([x, torch.ones(2, 1, 9, 7)], 1),
    "copy": copy.deepcopy,
    "numpy": lambda x: torch.from_numpy(x.add(0).numpy()),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("exact", [False, True])
def test_other_operators_get_the_values(name: str, exact: bool) -> None:
    x = numbers(2, 5, 9, 7)
    held = coded(x, exact=x if exact else None)
    expected = OTHERS[name](x if exact else (codes_of(x).float() - OF.zero) * OF.scale)
    made = OTHERS[name](held)
    assert not isinstance(made, CodedTensor)
    assert torch.equal(made, expected)
    # Reading did not change the inputs of layers.
    assert name == "an item" or held.codes_for(OF) is not None


def test_a_modified_tensor_no_longer_has_codes() -> None:
    x = numbers(2, 3, 4, 4)
    for write in (lambda y: y.add_(1), lambda y: y[0].add_(1), lambda y: y.view(-1).mul_(2)):
        exact = x.clone(memory_format=torch.contiguous_format)
        held, expected = coded(x.contiguous(), exact=exact), exact.clone()
        write(held)
        write(expected)
        assert held.codes_for(OF) is None
        assert torch.equal(held + 0, expected)
        assert torch.equal(held.relu(), expected.relu())
        # Other holders of the values keep them.
        assert not torch.equal(exact, expected)


@pytest.mark.parametrize("groups", [1, 5])
def test_cached_state_of_a_layer_is_checked_in_every_call(groups: int) -> None:
    torch.manual_seed(0)
    module = nn.Conv2d(5, 5, 3, padding=1, groups=groups)
    layer = LowBitConv2d.from_float(module, 4, 4, (-1.0, 2.0)).eval()
    to, x, other = layer.input_codes, numbers(2, 5, 8, 8), numbers(1, 5, 4, 9, seed=1)

    def held(x: torch.Tensor) -> CodedTensor:
        return CodedTensor(quantise(x, to)[0], to)

    def same(x: torch.Tensor) -> None:
        expected = copy.deepcopy(layer)(x)
        made = layer(held(x))
        assert made.shape == expected.shape
        assert made.stride() == expected.stride()
        assert torch.equal(made + 0, expected + 0)

    for image in (x, x, -x, other, x, x.contiguous(), x, x[:0], x):
        same(image)
    assert layer.scale is not None
    for change in (
        lambda: setattr(layer, "scale", 2 * layer.scale),
        lambda: layer.scale.data.mul_(0.5),
        lambda: setattr(layer.scale, "data", 3 * layer.scale),
        lambda: setattr(layer, "relu", True),
        lambda: setattr(layer, "output_codes", OF),
    ):
        change()
        same(x)
        same(-x)
    layer._buffers["scale"] = torch.ones(3)
    with pytest.raises(InvalidArgumentError, match="scale"):
        layer(held(x))


@pytest.mark.parametrize("codes", [None, OF])
@pytest.mark.parametrize("relu", [False, True])
def test_a_layer_can_include_a_sum(relu: bool, codes: Codes | None) -> None:
    torch.manual_seed(0)
    layer = LowBitConv2d.from_float(nn.Conv2d(5, 6, 3, padding=1), 3, 4, (-1.0, 2.0)).eval()
    x, addend = numbers(2, 5, 8, 8), numbers(2, 6, 8, 8, seed=1)
    plain = layer(x)
    total = plain + addend
    layer.after_sum = AfterSum(relu, codes)
    added_to = layer(x)
    added_to += addend
    for made in (layer(x) + addend, addend + layer(x), torch.add(layer(x), addend), added_to):
        expected = total.relu() if relu else total
        assert torch.equal(made + 0, expected)
        handed = made.codes_for(OF) if isinstance(made, HeldTensor) else None
        assert (handed is None) == (codes is None)
        assert handed is None or torch.equal(handed, codes_of(expected))
    # Regardless of later uses of its output, it equals the plain one.
    assert isinstance(layer(x), DeferredOutput)
    assert torch.equal(layer(x) * 1, plain)
    assert torch.equal(torch.add(layer(x), addend, alpha=2), plain + 2 * addend)
    assert torch.equal(layer(x) + addend[:1], plain + addend[:1])
    assert torch.equal(layer(x) + layer(x), (plain + plain).relu() if relu else plain + plain)


class Block(nn.Module):
    """A residual block whose ReLU is called twice, as in many models."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.short = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(self.relu(self.first(x)))
        y += self.short(x)
        return self.relu(y)


class Fire(nn.Module):
    """Two parallel layers on one input."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.small, self.large = nn.Conv2d(inputs, 4, 1), nn.Conv2d(inputs, 5, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.small(x).relu(), functional.relu(self.large(x))], 1)


def network() -> tuple[nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.ReLU(), Fire(6), nn.MaxPool2d(2), Fire(9), Block(9, 8), Block(8, 8),
        nn.Conv2d(8, 8, 1), nn.MaxPool2d(3), nn.Flatten(), nn.Linear(32, 4),
    )  # fmt: skip
    return model.eval(), torch.randn(2, 3, 16, 16)


@pytest.fixture(autouse=True)
def any_sum_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "MIN_SUM_ELEMS", 1)


def test_small_sums_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "MIN_SUM_ELEMS", 1 << 15)
    model, x = network()
    convert(model, wbits=3, abits=3, edge_bits=3, ranges=calibrate(model, [x]))
    with torch.no_grad():
        assert hand_over(model, lambda: model(x)) == 8
    layers = [module for module in model.modules() if isinstance(module, LowBitLayer)]
    assert not any(layer.after_sum for layer in layers)


def test_passing_codes_changes_nothing() -> None:
    model, x = network()
    convert(model, wbits=3, abits=3, edge_bits=3, ranges=calibrate(model, [x]))
    with torch.no_grad():
        expected = model(x)
        assert hand_over(model, lambda: model(x)) == 10
        assert torch.equal(model(x), expected)
        assert torch.equal(copy.deepcopy(model)(x), expected)
        # Again, from the current state.
        assert hand_over(model, lambda: model(x)) == 10
        assert torch.equal(model(x), expected)
    layers = {
        name: module for name, module in model.named_modules() if isinstance(module, LowBitLayer)
    }
    only = [name for name, layer in layers.items() if layer.output_codes]
    assert only == [
        "0", "2.small", "2.large", "4.small", "4.large", "5.first", "6.first", "7",
    ]  # fmt: skip
    sums = {name: layer.after_sum for name, layer in layers.items() if layer.after_sum}
    assert set(sums) == {"5.second", "6.second"}
    assert all(layer.relu and layer.codes for layer in sums.values())


class Clipped(nn.Module):
    """A sum of a clipped operand."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.relu = nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()
        self.second = nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.relu(self.first(x)) + x)


def test_a_clipped_operand_is_not_added_in_the_layer() -> None:
    torch.manual_seed(0)
    model, x = Clipped().eval(), torch.randn(1, 4, 6, 6)
    convert(model, wbits=3, abits=3, edge_bits=3, ranges=calibrate(model, [x]))
    with torch.no_grad():
        expected = model(x)
        assert fuse(model, lambda: model(x)) == 1
        assert torch.equal(model(x), expected)
    assert model.first.relu
    assert model.first.after_sum is None


def test_it_is_saved_and_loaded() -> None:
    model, x = network()
    convert(model, wbits=3, abits=3, edge_bits=3, ranges=calibrate(model, [x]))
    hand_over(model, lambda: model(x))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh, _ = network()
    load(fresh, torch.load(file, weights_only=True))
    with torch.no_grad():
        assert torch.equal(fresh(x), model(x))
    assert fresh[6].second.after_sum == model[6].second.after_sum  # type: ignore[union-attr]


def test_layers_that_read_other_codes_get_floats() -> None:
    model, x = network()
    ranges = calibrate(model, [x])
    convert(model, wbits=3, abits=3, ranges=ranges)
    layers: Any = model
    with torch.no_grad():
        wide = Codes(3, 2 * layers[2].large.input_codes.scale, layers[2].large.input_codes.zero)
        layers[2].large.input_codes = wide
        expected = model(x)
        hand_over(model, lambda: model(x))
        assert torch.equal(model(x), expected)
    assert layers[0].output_codes is None
    assert layers[2].small.output_codes == layers[4].small.input_codes
