"""Exact matrix multiplication of integers of 1 to 8 bits, by compiled kernels or PyTorch.

Weights are packed once for a kernel, which `slipstream.techniques.lowbit.dispatch` chooses;
activations are packed in each call. Without the compiled library the same functions compute the
same results through `torch.matmul`, but slower.

Source: Won et al., "ULPPACK: Fast Sub-8-bit Matrix Multiply on Commodity SIMD Hardware",
MLSys 2022, with faster schemes for processors that multiply bytes.
"""

from __future__ import annotations

import copy
import ctypes
import math
import struct
import weakref
from typing import Any

import torch

from slipstream.errors import InvalidArgumentError, SlipstreamError
from slipstream.techniques.lowbit import dispatch
from slipstream.techniques.lowbit.bindings import INVALID, OK, lowbit_library
from slipstream.techniques.lowbit.dense_rows import bit_rows, from_bit_rows

_INT32_TOP = 2**31 - 1
_NO_MEMORY = "not enough memory for the multiplication"
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

# Header of `PackedWeights.to_bytes`: mark, version, weight bits, activation bits, whether weights
# are signed, whether zero points follow, n, k.
_HEADER = struct.Struct("<4sBBBBB7xqq")
_MARK, _VERSION = b"LBWT", 1


class _Memory:
    """Native memory of packed weights, freed with the last reference."""

    def __init__(self, bound: ctypes.CDLL, handle: int) -> None:
        weakref.finalize(self, bound.slipstream_lowbit_free, handle)


class PackedWeights:
    """Weights [n, k] of a few bits, in the layout of a kernel. Immutable.

    Attributes:
        n, k: rows (output features) and columns (input features).
        bits: bits of each weight, 1 to 8.
        activation_bits: maximum bits of activations.
        signed: whether weights are ``-2**(bits-1) .. 2**(bits-1)-1``, not ``0 .. 2**bits-1``.
        zero_points: int32 [n], subtracted from the weights' rows, or None.
        scheme, level: the kernel; ``"torch"`` and ``"python"`` without the compiled library.
        nbytes: memory of the packed weights in bytes.
        stored: `to_bytes` as a uint8 tensor, for torch operators; None until first used.
    """

    stored: torch.Tensor | None = None

    def __init__(
        self,
        values: torch.Tensor,
        bits: int,
        activation_bits: int,
        signed: bool,
        zero_points: torch.Tensor | None,
        rows: int | None,
        scheme: str,
        level: str,
    ) -> None:
        """Pack `values`, uint8 with signed weights offset; use `pack_weights` instead."""
        self.n, self.k = values.shape
        self.bits, self.activation_bits, self.signed = bits, activation_bits, signed
        self.zero_points = zero_points
        offsets = torch.full((self.n,), 2 ** (bits - 1) if signed else 0, dtype=torch.int32)
        if zero_points is not None:
            offsets += zero_points
        bound = lowbit_library()
        if bound is None:
            self._handle, self._multiply, self._linear = 0, None, None
            self._weights: torch.Tensor | None = values.to(torch.int32) - offsets[:, None]
            self.scheme, self.level = "torch", "python"
            self.nbytes = self._weights.nbytes
            return
        shape = dispatch.Shape(rows, self.n, self.k, bits, activation_bits)
        kernel = dispatch.choose(shape, scheme=scheme, level=level)
        self.scheme, self.level = kernel.scheme, str(kernel.level)
        self._weights = None
        handle = ctypes.c_void_p()
        status = bound.slipstream_lowbit_pack(
            kernel.index,
            self.n,
            self.k,
            bits,
            activation_bits,
            values.data_ptr(),
            values.stride(0),
            offsets.data_ptr(),
            ctypes.byref(handle),
        )
        if status != OK or handle.value is None:
            raise SlipstreamError("not enough memory for the packed weights")
        self._handle = handle.value
        self._multiply = bound.slipstream_lowbit_multiply
        self._linear = bound.slipstream_lowbit_linear
        self.nbytes = int(bound.slipstream_lowbit_bytes(handle))
        self._memory = _Memory(bound, self._handle)

    def __repr__(self) -> str:
        sign = "signed " if self.signed else ""
        return (
            f"PackedWeights({self.n} x {self.k}, {sign}W{self.bits}A{self.activation_bits}, "
            f"{self.scheme} on {self.level})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_bytes, (self.to_bytes(),)

    def without_stored(self) -> PackedWeights:
        """Return a copy that shares memory, without `stored`."""
        clone = copy.copy(self)
        clone.stored = None
        return clone

    def __copy__(self) -> PackedWeights:
        clone = type(self).__new__(type(self))
        clone.__dict__.update(self.__dict__)
        return clone

    def for_rows(self, rows: int) -> PackedWeights:
        """Return the weights packed for the best kernel for `rows` rows, possibly `self`."""
        if self._multiply is None:
            return self
        shape = dispatch.Shape(rows, self.n, self.k, self.bits, self.activation_bits)
        kernel = dispatch.choose(shape)
        if (kernel.scheme, str(kernel.level)) == (self.scheme, self.level):
            return self
        return pack_weights(
            self.weights(), self.bits, activation_bits=self.activation_bits,
            zero_points=self.zero_points, signed=self.signed, rows=rows,
        )  # fmt: skip

    def weights(self) -> torch.Tensor:
        """Return the packed integers: uint8 [n, k], int8 if signed.

        Layouts are private to kernels, so weights are read by multiplication with the identity:
        fast enough for a checkpoint, not for a forward pass.
        """
        out = torch.empty((self.n, self.k), dtype=torch.int8 if self.signed else torch.uint8)
        zero = 0 if self.zero_points is None else self.zero_points
        step = min(self.k, 512)
        for first in range(0, self.k, step):
            last = min(first + step, self.k)
            identity = torch.zeros((last - first, self.k), dtype=torch.uint8)
            identity[torch.arange(last - first), torch.arange(first, last)] = 1
            out[:, first:last] = (matmul(identity, self) + zero).T.to(out.dtype)
        return out

    def to_bytes(self) -> bytes:
        """Serialise the weights, `bits` bits each in byte-aligned rows; equal for all kernels."""
        widths = self.bits, self.activation_bits, self.signed, self.zero_points is not None
        header = _HEADER.pack(_MARK, _VERSION, *widths, self.n, self.k)
        values = _offset(self.weights(), 2 ** (self.bits - 1) if self.signed else 0)
        parts = [header, bit_rows(values, self.bits).numpy().tobytes()]
        if self.zero_points is not None:
            parts.append(self.zero_points.numpy().astype("<i4").tobytes())
        return b"".join(parts)

    @classmethod
    def from_bytes(
        cls, data: bytes, *, rows: int | None = None, scheme: str = "auto", level: str = "auto"
    ) -> PackedWeights:
        """Load the result of `to_bytes`, packed for the best kernel of this processor.

        Raises:
            InvalidArgumentError: `data` is not a result of `to_bytes`.
        """
        if len(data) < _HEADER.size or data[:4] != _MARK:
            raise InvalidArgumentError("data", "does not contain packed weights")
        _, version, bits, activation_bits, signed, zeros, n, k = _HEADER.unpack_from(data)
        if version != _VERSION:
            raise InvalidArgumentError(
                "data", f"has version {version}; this slipstream reads {_VERSION}"
            )
        valid = 1 <= bits <= 8 and 1 <= activation_bits <= 8 and n > 0 and k > 0
        row_bytes = -(-k * bits // 8)
        if not valid or len(data) != _HEADER.size + n * (row_bytes + (4 if zeros else 0)):
            raise InvalidArgumentError("data", "is truncated or damaged")
        stored = torch.frombuffer(bytearray(data), dtype=torch.uint8)[_HEADER.size :]
        values = from_bit_rows(stored[: n * row_bytes].view(n, row_bytes), k, bits)
        zero_points = stored[n * row_bytes :].clone().view(torch.int32) if zeros else None
        if signed:
            values = (values.to(torch.int16) - 2 ** (bits - 1)).to(torch.int8)
        return pack_weights(
            values, bits, activation_bits=activation_bits, zero_points=zero_points, rows=rows,
            scheme=scheme, level=level,
        )  # fmt: skip


def pack_weights(
    weight: torch.Tensor,
    bits: int,
    *,
    activation_bits: int = 8,
    zero_points: torch.Tensor | int | None = None,
    signed: bool | None = None,
    rows: int | None = None,
    scheme: str = "auto",
    level: str = "auto",
) -> PackedWeights:
    """Pack integer weights for a kernel.

    Args:
        weight: integers [n, k]; unsigned ones are ``0 .. 2**bits-1``, signed ones
            ``-2**(bits-1) .. 2**(bits-1)-1``.
        bits: bits per weight, 1 to 8.
        activation_bits: maximum bits of activations, 1 to 8; fewer may run faster.
        zero_points: integers [n], or one for all rows, that `matmul` subtracts from the weights;
            within the weights' range.
        signed: whether weights are signed; None: unless the dtype is uint8.
        rows: rows of activations in a typical call, for the choice of a kernel.
        scheme, level: name and instruction set of a kernel instead of the best (see
            `slipstream.techniques.lowbit.dispatch`).

    Raises:
        InvalidArgumentError: `weight` is not a matrix of integers on the CPU, is empty, has a value
            out of range, or so many columns that a sum may overflow 32 bits.
        UnknownNameError: there is no such scheme or level.
    """
    _check_bits("bits", bits)
    _check_bits("activation_bits", activation_bits)
    _check_matrix("weight", weight, _INTEGERS)
    if signed is None:
        signed = weight.dtype is not torch.uint8
    lowest = -(2 ** (bits - 1)) if signed else 0
    top = lowest + 2**bits - 1
    _check_range("weight", weight, lowest, top, bits)
    n, k = weight.shape
    zeros = _checked_zero_points(zero_points, n, lowest, top, bits)
    # Bound on |w - zero|.
    max_weight = max(-lowest, top)
    if zeros is not None:
        max_weight = max(int(zeros.max()) - lowest, top - int(zeros.min()))
    max_columns = _INT32_TOP // ((2**activation_bits - 1) * max(max_weight, 1))
    if k > max_columns:
        raise InvalidArgumentError(
            "weight",
            f"has {k} columns; with W{bits}A{activation_bits} a sum of more than "
            f"{max_columns} products may overflow 32 bits",
            remedy="split the matrix along its columns and add the results in 64 bits",
        )
    if rows is not None and rows < 1:
        raise InvalidArgumentError("rows", f"{rows} is not a positive number of rows")
    values = _offset(weight, -lowest)
    return PackedWeights(values, bits, activation_bits, signed, zeros, rows, scheme, level)


def matmul(
    a: torch.Tensor,
    packed: PackedWeights,
    *,
    activation_zero: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``(a - activation_zero) @ (weight - zero_points).T`` exactly.

    Args:
        a: uint8 or int8 [m, k], of at most ``packed.activation_bits`` bits: unsigned values
            ``0 .. 2**bits-1``, signed ones ``-2**(bits-1) .. 2**(bits-1)-1``. Each row must be
            contiguous; the stride between rows is arbitrary.
        activation_zero: zero point of `a`, within its range.
        out: int32 [m, n] to write to, with contiguous rows.

    Returns:
        int32 [m, n].

    Raises:
        InvalidArgumentError: a dtype, shape, device or layout is not supported, or a value of `a`
            is out of range; `out` is then undefined.
    """
    dtype = a.dtype
    if a.dim() != 2 or not a.is_cpu or (dtype is not torch.uint8 and dtype is not torch.int8):
        _check_matrix("a", a, (torch.uint8, torch.int8), empty=True)
    m, k = a.shape
    if k != packed.k:
        raise InvalidArgumentError("a", f"has {k} columns, but the packed weights have {packed.k}")
    signed = dtype is torch.int8
    if activation_zero:
        _check_activation_zero(activation_zero, packed.activation_bits, signed)
    lda, inner = a.stride()
    if inner != 1 and k != 1:
        raise InvalidArgumentError(
            "a",
            f"has strides {(lda, inner)}; the values of a row must be contiguous",
            remedy="pass a.contiguous()",
        )
    if out is None:
        out = torch.empty((m, packed.n), dtype=torch.int32)
    else:
        _check_out(out, m, packed.n)
    if m == 0:
        return out
    if packed._multiply is None:
        return _torch_matmul(a, packed, activation_zero, out)
    status = packed._multiply(
        packed._handle,
        a.data_ptr(),
        signed,
        m,
        lda,
        activation_zero,
        out.data_ptr(),
        out.stride(0),
        torch.get_num_threads(),
    )
    if status == INVALID:
        _check_activations(a, packed.activation_bits)
    if status != OK:
        raise SlipstreamError(_NO_MEMORY)
    return out


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
    """Compute a layer in one call: round `x`, multiply, scale, add `bias`, apply ReLU if `relu`.

    ``a = clamp(round(x / activation_scale) + activation_zero, 0, 2**packed.activation_bits - 1)``
    and ``y = scale * matmul(a, packed, activation_zero=activation_zero) + bias``, in float32.

    Args:
        x: float32 [..., k]. A row with NaN gives NaN in all of its outputs.
        scale: float32 [n], scale of each output; usually activation scale times weight scale.
        bias: float32 [n] or None.
        activation_scale: scale of the activations' codes, positive.
        activation_zero: zero point of the activations, ``0 .. 2**activation_bits-1``.

    Returns:
        float32 [..., n].

    Raises:
        InvalidArgumentError: a dtype, shape, device or layout is not supported.
    """
    shape = x.shape
    if x.dtype is not torch.float32 or not x.is_cpu or not shape or shape[-1] != packed.k:
        check_floats(x, packed.k)
    rows = x if len(shape) == 2 else x.reshape(-1, packed.k)
    m = rows.shape[0]
    lda, inner = rows.stride()
    if inner != 1 and packed.k != 1:
        rows = rows.contiguous()
        lda = packed.k
    if activation_zero:
        _check_activation_zero(activation_zero, packed.activation_bits, False)
    n = packed.n
    check_vector("scale", scale, n)
    if bias is not None:
        check_vector("bias", bias, n)
    if not 0.0 < activation_scale < math.inf:
        raise InvalidArgumentError(
            "activation_scale", f"{activation_scale} is not a positive number"
        )
    y = torch.empty((m, n))
    if m == 0:
        return y.view(*shape[:-1], n)
    if packed._linear is None:
        _torch_linear(rows, packed, scale, bias, activation_scale, activation_zero, relu, y)
    else:
        status = packed._linear(
            packed._handle,
            rows.data_ptr(),
            m,
            lda,
            activation_scale,
            activation_zero,
            scale.data_ptr(),
            None if bias is None else bias.data_ptr(),
            0.0 if relu else -math.inf,
            y.data_ptr(),
            n,
            torch.get_num_threads(),
        )
        if status != OK:
            raise SlipstreamError(_NO_MEMORY)
    return y if len(shape) == 2 else y.view(*shape[:-1], n)


def _torch_matmul(
    a: torch.Tensor, packed: PackedWeights, activation_zero: int, out: torch.Tensor
) -> torch.Tensor:
    assert packed._weights is not None
    _check_activations(a, packed.activation_bits)
    out.copy_(torch.mm(a.to(torch.int32) - activation_zero, packed._weights.T))
    return out


def _torch_linear(
    rows: torch.Tensor,
    packed: PackedWeights,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    activation_scale: float,
    activation_zero: int,
    relu: bool,
    y: torch.Tensor,
) -> None:
    has_nan = torch.isnan(rows).any(1)
    step = torch.tensor(activation_scale, dtype=torch.float32)
    rounded = torch.nan_to_num(rows / step, posinf=math.inf, neginf=-math.inf).round()
    top = 2**packed.activation_bits - 1
    a = rounded.clamp(-activation_zero, top - activation_zero) + activation_zero
    product = matmul(a.to(torch.uint8), packed, activation_zero=activation_zero)
    torch.mul(product, scale, out=y)
    if bias is not None:
        y += bias
    if relu:
        y.clamp_(min=0.0)
    y[has_nan] = float("nan")


def _offset(weight: torch.Tensor, by: int) -> torch.Tensor:
    """Return `weight` + `by` as contiguous uint8."""
    if by:
        weight = weight.to(torch.int16) + by
    return weight.to(torch.uint8).contiguous()


def _check_bits(name: str, bits: int) -> None:
    if not 1 <= bits <= 8:
        raise InvalidArgumentError(name, f"{bits} is not between 1 and 8")


def _check_matrix(
    name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], *, empty: bool = False
) -> None:
    if tensor.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise InvalidArgumentError(name, f"has dtype {tensor.dtype}, not {names}")
    _check_device(name, tensor)
    if tensor.dim() != 2:
        raise InvalidArgumentError(name, f"has {tensor.dim()} dimensions instead of 2")
    if tensor.numel() == 0 and not empty:
        raise InvalidArgumentError(name, f"is empty: its shape is {tuple(tensor.shape)}")


def _check_device(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_cpu:
        raise InvalidArgumentError(
            name, f"is on device '{tensor.device}'; these kernels run on the CPU"
        )


def _check_range(name: str, tensor: torch.Tensor, lowest: int, top: int, bits: int) -> None:
    smallest, largest = (int(value) for value in torch.aminmax(tensor))
    if smallest < lowest or largest > top:
        raise InvalidArgumentError(
            name, f"has values from {smallest} to {largest}; {bits} bits hold {lowest} to {top}"
        )


def _checked_zero_points(
    zero_points: torch.Tensor | int | None, n: int, lowest: int, top: int, bits: int
) -> torch.Tensor | None:
    if zero_points is None:
        return None
    zeros = torch.as_tensor(zero_points)
    if zeros.dtype not in _INTEGERS:
        raise InvalidArgumentError("zero_points", f"has dtype {zeros.dtype}, not integers")
    if zeros.dim() > 1 or zeros.numel() not in (1, n):
        raise InvalidArgumentError(
            "zero_points", f"has shape {tuple(zeros.shape)} instead of ({n},)"
        )
    zeros = zeros.to(device="cpu", dtype=torch.int64)
    _check_range("zero_points", zeros, lowest, top, bits)
    return zeros.to(torch.int32).expand(n).contiguous()


def _check_activation_zero(zero: int, bits: int, signed: bool) -> None:
    lowest = -(2 ** (bits - 1)) if signed else 0
    if not lowest <= zero < lowest + 2**bits:
        raise InvalidArgumentError(
            "activation_zero", f"{zero} is not within {lowest} to {lowest + 2**bits - 1}"
        )


def _check_out(out: torch.Tensor, m: int, n: int) -> None:
    _check_matrix("out", out, (torch.int32,), empty=True)
    if tuple(out.shape) != (m, n):
        raise InvalidArgumentError("out", f"has shape {tuple(out.shape)} instead of {(m, n)}")
    disjoint = out.stride(0) >= n or m == 1
    if not disjoint or (out.stride(1) != 1 and n != 1):
        raise InvalidArgumentError(
            "out", f"has strides {out.stride()}; its rows must be contiguous and must not overlap"
        )


def check_floats(x: torch.Tensor, k: int) -> None:
    """Raise InvalidArgumentError unless `x` is float32 [..., k] on the CPU."""
    if x.dtype is not torch.float32:
        raise InvalidArgumentError("x", f"has dtype {x.dtype}, not float32")
    _check_device("x", x)
    if x.shape[-1:] != (k,):
        raise InvalidArgumentError(
            "x", f"has shape {tuple(x.shape)}; the last dimension must be {k}"
        )


def check_vector(name: str, vector: torch.Tensor, n: int) -> None:
    """Raise InvalidArgumentError unless `vector` is contiguous float32 [n] on the CPU."""
    if (
        vector.dtype is torch.float32
        and vector.shape == (n,)
        and vector.is_cpu
        and (vector.stride(0) == 1 or n == 1)
    ):
        return
    raise InvalidArgumentError(
        name,
        f"is {vector.dtype} {tuple(vector.shape)} on '{vector.device}' with strides "
        f"{vector.stride()} instead of contiguous float32 ({n},) on the CPU",
    )


def _check_activations(a: torch.Tensor, bits: int) -> None:
    lowest = -(2 ** (bits - 1)) if a.dtype is torch.int8 else 0
    _check_range("a", a, lowest, lowest + 2**bits - 1, bits)
