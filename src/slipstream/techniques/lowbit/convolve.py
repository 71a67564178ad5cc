"""Convolutions of codes, and the quantisation and epilogue of low-bit products.

Each function has a compiled form and a bitwise equal reference in PyTorch (`reference_...`).
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from slipstream.errors import InvalidArgumentError, SlipstreamError
from slipstream.native import cpu_features
from slipstream.native.family import FLOAT, INT32, INT64, POINTER, tensor_pointer
from slipstream.techniques.lowbit.bindings import INVALID, OK, lowbit_library
from slipstream.techniques.lowbit.kernels import PackedWeights, check_vector, matmul
from slipstream.techniques.lowbit.windows import Convolution

_i32, _i64, _f32, _ptr = INT32, INT64, FLOAT, POINTER
_FLOAT32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Codes:
    """Unsigned codes of activations: ``clamp(round(x / scale) + zero, 0, 2**bits - 1)``.

    Attributes:
        bits: bits per code, 1 to 8.
        scale: step between codes, positive.
        zero: the code of 0.

    Raises:
        InvalidArgumentError: a value is out of range.
    """

    bits: int
    scale: float
    zero: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 8:
            raise InvalidArgumentError("bits", f"{self.bits} is not from 1 to 8")
        if not 0 < self.scale < math.inf:
            raise InvalidArgumentError("scale", f"{self.scale} is not a positive number")
        if not 0 <= self.zero <= self.top:
            raise InvalidArgumentError("zero", f"{self.zero} is not a code from 0 to {self.top}")

    @property
    def top(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1


@dataclass(frozen=True)
class Epilogue:
    """Operations on products: ``scale * product + bias + added``, clipped, in float32.

    Attributes:
        scale: float32 [n].
        bias: float32 [n] or None.
        relu: whether to clip at 0 from below.
        binary: whether weights 0 and 1 represent -1 and 1, and the last of n + 1 columns of
            products holds the sums of activations.
        codes: quantisation of the output; None for floats.
        both: whether to write floats as well as codes.
        ceiling: maximum of the output.

    Raises:
        InvalidArgumentError: `ceiling` is not a float32 value.
    """

    scale: torch.Tensor
    bias: torch.Tensor | None = None
    relu: bool = False
    binary: bool = False
    codes: Codes | None = None
    both: bool = False
    ceiling: float = math.inf

    def __post_init__(self) -> None:
        if not self.ceiling >= -_FLOAT32_MAX:
            raise InvalidArgumentError("ceiling", f"{self.ceiling} is not a float32 value")


class Outcome(NamedTuple):
    """Output of a layer: float32, uint8 codes, or both, of the same shape."""

    floats: torch.Tensor | None
    codes: torch.Tensor | None


class _Epilogue(ctypes.Structure):
    _fields_ = (
        ("scale", _ptr),
        ("bias", _ptr),
        ("floor", _f32),
        ("ceiling", _f32),
        ("binary", _i32),
        ("code_scale", _f32),
        ("code_zero", _i32),
        ("code_top", _i32),
    )


class _Result(ctypes.Structure):
    _fields_ = (("added", _ptr), ("floats", _ptr), ("codes", _ptr))


class _Convolution(ctypes.Structure):
    _fields_ = tuple(
        (name, _i64)
        for name in (
            *("images", "height", "width", "channels"),
            *("kernel_height", "kernel_width", "stride_height", "stride_width"),
            *("padding_height", "padding_width", "dilation_height", "dilation_width"),
            *("out_height", "out_width"),
        )
    )


def quantise(x: torch.Tensor, codes: Codes) -> tuple[torch.Tensor, bool]:
    """Return the codes of `x`, and whether no value is NaN; codes of NaN are undefined.

    Args:
        x: float32, contiguous or channels-last.

    Returns:
        uint8 of the same shape and strides.
    """
    dense = x.is_contiguous() or (x.dim() == 4 and x.permute(0, 2, 3, 1).is_contiguous())
    if x.dtype is not torch.float32 or not x.is_cpu or not dense:
        raise InvalidArgumentError(
            "x", f"is {x.dtype} on '{x.device}' with strides {x.stride()}",
            remedy="pass contiguous float32 on the CPU",
        )  # fmt: skip
    bound = lowbit_library()
    if bound is None:
        return reference_quantise(x, codes)
    out = torch.empty_like(x, dtype=torch.uint8)
    status = bound.slipstream_quantise(
        _has_avx2(), x.data_ptr(), x.numel(), codes.scale, codes.zero, codes.top, out.data_ptr()
    )
    return out, status == OK


def reference_quantise(x: torch.Tensor, codes: Codes) -> tuple[torch.Tensor, bool]:
    """Compute `quantise` in PyTorch."""
    steps = (x / torch.tensor(codes.scale)).round().nan_to_num(0.0, math.inf, -math.inf)
    clamped = steps.clamp(-codes.zero, codes.top - codes.zero) + codes.zero
    return clamped.to(torch.uint8), not bool(x.isnan().any())


def patches(
    image: torch.Tensor, shape: Convolution, outside: int, first: int = 0, last: int | None = None
) -> torch.Tensor:
    """Gather the inputs of output pixels ``first .. last``: uint8 [pixels, kernel * channels].

    Args:
        image: uint8, NHWC and contiguous.
        outside: value of the padding.
    """
    last = shape.rows if last is None else last
    _check_image(image, shape)
    if not 0 <= first <= last <= shape.rows:
        raise InvalidArgumentError("first", f"{first} to {last} is not within {shape.rows} pixels")
    bound = lowbit_library()
    if bound is None:
        return reference_patches(image, shape, outside)[first:last]
    out = torch.empty((last - first, shape.columns), dtype=torch.uint8)
    bound.slipstream_patches(
        ctypes.byref(_shape(shape)), image.data_ptr(), outside, first, last, out.data_ptr()
    )
    return out


def reference_patches(image: torch.Tensor, shape: Convolution, outside: int) -> torch.Tensor:
    """Compute `patches` of all output pixels in PyTorch."""
    pad_y, pad_x = shape.padding
    padded = torch.nn.functional.pad(
        image.permute(0, 3, 1, 2).float(), (pad_x, pad_x, pad_y, pad_y), value=float(outside)
    )
    unfolded = torch.nn.functional.unfold(
        padded, shape.kernel, dilation=shape.dilation, stride=shape.stride
    )
    channels, pixels = shape.image[3], math.prod(shape.kernel)
    by_pixel = unfolded.reshape(shape.image[0], channels, pixels, -1).permute(0, 3, 2, 1)
    return by_pixel.reshape(shape.rows, pixels * channels).to(torch.uint8).contiguous()


def reference_finish(
    products: torch.Tensor, epilogue: Epilogue, added: torch.Tensor | None = None
) -> Outcome:
    """Apply `epilogue` to `products` (int32 [m, n], or [m, n + 1] if binary) in PyTorch: [m, n].

    Args:
        added: float32 [m, n], contiguous.
    """
    if epilogue.binary:
        products = 2 * products[:, :-1] - products[:, -1:]
    return apply_epilogue(products.float() * epilogue.scale, epilogue, added, reference_quantise)


def apply_epilogue(
    y: torch.Tensor,
    epilogue: Epilogue,
    added: torch.Tensor | None,
    rounding: Callable[[torch.Tensor, Codes], tuple[torch.Tensor, bool]] = quantise,
) -> Outcome:
    """Apply `epilogue` to scaled products."""
    if epilogue.bias is not None:
        y = y + epilogue.bias
    if added is not None:
        y = y + added
    if epilogue.relu:
        y = y.clamp(min=0.0)
    if epilogue.ceiling <= _FLOAT32_MAX:
        y = y.clamp(max=epilogue.ceiling)
    if epilogue.codes is None:
        return Outcome(y, None)
    return Outcome(y if epilogue.both else None, rounding(y, epilogue.codes)[0])


class Prepared:
    """A layer from codes to floats or codes (patches, product, epilogue), for one image shape.

    Args:
        packed: weights [n, kernel height * width * channels], or [n, kernel height * width] if
            depthwise; with another row of ones if the epilogue is binary.
        zero: the code of 0, also used for padding.

    Attributes:
        out: images, height, width and channels of the output.
    """

    def __init__(
        self, packed: PackedWeights, shape: Convolution, epilogue: Epilogue, zero: int = 0
    ) -> None:
        """Precompute what does not depend on the image.

        Raises:
            InvalidArgumentError: weights, scale, bias and shape do not match.
        """
        n = packed.n - epilogue.binary
        _check_vectors(epilogue, n)
        if packed.k != shape.columns:
            raise InvalidArgumentError(
                "image", f"has {shape.columns} codes per output pixel, the weights have {packed.k}"
            )
        self._memory = [
            0 if tensor is None else tensor.data_ptr() for tensor in (epilogue.scale, epilogue.bias)
        ]
        self._by_channel: torch.Tensor | None = None
        if shape.depthwise:
            if shape.image[3] != n:
                raise InvalidArgumentError(
                    "image", f"has {shape.image[3]} channels, the weights are for {n}"
                )
            self._by_channel = _by_channel(packed, epilogue.binary)
            epilogue = replace(epilogue, binary=False)
        self._epilogue = epilogue
        self.out = (shape.image[0], *shape.out_size, n)
        self._packed, self._shape, self._zero = packed, shape, zero
        self._bound = lowbit_library()
        self._vectorised = _has_avx2()
        self._structures = _shape(shape), _epilogue(epilogue)
        self._pointers = tuple(map(ctypes.byref, self._structures))
        images, height, width, channels = shape.image
        self._image_size = torch.Size((images, channels, height, width))
        self._strides = (height * width * channels, 1, width * channels, channels)
        self._out_size = (images, n, *shape.out_size)

    def matches(self, scale: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """Return whether it was prepared with these tensors, unchanged."""
        epilogue = self._epilogue
        if epilogue.scale is not scale or epilogue.bias is not bias:
            return False
        if self._memory != [scale.data_ptr(), 0 if bias is None else bias.data_ptr()]:
            return False
        # New data of a tensor may have the address of the old.
        _check_vectors(self._epilogue, self.out[3])
        return True

    def __call__(self, image: torch.Tensor, added: torch.Tensor | None = None) -> Outcome:
        """The layer's output, NHWC.

        Args:
            image: uint8, NHWC and contiguous, of at most ``packed.activation_bits`` bits.
            added: float32, of the output's shape, contiguous.

        Raises:
            InvalidArgumentError: a dtype, shape or layout does not match, or a code is too large.
        """
        _check_image(image, self._shape)
        _check_added(added, self.out)
        if 0 in self.out:
            return _empty(self.out, self._epilogue)
        if self._bound is None:
            return self._by_torch(image, added)
        out = _empty(self.out, self._epilogue)
        self._run(image, out, added)
        return out

    def in_torch_order(self, image: torch.Tensor) -> Outcome | None:
        """Compute with image and output in torch's order: (images, channels, height, width).

        This avoids views, whose creation dominates the time of small layers.

        Returns:
            The output; None if the image has another shape or is not channels-last.
        """
        if (
            image.shape != self._image_size
            or image.stride() != self._strides
            or self._bound is None
        ):
            return None
        out = _empty(self._out_size, self._epilogue, torch.channels_last)
        self._run(image, out, None)
        return out

    def _run(self, image: torch.Tensor, out: Outcome, added: torch.Tensor | None) -> None:
        bound: Any = self._bound
        shape, epilogue = self._pointers
        result = ctypes.byref(_result(out, added))
        source, threads = (
            (self._vectorised, shape, image.data_ptr(), self._zero),
            torch.get_num_threads(),
        )
        if self._by_channel is not None:
            status = bound.slipstream_depthwise(
                *source, self._packed.activation_bits, self._by_channel.data_ptr(), epilogue,
                result, threads,
            )  # fmt: skip
        else:
            status = bound.slipstream_convolve(
                *source, self._packed._handle, self.out[3], epilogue, result, threads
            )
        if status == INVALID:
            raise InvalidArgumentError(
                "image", f"has codes above {2**self._packed.activation_bits - 1}",
                remedy="quantise it to the bits for which the weights were packed",
            )  # fmt: skip
        _check(status)

    def _by_torch(self, image: torch.Tensor, added: torch.Tensor | None) -> Outcome:
        codes = reference_patches(image, self._shape, self._zero)
        if self._by_channel is not None:
            weights = self._by_channel.transpose(0, 1).flatten(1)[:, : self._packed.k]
            centred = codes.view(codes.shape[0], self._packed.k, -1).to(torch.int32) - self._zero
            products = (centred * weights.T).sum(1, dtype=torch.int32)
        else:
            products = matmul(codes, self._packed, activation_zero=self._zero)
        rows = None if added is None else added.reshape(products.shape[0], self.out[3])
        outputs = reference_finish(products, self._epilogue, rows)
        return Outcome(
            *(None if output is None else output.reshape(self.out) for output in outputs)
        )


def _by_channel(packed: PackedWeights, binary: bool) -> torch.Tensor:
    """Return a depthwise layer's weights in its kernel's layout: int16 [pairs of pixels, n, 2].

    Args:
        binary: whether weights 0 and 1 represent -1 and 1, and the last row is one of ones.
    """
    weights = packed.weights().to(torch.int16)
    if binary:
        weights = 2 * weights[:-1] - 1
    even = torch.nn.functional.pad(weights, (0, packed.k % 2))
    pairs: torch.Tensor = even.unflatten(1, (-1, 2)).transpose(0, 1).contiguous()
    return pairs


def convolved(
    image: torch.Tensor,
    shape: Convolution,
    packed: Sequence[PackedWeights],
    epilogue: Epilogue,
    zero: int,
    added: torch.Tensor | None = None,
) -> Outcome:
    """Compute a layer once, also for weights in blocks of columns; see `Prepared`.

    Args:
        packed: a matrix, or one per block; the epilogue's scale is then [n, blocks].

    Raises:
        InvalidArgumentError: weights, scale, bias and shape do not match.
    """
    if len(packed) == 1:
        return Prepared(packed[0], shape, epilogue, zero)(image, added)
    n, scale, bias = packed[0].n - epilogue.binary, epilogue.scale, epilogue.bias
    fits = sum(block.k for block in packed) == shape.columns and all(
        block.n == packed[0].n for block in packed
    )
    scale_fits = scale.dtype is torch.float32 and scale.is_cpu and scale.shape == (n, len(packed))
    if not fits or not scale_fits:
        raise InvalidArgumentError(
            "scale", f"is {scale.dtype} {tuple(scale.shape)} on '{scale.device}'; weights are "
            f"{len(packed)} blocks of {n} rows for {shape.columns} codes per output pixel",
        )  # fmt: skip
    if bias is not None:
        check_vector("bias", bias, n)
    _check_image(image, shape)
    out = (shape.image[0], *shape.out_size, n)
    _check_added(added, out)
    rows = (
        image.reshape(shape.rows, shape.columns) if shape.pointwise else patches(image, shape, zero)
    )
    total, first = torch.zeros(shape.rows, n), 0
    for number, block in enumerate(packed):
        products = matmul(rows[:, first : first + block.k], block, activation_zero=zero)
        if epilogue.binary:
            products = 2 * products[:, :-1] - products[:, -1:]
        total += products.float() * scale[:, number]
        first += block.k
    return apply_epilogue(total.reshape(out), epilogue, added)


def max_pool(image: torch.Tensor, shape: Convolution, out_size: tuple[int, int]) -> torch.Tensor:
    """Compute the maximum code of each window, by channel: uint8, NHWC.

    Args:
        image: uint8, NHWC and contiguous.
        shape: shape of the window, each position of which overlaps the image.
        out_size: height and width; one more than in `shape` if sizes are rounded up.
    """
    _check_image(image, shape)
    bound = lowbit_library()
    if bound is None:
        return reference_max_pool(image, shape, out_size)
    out = torch.empty((shape.image[0], *out_size, shape.image[3]), dtype=torch.uint8)
    window = _shape(shape, out_size)
    _check(
        bound.slipstream_max_pool(
            _has_avx2(), ctypes.byref(window), image.data_ptr(), out.data_ptr()
        )
    )
    return out


def reference_max_pool(
    image: torch.Tensor, shape: Convolution, out_size: tuple[int, int]
) -> torch.Tensor:
    """Compute `max_pool` in PyTorch."""
    pooled = torch.nn.functional.max_pool2d(
        image.permute(0, 3, 1, 2).float(), shape.kernel, shape.stride, shape.padding,
        shape.dilation, ceil_mode=out_size != shape.out_size,
    )  # fmt: skip
    return pooled.permute(0, 2, 3, 1).to(torch.uint8).contiguous()


def _empty(
    shape: tuple[int, ...],
    epilogue: Epilogue,
    order: torch.memory_format = torch.contiguous_format,
) -> Outcome:
    coded = epilogue.codes is not None
    return Outcome(
        torch.empty(shape, memory_format=order) if epilogue.both or not coded else None,
        torch.empty(shape, dtype=torch.uint8, memory_format=order) if coded else None,
    )


def _result(out: Outcome, added: torch.Tensor | None) -> Any:
    floats, codes = out
    return _Result(*map(tensor_pointer, (added, floats, codes)))


@functools.lru_cache(maxsize=1024)
def _shape(shape: Convolution, out_size: tuple[int, int] | None = None) -> Any:
    size = out_size or shape.out_size
    return _Convolution(
        *shape.image, *shape.kernel, *shape.stride, *shape.padding, *shape.dilation, *size
    )


def _epilogue(epilogue: Epilogue) -> Any:
    codes = epilogue.codes
    return _Epilogue(
        tensor_pointer(epilogue.scale),
        tensor_pointer(epilogue.bias),
        0.0 if epilogue.relu else -math.inf,
        epilogue.ceiling,
        epilogue.binary,
        0.0 if codes is None else codes.scale,
        0 if codes is None else codes.zero,
        0 if codes is None else codes.top,
    )


def _check_image(image: torch.Tensor, shape: Convolution) -> None:
    if (
        image.dtype is torch.uint8
        and image.is_cpu
        and tuple(image.shape) == shape.image
        and image.is_contiguous()
    ):
        return
    raise InvalidArgumentError(
        "image", f"is {image.dtype} {tuple(image.shape)} on '{image.device}', "
        f"not contiguous codes (uint8) {shape.image} on the CPU",
    )  # fmt: skip


def _check_added(added: torch.Tensor | None, shape: tuple[int, ...]) -> None:
    if added is None or (
        added.dtype is torch.float32
        and added.is_cpu
        and tuple(added.shape) == shape
        and added.is_contiguous()
    ):
        return
    raise InvalidArgumentError(
        "added", f"is {added.dtype} {tuple(added.shape)}, not contiguous float32 {shape}"
    )


def _check_vectors(epilogue: Epilogue, n: int) -> None:
    check_vector("scale", epilogue.scale, n)
    if epilogue.bias is not None:
        check_vector("bias", epilogue.bias, n)


def _check(status: int) -> None:
    if status != OK:
        raise SlipstreamError("not enough memory for the layer")


def _has_avx2() -> bool:
    return "avx2" in cpu_features().features
