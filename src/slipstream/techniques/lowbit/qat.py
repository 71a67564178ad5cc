"""Quantisation-aware training, and conversion to low-bit layers.

`prepare_training` adds fake quantisation with learned scales (LSQ) to a model's layers; the model
is then trained as before. `convert` replaces them by low-bit layers, which compute the same up to
the order of float32 sums. With ranges, `convert` also accepts a model without such training.

Source: Esser et al., "Learned Step Size Quantization", ICLR 2020, with the first and last layer in
eight bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import nn

from slipstream.errors import InvalidArgumentError
from slipstream.quant import (
    BinaryWeights,
    Calibration,
    FakeQuantize,
    Format,
    Granularity,
    binarize,
    calibrate,
    call_model,
    grid_of_weights,
    quantize,
)
from slipstream.surgery import ModuleSelection, consecutive_pairs, place
from slipstream.techniques.lowbit.attention import split_attention
from slipstream.techniques.lowbit.convolve import Codes
from slipstream.techniques.lowbit.handover import hand_over
from slipstream.techniques.lowbit.layer import (
    LowBitLayer,
    as_rows,
    as_torch,
    is_depthwise,
    is_transposed_linear,
    shallow_copy,
    why_unsupported,
)
from slipstream.techniques.lowbit.nn import LowBitConv2d, LowBitLinear, low_bit_class

EDGE_BITS = 8


class _FakeQuantised(nn.Module):
    """Mixin that adds fake quantisation to a float layer."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    weight_fake: FakeQuantize | BinaryWeights
    input_fake: FakeQuantize
    wbits: int

    def initialise(self, wbits: int, abits: int, granularity: Granularity, ranges: Any) -> None:
        """Initialise scales by the least error of the weights, and from `ranges` of inputs."""
        self.wbits = wbits
        rows = as_rows(self.weight.detach())
        if wbits == 1:
            self.weight_fake = BinaryWeights(granularity)
        else:
            grid = grid_of_weights(
                rows, Format(wbits, signed=True), granularity, method="least_error"
            )
            self.weight_fake = FakeQuantize(grid)
        self.input_fake = FakeQuantize(ranges.grid(Format(abits)))

    def rounded_weight(self) -> torch.Tensor:
        """Return the fake-quantised weight; gradients reach weight and scales."""
        return cast(torch.Tensor, self.weight_fake(self.weight))

    def coded(self) -> tuple[torch.Tensor, torch.Tensor, Codes]:
        """Return the weights' codes as rows, their scales, and the codes of inputs."""
        rows = as_rows(self.weight.detach())
        if isinstance(self.weight_fake, BinaryWeights):
            codes, scale = binarize(rows, self.weight_fake.granularity)
        else:
            grid = self.weight_fake.grid
            codes, scale = quantize(rows, grid), grid.scale
        input_grid = self.input_fake.grid
        return (
            codes,
            scale,
            Codes(input_grid.format.bits, float(input_grid.scale), int(input_grid.zero)),
        )

    @property
    def scales(self) -> str:
        """The weights' granularity as text."""
        return str(self.weight_fake.granularity)


class QatLinear(_FakeQuantised, nn.Linear):  # type: ignore[misc]
    """``nn.Linear`` with fake-quantised input and weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map float32 [..., in] to float32 [..., out]."""
        output: torch.Tensor = nn.functional.linear(
            self.input_fake(x), self.rounded_weight(), self.bias
        )
        return output


class QatConv2d(_FakeQuantised, nn.Conv2d):  # type: ignore[misc]
    """``nn.Conv2d`` with fake-quantised input and weight."""

    def rounded_weight(self) -> torch.Tensor:
        n, channels, height, width = self.weight.shape
        rows: torch.Tensor = self.weight_fake(as_rows(self.weight))
        return rows.reshape(n, height, width, channels).permute(0, 3, 1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map float32 NCHW to float32 NCHW."""
        output: torch.Tensor = self._conv_forward(
            self.input_fake(x), self.rounded_weight(), self.bias
        )
        return output


def prepare_training(
    model: nn.Module,
    wbits: int,
    abits: int,
    ranges: Calibration,
    *,
    scales: str = "channel",
    edge_bits: int = EDGE_BITS,
    only: str = "*",
    except_: str = "",
) -> list[str]:
    """Add fake quantisation to the linear layers and convolutions of `model`, in place.

    Parameters remain the same objects, so that an existing optimizer still trains them. Add the
    scales to it: ``optimizer.add_param_group({"params": added_parameters(model)})``.

    Args:
        wbits, abits: bits of weights and activations, 1 to 8.
        ranges: ranges of the layers' inputs, from `slipstream.quant.calibrate` on a few batches.
        scales: granularity of the weights' scales: ``"tensor"``, ``"channel"`` or ``"blockN"``.
        edge_bits: minimum bits of the first and last layer, if selected, and of depthwise
            convolutions.
        only, except_: patterns of qualified names.

    Returns:
        The names of the layers in the order of execution.

    Raises:
        InvalidArgumentError: bits are not from 1 to 8, or no layer is selected.
    """
    granularity = Granularity.of(scales)
    chosen = [
        name for name in chosen_layers(model, ranges, only, except_)
        if not is_transposed_linear(model.get_submodule(name))
    ]  # fmt: skip
    for name, weight_bits, input_bits in _with_bits(model, chosen, ranges, wbits, abits, edge_bits):
        old = model.get_submodule(name)
        # Shares parameters with the old layer.
        layer: Any = shallow_copy(old, QatLinear if isinstance(old, nn.Linear) else QatConv2d)
        short = is_depthwise(old) and granularity.block
        layer_granularity = Granularity.of("channel") if short else granularity
        layer.initialise(weight_bits, input_bits, layer_granularity, ranges[name])
        place(model, name, layer)
    return chosen


def added_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the scales that `prepare_training` added, for an optimizer to train."""
    return [
        parameter for fake in model.modules() if isinstance(fake, FakeQuantize)
        for parameter in fake.parameters()
    ]  # fmt: skip


def convert(
    model: nn.Module,
    *,
    wbits: int = 3,
    abits: int = 3,
    ranges: Calibration | None = None,
    scales: str = "channel",
    edge_bits: int = EDGE_BITS,
    only: str = "*",
    except_: str = "",
    least_error: bool = True,
    run: Callable[[], object] | None = None,
) -> list[str]:
    """Replace fake-quantised or float layers by low-bit layers, in place.

    Layers from `prepare_training` keep their bits and scales; the settings apply to other layers,
    which require `ranges`.

    Args:
        wbits, abits, ranges, scales, edge_bits, only, except_: see `prepare_training`.
        least_error: whether the weights' scales minimise the error, see
            `slipstream.quant.code_weights`.
        run: runs a forward pass of the model. With it, batch norms and ReLUs directly after a
            low-bit layer are fused into it, neighbours exchange codes, and weights are packed for
            the number of rows in this pass.

    Returns:
        The names of the layers.

    Raises:
        InvalidArgumentError: the model is in training mode, has no layer to convert, or a weight
            is not finite.
    """
    if model.training:
        raise InvalidArgumentError(
            "model",
            "is in training mode, but low-bit layers support only inference",
            remedy="call model.eval()",
        )
    names = [name for name, module in model.named_modules() if isinstance(module, _FakeQuantised)]
    for name in names:
        place(model, name, _converted(model.get_submodule(name)))
    if ranges is not None:
        chosen = chosen_layers(model, ranges, only, except_, needed=not names)
        bits = _with_bits(model, chosen, ranges, wbits, abits, edge_bits)
        for name, weight_bits, input_bits in bits:
            old = model.get_submodule(name)
            layer = low_bit_class(old).from_float(
                old, weight_bits, input_bits, ranges[name], scales=scales, least_error=least_error
            )
            place(model, name, layer)
        names += chosen
    if not names:
        raise InvalidArgumentError(
            "model", "has no layer to convert",
            remedy="call prepare_training(model, ...) before training it, or pass ranges",
        )  # fmt: skip
    if run is not None:
        fuse(model, run)
        _expect_rows(model, run)
    return names


def quantise_model(
    model: nn.Module, batches: Iterable[Any], *, wbits: int = 3, abits: int = 3, **settings: Any
) -> list[str]:
    """Calibrate `model` on `batches`, and convert it with fusion; see `convert`.

    Torch's attention is split into layers (see `slipstream.techniques.lowbit.attention`).

    Args:
        batches: see `slipstream.quant.calibrate`; the first is run again to trace the order of
            layers.
        wbits, abits: bits of weights and activations, 1 to 8.
        settings: further arguments of `convert`.
    """
    model.eval()
    samples = list(batches)
    split_attention(model)
    ranges = calibrate(model, samples, modules=convertible)

    def run() -> object:
        with torch.no_grad():
            return call_model(model, samples[0])

    return convert(model, wbits=wbits, abits=abits, ranges=ranges, run=run, **settings)


def load(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Convert a float `model` to the low-bit layers of `state`, a saved ``state_dict``.

    Batch norms and ReLUs that were fused into layers are removed.

    Raises:
        InvalidArgumentError: the state is not of this model, whose modules are then restored.
    """
    opened = split_attention(model, lambda name: any(key.startswith(f"{name}.") for key in state))
    modules = dict(model.named_modules())
    replacements: dict[str, nn.Module] = {}
    for key, extra in state.items():
        name = key.removesuffix("._extra_state")
        if name == key or not isinstance(extra, Mapping) or "wbits" not in extra:
            continue
        for module_name in (name, *extra["absorbed"]):
            if module_name not in modules:
                raise InvalidArgumentError(
                    "state", f"has a module '{module_name}', which the model does not have"
                )
        if (reason := why_unsupported(modules[name])) is not None:
            raise InvalidArgumentError("model", f"'{name}': {reason}")
        old = as_torch(modules[name])
        replacements[name] = low_bit_class(old).shaped_like(
            old, f"{name}.bias" in state, extra["wbits"], extra["input"][0], extra["scales"]
        ).train(old.training)  # fmt: skip
        replacements |= {str(module_name): nn.Identity() for module_name in extra["absorbed"]}
    for name, module in replacements.items():
        place(model, name, module)
    try:
        model.load_state_dict(state)
    except (RuntimeError, InvalidArgumentError) as error:
        for name, old_module in [
            *((name, modules[name]) for name in replacements),
            *opened.items(),
        ]:
            place(model, name, old_module)
        raise InvalidArgumentError("state", f"is not of this model: {error}") from error


def fuse(model: nn.Module, run: Callable[[], object]) -> int:
    """Fuse following modules and sums into low-bit layers, and let layers exchange codes.

    Folding a batch norm in eval mode into the scales changes results by float32 rounding. ReLUs,
    sums and codes do not change results.

    Args:
        run: runs a forward pass.

    Returns:
        The number of fused modules, plus the number of layers that pass codes on or fuse a sum.
    """
    layers = (LowBitLinear, LowBitConv2d)
    fused = 0
    layer: Any
    norm: Any
    for pair in consecutive_pairs(model, run, layers, (nn.BatchNorm1d, nn.BatchNorm2d)):
        layer, norm = map(model.get_submodule, (pair.first, pair.second))
        if norm.training or norm.running_mean is None or norm._forward_hooks:
            continue
        factor = (norm.running_var + norm.eps).rsqrt()
        if norm.weight is not None:
            factor = factor * norm.weight.detach()
        addend = -norm.running_mean * factor
        if norm.bias is not None:
            addend = addend + norm.bias.detach()
        layer.multiply_add(factor.float(), addend.float())
        _absorb(model, layer, pair.second)
        fused += 1
    for pair in consecutive_pairs(model, run, layers, (nn.ReLU, nn.ReLU6)):
        layer, clip = map(model.get_submodule, (pair.first, pair.second))
        layer.relu, layer.ceiling = True, getattr(clip, "max_val", math.inf)
        _absorb(model, layer, pair.second)
        fused += 1
    return fused + hand_over(model, run)


def _expect_rows(model: nn.Module, run: Callable[[], object]) -> None:
    """Pack every low-bit layer's weights for its number of rows in a forward pass."""
    rows: dict[LowBitLayer, int] = {}

    def record_rows(layer: Any, args: Any, output: torch.Tensor) -> None:
        rows[layer] = output.numel() // len(layer.scale)

    layers = [module for module in model.modules() if isinstance(module, LowBitLayer)]
    hooks = [layer.register_forward_hook(record_rows) for layer in layers]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    for layer, count in rows.items():
        layer.expect_rows(count)


def _absorb(model: nn.Module, layer: LowBitLayer, name: str) -> None:
    place(model, name, nn.Identity())
    layer.absorbed = (*layer.absorbed, name)


def chosen_layers(
    model: nn.Module, ranges: Calibration, only: str, except_: str, *, needed: bool = True
) -> list[str]:
    """Return the selected float layers that have a low-bit form, in the order of execution.

    A model that is itself a layer is excluded, because it cannot be replaced.
    """
    names = [
        name
        for name in ranges
        if name and ":" not in name and convertible(name, model.get_submodule(name))
    ]
    selection = ModuleSelection(only, except_)
    if names and needed and (reason := selection.no_match_reason(names)) is not None:
        raise InvalidArgumentError(
            "model", reason, remedy="select layers by name with only=GLOB and except=GLOB"
        )
    names = [name for name in names if name in selection]
    if not names and needed:
        reasons = {
            why_unsupported(module) for name, module in model.named_modules() if name in ranges
        }
        raise InvalidArgumentError(
            "model", "has no layer that can be converted",
            where="; ".join(sorted(reason for reason in reasons if reason)) or None,
            remedy="select linear layers and convolutions by name with only=GLOB and except=GLOB",
        )  # fmt: skip
    return names


def convertible(name: str, module: Any) -> bool:
    """Return whether a layer can be replaced by a low-bit layer."""
    plain = type(module) in (nn.Linear, nn.Conv2d) or is_transposed_linear(module)
    return plain and why_unsupported(module) is None


def _with_bits(
    model: nn.Module, chosen: list[str], ranges: Calibration, wbits: int, abits: int, edge_bits: int
) -> list[tuple[str, int, int]]:
    """Return names with bits of weights and activations.

    The first and last layer have more bits, and so have depthwise convolutions, whose few weights
    save little and affect accuracy.
    """
    in_order = [name for name in ranges if ":" not in name]
    edges = {in_order[0], in_order[-1]}
    return [
        (name, max(edge_bits, wbits), max(edge_bits, abits))
        if name in edges or is_depthwise(model.get_submodule(name))
        else (name, wbits, abits)
        for name in chosen
    ]


def _converted(old: Any) -> LowBitLayer:
    codes, scale, input_codes = old.coded()
    kind = low_bit_class(old)
    layer = kind.shaped_like(old, old.bias is not None, old.wbits, input_codes.bits, old.scales)
    layer.set_weights(codes, scale, input_codes, old.bias)
    layer.training = old.training
    return layer
