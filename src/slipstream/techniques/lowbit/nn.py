"""`LowBitLinear` and `LowBitConv2d`: layers of an inference in 1 to 8 bits.

Activations are rounded to unsigned codes with one scale and one zero point, multiplied exactly with
weights of few bits, and scaled, shifted and clipped in one pass behind. Layers that follow each
other directly hand over codes rather than floats, with the same results.
"""

from __future__ import annotations

import functools
import math
from typing import Self

import torch
from torch import nn

from slipstream.errors import InvalidArgumentError
from slipstream.native.operators import plainly, profiled
from slipstream.quant import Granularity
from slipstream.techniques.lowbit.bindings import OK
from slipstream.techniques.lowbit.coded import CodedTensor, Unfinished
from slipstream.techniques.lowbit.convolve import Codes, Prepared
from slipstream.techniques.lowbit.kernels import linear
from slipstream.techniques.lowbit.layer import LowBitLayer
from slipstream.techniques.lowbit.operators import window
from slipstream.techniques.lowbit.windows import Convolution, pair


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
    def shaped_like(
        cls, module: nn.Linear, bias: bool, wbits: int, abits: int, scales: str
    ) -> Self:
        """See `LowBitLayer.shaped_like`."""
        sizes = module.in_features, module.out_features
        return cls(*sizes, bias, wbits=wbits, abits=abits, scales=scales)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Floats [..., in] to the same dtype [..., out]; a row that holds NaN gives NaN.

        Also takes uint8, codes as of `input_codes`, and gives a `CodedTensor` where `output_codes`
        are set.

        Raises:
            InvalidArgumentError: another dtype, device or shape, or `x` needs a gradient
                in training mode.
            SlipstreamError: in a backward pass: gradients end here.
        """
        if torch.compiler.is_compiling():
            return self._as_operator(x)
        output = self._at_once(x)
        if output is not None:
            return output
        if not self._runs_plainly(x):
            return self._as_operator(x)
        x = self._read(x)
        self._check(x)
        if x.shape[-1:] != (self.in_features,):
            raise self._misshapen(x)
        if x.dtype is torch.float32 and self._floats_at_once():
            seen = self.input_codes
            return linear(
                x, self._packed[0], self.scale, self.bias,
                activation_scale=seen.scale, activation_zero=seen.zero, relu=self.relu,
            )  # fmt: skip
        rows = x.reshape(-1, self.in_features).contiguous()
        codes, whole = self._coded(rows)
        shape = Convolution((1, 1, rows.shape[0], self.in_features))
        floats, handed = self._multiply(codes.view(shape.image), shape)
        if not whole:
            _spoil(floats, handed, rows.isnan().any(1), (0, 0))
        wanted = (*x.shape[:-1], self.out_features)
        return _handed(
            None if floats is None else floats.reshape(wanted),
            None if handed is None else handed.reshape(wanted),
            self.output_codes, self.relu,
        )  # fmt: skip

    def _as_operator(self, x: torch.Tensor) -> torch.Tensor:
        """The same, seen by compilers, tracers and autograd."""
        operands = self._operands(x)
        if x.shape[-1:] != (self.in_features,):
            raise self._misshapen(x)
        output: torch.Tensor = torch.ops.slipstream.lowbit_linear(*operands)
        return output.to(x.dtype)

    def _misshapen(self, x: torch.Tensor) -> InvalidArgumentError:
        return InvalidArgumentError(
            "x", f"has shape {tuple(x.shape)}; the last dimension must be {self.in_features}"
        )

    def _at_once(self, x: torch.Tensor) -> torch.Tensor | None:
        """The result for the usual input of the usual layer; None where there is more to see to.

        Small layers are called more often than they take to look up what they are.
        """
        if not plainly(x) or x.dtype is not torch.float32 or x.dim() != 2 or x.requires_grad:
            return None
        rows, k = x.shape
        if k != self.in_features or not rows or not x.is_cpu or not x.is_contiguous():
            return None
        call = self._call
        if call is None:
            call = self.__dict__["_call"] = self._usual_call()
        if not call:
            return None
        multiply, packed, step, zero, floor, n, (scale, scale_at, bias, bias_at) = call
        buffers = self._buffers
        # A buffer may have been replaced, and so may have its data.
        if (
            buffers["scale"] is not scale or buffers["bias"] is not bias or scale is None
            or scale.data_ptr() != scale_at or scale.numel() != n or not scale.is_contiguous()
            or (bias is not None and (
                bias.data_ptr() != bias_at or bias.numel() != n or not bias.is_contiguous()
            ))
            or profiled()
        ):  # fmt: skip
            self.__dict__["_call"] = None
            return None
        y = torch.empty((rows, n))
        status = multiply(
            packed._handle, x.data_ptr(), rows, k, step, zero, scale_at, bias_at, floor,
            y.data_ptr(), n, torch.get_num_threads(),
        )  # fmt: skip
        return y if status == OK else None

    def extra_repr(self) -> str:
        """For ``print(model)``."""
        return f"{self.in_features}, {self.out_features}, {self._described()}"


class LowBitConv2d(LowBitLayer):
    """``nn.Conv2d`` without groups or depthwise, for inference, with few bits.

    Images are NCHW in shape and channels-last in memory; what comes otherwise is copied. Beyond the
    image lies the code of zero.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, bias, groups: as of
            ``nn.Conv2d``; numbers only. Groups are 1, or as many as there are channels.
        wbits, abits, scales: as of `LowBitLinear`; channels of weights count kernel height, kernel
            width, input channel in this order. Depthwise ones are too short for blocks: these
            have a scale a channel.

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
        groups: int = 1,
        wbits: int = 3,
        abits: int = 3,
        scales: str = "channel",
    ) -> None:
        kernel = _pair("kernel_size", kernel_size, 1)
        if groups != 1 and not groups == in_channels == out_channels:
            raise InvalidArgumentError(
                "groups", f"{groups} are neither 1 nor {in_channels} channels to {out_channels}"
            )
        columns = math.prod(kernel) * (1 if groups > 1 else in_channels)
        if groups > 1 and Granularity.of(scales).block:
            scales = "channel"
        super().__init__(out_channels, columns, bias, wbits, abits, scales)
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size = kernel
        self.stride = _pair("stride", stride, 1)
        self.padding = _pair("padding", padding, 0)
        self.dilation = _pair("dilation", dilation, 1)

    @classmethod
    def shaped_like(
        cls, module: nn.Conv2d, bias: bool, wbits: int, abits: int, scales: str
    ) -> Self:
        """See `LowBitLayer.shaped_like`."""
        return cls(
            module.in_channels, module.out_channels, pair(module.kernel_size),
            pair(module.stride), padding_of(module), pair(module.dilation), bias,
            groups=module.groups, wbits=wbits, abits=abits, scales=scales,
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Floats [images, in, height, width] to the same dtype [images, out, ...], channels-last.

        An image that holds NaN gives NaN, at least where the kernel sees it. Also takes uint8,
        codes as of `input_codes`, and gives a `CodedTensor` where `output_codes` are set, or an
        `Unfinished` one where a sum comes next.

        Raises:
            InvalidArgumentError: another dtype, device or shape, an image smaller than the kernel,
                or `x` needs a gradient in training mode.
            SlipstreamError: in a backward pass: gradients end here.
        """
        if torch.compiler.is_compiling() or not self._runs_plainly(x):
            return self._as_operator(x)
        x = self._read(x)
        output = self._at_once(x)
        if output is not None:
            return output
        self._check(x)
        if x.dim() == 3:
            return self.forward(x[None])[0]
        self._check_shape(x)
        pixels = x.permute(0, 2, 3, 1).contiguous()
        shape = _shape(
            tuple(pixels.shape), self.kernel_size, self.stride, self.padding, self.dilation,
            self.groups > 1,
        )  # fmt: skip
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
            output = finish()
            if len(self._packed) == 1 and x.dtype is torch.uint8:
                self.__dict__["_call"] = self._prepare(image.shape, shape, sums=False)
            return output
        return Unfinished((x.shape[0], *shape.out_size, self.out_channels), finish)

    def _at_once(self, x: torch.Tensor) -> torch.Tensor | None:
        """The output for codes like the last ones; None where there is more to see to."""
        prepared = self._call
        if not isinstance(prepared, Prepared) or x.dtype is not torch.uint8:
            return None
        buffers = self._buffers
        scale = buffers["scale"]
        if scale is None or not prepared.serves(scale, buffers["bias"]):
            return None
        output = prepared.in_torchs_order(x)
        if output is None:
            return None
        return _handed(*output, self.output_codes, self.relu)

    def _as_operator(self, x: torch.Tensor) -> torch.Tensor:
        """The same, seen by compilers, tracers and autograd."""
        if x.dim() == 3:
            return self._as_operator(x[None])[0]
        operands = self._operands(x)
        self._check_shape(x)
        output: torch.Tensor = torch.ops.slipstream.lowbit_conv2d(
            *operands, self.kernel_size, self.stride, self.padding, self.dilation, self.groups > 1
        )
        return output.to(x.dtype)

    def _check_shape(self, x: torch.Tensor) -> None:
        if x.dim() != 4 or x.shape[1] != self.in_channels:
            raise InvalidArgumentError(
                "x",
                f"has shape {tuple(x.shape)} instead of (images, {self.in_channels}, "
                "height, width)",
            )

    def extra_repr(self) -> str:
        """For ``print(model)``."""
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
            f"stride={self.stride}, padding={self.padding}, groups={self.groups}, "
            f"{self._described()}"
        )


def low_bit_class(module: nn.Module) -> type[LowBitLayer]:
    """The class of the low-bit layer in the place of a linear layer or a convolution."""
    return LowBitConv2d if isinstance(module, nn.Conv2d) else LowBitLinear


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
    return pair(module.padding)


_shape = functools.lru_cache(maxsize=1024)(window)


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


def _pair(name: str, value: int | tuple[int, int], least: int) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, int) else tuple(value)
    if len(pair) != 2 or any(not isinstance(one, int) or one < least for one in pair):
        raise InvalidArgumentError(name, f"{value} is not one or two numbers of at least {least}")
    return pair[0], pair[1]
