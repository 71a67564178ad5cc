"""Torch operators of low-bit products: ``slipstream::lowbit_matmul``, ``_linear``, ``_conv2d``.

Compilers, exporters and tracers use these; plain calls bypass them. Weights are a tensor of the
bytes of `PackedWeights.to_bytes`, so that an exported program stores them compactly and runs on any
processor: they are packed for a kernel once, and the result is cached with their storage.
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

_NO_GRADIENT = "its rounding has no gradient"


def matmul(
    a: torch.Tensor,
    packed: PackedWeights,
    *,
    activation_zero: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `lowbit.kernels.matmul`, as a torch operator if compiled or traced without `out`."""
    if out is None and _needs_operator(a):
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
    """Compute `lowbit.kernels.linear`, as a torch operator if compiled or traced."""
    if _needs_operator(x) or x.requires_grad:
        output: torch.Tensor = torch.ops.slipstream.lowbit_linear(
            x, [stored(packed)], scale, bias, activation_scale, activation_zero, False, relu,
            math.inf,
        )  # fmt: skip
        return output
    return kernels.linear(
        x, packed, scale, bias, activation_scale=activation_scale,
        activation_zero=activation_zero, relu=relu,
    )  # fmt: skip


def _needs_operator(x: torch.Tensor) -> bool:
    """Return whether to call a torch operator; kernels refuse meta tensors."""
    return torch.compiler.is_compiling() or not (x.is_meta or plainly(x))


def stored(packed: PackedWeights) -> torch.Tensor:
    """Return `packed` as a cached tensor for the operators, uint8 [bytes]."""
    # Created outside the compiled program, which only reads the attribute.
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
                _cache(packed.stored, packed)
        finally:
            c._set_tracing_state(tracing)
    return True


def _cache(weights: torch.Tensor, packed: PackedWeights) -> None:
    storage: Any = weights.untyped_storage()
    # Without a reference to the tensor, which would be a cycle that is never freed.
    storage.slipstream_packed = (packed.without_stored(), _version(weights))


def _version(weights: torch.Tensor) -> int:
    return -1 if weights.is_inference() else weights._version


def _packed(weights: torch.Tensor) -> PackedWeights:
    """Return the packed weights of a tensor that `stored` created, or a copy of it."""
    if weights.dtype is not torch.uint8 or weights.dim() != 1 or not weights.is_contiguous():
        raise InvalidArgumentError(
            "weights", f"are {weights.dtype} {tuple(weights.shape)}, not contiguous uint8 [bytes]"
        )
    if not weights.is_cpu:
        raise InvalidArgumentError("weights", f"are on device '{weights.device}', not the CPU")
    storage: Any = weights.untyped_storage()
    owns_storage = len(storage) == len(weights)
    cached = getattr(storage, "slipstream_packed", None) if owns_storage else None
    if cached is not None and cached[1] == _version(weights):
        return cast(PackedWeights, cached[0])
    packed = PackedWeights.from_bytes(weights.numpy().tobytes())
    if owns_storage:
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
    kernels.check_floats(x, sum(block.k for block in packed))
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
    if not packed or len({block.activation_bits for block in packed}) > 1:
        raise InvalidArgumentError("weights", "are empty, or for activations of different bits")
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
    """Return the shape of a convolution over images (NHWC).

    Raises:
        InvalidArgumentError: a size is invalid, or images are smaller than the kernel.
    """
    arguments = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    for name, sizes in arguments.items():
        if len(sizes) != 2 or min(sizes) < (name != "padding") or max(sizes) > _MAX_SIZE:
            raise InvalidArgumentError(name, f"{list(sizes)} is not a valid height and width")
    images, height, width, channels = image
    pairs = [(int(first), int(second)) for first, second in arguments.values()]
    shape = Convolution((images, height, width, channels), *pairs, depthwise=depthwise)
    # Symbolic sizes of compilers cannot be compared.
    concrete = isinstance(height, int) and isinstance(width, int)
    if concrete and min(height, width, *shape.out_size) < 1:
        raise InvalidArgumentError(
            "x", f"is {height} x {width}, smaller than the kernel {tuple(kernel)}"
        )
    return shape


# Maximum of kernels, strides and paddings, so that products of two fit 64 bits.
_MAX_SIZE = 1 << 24


def _linear_shape(x: Any, weights: Any, scale: Any, *how: Any) -> torch.Tensor:
    output: torch.Tensor = x.new_empty((*x.shape[:-1], scale.shape[0]))
    return output


def _conv2d_shape(x: Any, weights: Any, scale: Any, *how: Any) -> torch.Tensor:
    images, channels, height, width = x.shape
    out = window((images, height, width, channels), *how[-5:]).out_size
    output: torch.Tensor = x.new_empty((images, *out, scale.shape[0])).permute(0, 3, 1, 2)
    return output


def _batched(operator: str, dims: int) -> Any:
    """Return the vmap rule of an operator whose first argument may be batched.

    Args:
        dims: dimensions of the first argument, into whose first the batch is folded; 0 if any
            number is allowed.
    """

    def rule(info: Any, in_dims: Any, x: torch.Tensor, *others: Any) -> Any:
        flat = [d for dim in in_dims[1:] for d in (dim if isinstance(dim, list) else [dim])]
        if any(d is not None for d in flat):
            raise InvalidArgumentError(
                f"slipstream::{operator}", "does not support vmap over weights, scales or biases",
                remedy="set in_dims so that only the first argument is batched",
            )  # fmt: skip
        call = getattr(torch.ops.slipstream, operator).default
        x = x.movedim(in_dims[0], 0)
        if not dims:
            return call(x, *others), 0
        return call(x.flatten(0, 1), *others).unflatten(0, x.shape[:2]), 0

    return rule


_ARGS = (
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
    f"lowbit_linear(Tensor x, {_ARGS}) -> Tensor",
    _linear,
    _linear_shape,
    ("CPU",),
    no_gradient=_NO_GRADIENT,
    batched=_batched("lowbit_linear", 0),
)
define(
    f"lowbit_conv2d(Tensor x, {_ARGS}, int[] kernel, int[] stride, int[] padding, int[] dilation, "
    "bool depthwise) -> Tensor",
    _conv2d,
    _conv2d_shape,
    ("CPU",),
    no_gradient=_NO_GRADIENT,
    batched=_batched("lowbit_conv2d", 4),
)
