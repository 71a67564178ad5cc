"""Low-bit products as operators of torch: ``slipstream::lowbit_matmul``, ``_linear``, ``_conv2d``.

Compilers, exporters and tracers see these; plain calls go around them. Weights are a tensor of the
bytes `PackedWeights.to_bytes` writes, so that an exported program holds them without gaps and runs
on any processor: what a kernel reads is made of them once and kept beside their storage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch

from slipstream.errors import InvalidArgumentError
from slipstream.native.operators import define, plainly
from slipstream.techniques.lowbit import kernels
from slipstream.techniques.lowbit.convolve import Codes, Epilogue, convolved, quantise
from slipstream.techniques.lowbit.kernels import PackedWeights
from slipstream.techniques.lowbit.windows import Convolution

_NO_GRADIENT = "it rounds, and gradients end there"


def matmul(
    a: torch.Tensor,
    packed: PackedWeights,
    *,
    activation_zero: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `slipstream.techniques.lowbit.kernels.matmul`; also seen by compilers (without `out`)."""
    if out is None and _watched(a):
        product: torch.Tensor = torch.ops.slipstream.lowbit_matmul(
            a, stored(packed), packed.n, activation_zero
        )
        return product
    return kernels.matmul(a, packed, activation_zero=activation_zero, out=out)


def linear(
    x: torch.Tensor,
    packed: PackedWeights,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation_scale: float,
    activation_zero: int = 0,
    relu: bool = False,
) -> torch.Tensor:
    """See `slipstream.techniques.lowbit.kernels.linear`; also seen by compilers."""
    if _watched(x) or x.requires_grad:
        output: torch.Tensor = torch.ops.slipstream.lowbit_linear(
            x, [stored(packed)], scale, bias, activation_scale, activation_zero, False, relu,
            math.inf,
        )  # fmt: skip
        return output
    return kernels.linear(
        x, packed, scale, bias, activation_scale=activation_scale,
        activation_zero=activation_zero, relu=relu,
    )  # fmt: skip


def _watched(x: torch.Tensor) -> bool:
    """Whether an operator has to be seen; tensors on meta are refused with the others."""
    return torch.compiler.is_compiling() or not (x.is_meta or plainly(x))


def stored(packed: PackedWeights) -> torch.Tensor:
    """`packed` as a tensor that the operators take: uint8 [bytes]; the same at every call."""
    # A compiler is not to see how it is made: what it reads is there before it looks.
    _store(packed)
    assert packed.stored is not None
    return packed.stored


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _store(packed: PackedWeights) -> bool:
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    if packed.stored is None:
        c: Any = torch._C
        tracing = c._get_tracing_state()
        c._set_tracing_state(None)
        try:
            with unset_fake_temporarily():
                packed.stored = torch.frombuffer(bytearray(packed.to_bytes()), dtype=torch.uint8)
                _remember(packed.stored, packed)
        finally:
            c._set_tracing_state(tracing)
    return True


def _remember(weights: torch.Tensor, packed: PackedWeights) -> None:
    storage: Any = weights.untyped_storage()
    # Without a reference back to the tensor, which would keep both for good.
    storage.slipstream_packed = (packed.twin(), _version(weights))


def _version(weights: torch.Tensor) -> int:
    return -1 if weights.is_inference() else weights._version


def _packed(weights: torch.Tensor) -> PackedWeights:
    """What `stored` gave, wherever it has been since."""
    if weights.dtype is not torch.uint8 or weights.dim() != 1 or not weights.is_contiguous():
        raise InvalidArgumentError(
            "weights", f"are {weights.dtype} {tuple(weights.shape)}, not contiguous uint8 [bytes]"
        )
    if not weights.is_cpu:
        raise InvalidArgumentError("weights", f"are on device '{weights.device}', not the CPU")
    storage: Any = weights.untyped_storage()
    whole = len(storage) == len(weights)
    kept = getattr(storage, "slipstream_packed", None) if whole else None
    if kept is not None and kept[1] == _version(weights):
        return cast(PackedWeights, kept[0])
    packed = PackedWeights.from_bytes(weights.numpy().tobytes())
    if whole:
        storage.slipstream_packed = (packed, _version(weights))
    return packed


def _matmul(a: torch.Tensor, weights: torch.Tensor, n: int, activation_zero: int) -> torch.Tensor:
    packed = _packed(weights)
    if packed.n != n:
        raise InvalidArgumentError("n", f"is {n}, but the weights have {packed.n} rows")
    if a.dim() == 2 and a.stride(1) != 1:
        a = a.contiguous()
    return kernels.matmul(a, packed, activation_zero=activation_zero)


def _linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    activation_scale: float,
    activation_zero: int,
    binary: bool,
    relu: bool,
    ceiling: float,
) -> torch.Tensor:
    packed = _all_packed(weights)
    if len(packed) == 1 and not binary and ceiling == math.inf:
        return kernels.linear(
            x, packed[0], scale, bias, activation_scale=activation_scale,
            activation_zero=activation_zero, relu=relu,
        )  # fmt: skip
    kernels.check_floats(x, sum(one.k for one in packed))
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    shape = Convolution((1, 1, *rows.shape))
    output = _multiplied(
        rows.view(shape.image), shape, packed,
        Epilogue(scale, bias, relu, binary, ceiling=ceiling), activation_scale, activation_zero,
    )  # fmt: skip
    output[0, 0][rows.isnan().any(1)] = torch.nan
    return output.view(*x.shape[:-1], output.shape[-1])


def _conv2d(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    activation_scale: float,
    activation_zero: int,
    binary: bool,
    relu: bool,
    ceiling: float,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    depthwise: bool,
) -> torch.Tensor:
    packed = _all_packed(weights)
    if x.dim() != 4 or x.dtype is not torch.float32 or not x.is_cpu:
        raise InvalidArgumentError(
            "x", f"is {x.dtype} {tuple(x.shape)} on '{x.device}', not float32 images on the CPU"
        )
    pixels = x.permute(0, 2, 3, 1).contiguous()
    shape = window(tuple(pixels.shape), kernel, stride, padding, dilation, depthwise)
    output = _multiplied(
        pixels, shape, packed, Epilogue(scale, bias, relu, binary, ceiling=ceiling),
        activation_scale, activation_zero,
    )  # fmt: skip
    output[pixels.isnan().flatten(1).any(1)] = torch.nan
    return output.permute(0, 3, 1, 2)


def _all_packed(weights: Sequence[torch.Tensor]) -> tuple[PackedWeights, ...]:
    packed = tuple(map(_packed, weights))
    if not packed or len({one.activation_bits for one in packed}) > 1:
        raise InvalidArgumentError("weights", "are none, or for activations of different bits")
    return packed


def _multiplied(
    image: torch.Tensor,
    shape: Convolution,
    packed: tuple[PackedWeights, ...],
    epilogue: Epilogue,
    activation_scale: float,
    activation_zero: int,
) -> torch.Tensor:
    codes = Codes(packed[0].activation_bits, activation_scale, activation_zero)
    floats, _ = convolved(quantise(image, codes)[0], shape, packed, epilogue, codes.zero)
    assert floats is not None
    return floats


def window(
    image: tuple[int, ...],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    depthwise: bool = False,
) -> Convolution:
    """The shape of a convolution over images (NHWC).

    Raises:
        InvalidArgumentError: a size that is not possible, or images smaller than the kernel.
    """
    each = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    for name, sizes in each.items():
        if len(sizes) != 2 or min(sizes) < (name != "padding") or max(sizes) > _LARGEST:
            raise InvalidArgumentError(name, f"{list(sizes)} is not a height and a width")
    images, height, width, channels = image
    pairs = [(int(one), int(other)) for one, other in each.values()]
    shape = Convolution((images, height, width, channels), *pairs, depthwise=depthwise)
    # Compilers know no size to compare.
    known = isinstance(height, int) and isinstance(width, int)
    if known and min(height, width, *shape.out_size) < 1:
        raise InvalidArgumentError(
            "x", f"is {height} x {width}, smaller than the kernel {tuple(kernel)}"
        )
    return shape


# Of kernels, strides and paddings: products of two still fit 64 bits.
_LARGEST = 1 << 24


def _linear_shape(x: Any, weights: Any, scale: Any, *how: Any) -> torch.Tensor:
    output: torch.Tensor = x.new_empty((*x.shape[:-1], scale.shape[0]))
    return output


def _conv2d_shape(x: Any, weights: Any, scale: Any, *how: Any) -> torch.Tensor:
    images, channels, height, width = x.shape
    out = window((images, height, width, channels), *how[-5:]).out_size
    output: torch.Tensor = x.new_empty((images, *out, scale.shape[0])).permute(0, 3, 1, 2)
    return output


def _batched(operator: str, dims: int) -> Any:
    """The rule of an operator whose first argument may have one dimension more than `dims`."""

    def rule(info: Any, in_dims: Any, x: torch.Tensor, *others: Any) -> Any:
        flat = [one for dim in in_dims[1:] for one in (dim if isinstance(dim, list) else [dim])]
        if any(one is not None for one in flat):
            raise InvalidArgumentError(
                f"slipstream::{operator}", "takes no weights, scales or biases from vmap",
                remedy="in_dims: a batch of the first argument alone",
            )  # fmt: skip
        call = getattr(torch.ops.slipstream, operator).default
        x = x.movedim(in_dims[0], 0)
        if not dims:
            return call(x, *others), 0
        return call(x.flatten(0, 1), *others).unflatten(0, x.shape[:2]), 0

    return rule


_HOW = (
    "Tensor[] weights, Tensor scale, Tensor? bias, float activation_scale, int activation_zero, "
    "bool binary, bool relu, float ceiling"
)
define(
    "lowbit_matmul(Tensor a, Tensor weights, SymInt n, int activation_zero) -> Tensor",
    _matmul,
    lambda a, weights, n, zero: a.new_empty((a.shape[0], n), dtype=torch.int32),
    ("CPU",),
    batched=_batched("lowbit_matmul", 2),
)
define(
    f"lowbit_linear(Tensor x, {_HOW}) -> Tensor",
    _linear,
    _linear_shape,
    ("CPU",),
    no_gradient=_NO_GRADIENT,
    batched=_batched("lowbit_linear", 0),
)
define(
    f"lowbit_conv2d(Tensor x, {_HOW}, int[] kernel, int[] stride, int[] padding, int[] dilation, "
    "bool depthwise) -> Tensor",
    _conv2d,
    _conv2d_shape,
    ("CPU",),
    no_gradient=_NO_GRADIENT,
    batched=_batched("lowbit_conv2d", 4),
)
