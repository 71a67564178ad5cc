"""Layers that compute tiles of images, batch norm over groups of ranks, and their insertion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from slipstream.arguments import as_integer
from slipstream.errors import InvalidArgumentError, WorkloadError
from slipstream.ranks.group import ProcessGroup, process_group
from slipstream.surgery.check import difference, outputs_of
from slipstream.techniques.spatial.tiles import RankSum, Tiles
from slipstream.techniques.spatial.window import Window

Size = tuple[int, int]


class _Tiled(nn.Module):
    """A layer whose input is a tile, or the whole image after a layer that ends the tiles.

    Attributes:
        ends: whether all ranks have the whole output.
        sizes: height and width of the whole input of each call in a forward pass.
    """

    ends = False
    tiles: Tiles
    sizes: list[Size]
    calls: int

    def forward(self, x: torch.Tensor) -> Any:
        if self.tiles.whole:
            self.sizes.append((x.shape[-2], x.shape[-1]) if x.dim() > 2 else (1, 1))
            output = super().forward(x)
            if self.ends:
                self.tiles.ended.append((*output.shape[2:], 1, 1)[:2])
            return output
        # A call is repeated in the backward pass of activation checkpointing.
        size = self.sizes[self.calls % len(self.sizes)]
        self.calls += 1
        if x.dim() <= 2 or tuple(x.shape[-2:]) == size:
            return super().forward(x)
        return self.on_tile(x, size)

    def on_tile(self, x: torch.Tensor, size: Size) -> torch.Tensor:
        raise NotImplementedError

    def check(self) -> None:
        """Raise an `InvalidArgumentError` unless tiles of all inputs have outputs and halos."""
        for size in self.sizes:
            # Behind a layer that ends the tiles, all ranks compute the same.
            if any(size[0] <= end[0] and size[1] <= end[1] for end in self.tiles.ended):
                continue
            self.tiles.own(size)
            for extent, tiles, window in zip(size, self.tiles.shape, self.windows(), strict=True):
                window.needs(extent, tiles)

    def windows(self) -> list[Window]:
        """Return the windows along height and width."""
        layer: Any = self
        if not hasattr(layer, "kernel_size"):
            return [Window(1, 1, 0)] * 2
        padding = layer.padding
        if isinstance(padding, str):
            reach = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
            padding = [0 if padding == "valid" else r // 2 for r in reach]
        dilation = getattr(layer, "dilation", 1)
        columns = (layer.kernel_size, layer.stride, padding, dilation)
        return [
            Window(*(int(value if isinstance(value, int) else value[axis]) for value in columns))
            for axis in range(2)
        ]


class TiledConv2d(_Tiled, nn.Conv2d):
    """``nn.Conv2d`` on tiles, [n, c, h, w], whose halo comes from neighbouring ranks."""

    def on_tile(self, x: torch.Tensor, size: Size) -> torch.Tensor:
        x, padding = self.tiles.extend(x, size, self.windows(), 0.0)
        return functional.conv2d(
            x, self.weight, self.bias, self.stride, padding, self.dilation, self.groups
        )


class TiledMaxPool2d(_Tiled, nn.MaxPool2d):
    """``nn.MaxPool2d`` on tiles."""

    def on_tile(self, x: torch.Tensor, size: Size) -> torch.Tensor:
        x, padding = self.tiles.extend(x, size, self.windows(), float("-inf"))
        return functional.max_pool2d(x, self.kernel_size, self.stride, padding, self.dilation)


class TiledAvgPool2d(_Tiled, nn.AvgPool2d):
    """``nn.AvgPool2d`` on tiles; padding counts."""

    def on_tile(self, x: torch.Tensor, size: Size) -> torch.Tensor:
        x, padding = self.tiles.extend(x, size, self.windows(), 0.0)
        return functional.avg_pool2d(
            x, self.kernel_size, self.stride, padding, divisor_override=self.divisor_override
        )


class TiledAdaptiveAvgPool2d(_Tiled, nn.AdaptiveAvgPool2d):
    """``nn.AdaptiveAvgPool2d``, which ends the tiles: all ranks have its whole output."""

    ends = True

    def on_tile(self, x: torch.Tensor, size: Size) -> torch.Tensor:
        if self.output_size in (1, (1, 1)):
            return self.tiles.sum(x.sum((-2, -1), keepdim=True)) / (size[0] * size[1])
        whole: torch.Tensor = nn.AdaptiveAvgPool2d.forward(self, self.tiles.whole_image(x, size))
        return whole


class TiledFlatten(_Tiled, nn.Flatten):
    """``nn.Flatten``, which ends the tiles."""

    ends = True

    def on_tile(self, x: torch.Tensor, size: Size) -> torch.Tensor:
        return nn.Flatten.forward(self, self.tiles.whole_image(x, size))


class _Normalise(torch.autograd.Function):
    """Batch norm in training, [n, c, ...], with statistics that `total` sums over ranks.

    Returns the output, mean, variance and number of values per channel, all but the first without
    gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor,
        total: Callable[[torch.Tensor], torch.Tensor], eps: float,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        count = x.new_tensor([x.numel() / x.shape[1]])
        mean, variance = torch.batch_norm_update_stats(x, None, None, 0.0)
        sums = total(torch.cat([mean * count, count]))
        number = sums[-1]
        centre = sums[:-1] / number
        spread = total(count * (variance + (mean - centre).square())) / number
        out = functional.batch_norm(x, centre, spread, weight, bias, False, 0.0, eps)
        ctx.save_for_backward(x, weight, centre, spread)
        ctx.total, ctx.number, ctx.eps = total, number, eps
        ctx.mark_non_differentiable(centre, spread, number)
        return out, centre, spread, number

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, variance = ctx.saved_tensors
        inverse = (variance + ctx.eps).rsqrt()
        dx, dweight, dbias = torch.ops.aten.native_batch_norm_backward(
            gradient, x, weight, mean, variance, mean, inverse, False, ctx.eps, [True] * 3
        )
        by_weight, by_bias = (ctx.total(torch.stack([dweight, dbias])) / ctx.number).unbind()
        # dx - weight inverse (mean of dy + x^ mean of dy x^), with x^ = (x - mean) inverse.
        slope = weight * inverse.square() * by_weight
        shift = weight * inverse * by_bias - slope * mean
        shape = [1, -1, *[1] * (x.dim() - 2)]
        dx = dx.sub_(torch.addcmul(shift.view(shape), x, slope.view(shape)))
        return dx, dweight, dbias, None, None


def normalised(
    layer: Any, x: torch.Tensor, total: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return `x` after batch norm in training, with statistics that `total` sums over ranks."""
    layer._check_input_dim(x)
    wide = x.float() if x.dtype.itemsize < 4 else x
    ones = wide.new_ones(x.shape[1])
    weight = layer.weight.to(wide.dtype) if layer.affine else ones
    bias = layer.bias.to(wide.dtype) if layer.affine else torch.zeros_like(ones)
    out, mean, variance, number = _Normalise.apply(wide, weight, bias, total, layer.eps)
    if layer.training and layer.running_mean is not None:
        layer.num_batches_tracked.add_(1)
        momentum = layer.momentum
        seen = 1.0 / float(layer.num_batches_tracked) if momentum is None else momentum
        unbiased = variance * (number / (number - 1.0).clamp(min=1.0))
        layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), seen)
        layer.running_var.lerp_(unbiased.to(layer.running_var.dtype), seen)
    result: torch.Tensor = out.to(x.dtype)
    return result


def _uses_batch(layer: Any) -> bool:
    return bool(layer.training or layer.running_mean is None)


class TiledBatchNorm2d(_Tiled, nn.BatchNorm2d):
    """``nn.BatchNorm2d`` over all tiles of the images."""

    def on_tile(self, x: torch.Tensor, size: Size) -> torch.Tensor:
        if _uses_batch(self):
            return normalised(self, x, self.tiles.sum)
        return nn.BatchNorm2d.forward(self, x)


class _Grouped(nn.Module):
    ranks: RankSum

    def forward(self, x: torch.Tensor) -> Any:
        if _uses_batch(self):
            return normalised(self, x, self.ranks.sum)
        return super().forward(x)


class GroupBatchNorm1d(_Grouped, nn.BatchNorm1d):
    """``nn.BatchNorm1d`` with the statistics of a group of ranks."""


class GroupBatchNorm2d(_Grouped, nn.BatchNorm2d):
    """``nn.BatchNorm2d`` with the statistics of a group of ranks."""


class GroupBatchNorm3d(_Grouped, nn.BatchNorm3d):
    """``nn.BatchNorm3d`` with the statistics of a group of ranks."""


_TILED: dict[type[nn.Module], type[_Tiled]] = {
    nn.Conv2d: TiledConv2d,
    nn.MaxPool2d: TiledMaxPool2d,
    nn.AvgPool2d: TiledAvgPool2d,
    nn.AdaptiveAvgPool2d: TiledAdaptiveAvgPool2d,
    nn.Flatten: TiledFlatten,
    nn.BatchNorm2d: TiledBatchNorm2d,
}
_GROUPED: dict[type[nn.Module], type[_Grouped]] = {
    nn.BatchNorm1d: GroupBatchNorm1d,
    nn.BatchNorm2d: GroupBatchNorm2d,
    nn.BatchNorm3d: GroupBatchNorm3d,
}


def group_batch_norm(model: nn.Module, ranks: int, group: Any = None) -> nn.Module:
    """Let every batch norm use the statistics of groups of `ranks` consecutive ranks, in place.

    Parameters and the state dictionary are unchanged. All ranks call this.

    Args:
        ranks: number of ranks in a group; it divides the ranks of `group`.
        group: process group; None for the default group.

    Raises:
        UsageError: no process group is initialised.
        InvalidArgumentError: `ranks` does not divide the number of ranks.
        WorkloadError: the model has no batch norm.
    """
    whole = process_group(group)
    if as_integer("ranks", ranks) > whole.size or whole.size % ranks:
        raise InvalidArgumentError(
            "ranks", f"{whole.size} ranks do not make groups of {ranks}",
            remedy="one of " + ", ".join(str(n) for n in range(1, whole.size + 1)
                                         if whole.size % n == 0),
        )  # fmt: skip
    members = dist.get_process_group_ranks(group)
    parts = [dist.new_group(members[at : at + ranks]) for at in range(0, whole.size, ranks)]
    own = RankSum(ProcessGroup(parts[whole.rank // ranks], name="batch_norm"))
    layers: list[Any] = [layer for layer in model.modules() if type(layer) in _GROUPED]
    if not layers:
        raise WorkloadError(
            "the model has no batch norm, or all of it is in groups already",
            remedy="remove batch_norm_groups",
        )
    for layer in layers:
        layer.__class__ = _GROUPED[type(layer)]
        layer.ranks = own
    return model


def partition(
    model: nn.Module, example: torch.Tensor, rows: int, columns: int, group: Any = None
) -> nn.Module:
    """Divide the images of `model` into tiles, one per rank, in place.

    All ranks call the model with the same images, and each computes one tile until a layer that
    pools or flattens whole images; from there on all ranks compute the same. Averaging gradients
    over ranks, as DistributedDataParallel does, gives those of one process. Parameters and the
    state dictionary are unchanged.

    Args:
        example: images for which the result is checked, [n, c, height, width].
        rows, columns: number of tiles along height and width.
        group: process group of the tiles; None for the default group.

    Raises:
        UsageError: no process group is initialised.
        InvalidArgumentError: the tiles are not the ranks of the group, or too small for the halo;
            `example` is not a batch of images.
        WorkloadError: a layer cannot compute tiles, the outputs differ, or the model is divided
            already.
    """
    tiles = Tiles(rows, columns, group)
    _need_images(example)
    if any(isinstance(layer, _Tiled) for layer in model.modules()):
        raise WorkloadError("the model is divided already", remedy="call partition once")
    layers = {name: layer for name, layer in model.named_modules() if type(layer) in _TILED}
    for name, layer in layers.items():
        if (reason := _why_whole(layer)) is not None:
            raise WorkloadError(f"layer '{name}' cannot compute tiles: {reason}")
    classes = {layer: type(layer) for layer in layers.values()}

    def outputs() -> list[Any]:
        # Rounding to 16 bits would exceed the tolerance of the comparison.
        with torch.autocast("cpu", enabled=False):
            return outputs_of(model, lambda: model(example))

    (before,) = outputs()
    for layer in layers.values():
        layer.__class__ = _TILED[type(layer)]
        layer.tiles, layer.sizes, layer.calls = tiles, [], 0
    border = _Border(tiles, list(layers.values()))
    hooks = [
        model.register_forward_pre_hook(border.divide, with_kwargs=True),
        model.register_forward_hook(border.join),
    ]
    try:
        # Recording the sizes of layers calls the model again.
        *_, after = outputs()
        wrong = difference(before, after)
    except Exception:
        wrong = "failed"
        raise
    finally:
        if wrong is not None:
            for hook in hooks:
                hook.remove()
            for layer, kind in classes.items():
                layer.__class__ = kind
    if wrong is not None:
        others = {type(m).__name__ for m in model.modules() if not list(m.children())}
        raise WorkloadError(
            f"on tiles {wrong}: the model combines pixels outside of layers that exchange halos "
            f"(its layers: {', '.join(sorted(others))})",
            remedy="use nn.AdaptiveAvgPool2d or nn.Flatten to leave the tiles, not means or views",
        )
    return model


def _why_whole(layer: Any) -> str | None:
    """Return why a layer cannot compute tiles; None if it can."""
    if getattr(layer, "padding_mode", "zeros") != "zeros":
        return f"its padding mode is {layer.padding_mode}"
    if getattr(layer, "ceil_mode", False) or getattr(layer, "return_indices", False):
        return "ceil_mode and return_indices are not supported"
    if isinstance(layer, nn.AvgPool2d) and layer.padding and not layer.count_include_pad:
        return "its padding does not count"
    if getattr(layer, "padding", None) == "same" and any(k % 2 == 0 for k in layer.kernel_size):
        return "its padding is uneven"
    return None


def _need_images(*inputs: Any) -> tuple[Any, ...]:
    """Return `inputs`, the first of which must be images."""
    first = inputs[0] if inputs else None
    if not isinstance(first, torch.Tensor) or first.dim() != 4:
        found = f"a tensor of shape {list(first.shape)}" if isinstance(first, torch.Tensor) else (
            f"of type {type(first).__name__}" if inputs else "missing"
        )  # fmt: skip
        raise InvalidArgumentError(
            "images", f"the first positional argument of the model is {found}",
            remedy="pass images, [n, c, height, width], as its first positional argument",
        )  # fmt: skip
    return inputs


class _Border:
    """Hooks of a partitioned model: its input becomes a tile, tiles in its output whole images."""

    def __init__(self, tiles: Tiles, layers: Sequence[Any]) -> None:
        self.tiles, self.layers = tiles, layers
        self.size: tuple[int, ...] = ()
        self.output: tuple[int, ...] = ()

    def divide(self, model: nn.Module, inputs: Any, named: dict[str, Any]) -> Any:
        """Return the tile of the first input; record the sizes of layers for a new image size."""
        if self.tiles.whole:
            return None
        images, *others = _need_images(*inputs)
        if tuple(images.shape[1:]) != self.size:
            self._record(model, images[:1], others, named)
        for layer in self.layers:
            layer.calls = 0
        rows, columns = self.tiles.own(images.shape[-2:])
        return (images[..., rows, columns], *others), named

    def _record(
        self, model: nn.Module, images: torch.Tensor, others: Sequence[Any], named: dict[str, Any]
    ) -> None:
        # An error must not leave the sizes of other images.
        self.size = ()
        for layer in self.layers:
            layer.sizes = []
        self.tiles.ended = []
        self.tiles.whole = True
        try:
            (output,) = outputs_of(model, lambda: model(images, *others, **named))
        finally:
            self.tiles.whole = False
        self.output = tuple(output.shape[-2:]) if isinstance(output, torch.Tensor) else ()
        # The same error on all ranks, before any of them waits for another.
        self.tiles.own(images.shape[-2:])
        for layer in self.layers:
            layer.check()
        self.size = tuple(images.shape[1:])

    def join(self, model: nn.Module, inputs: Any, output: Any) -> Any:
        """Return whole images if `output` is a tile."""
        whole = self.tiles.whole or not isinstance(output, torch.Tensor) or output.dim() < 3
        if whole or tuple(output.shape[-2:]) == self.output:
            return None
        return self.tiles.whole_image(output, self.output)
