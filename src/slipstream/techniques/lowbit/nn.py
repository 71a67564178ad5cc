"""`LowBitLinear` and `LowBitConv2d`: layers for inference in 1 to 8 bits.

Activations are quantised to unsigned codes with one scale and zero point, multiplied exactly with
low-bit weights, then scaled, shifted and clipped in one pass. Adjacent layers can exchange codes
instead of floats, with equal results.
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
from slipstream.techniques.lowbit.coded import CodedTensor, DeferredOutput
from slipstream.techniques.lowbit.convolve import Codes, Prepared
from slipstream.techniques.lowbit.kernels import linear
from slipstream.techniques.lowbit.layer import LowBitLayer
from slipstream.techniques.lowbit.operators import window
from slipstream.techniques.lowbit.windows import Convolution, pair


class LowBitLinear(LowBitLayer):
    """``nn.Linear`` for inference, with weights and activations of few bits.

    Args:
        in_features, out_features, bias: see ``nn.Linear``.
        wbits, abits: bits of weights and activations, 1 to 8.
        scales: granularity of the weights' scales: ``"tensor"``, ``"channel"`` or ``"blockN"``
            with N from 32 to 128; each block costs a separate matmul.

    Raises:
        InvalidArgumentError: an argument is out of range.
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
        """Map floats [..., in] to the same dtype [..., out]; a row with NaN gives NaN.

        Also accepts uint8 codes of `input_codes`, and returns a `CodedTensor` if `output_codes`
        are set.

        Raises:
            InvalidArgumentError: a dtype, device or shape is not supported, or `x` needs a gradient
                in training mode.
            SlipstreamError: in a backward pass, because there is no gradient.
        """
        if torch.compiler.is_compiling():
            return self._as_operator(x)
        output = self._by_cached_call(x)
        if output is not None:
            return output
        if not self._runs_plainly(x):
            return self._as_operator(x)
        x = self._read(x)
        self._check(x)
        if x.shape[-1:] != (self.in_features,):
            raise self._shape_error(x)
        if x.dtype is torch.float32 and self._is_single_call():
            x_codes = self.input_codes
            return linear(
                x, self._packed[0], self.scale, self.bias,
                activation_scale=x_codes.scale, activation_zero=x_codes.zero, relu=self.relu,
            )  # fmt: skip
        rows = x.reshape(-1, self.in_features).contiguous()
        codes, finite = self._coded(rows)
        shape = Convolution((1, 1, rows.shape[0], self.in_features))
        floats, output_codes = self._multiply(codes.view(shape.image), shape)
        if not finite:
            _set_nan(floats, output_codes, rows.isnan().any(1), (0, 0))
        output_shape = (*x.shape[:-1], self.out_features)
        return _output(
            None if floats is None else floats.reshape(output_shape),
            None if output_codes is None else output_codes.reshape(output_shape),
            self.output_codes, self.relu,
        )  # fmt: skip

    def _as_operator(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the layer by a torch operator, for compilers, tracers and autograd."""
        operands = self._operands(x)
        if x.shape[-1:] != (self.in_features,):
            raise self._shape_error(x)
        output: torch.Tensor = torch.ops.slipstream.lowbit_linear(*operands)
        return output.to(x.dtype)

    def _shape_error(self, x: torch.Tensor) -> InvalidArgumentError:
        return InvalidArgumentError(
            "x", f"has shape {tuple(x.shape)}; the last dimension must be {self.in_features}"
        )

    def _by_cached_call(self, x: torch.Tensor) -> torch.Tensor | None:
        """Compute the common case by the cached call; return None if it does not apply.

        In small layers, checks and look-ups would take longer than the kernel.
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
        return f"{self.in_features}, {self.out_features}, {self._described()}"


class LowBitConv2d(LowBitLayer):
    """``nn.Conv2d`` for inference in few bits, without groups or depthwise.

    Images have shape NCHW and channels-last memory; others are copied. The padding is the code of
    zero.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, bias, groups: see
            ``nn.Conv2d``; sizes must be integers. Groups are 1 or the number of channels.
        wbits, abits, scales: see `LowBitLinear`; columns of weights are ordered by kernel height,
            kernel width, input channel. Depthwise weights are too short for blocks, and have a
            scale per channel instead.

    Raises:
        InvalidArgumentError: an argument is out of range.
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
                "groups", f"{groups} is neither 1 nor both in_channels and out_channels"
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
        """Map floats [images, in, height, width] to that dtype [images, out, ...], channels-last.

        An image with NaN gives NaN, at least wherever the kernel reads it. Also accepts uint8 codes
        of `input_codes`, and returns a `CodedTensor` if `output_codes` are set, or a
        `DeferredOutput` if `after_sum` is set.

        Raises:
            InvalidArgumentError: a dtype, device or shape is not supported, an image is smaller
                than the kernel, or `x` needs a gradient in training mode.
            SlipstreamError: in a backward pass, because there is no gradient.
        """
        if torch.compiler.is_compiling() or not self._runs_plainly(x):
            return self._as_operator(x)
        x = self._read(x)
        output = self._by_cached_call(x)
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
        if x.dtype is torch.float32 and shape.pointwise and self._is_single_call():
            codes = self.input_codes
            out = linear(
                pixels, self._packed[0], self.scale, self.bias,
                activation_scale=codes.scale, activation_zero=codes.zero, relu=self.relu,
            )  # fmt: skip
            return out.permute(0, 3, 1, 2)
        image, finite = self._coded(pixels)
        nan_images = None if finite else pixels.isnan().flatten(1).any(1)

        def finish(added: torch.Tensor | None = None) -> torch.Tensor:
            rows = None if added is None else added.permute(0, 2, 3, 1).contiguous()
            floats, codes = self._multiply(image, shape, rows)
            if nan_images is not None:
                _set_nan(floats, codes, nan_images, ())
            summed = None if added is None else self.after_sum
            return _output(
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
        return DeferredOutput((x.shape[0], *shape.out_size, self.out_channels), finish)

    def _by_cached_call(self, x: torch.Tensor) -> torch.Tensor | None:
        """Compute codes of the last image's shape by the cached call; None if it does not apply."""
        prepared = self._call
        if not isinstance(prepared, Prepared) or x.dtype is not torch.uint8:
            return None
        buffers = self._buffers
        scale = buffers["scale"]
        if scale is None or not prepared.matches(scale, buffers["bias"]):
            return None
        output = prepared.in_torch_order(x)
        if output is None:
            return None
        return _output(*output, self.output_codes, self.relu)

    def _as_operator(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the layer by a torch operator, for compilers, tracers and autograd."""
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
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
            f"stride={self.stride}, padding={self.padding}, groups={self.groups}, "
            f"{self._described()}"
        )


def low_bit_class(module: nn.Module) -> type[LowBitLayer]:
    """Return the low-bit class for a linear layer or a convolution."""
    return LowBitConv2d if isinstance(module, nn.Conv2d) else LowBitLinear


def padding_of(module: nn.Conv2d) -> tuple[int, int]:
    """Return height and width of the padding, also for ``valid`` and ``same``."""
    if module.padding == "valid":
        return (0, 0)
    if module.padding == "same":
        pad_y, pad_x = (
            (k - 1) * d // 2 for k, d in zip(module.kernel_size, module.dilation, strict=True)
        )
        return pad_y, pad_x
    assert not isinstance(module.padding, str)
    return pair(module.padding)


_shape = functools.lru_cache(maxsize=1024)(window)


def _output(
    floats: torch.Tensor | None, codes: torch.Tensor | None, of: Codes | None, clipped: bool
) -> torch.Tensor:
    """Wrap a layer's floats, codes, or both as a tensor."""
    if codes is not None and of is not None:
        return CodedTensor(codes, of, floats, clipped)
    assert floats is not None
    return floats


def _set_nan(
    floats: torch.Tensor | None,
    codes: torch.Tensor | None,
    mask: torch.Tensor,
    at: tuple[int, ...],
) -> None:
    """Set outputs that depend on NaN to NaN; codes cannot represent it."""
    if codes is not None or floats is None:
        raise InvalidArgumentError(
            "x", "contains NaN, which has no code", remedy="find the operator that produced NaN"
        )
    floats[at][mask] = math.nan


def _pair(name: str, value: int | tuple[int, int], minimum: int) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, int) else tuple(value)
    if len(pair) != 2 or any(not isinstance(size, int) or size < minimum for size in pair):
        raise InvalidArgumentError(
            name, f"{value} is not one or two integers of at least {minimum}"
        )
    return pair[0], pair[1]
