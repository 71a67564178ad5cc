"""The door to the compiled encoders (native/src/compress) and to their numpy reference.

All tensors are float32 on a processor and contiguous unless said otherwise. Which kernel runs is
chosen once: the best level that this processor has; all give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.errors import SlipstreamError
from slipstream.native import InstructionSet
from slipstream.native.family import FLOAT, INT32, INT64, POINTER, Family
from slipstream.techniques.distributed.compression import _reference as reference

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


def kernels() -> dict[InstructionSet, int]:
    """The kernels that run here, see `Family.kernels`."""
    return _FAMILY.kernels


def finite(x: torch.Tensor) -> bool:
    """Whether no number of x [n] is NaN, infinite, or at least 2^100."""
    kernel = _kernel()
    if kernel is None:
        return reference.finite(x.numpy())
    return bool(_FAMILY.library.slipstream_compress_finite(kernel, x.data_ptr(), x.numel()))


@dataclass(frozen=True)
class Blocks:
    """Where each block of a bucket starts and ends, and where its codes go.

    Blocks do not cross from one parameter to the next, so that a parameter whose gradient is zero
    contributes exactly zero.

    Attributes:
        offset, length, position: int64 [blocks]: of the first number, in numbers; of the first
            code, in bytes.
        nbytes: of all codes.
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
        """Blocks of at most `size` numbers; `spans` are parameters' (offset, length)."""
        offsets, lengths = [], []
        for start, count in spans:
            for at in range(0, count, size):
                offsets.append(start + at)
                lengths.append(min(size, count - at))
        length = np.array(lengths, np.int64)
        groups = -(-length // reference.GROUP) * reference.GROUP
        ends = np.cumsum(groups * bits // 8)
        position = np.concatenate([np.zeros(1, np.int64), ends[:-1]]) if lengths else ends
        return cls(bits, np.array(offsets, np.int64), length, position,
                   int(ends[-1]) if lengths else 0)  # fmt: skip

    def encode(
        self, gradient: torch.Tensor, residual: torch.Tensor, scales: torch.Tensor,
        codes: torch.Tensor,
    ) -> None:  # fmt: skip
        """Fill scales float32 [blocks] and codes uint8 [nbytes]; the residual keeps the rest."""
        kernel = _kernel()
        if kernel is None:
            for b, (at, count, place) in enumerate(self._each()):
                scale, made = reference.encode_block(
                    self.bits, gradient.numpy()[at : at + count], residual.numpy()[at : at + count]
                )
                scales[b] = float(scale)
                codes.numpy()[place : place + made.size] = made
            return
        _FAMILY.call(
            "compress_blocks_encode", kernel, self.bits, gradient.data_ptr(), residual.data_ptr(),
            len(self), *self._tables(), scales.data_ptr(), codes.data_ptr(),
        )  # fmt: skip

    def decode(
        self, scales: torch.Tensor, codes: torch.Tensor, out: torch.Tensor, weight: float,
        add: bool,
    ) -> None:  # fmt: skip
        """out = decoded * weight, or out += where `add`."""
        kernel = _kernel()
        if kernel is None:
            into = out.numpy()
            for b, (at, count, place) in enumerate(self._each()):
                scale = scales.numpy()[b] * np.float32(weight)
                made = reference.decode_block(self.bits, scale, codes.numpy()[place:], count)
                into[at : at + count] = made + into[at : at + count] if add else made
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
    """Fill indices int32 [k], ascending, and values [k] with the largest of gradient + residual."""
    kernel = _kernel()
    if kernel is None:
        found = reference.top(gradient.numpy(), residual.numpy(), indices.numel())
        indices.numpy()[:], values.numpy()[:] = found
        return
    _FAMILY.call(
        "compress_top", kernel, gradient.data_ptr(), residual.data_ptr(), gradient.numel(),
        indices.numel(), indices.data_ptr(), values.data_ptr(),
    )  # fmt: skip


def scatter(indices: torch.Tensor, values: torch.Tensor, out: torch.Tensor, weight: float) -> None:
    """out[indices] += values * weight; the indices of one call differ.

    Raises:
        SlipstreamError: an index outside `out`.
    """
    if _kernel() is None:
        if indices.numel() and not (0 <= int(indices.min()) <= int(indices.max()) < out.numel()):
            raise SlipstreamError("an index of a compressed gradient lies outside its bucket")
        out.numpy()[indices.numpy()] += values.numpy() * np.float32(weight)
        return
    _FAMILY.call(
        "compress_scatter", indices.data_ptr(), values.data_ptr(), indices.numel(), weight,
        out.data_ptr(), out.numel(),
    )  # fmt: skip


def project(
    gradient: torch.Tensor, residual: torch.Tensor, q: torch.Tensor, p: torch.Tensor
) -> None:
    """residual [rows, columns] += gradient; p [rank, rows] = q residual^T for q [rank, columns]."""
    kernel = _kernel()
    if kernel is None:
        p.numpy()[:] = reference.project(gradient.numpy(), residual.numpy(), q.numpy())
        return
    _FAMILY.call(
        "compress_project", kernel, gradient.data_ptr(), residual.data_ptr(), *residual.shape,
        q.shape[0], q.data_ptr(), p.data_ptr(),
    )  # fmt: skip


def orthonormalise(p: torch.Tensor) -> None:
    """The rows of p [rank, rows], in place; those that depend on earlier ones become zero."""
    kernel = _kernel()
    if kernel is None:
        reference.orthonormalise(p.numpy())
        return
    _FAMILY.call("compress_orthonormalise", kernel, p.data_ptr(), p.shape[1], p.shape[0])


def project_back(residual: torch.Tensor, p: torch.Tensor, q: torch.Tensor) -> None:
    """q [rank, columns] = p residual."""
    kernel = _kernel()
    if kernel is None:
        q.numpy()[:] = reference.project_back(residual.numpy(), p.numpy())
        return
    _FAMILY.call(
        "compress_project_back", kernel, residual.data_ptr(), *residual.shape, p.shape[0],
        p.data_ptr(), q.data_ptr(),
    )  # fmt: skip


def reconstruct(
    p: torch.Tensor, q: torch.Tensor, residual: torch.Tensor, out: torch.Tensor
) -> None:
    """out [rows, columns] = p^T q; residual -= out."""
    kernel = _kernel()
    if kernel is None:
        out.numpy()[:] = reference.reconstruct(p.numpy(), q.numpy(), residual.numpy())
        return
    _FAMILY.call(
        "compress_reconstruct", kernel, p.data_ptr(), q.data_ptr(), *residual.shape, p.shape[0],
        residual.data_ptr(), out.data_ptr(),
    )  # fmt: skip
