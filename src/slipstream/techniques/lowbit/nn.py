"""`LowBitLinear` and `LowBitConv2d`: layers of an inference in 1 to 8 bits.

Activations are rounded to unsigned codes with one scale and one zero point, multiplied exactly with
weights of few bits, and scaled, shifted and clipped in one pass behind. Layers that follow each
other directly hand over codes rather than floats, with the same results.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import nn

from slipstream.errors import InvalidArgumentError
from slipstream.quant import Format, code_weights
from slipstream.techniques.lowbit._bindings import OK
from slipstream.techniques.lowbit.coded import CodedTensor, HeldTensor, Unfinished
from slipstream.techniques.lowbit.convolve import (
    Codes,
    Convolution,
)
from slipstream.techniques.lowbit.kernels import linear
from slipstream.techniques.lowbit.layer import LowBitLayer


class LowBitLinear(LowBitLayer):
    """``nn.Linear`` for inference, with weights and activations of few bits.

    Args:
        in_features, out_features, bias: as of ``nn.Linear``.
        wbits, abits: 1 to 8.
        scales: ``"tensor"``, ``"channel"`` or ``"blockN"`` with N from 32 to 128; blocks cost one
            multiplication each.

    Raises:
        InvalidArgumentError: values other than these.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        wbits: int = 3,
        abits: int = 3,
        scales: str = "channel",
    ) -> None:
        super().__init__(out_features, in_features, bias, wbits, abits, scales)
        self.in_features, self.out_features = in_features, out_features

    @classmethod
    def from_float(
        cls,
        module: nn.Linear,
        wbits: int,
        abits: int,
        ranges: Any,
        *,
        scales: str = "channel",
        least_error: bool = True,
    ) -> Self:
        """The layer that does what `module` does, with its weights rounded.

        Args:
            ranges: of inputs: a `slipstream.quant.Range`, or (low, high).
            least_error: of the weights: see `slipstream.quant.code_weights`.

        Raises:
            InvalidArgumentError: a weight or range that holds NaN or infinity, or other bits.
        """
        made = cls(
            module.in_features, module.out_features, module.bias is not None,
            wbits=wbits, abits=abits, scales=scales,
        )  # fmt: skip
        codes, scale = code_weights(module.weight, wbits, made.granularity, least_error=least_error)
        made.set_weights(codes, scale, codes_of_range(ranges, abits), module.bias)
        made.training = module.training
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [..., in] to float32 [..., out]; a row that holds NaN gives NaN.

        Also takes uint8, codes as of `input_codes`, and gives a `CodedTensor` where `output_codes`
        are set.

        Raises:
            InvalidArgumentError: another dtype, device or shape, or `x` needs a gradient
                in training mode.
        """
        made = self._at_once(x)
        if made is not None:
            return made
        x = self._read(x)
        self._check(x)
        if x.shape[-1:] != (self.in_features,):
            raise InvalidArgumentError(
                "x", f"has shape {tuple(x.shape)}; the last dimension must be {self.in_features}"
            )
        if x.dtype is torch.float32 and self._floats_at_once():
            codes = self.input_codes
            return linear(
                x, self._packed[0], self.scale, self.bias,
                activation_scale=codes.scale, activation_zero=codes.zero, relu=self.relu,
            )  # fmt: skip
        rows = x.reshape(-1, self.in_features).contiguous()
        image, whole = self._coded(rows)
        shape = Convolution((1, 1, rows.shape[0], self.in_features))
        floats, handed = self._multiply(image, shape)
        if not whole:
            _spoil(floats, handed, rows.isnan().any(1), (0, 0))
        wanted = (*x.shape[:-1], self.out_features)
        return _handed(
            None if floats is None else floats.reshape(wanted),
            None if handed is None else handed.reshape(wanted),
            self.output_codes, self.relu,
        )  # fmt: skip

    def _at_once(self, x: torch.Tensor) -> torch.Tensor | None:
        """The result for the usual input of the usual layer; None where there is more to see to.

        Small layers are called more often than they take to look up what they are.
        """
        call = self._call
        if call is None or isinstance(x, HeldTensor):
            return None
        if x.dtype is not torch.float32 or x.dim() != 2 or x.requires_grad:
            return None
        rows, k = x.shape
        if k != self.in_features or not rows or not x.is_cpu or not x.is_contiguous():
            return None
        multiply, handle, scale, zero, floor, n = call
        buffers = self._buffers
        factors, bias = buffers["scale"], buffers["bias"]
        assert factors is not None
        y = torch.empty((rows, n))
        status = multiply(
            handle, x.data_ptr(), rows, k, scale, zero, factors.data_ptr(),
            None if bias is None else bias.data_ptr(), floor, y.data_ptr(), n,
            torch.get_num_threads(),
        )  # fmt: skip
        return y if status == OK else None

    def extra_repr(self) -> str:
        """For ``print(model)``."""
        return f"{self.in_features}, {self.out_features}, {self._described()}"


class LowBitConv2d(LowBitLayer):
    """``nn.Conv2d`` without groups, for inference, with weights and activations of few bits.

    Images are NCHW in shape and channels-last in memory; what comes otherwise is copied. Beyond the
    image lies the code of zero.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, bias: as of
            ``nn.Conv2d``; numbers only.
        wbits, abits, scales: as of `LowBitLinear`; channels of weights count kernel height, kernel
            width, input channel in this order.

    Raises:
        InvalidArgumentError: values other than these.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        bias: bool = True,
        *,
        wbits: int = 3,
        abits: int = 3,
        scales: str = "channel",
    ) -> None:
        kernel = _pair("kernel_size", kernel_size, 1)
        super().__init__(out_channels, in_channels * math.prod(kernel), bias, wbits, abits, scales)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size = kernel
        self.stride = _pair("stride", stride, 1)
        self.padding = _pair("padding", padding, 0)
        self.dilation = _pair("dilation", dilation, 1)

    @classmethod
    def from_float(
        cls,
        module: nn.Conv2d,
        wbits: int,
        abits: int,
        ranges: Any,
        *,
        scales: str = "channel",
        least_error: bool = True,
    ) -> Self:
        """The layer that does what `module` does, with its weights rounded.

        Args:
            ranges: of inputs: a `slipstream.quant.Range`, or (low, high).

        Raises:
            InvalidArgumentError: groups (depthwise convolutions are no matrix product), padding
                other than with zeros, NaN or infinity in a weight or range, or other bits.
        """
        if (reason := why_kept(module)) is not None:
            raise InvalidArgumentError("module", reason, remedy="leave it as it is")
        made = cls(
            module.in_channels, module.out_channels, _two(module.kernel_size),
            _two(module.stride), padding_of(module), _two(module.dilation),
            module.bias is not None, wbits=wbits, abits=abits, scales=scales,
        )  # fmt: skip
        codes, scale = code_weights(
            as_rows(module.weight), wbits, made.granularity, least_error=least_error
        )
        made.set_weights(codes, scale, codes_of_range(ranges, abits), module.bias)
        made.training = module.training
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [images, in, height, width] to float32 [images, out, ...], channels-last.

        An image that holds NaN gives NaN, at least where the kernel sees it. Also takes uint8,
        codes as of `input_codes`, and gives a `CodedTensor` where `output_codes` are set, or an
        `Unfinished` one where a sum comes next.

        Raises:
            InvalidArgumentError: another dtype, device or shape, an image smaller than the kernel,
                or `x` needs a gradient
                in training mode.
        """
        x = self._read(x)
        self._check(x)
        if x.dim() == 3:
            return self.forward(x[None])[0]
        if x.dim() != 4 or x.shape[1] != self.in_channels:
            raise InvalidArgumentError(
                "x",
                f"has shape {tuple(x.shape)} instead of (images, {self.in_channels}, "
                "height, width)",
            )
        pixels = x.permute(0, 2, 3, 1).contiguous()
        images, height, width, _ = pixels.shape
        shape = _shape(
            tuple(pixels.shape), self.kernel_size, self.stride, self.padding, self.dilation
        )
        if min(shape.out_size) < 1:
            raise InvalidArgumentError(
                "x", f"is {height} x {width}, smaller than the kernel {self.kernel_size}"
            )
        if x.dtype is torch.float32 and shape.pointwise and self._floats_at_once():
            codes = self.input_codes
            out = linear(
                pixels, self._packed[0], self.scale, self.bias,
                activation_scale=codes.scale, activation_zero=codes.zero, relu=self.relu,
            )  # fmt: skip
            return out.permute(0, 3, 1, 2)
        image, whole = self._coded(pixels)
        spoiled = None if whole else pixels.isnan().flatten(1).any(1)

        def finish(added: torch.Tensor | None = None) -> torch.Tensor:
            rows = None if added is None else added.permute(0, 2, 3, 1).contiguous()
            floats, codes = self._multiply(image, shape, rows)
            if spoiled is not None:
                _spoil(floats, codes, spoiled, ())
            summed = None if added is None else self.after_sum
            return _handed(
                None if floats is None else floats.permute(0, 3, 1, 2),
                None if codes is None else codes.permute(0, 3, 1, 2),
                self.output_codes if summed is None else summed.codes,
                self.relu if summed is None else summed.relu,
            )

        if self.after_sum is None:
            return finish()
        return Unfinished((images, *shape.out_size, self.out_channels), finish)

    def extra_repr(self) -> str:
        """For ``print(model)``."""
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
            f"stride={self.stride}, padding={self.padding}, {self._described()}"
        )


def why_kept(module: nn.Module) -> str | None:
    """None, or why `module` has no low-bit form; it then stays in float32."""
    if isinstance(module, nn.Linear):
        return None
    if not isinstance(module, nn.Conv2d):
        return f"a {type(module).__name__} is neither linear nor a two-dimensional convolution"
    if module.groups != 1:
        what = "depthwise" if module.groups == module.in_channels else "grouped"
        return f"a {what} convolution is no matrix product"
    if module.padding_mode != "zeros":
        return f"it pads with '{module.padding_mode}', not with zeros"
    if module.padding == "same" and any((k - 1) * d % 2 for k, d in zip(
        module.kernel_size, module.dilation, strict=True
    )):  # fmt: skip
        return "it pads one side more than the other"
    return None


def codes_of_range(ranges: Any, bits: int) -> Codes:
    """How inputs of that range (a `slipstream.quant.Range`, or low and high) are rounded.

    Raises:
        InvalidArgumentError: no finite range.
    """
    from slipstream.quant import grid_of_range

    low, high = (ranges.low, ranges.high) if hasattr(ranges, "low") else ranges
    grid = grid_of_range(low, high, Format(bits))
    return Codes(bits, float(grid.scale), int(grid.zero))


def as_rows(weight: torch.Tensor) -> torch.Tensor:
    """A convolution's weight [n, channels, height, width] as [n, height * width * channels]."""
    return weight.permute(0, 2, 3, 1).reshape(weight.shape[0], -1)


def padding_of(module: nn.Conv2d) -> tuple[int, int]:
    """Height and width of the padding, also where it is a word."""
    if module.padding == "valid":
        return (0, 0)
    if module.padding == "same":
        high, wide = (
            (k - 1) * d // 2 for k, d in zip(module.kernel_size, module.dilation, strict=True)
        )
        return high, wide
    assert not isinstance(module.padding, str)
    return _two(module.padding)


@functools.lru_cache(maxsize=1024)
def _shape(image: Any, kernel: Any, stride: Any, padding: Any, dilation: Any) -> Convolution:
    return Convolution(image, kernel, stride, padding, dilation)


def _handed(
    floats: torch.Tensor | None, codes: torch.Tensor | None, of: Codes | None, clipped: bool
) -> torch.Tensor:
    """What a layer gives: floats, codes, or both."""
    if codes is not None and of is not None:
        return CodedTensor(codes, of, floats, clipped)
    assert floats is not None
    return floats


def _spoil(
    floats: torch.Tensor | None,
    codes: torch.Tensor | None,
    which: torch.Tensor,
    at: tuple[int, ...],
) -> None:
    """Make what came of something that is no number no number either."""
    if codes is not None or floats is None:
        raise InvalidArgumentError(
            "x", "holds NaN, which has no code", remedy="find where it comes from"
        )
    floats[at][which] = math.nan


def _two(values: Sequence[int]) -> tuple[int, int]:
    one, two = values
    return one, two


def _pair(name: str, value: int | tuple[int, int], least: int) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, int) else tuple(value)
    if len(pair) != 2 or any(not isinstance(one, int) or one < least for one in pair):
        raise InvalidArgumentError(name, f"{value} is not one or two numbers of at least {least}")
    return pair[0], pair[1]
