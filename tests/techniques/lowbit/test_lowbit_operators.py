"""Low-bit layers under all of torch's module transformations: equal results, or clear errors."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from slipstream.errors import InvalidArgumentError, SlipstreamError
from slipstream.techniques.lowbit import LowBitConv2d, LowBitLinear, linear, matmul, pack_weights
from slipstream.techniques.lowbit.operators import window

RANGE = (-1.5, 2.5)


def made(kind: str) -> tuple[Any, torch.Tensor]:
    """A layer in eval mode, and an input."""
    torch.manual_seed(0)
    if kind.startswith("conv"):
        bits, scales = (1, "channel") if kind == "conv binary" else (4, "channel")
        shape = (6, 6) if kind == "conv depthwise" else (6, 9)
        groups = 6 if kind == "conv depthwise" else 1
        module = nn.Conv2d(*shape, 3, stride=(2, 1), padding=1, groups=groups)
        layer: Any = LowBitConv2d.from_float(module, bits, 6, RANGE, scales=scales)
        return layer.eval(), torch.randn(2, 6, 8, 7)
    bits, scales = {"linear": (4, "channel"), "blocks": (3, "block32"), "binary": (1, "channel")}[
        kind
    ]
    layer = LowBitLinear.from_float(nn.Linear(70, 9), bits, 6, RANGE, scales=scales)
    return layer.eval(), torch.randn(3, 70)


KINDS = pytest.mark.parametrize(
    "kind", ["linear", "blocks", "binary", "conv", "conv binary", "conv depthwise"]
)


@KINDS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_round_their_values(kind: str, dtype: torch.dtype) -> None:
    layer, x = made(kind)
    expected, rounded = layer(x), layer(x.to(dtype).float())
    assert torch.equal(layer.to(dtype)(x), expected)
    y = layer(x.to(dtype))
    assert y.dtype is dtype
    assert torch.equal(y, rounded.to(dtype))


@KINDS
def test_a_layer_on_meta_has_shapes_and_no_values(kind: str) -> None:
    layer, x = made(kind)
    expected = layer(x)
    layer.to("meta")
    with pytest.raises(InvalidArgumentError, match="meta"):
        layer(x)
    y = layer(x.to("meta"))
    assert y.is_meta
    assert y.shape == expected.shape


@KINDS
def test_buffers_are_checked_in_every_call(kind: str) -> None:
    layer, x = made(kind)
    expected = layer(x)
    good, n = layer.scale.clone(), len(layer.scale)
    wide = torch.stack([good, good], -1)[..., 0]

    def attempts() -> Any:
        yield lambda: setattr(layer, "scale", torch.ones(1))
        yield lambda: setattr(layer, "scale", good.double())
        yield lambda: setattr(layer.scale, "data", torch.ones(1))
        yield lambda: setattr(layer.bias, "data", torch.ones(2))
        yield lambda: layer._buffers.update(scale=good.half())

    for spoil in attempts():
        layer.scale, layer.bias = good.clone(), layer.bias[:1].expand(n).contiguous()
        layer(x)
        spoil()
        with pytest.raises(InvalidArgumentError):
            layer(x)
    layer, x = made(kind)
    layer(x)
    if good.dim() == 1:
        layer.scale.data = wide
        with pytest.raises(InvalidArgumentError, match="contiguous"):
            layer(x)
    layer.scale = 2 * good
    layer.bias = torch.zeros(n)
    doubled = layer(x)
    layer.scale = good
    layer.bias = torch.zeros(n)
    torch.testing.assert_close(doubled, 2 * layer(x))
    assert not torch.equal(doubled, expected)


def compiled(layer: nn.Module, x: torch.Tensor) -> Callable[..., Any]:
    # All models here share one forward, of which torch.compile keeps a limited number of versions.
    torch.compiler.reset()
    return torch.compile(layer, fullgraph=True, backend="aot_eager")


def dynamic(layer: nn.Module, x: torch.Tensor) -> Callable[..., Any]:
    torch.compiler.reset()
    return torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)


def exported(layer: nn.Module, x: torch.Tensor) -> Callable[..., Any]:
    file = io.BytesIO()
    torch.export.save(torch.export.export(layer, (x,)), file)
    file.seek(0)
    module: Callable[..., Any] = torch.export.load(file).module()
    return module


def strictly_exported(layer: nn.Module, x: torch.Tensor) -> Callable[..., Any]:
    module: Callable[..., Any] = torch.export.export(layer, (x,), strict=True).module()
    return module


def traced(layer: nn.Module, x: torch.Tensor) -> Callable[..., Any]:
    function: Callable[..., Any] = torch.jit.trace(layer, x)
    return function


def pickled(layer: nn.Module, x: torch.Tensor) -> Callable[..., Any]:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded: Callable[..., Any] = torch.load(file, weights_only=False)
    return loaded


def batched(layer: nn.Module, x: torch.Tensor) -> Callable[..., Any]:
    return lambda batch: torch.vmap(layer, in_dims=1)(
        batch[:, None].expand(-1, 2, *batch.shape[1:])
    )[1]


@pytest.mark.filterwarnings("ignore")
@KINDS
@pytest.mark.parametrize(
    "way", [compiled, dynamic, exported, strictly_exported, traced, pickled, batched]
)
def test_every_way_of_calling_gives_equal_results(
    kind: str, way: Callable[[nn.Module, torch.Tensor], Callable[..., Any]]
) -> None:
    layer, x = made(kind)
    model = nn.Sequential(layer, nn.Tanh())
    expected = model(x)
    function = way(copy.deepcopy(model), x)
    torch.testing.assert_close(function(x), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(function(x + 0.1), model(x + 0.1), rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
@KINDS
def test_operators_pass_torchs_checks(kind: str) -> None:
    layer, x = made(kind)
    operators = torch.ops.slipstream
    operands = layer._operands(x)
    if kind.startswith("conv"):
        shape = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
        arguments = (*operands, *map(list, shape), layer.groups > 1)
        torch.library.opcheck(operators.lowbit_conv2d.default, arguments)
    else:
        torch.library.opcheck(operators.lowbit_linear.default, operands)


@pytest.mark.parametrize("which", ["kernel", "stride", "padding", "dilation"])
def test_sizes_with_products_beyond_64_bits_are_refused_by_name(which: str) -> None:
    sizes = {"kernel": (1, 1), "stride": (1, 1), "padding": (0, 0), "dilation": (1, 1)}
    assert window((1, 8, 8, 3), **sizes).out_size == (8, 8)
    with pytest.raises(InvalidArgumentError, match=rf"{which}.*{2**25}"):
        window((1, 8, 8, 3), **{**sizes, which: (2**25, 1)})


@pytest.mark.filterwarnings("ignore")
def test_matmuls_are_operators_too() -> None:
    packed = pack_weights(torch.randint(-4, 4, (5, 20), dtype=torch.int8), 3, activation_bits=4)
    a = torch.randint(0, 16, (6, 20), dtype=torch.uint8)
    x, scale = torch.randn(6, 20), torch.rand(5)

    def both(a: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = linear(x, packed, scale, activation_scale=0.2, activation_zero=7)
        return matmul(a, packed, activation_zero=7), y

    expected = both(a, x)
    for made_ in (
        torch.compile(both, fullgraph=True, backend="aot_eager"),
        torch.jit.trace(both, (a, x)),
        lambda a, x: [output.flatten(0, 1) for output in torch.vmap(both)(
            a.unflatten(0, (2, 3)), x.unflatten(0, (2, 3))
        )],
    ):  # fmt: skip
        assert all(map(torch.equal, made_(a, x), expected))
    with pytest.raises(InvalidArgumentError, match="vmap"):
        torch.vmap(lambda s: linear(x, packed, s, activation_scale=0.2))(scale.expand(2, 5))


@KINDS
def test_an_empty_batch_gives_an_empty_batch(kind: str) -> None:
    layer, x = made(kind)
    expected = layer(x)
    assert layer(x[:0]).shape == (0, *expected.shape[1:])
    assert layer(x[:0].half()).shape == (0, *expected.shape[1:])


@KINDS
def test_it_accepts_the_dtypes_of_autocast(kind: str) -> None:
    layer, x = made(kind)
    before = nn.Conv2d(6, 6, 1) if kind.startswith("conv") else nn.Linear(70, 70)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        between = before(x)
        y = layer(between)
    assert between.dtype is y.dtype is torch.bfloat16
    assert torch.equal(y, layer(between.float().detach()).bfloat16())


@KINDS
def test_gradients_raise_a_clear_error(kind: str) -> None:
    layer, x = made(kind)
    expected = layer(x)
    y = layer(x.requires_grad_())
    assert torch.equal(y, expected)
    with pytest.raises(SlipstreamError, match=r"slipstream::lowbit[^\n]*\n.*no_grad"):
        y.sum().backward()
    with torch.no_grad():
        assert not layer(x).requires_grad
    layer.train()
    with pytest.raises(InvalidArgumentError, match="needs a gradient"):
        layer(x)


@pytest.mark.filterwarnings("ignore")
def test_torch_onnx_raises_a_clear_error() -> None:
    layer, x = made("linear")
    with pytest.raises(InvalidArgumentError, match=r"^model: .*torch\.onnx[^\n]*\n.*to_onnx"):
        torch.onnx.export(nn.Sequential(layer), (x,), io.BytesIO(), dynamo=False)


def test_a_profiler_shows_them() -> None:
    for kind in ("linear", "conv"):
        layer, x = made(kind)
        with torch.profiler.profile() as profile:
            layer(x)
        seen = {event.key for event in profile.key_averages()}
        assert f"slipstream::lowbit_{'linear' if kind == 'linear' else 'conv2d'}" in seen
