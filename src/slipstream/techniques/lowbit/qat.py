"""Training with fake quantisation, and the way from there to low-bit layers.

`prepare_training` puts rounding into a model's layers, with scales that are learned (LSQ); the
model is then trained as before. `convert` makes low-bit layers of it, which compute the same up to
the order of float32 sums. Given ranges, `convert` also takes a model that was not trained so.

Source: Esser et al., "Learned Step Size Quantization", ICLR 2020; first and last layer in eight
bits as there.
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
    called,
    grid_of_weights,
    quantize,
)
from slipstream.surgery import ModuleSelection, consecutive_pairs, place
from slipstream.techniques.lowbit.attention import open_up
from slipstream.techniques.lowbit.convolve import Codes
from slipstream.techniques.lowbit.handover import hand_over
from slipstream.techniques.lowbit.layer import (
    LowBitLayer,
    as_rows,
    as_torch,
    is_depthwise,
    is_transposed_linear,
    shallow_copy,
    why_kept,
)
from slipstream.techniques.lowbit.nn import LowBitConv2d, LowBitLinear, low_bit_class

EDGE_BITS = 8


class _Trained(nn.Module):
    """What both layers below add to a float layer."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    weight_fake: FakeQuantize | BinaryWeights
    input_fake: FakeQuantize
    wbits: int

    def take(self, wbits: int, abits: int, granularity: Granularity, ranges: Any) -> None:
        """Start from the best scales of the weights as they are, and from `ranges` of inputs."""
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
        """The weight as its codes give it back; gradients reach weight and scales."""
        return cast(torch.Tensor, self.weight_fake(self.weight))

    def coded(self) -> tuple[torch.Tensor, torch.Tensor, Codes]:
        """Codes of the weights (rows), their scales, and how inputs are rounded."""
        rows = as_rows(self.weight.detach())
        if isinstance(self.weight_fake, BinaryWeights):
            codes, scale = binarize(rows, self.weight_fake.granularity)
        else:
            grid = self.weight_fake.grid
            codes, scale = quantize(rows, grid), grid.scale
        seen = self.input_fake.grid
        return codes, scale, Codes(seen.format.bits, float(seen.scale), int(seen.zero))

    @property
    def scales(self) -> str:
        """The weights' granularity, in words."""
        return str(self.weight_fake.granularity)


class QatLinear(_Trained, nn.Linear):  # type: ignore[misc]
    """``nn.Linear`` whose input and weight are rounded on the way."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [..., in] to float32 [..., out]."""
        output: torch.Tensor = nn.functional.linear(
            self.input_fake(x), self.rounded_weight(), self.bias
        )
        return output


class QatConv2d(_Trained, nn.Conv2d):  # type: ignore[misc]
    """``nn.Conv2d`` whose input and weight are rounded on the way."""

    def rounded_weight(self) -> torch.Tensor:
        """See `_Trained.rounded_weight`."""
        n, channels, high, wide = self.weight.shape
        rows: torch.Tensor = self.weight_fake(as_rows(self.weight))
        return rows.reshape(n, high, wide, channels).permute(0, 3, 1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """float32 NCHW to float32 NCHW."""
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
    """Put fake quantisation into the linear layers and convolutions of `model`, in place.

    Parameters stay the objects they are, so that an optimizer made before still trains them; add
    the scales to it: ``optimizer.add_param_group({"params": added_parameters(model)})``.

    Args:
        wbits, abits: of weights and activations, 1 to 8.
        ranges: of the layers' inputs, from `slipstream.quant.calibrate` on a few batches.
        scales: ``"tensor"``, ``"channel"`` or ``"blockN"``, of weights.
        edge_bits: of the layers that run first and last, where they are among the chosen, and of
            depthwise convolutions.
        only, except_: patterns of qualified names.

    Returns:
        The names of the layers, in the order they run.

    Raises:
        InvalidArgumentError: bits other than 1 to 8, or no layer is chosen.
    """
    granularity = Granularity.of(scales)
    chosen = [
        name for name in chosen_layers(model, ranges, only, except_)
        if not is_transposed_linear(model.get_submodule(name))
    ]  # fmt: skip
    for name, weight_bits, input_bits in _with_bits(model, chosen, ranges, wbits, abits, edge_bits):
        old = model.get_submodule(name)
        # With the very parameters of the old one.
        layer: Any = shallow_copy(old, QatLinear if isinstance(old, nn.Linear) else QatConv2d)
        short = is_depthwise(old) and granularity.block
        each = Granularity.of("channel") if short else granularity
        layer.take(weight_bits, input_bits, each, ranges[name])
        place(model, name, layer)
    return chosen


def added_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The scales `prepare_training` has added, which an optimizer should train too."""
    return [
        one for fake in model.modules() if isinstance(fake, FakeQuantize)
        for one in fake.parameters()
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
    """Put low-bit layers in the place of trained or float ones, in place.

    Layers that went through `prepare_training` keep their bits and scales; the settings are for
    others, which need `ranges`.

    Args:
        least_error: of the weights: see `slipstream.quant.code_weights`.
        run: runs one forward pass of the model. With it, batch norms and ReLUs that directly
            follow a low-bit layer become part of it, neighbours hand over codes, and weights are
            packed for as many rows as the layer then sees.

    Returns:
        The names of the layers.

    Raises:
        InvalidArgumentError: the model is in training mode, no layer is left to convert, or a
            weight holds NaN or infinity.
    """
    if model.training:
        raise InvalidArgumentError(
            "model", "is in training mode, and low-bit layers only infer", remedy="model.eval()"
        )
    names = [name for name, one in model.named_modules() if isinstance(one, _Trained)]
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
            remedy="prepare_training(model, ...) before training it, or give ranges",
        )  # fmt: skip
    if run is not None:
        fuse(model, run)
        _expect_rows(model, run)
    return names


def quantise_model(
    model: nn.Module, batches: Iterable[Any], *, wbits: int = 3, abits: int = 3, **settings: Any
) -> list[str]:
    """`convert` with ranges calibrated on `batches`, and neighbours fused: all in one call.

    Attention of torch is opened up for it (see `slipstream.techniques.lowbit.attention`).

    Args:
        batches: as of `slipstream.quant.calibrate`; the first is run again to see which layers
            follow which.
        settings: as of `convert`.
    """
    model.eval()
    kept = list(batches)
    open_up(model)
    ranges = calibrate(model, kept, modules=convertible)

    def run() -> object:
        with torch.no_grad():
            return called(model, kept[0])

    return convert(model, wbits=wbits, abits=abits, ranges=ranges, run=run, **settings)


def load(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Give a float `model` the low-bit layers that `state`, a saved ``state_dict``, is of.

    Batch norms and ReLUs that had become part of a layer are taken out, too.

    Raises:
        InvalidArgumentError: the model and the state do not belong together; the model is then
            left with the modules it had.
    """
    opened = open_up(model, lambda name: any(key.startswith(f"{name}.") for key in state))
    named = dict(model.named_modules())
    new: dict[str, nn.Module] = {}
    for key, extra in state.items():
        name = key.removesuffix("._extra_state")
        if name == key or not isinstance(extra, Mapping) or "wbits" not in extra:
            continue
        for one in (name, *extra["absorbed"]):
            if one not in named:
                raise InvalidArgumentError("state", f"has a module '{one}', the model none")
        if (reason := why_kept(named[name])) is not None:
            raise InvalidArgumentError("model", f"'{name}': {reason}")
        old = as_torch(named[name])
        new[name] = low_bit_class(old).shaped_like(
            old, f"{name}.bias" in state, extra["wbits"], extra["input"][0], extra["scales"]
        ).train(old.training)  # fmt: skip
        new |= {str(one): nn.Identity() for one in extra["absorbed"]}
    for name, module in new.items():
        place(model, name, module)
    try:
        model.load_state_dict(state)
    except (RuntimeError, InvalidArgumentError) as error:
        for name, old_module in [*((name, named[name]) for name in new), *opened.items()]:
            place(model, name, old_module)
        raise InvalidArgumentError("state", f"is not of this model: {error}") from error


def fuse(model: nn.Module, run: Callable[[], object]) -> int:
    """Let low-bit layers do what directly follows them, and hand codes to those that read them.

    A batch norm in eval mode is multiplied into the layer's scales; the rounding of float32 aside
    nothing changes. A ReLU, a sum and the codes change nothing at all.

    Args:
        run: runs one forward pass.

    Returns:
        How many modules became part of a layer, and how many layers hand codes on or take a sum
        along.
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
    """Let every low-bit layer know how many rows a call has."""
    rows: dict[LowBitLayer, int] = {}

    def note(layer: Any, args: Any, output: torch.Tensor) -> None:
        rows[layer] = output.numel() // len(layer.scale)

    layers = [one for one in model.modules() if isinstance(one, LowBitLayer)]
    hooks = [one.register_forward_hook(note) for one in layers]
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
    """The float layers that have a low-bit form, in the order in which they ran.

    A model that is itself a layer is not among them: nothing holds it that could hold another.
    """
    names = [
        name
        for name in ranges
        if name and ":" not in name and convertible(name, model.get_submodule(name))
    ]
    selection = ModuleSelection(only, except_)
    if names and needed and (reason := selection.why_none(names)) is not None:
        raise InvalidArgumentError("model", reason, remedy="only=GLOB, except=GLOB by name")
    names = [name for name in names if name in selection]
    if not names and needed:
        reasons = {why_kept(one) for name, one in model.named_modules() if name in ranges}
        raise InvalidArgumentError(
            "model", "has no layer that can be taken",
            where="; ".join(sorted(one for one in reasons if one)) or None,
            remedy="only=GLOB and except=GLOB choose linear layers and convolutions by name",
        )  # fmt: skip
    return names


def convertible(name: str, module: Any) -> bool:
    """Whether a layer has a low-bit form that can take its place."""
    plain = type(module) in (nn.Linear, nn.Conv2d) or is_transposed_linear(module)
    return plain and why_kept(module) is None


def _with_bits(
    model: nn.Module, chosen: list[str], ranges: Calibration, wbits: int, abits: int, edge_bits: int
) -> list[tuple[str, int, int]]:
    """Bits of weights and activations of each; more at the model's two ends and where few save
    nothing: depthwise convolutions, whose few weights matter much."""
    ran = [name for name in ranges if ":" not in name]
    edges = {ran[0], ran[-1]}
    return [
        (name, max(edge_bits, wbits), max(edge_bits, abits))
        if name in edges or is_depthwise(model.get_submodule(name))
        else (name, wbits, abits)
        for name in chosen
    ]


def _converted(old: Any) -> LowBitLayer:
    codes, scale, seen = old.coded()
    kind = low_bit_class(old)
    layer = kind.shaped_like(old, old.bias is not None, old.wbits, seen.bits, old.scales)
    layer.set_weights(codes, scale, seen, old.bias)
    layer.training = old.training
    return layer
