"""The compiled encoders (native/src/compress), and bit-identical fallbacks in NumPy.

Tensors are contiguous float32 on CPU unless stated otherwise. The kernel is chosen once, for the
best instruction set of this CPU. Sums use 16 lanes, which are added in halves; see
native/src/compress/kernel.h.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import SlipstreamError
from slipstream.native import InstructionSet
from slipstream.native.family import FLOAT, INT32, INT64, POINTER, Family

if TYPE_CHECKING:
    import torch

_FAMILY = Family("compress", {
    "compress_finite": [INT32, POINTER, INT64],
    "compress_blocks_encode": [INT32, INT32, *[POINTER] * 2, INT64, *[POINTER] * 5],
    "compress_blocks_decode": [INT32, INT32, *[POINTER] * 2, INT64, *[POINTER] * 3, FLOAT, INT32,
                               POINTER],
    "compress_top": [INT32, *[POINTER] * 2, INT64, INT64, *[POINTER] * 2],
    "compress_scatter": [*[POINTER] * 2, INT64, FLOAT, POINTER, INT64],
    "compress_project": [INT32, *[POINTER] * 2, INT64, INT64, INT32, *[POINTER] * 2],
    "compress_orthonormalise": [INT32, POINTER, INT64, INT32],
    "compress_project_back": [INT32, POINTER, INT64, INT64, INT32, *[POINTER] * 2],
    "compress_reconstruct": [INT32, *[POINTER] * 2, INT64, INT64, INT32, *[POINTER] * 2],
})  # fmt: skip
_kernel = _FAMILY.kernel
_LANES = 16
_GROUP = 32
_LARGEST = np.float32(2.0**100)
_DEPENDENT = 1e-5
_LARGEST_CODE = {4: np.float32(7.0), 8: np.float32(127.0)}
_Floats = NDArray[np.float32]
_Codes = NDArray[np.uint8]


def kernels() -> dict[InstructionSet, int]:
    """Return the kernels that this machine supports, see `Family.kernels`."""
    return _FAMILY.kernels


def finite(x: torch.Tensor) -> bool:
    """Whether all elements of x [n] are below 2^100 in magnitude, and not NaN."""
    kernel = _kernel()
    if kernel is None:
        return bool((x.abs() < float(_LARGEST)).all())
    return bool(_FAMILY.library.slipstream_compress_finite(kernel, x.data_ptr(), x.numel()))


@dataclass(frozen=True)
class Blocks:
    """Blocks of a bucket, and the positions of their codes.

    A block belongs to a single parameter, so that a zero gradient contributes exactly zero.

    Attributes:
        offset, length: first element and number of elements of each block, int64 [blocks].
        position: first code of each block, in bytes, int64 [blocks].
        nbytes: size of all codes.
    """

    bits: int
    offset: Any
    length: Any
    position: Any
    nbytes: int

    def __len__(self) -> int:
        return len(self.offset)

    @classmethod
    def of(cls, spans: Sequence[tuple[int, int]], size: int, bits: int) -> Blocks:
        """Split parameters, `spans` of (offset, length), into blocks of at most `size` elements."""
        offsets, lengths = [], []
        for start, count in spans:
            for at in range(0, count, size):
                offsets.append(start + at)
                lengths.append(min(size, count - at))
        length = np.array(lengths, np.int64)
        groups = -(-length // _GROUP) * _GROUP
        ends = np.cumsum(groups * bits // 8)
        position = np.concatenate([np.zeros(1, np.int64), ends[:-1]]) if lengths else ends
        return cls(bits, np.array(offsets, np.int64), length, position,
                   int(ends[-1]) if lengths else 0)  # fmt: skip

    def encode(
        self, gradient: torch.Tensor, residual: torch.Tensor, scales: torch.Tensor,
        codes: torch.Tensor,
    ) -> None:  # fmt: skip
        """Fill scales float32 [blocks] and codes uint8 [nbytes], and update the residual."""
        kernel = _kernel()
        if kernel is None:
            for b, (at, count, place) in enumerate(self._each()):
                scale, packed = _encode_block(
                    self.bits, gradient.numpy()[at : at + count], residual.numpy()[at : at + count]
                )
                scales[b] = float(scale)
                codes.numpy()[place : place + packed.size] = packed
            return
        _FAMILY.call(
            "compress_blocks_encode", kernel, self.bits, gradient.data_ptr(), residual.data_ptr(),
            len(self), *self._tables(), scales.data_ptr(), codes.data_ptr(),
        )  # fmt: skip

    def decode(
        self, scales: torch.Tensor, codes: torch.Tensor, out: torch.Tensor, weight: float,
        add: bool,
    ) -> None:  # fmt: skip
        """Write the decoded elements times `weight` to `out`, or add them if `add`."""
        kernel = _kernel()
        if kernel is None:
            into = out.numpy()
            for b, (at, count, place) in enumerate(self._each()):
                scale = scales.numpy()[b] * np.float32(weight)
                decoded = _decode_block(self.bits, scale, codes.numpy()[place:], count)
                into[at : at + count] = decoded + into[at : at + count] if add else decoded
            return
        _FAMILY.call(
            "compress_blocks_decode", kernel, self.bits, scales.data_ptr(), codes.data_ptr(),
            len(self), *self._tables(), weight, int(add), out.data_ptr(),
        )  # fmt: skip

    def _tables(self) -> tuple[int, int, int]:
        return self.offset.ctypes.data, self.length.ctypes.data, self.position.ctypes.data

    def _each(self) -> Any:
        return zip(self.offset.tolist(), self.length.tolist(), self.position.tolist(), strict=True)


def top(
    gradient: torch.Tensor, residual: torch.Tensor, indices: torch.Tensor, values: torch.Tensor
) -> None:
    """Select the k largest of gradient + residual: ascending indices int32 [k], values [k]."""
    kernel = _kernel()
    if kernel is None:
        residual += gradient
        # Ties are resolved in favour of the lower index.
        order = np.argsort(-np.abs(residual.numpy()), kind="stable")[: indices.numel()]
        indices.numpy()[:] = np.sort(order)
        values.copy_(residual[indices])
        residual[indices] = 0.0
        return
    _FAMILY.call(
        "compress_top", kernel, gradient.data_ptr(), residual.data_ptr(), gradient.numel(),
        indices.numel(), indices.data_ptr(), values.data_ptr(),
    )  # fmt: skip


def scatter(indices: torch.Tensor, values: torch.Tensor, out: torch.Tensor, weight: float) -> None:
    """Compute out[indices] += values * weight, for unique indices.

    Raises:
        SlipstreamError: an index outside `out`.
    """
    if _kernel() is None:
        if indices.numel() and not (0 <= int(indices.min()) <= int(indices.max()) < out.numel()):
            raise SlipstreamError("an index of a compressed gradient is outside its bucket")
        out.numpy()[indices.numpy()] += values.numpy() * np.float32(weight)
        return
    _FAMILY.call(
        "compress_scatter", indices.data_ptr(), values.data_ptr(), indices.numel(), weight,
        out.data_ptr(), out.numel(),
    )  # fmt: skip


def project(
    gradient: torch.Tensor, residual: torch.Tensor, q: torch.Tensor, p: torch.Tensor
) -> None:
    """Add gradient to residual [rows, columns]; p [rank, rows] = q [rank, columns] residual^T."""
    kernel = _kernel()
    if kernel is None:
        residual += gradient
        for row, factor in zip(q.numpy(), p.numpy(), strict=True):
            factor[:] = [_sum(line * row) for line in residual.numpy()]
        return
    _FAMILY.call(
        "compress_project", kernel, gradient.data_ptr(), residual.data_ptr(), *residual.shape,
        q.shape[0], q.data_ptr(), p.data_ptr(),
    )  # fmt: skip


def orthonormalise(p: torch.Tensor) -> None:
    """Orthonormalise the rows of p [rank, rows] in place; dependent rows become zero."""
    kernel = _kernel()
    if kernel is None:
        vectors = p.numpy()
        for k, vector in enumerate(vectors):
            before = np.sqrt(_dot(vector, vector))
            for _ in range(2):
                for basis in vectors[:k]:
                    vector -= np.float32(_dot(vector, basis)) * basis
            after = np.sqrt(_dot(vector, vector))
            vector *= np.float32(1.0 / after) if after > _DEPENDENT * before else np.float32(0)
        return
    _FAMILY.call("compress_orthonormalise", kernel, p.data_ptr(), p.shape[1], p.shape[0])


def project_back(residual: torch.Tensor, p: torch.Tensor, q: torch.Tensor) -> None:
    """Compute q [rank, columns] = p residual."""
    kernel = _kernel()
    if kernel is None:
        into = q.zero_().numpy()
        for row, factors in zip(residual.numpy(), p.numpy().T, strict=True):
            into += factors[:, None] * row
        return
    _FAMILY.call(
        "compress_project_back", kernel, residual.data_ptr(), *residual.shape, p.shape[0],
        p.data_ptr(), q.data_ptr(),
    )  # fmt: skip


def reconstruct(
    p: torch.Tensor, q: torch.Tensor, residual: torch.Tensor, out: torch.Tensor
) -> None:
    """Compute out [rows, columns] = p^T q, and subtract it from the residual."""
    kernel = _kernel()
    if kernel is None:
        into = out.zero_().numpy()
        for left, right in zip(p.numpy(), q.numpy(), strict=True):
            into += left[:, None] * right
        residual -= out
        return
    _FAMILY.call(
        "compress_reconstruct", kernel, p.data_ptr(), q.data_ptr(), *residual.shape, p.shape[0],
        residual.data_ptr(), out.data_ptr(),
    )  # fmt: skip


def _encode_block(bits: int, gradient: _Floats, residual: _Floats) -> tuple[np.float32, _Codes]:
    """Return the scale and the codes of one block, and update the residual."""
    residual += gradient
    if bits == 1:
        return _encode_signs(residual)
    most = np.abs(residual).max(initial=np.float32(0)) / _LARGEST_CODE[bits]
    rounded = (int(np.float32(most).view(np.uint32)) + 0xFFFF) & 0xFFFF0000
    scale = np.uint32(rounded).view(np.float32)
    if not scale > np.float32(1e-37):
        scale = inverse = np.float32(0)
    else:
        inverse = np.float32(1) / scale
    codes = np.rint(residual * inverse)
    residual -= codes * scale
    padded = np.zeros(-(-codes.size // _GROUP) * _GROUP, np.int8)
    padded[: codes.size] = codes
    if bits == 8:
        return scale, padded.view(np.uint8)
    low, high = padded.view(np.uint8).reshape(-1, 2, _LANES).transpose(1, 0, 2)
    both: _Codes = (low & np.uint8(15)) | (high << np.uint8(4))
    return scale, both.reshape(-1)


def _encode_signs(residual: _Floats) -> tuple[np.float32, _Codes]:
    scale = _sum(np.abs(residual)) / np.float32(residual.size)
    signs = residual >= 0
    residual -= np.where(signs, scale, -scale)
    padded = np.zeros(-(-signs.size // _GROUP) * _GROUP, np.bool_)
    # Lanes beyond the end count as zeros, whose sign is plus.
    padded[: -(-signs.size // _LANES) * _LANES] = True
    padded[: signs.size] = signs
    return scale, np.packbits(padded, bitorder="little")


def _decode_block(bits: int, scale: np.float32, codes: _Codes, length: int) -> _Floats:
    """float32 [length]."""
    if bits == 1:
        signs = np.unpackbits(codes, bitorder="little")[:length]
        return np.where(signs == 1, scale, -scale).astype(np.float32)
    if bits == 8:
        return codes.view(np.int8)[:length] * scale
    low = (codes << 4).view(np.int8) >> 4
    high = codes.view(np.int8) >> 4
    both = np.stack([low.reshape(-1, _LANES), high.reshape(-1, _LANES)], axis=1)
    return both.reshape(-1)[:length] * scale


def _sum(x: NDArray[Any]) -> Any:
    lanes = np.pad(x, (0, -x.size % _LANES)).reshape(-1, _LANES)
    total = np.zeros(_LANES, x.dtype)
    for line in lanes:
        total = total + line
    half = _LANES // 2
    while half:
        total[:half] = total[:half] + total[half : 2 * half]
        half //= 2
    return total[0]


def _dot(a: _Floats, b: _Floats) -> np.float64:
    product: np.float64 = _sum(a.astype(np.float64) * b.astype(np.float64))
    return product
