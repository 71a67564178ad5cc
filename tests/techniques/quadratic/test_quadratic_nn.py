"""Quadratic layers against their formulas, autograd, and the memory of first-order layers."""

from __future__ import annotations

import copy
import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from model_uses import check_uses
from slipstream.errors import (
    InvalidArgumentError,
    SlipstreamError,
    SlipstreamWarning,
    UnknownNameError,
)
from slipstream.surgery import saved_bytes
from slipstream.techniques.quadratic import NEURONS, Conv2d, FusedQuadratic, Linear, convert, fuse

SHAPES: list[dict[str, Any]] = [
    {}, {"stride": 2, "padding": 1}, {"dilation": 2, "padding": 2}, {"groups": 2, "padding": 1},
    {"bias": False},
]  # fmt: skip


def by_formula(layer: Any, x: torch.Tensor, plain: Any) -> torch.Tensor:
    """The neuron's formula, written out."""
    groups = layer._projection.groups
    branches = NEURONS[layer.neuron].branches
    weight = layer.weight.view(groups, branches, -1, *layer.weight.shape[1:]) if branches else None

    def project(number: int) -> torch.Tensor:
        made: torch.Tensor = plain(x, weight[:, number].flatten(0, 1))  # type: ignore[index]
        return made

    squares = None if layer.square_weight is None else plain(x * x, layer.square_weight)
    y = {
        "t2": lambda: squares,
        "t3": lambda: project(0) ** 2,
        "t4": lambda: project(0) * project(1),
        "bilinear": lambda: project(0) * project(1),
        "t2&4": lambda: project(0) * project(1) + squares,
        "ours": lambda: project(0) * project(1) + project(2),
        "glu": lambda: project(0) * project(1).sigmoid(),
    }[layer.neuron]()
    if layer.bias is None:
        return y  # type: ignore[no-any-return]
    return y + (layer.bias if y.dim() == 2 else layer.bias.view(-1, 1, 1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("neuron", NEURONS)
def test_a_layer_equals_its_formula_and_its_gradients_autograds(neuron: str) -> None:
    torch.manual_seed(0)
    for options, memory in itertools.product(SHAPES, ("hybrid", "naive")):
        layer: Any = Conv2d(4, 6, 3, neuron=neuron, memory=memory, **options).double()
        x = torch.randn(2, 4, 7, 8, dtype=torch.float64, requires_grad=True)
        how = {name: value for name, value in options.items() if name != "bias"}
        expected = by_formula(layer, x, lambda x, w, how=how: nn.functional.conv2d(x, w, **how))
        compare(layer(x), expected, [x, *layer.parameters()])
    layer = Linear(5, 4, neuron=neuron).double()
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    compare(layer(x), by_formula(layer, x, nn.functional.linear), [x, *layer.parameters()])
    assert torch.autograd.gradcheck(layer, (x,))


def compare(made: torch.Tensor, expected: torch.Tensor, sources: list[Any]) -> None:
    torch.testing.assert_close(made, expected, rtol=1e-12, atol=1e-12)
    sources = [source for source in sources if source.numel()]  # t2 has no branches
    weights = torch.randn_like(made)
    ours = torch.autograd.grad((made * weights).sum(), sources)
    theirs = torch.autograd.grad((expected * weights).sum(), sources)
    for gradient, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("training", [True, False])
def test_branch_norm_equals_torchs(training: bool) -> None:
    torch.manual_seed(0)
    both = [Conv2d(3, 4, 3, branch_norm=True, memory=m).double() for m in ("hybrid", "naive")]
    both[1].load_state_dict(both[0].state_dict())
    x = torch.randn(5, 3, 6, 6, dtype=torch.float64, requires_grad=True)
    for norm in both:
        norm(x)  # the running statistics differ from their initial values
        norm.train(training)
    found = [
        torch.autograd.grad(module(x).sin().sum(), [x, *module.parameters()]) for module in both
    ]
    for gradient, other in zip(*found, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-9, atol=1e-10)
    for name, value in both[0].state_dict().items():
        torch.testing.assert_close(value, both[1].state_dict()[name])


def test_no_more_is_saved_than_by_a_first_order_layer() -> None:
    x = torch.randn(8, 16, 16, 16, requires_grad=True)
    first, ours = nn.Conv2d(16, 16, 3, padding=1), Conv2d(16, 16, 3, padding=1)
    naive = Conv2d(16, 16, 3, padding=1, memory="naive")
    saved = [saved_bytes(lambda m=m: m(x), m.parameters()) for m in (first, ours, naive)]
    assert saved[1] <= 1.05 * saved[0] < saved[2]
    with_norm = nn.Sequential(first, nn.BatchNorm2d(16))
    ours = Conv2d(16, 16, 3, padding=1, branch_norm=True)
    saved = [saved_bytes(lambda m=m: m(x), m.parameters()) for m in (with_norm, ours)]
    assert saved[1] <= 1.1 * saved[0]


def test_a_converted_model_starts_unchanged_and_learns() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(),
        nn.Linear(4 * 16, 3),
    )  # fmt: skip
    x = torch.randn(5, 1, 6, 6)
    before = model(x)
    assert convert(model, except_="4") == ["0", "2"]
    torch.testing.assert_close(model(x), before, rtol=1e-6, atol=1e-6)
    model(x).square().sum().backward()
    assert all(float(parameter.grad.abs().sum()) > 0 for parameter in model.parameters())


@pytest.mark.parametrize("function", ["circles", "xor", "polynomial"])
def test_one_layer_learns_a_quadratic_function(function: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(512, 2)
    target = {
        "circles": x.square().sum(1) - 1.4, "xor": x[:, 0] * x[:, 1],
        "polynomial": 2 * x[:, 0] * x[:, 1] - x[:, 1] ** 2 + x[:, 0] + 0.5,
    }[function]  # fmt: skip
    layer = nn.Sequential(Linear(2, 4), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(layer.parameters(), 0.05)
    for _ in range(400):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(layer(x)[:, 0], target)
        loss.backward()
        optimizer.step()
    assert loss.item() / target.var().item() <= 1e-3


@pytest.mark.parametrize("branch_norm", [False, True])
def test_a_deep_stack_that_diverges_is_reported_within_eight_steps(branch_norm: bool) -> None:
    torch.manual_seed(0)
    layers = [Conv2d(4, 4, 3, padding=1, branch_norm=branch_norm) for _ in range(12)]
    model, x = nn.Sequential(*layers), torch.randn(4, 4, 6, 6)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(8):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    messages = [str(warning.message) for warning in caught if warning.category is SlipstreamWarning]
    assert bool(messages) is not branch_norm
    assert all("is not finite; use branch_norm=True" in message for message in messages)
    assert bool(torch.isfinite(model(x)).all()) is branch_norm


def test_autocast_leaves_the_layer_to_autograd() -> None:
    layer, x = Linear(8, 8), torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    y.float().sum().backward()
    assert torch.isfinite(layer.weight.grad).all()


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Linear(2, 2, neuron="t5"), UnknownNameError, "t5"),
        (lambda: Linear(2, 2, neuron="t2", branch_norm=True), InvalidArgumentError, "no branch"),
        (lambda: convert(nn.ReLU()), InvalidArgumentError, "no nn"),
        (lambda: convert(nn.Linear(2, 2)), InvalidArgumentError, "is a single layer"),
        (
            lambda: convert(nn.Sequential(nn.Linear(2, 2)), "t4"),
            InvalidArgumentError,
            "linear term",
        ),
    ],
)
def test_errors_explain_themselves(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


def test_second_derivatives_are_refused() -> None:
    x = torch.randn(3, 2, requires_grad=True)
    with pytest.raises(SlipstreamError, match=r'quadratic[^\n]*\n.*memory="naive"'):
        torch.autograd.grad(Linear(2, 2)(x).sum(), x, create_graph=True)


@pytest.mark.parametrize("neuron", ["ours", "t3", "t4", "glu"])
@pytest.mark.parametrize("branch_norm", [False, True])
def test_fusing_for_inference_preserves_outputs(neuron: str, branch_norm: bool) -> None:
    torch.manual_seed(0)
    conv = Conv2d(3, 6, 3, padding=1, neuron=neuron, branch_norm=branch_norm)
    linear = Linear(6, 4, neuron=neuron)
    model = torch.nn.Sequential(conv, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), linear)
    x = torch.randn(8, 3, 6, 6)
    for _ in range(3):
        model(x)  # so that all running statistics differ from their initial values
    with torch.no_grad():
        for module in (conv, linear):
            assert module.bias is not None
            module.bias.normal_()
        expected = model.eval()(x)
        assert fuse(model) == ["0", "3"]
        torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


def test_a_layer_that_cannot_be_fused_reports_it() -> None:
    with pytest.raises(InvalidArgumentError, match="cannot be computed as one matmul"):
        FusedQuadratic(Linear(3, 2, neuron="t2&4"))
    with pytest.raises(InvalidArgumentError, match="a single layer"):
        fuse(Linear(3, 2))


def separable(neuron: str = "ours", **how: Any) -> nn.Sequential:
    """With a depthwise and a grouped convolution."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 8, 3, groups=2),
        nn.Tanh(), nn.Flatten(-3), nn.Linear(8 * 9, 5),
    )  # fmt: skip
    convert(model, neuron, only="[0-2]", **how)
    return model


def encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 1)
    convert(model)
    return model


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (separable, (3, 4, 7, 7)),
        (lambda: separable("t2&4", init="random", branch_norm=True), (3, 4, 7, 7)),
        (encoder, (3, 5, 16)),
    ],
)
def test_a_converted_model_supports_common_uses_of_models(make: Any, shape: Any) -> None:
    check_uses(make, torch.randn(shape))


def test_padded_batches_of_an_encoder_do_not_become_nested_tensors() -> None:
    model = encoder().eval()
    x, padding = torch.randn(3, 5, 16), torch.zeros(3, 5, dtype=torch.bool)
    padding[:, 4] = True
    expected = model(x, src_key_padding_mask=padding)
    with torch.no_grad():
        made = model(x, src_key_padding_mask=padding)
    torch.testing.assert_close(made[:, :4], expected[:, :4])


@pytest.mark.parametrize("memory", ["hybrid", "naive"])
def test_accepts_unbatched_images_and_rows_of_any_shape(memory: Any) -> None:
    conv: Any = Conv2d(4, 6, 3, memory=memory)
    x = torch.randn(2, 4, 7, 8)
    torch.testing.assert_close(conv(x[0]), conv(x)[0])
    torch.testing.assert_close(FusedQuadratic(conv)(x[0]), FusedQuadratic(conv)(x)[0])
    linear: Any = Linear(4, 6, memory=memory, branch_norm=True)
    rows = torch.randn(2, 5, 4)
    torch.testing.assert_close(linear(rows), linear(rows.flatten(0, 1)).view(2, 5, 6))


def test_hooks_and_frozen_layers_stay_and_tied_ones_stay_first_order() -> None:
    model: Any = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 10))
    model[2].weight = model[0].weight
    calls: list[int] = []
    model[1].register_forward_hook(lambda *ignored: calls.append(1))
    model[1].weight.requires_grad_(False)
    with pytest.warns(SlipstreamWarning, match="2: its weight is shared with another layer"):
        assert convert(model) == ["1"]
    assert model[2].weight is model[0].weight
    assert [n for n, p in model[1].named_parameters() if not p.requires_grad] == ["weight"]
    model(torch.tensor([3]))
    assert calls == [1]
    with pytest.raises(InvalidArgumentError, match="no layer that can be replaced"):
        convert(model)


def test_a_converted_model_trains_at_the_learning_rate_of_the_original() -> None:
    """With equal steps for the product's weights it diverges."""
    torch.manual_seed(0)
    layers = nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    first, x = nn.Sequential(*layers), torch.randn(512, 64)
    y, model = (x @ torch.randn(64, 10)).argmax(1), copy.deepcopy(first)
    convert(model)
    losses = []
    for network in (first, model):
        optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9)
        for step in range(120):
            batch = torch.arange(step * 64, step * 64 + 64) % 512
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(network(x[batch]), y[batch])
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[1] < 1.2 * losses[0]
