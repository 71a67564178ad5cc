"""The encoders in plain numpy: what every compiled kernel equals to the bit.

Arrays are float32; `residual` is changed in place, as `slipstream.native` code does. Sums run over
16 lanes, which are added in halves; see native/src/compress/kernel.h.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

LANES = 16
GROUP = 32
LARGEST = np.float32(2.0**100)
_DEPENDENT = 1e-5
_LARGEST_CODE = {4: np.float32(7.0), 8: np.float32(127.0)}

Floats = NDArray[np.float32]
Codes = NDArray[np.uint8]


def finite(x: Floats) -> bool:
    """Whether no number is NaN, infinite, or so large that sums may be."""
    return bool(np.all(np.abs(x) < LARGEST))


def _lanes(x: NDArray[Any]) -> NDArray[Any]:
    """[ceil(n / 16), 16], padded with zeros."""
    padded = np.zeros(-(-x.size // LANES) * LANES, x.dtype)
    padded[: x.size] = x
    return padded.reshape(-1, LANES)


def _sum(x: NDArray[Any]) -> Any:
    total = np.zeros(LANES, x.dtype)
    for line in _lanes(x):
        total = total + line
    half = LANES // 2
    while half:
        total[:half] = total[:half] + total[half : 2 * half]
        half //= 2
    return total[0]


def encode_block(bits: int, gradient: Floats, residual: Floats) -> tuple[np.float32, Codes]:
    """The scale and the codes of one block; the residual keeps what they leave out."""
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
    padded = np.zeros(-(-codes.size // GROUP) * GROUP, np.int8)
    padded[: codes.size] = codes
    if bits == 8:
        return scale, padded.view(np.uint8)
    low, high = padded.view(np.uint8).reshape(-1, 2, LANES).transpose(1, 0, 2)
    both: Codes = (low & np.uint8(15)) | (high << np.uint8(4))
    return scale, both.reshape(-1)


def _encode_signs(residual: Floats) -> tuple[np.float32, Codes]:
    scale = _sum(np.abs(residual)) / np.float32(residual.size)
    signs = residual >= 0
    residual -= np.where(signs, scale, -scale)
    padded = np.zeros(-(-signs.size // GROUP) * GROUP, np.bool_)
    # A line's lanes beyond the end count as zeros, whose sign is plus.
    padded[: -(-signs.size // LANES) * LANES] = True
    padded[: signs.size] = signs
    return scale, np.packbits(padded, bitorder="little")


def decode_block(bits: int, scale: np.float32, codes: Codes, length: int) -> Floats:
    """float32 [length]."""
    if bits == 1:
        signs = np.unpackbits(codes, bitorder="little")[:length]
        return np.where(signs == 1, scale, -scale).astype(np.float32)
    if bits == 8:
        return codes.view(np.int8)[:length] * scale
    low = (codes << 4).view(np.int8) >> 4
    high = codes.view(np.int8) >> 4
    both = np.stack([low.reshape(-1, LANES), high.reshape(-1, LANES)], axis=1)
    return both.reshape(-1)[:length] * scale


def top(gradient: Floats, residual: Floats, k: int) -> tuple[NDArray[np.int32], Floats]:
    """Indices, ascending, and values of the k largest magnitudes; of equals the lower index."""
    residual += gradient
    order = np.argsort(-np.abs(residual), kind="stable")[:k]
    indices = np.sort(order).astype(np.int32)
    values = residual[indices].copy()
    residual[indices] = 0
    return indices, values


def project(gradient: Floats, residual: Floats, q: Floats) -> Floats:
    """p [rank, rows] = q M^T for M = residual + gradient [rows, columns]."""
    residual += gradient
    rows, rank = residual.shape[0], q.shape[0]
    p = np.zeros((rank, rows), np.float32)
    for k in range(rank):
        for i in range(rows):
            p[k, i] = _sum(residual[i] * q[k])
    return p


def orthonormalise(p: Floats) -> None:
    """The rows of p, in place; those that depend on earlier ones become zero."""
    for k, vector in enumerate(p):
        before = np.sqrt(_dot(vector, vector))
        for _ in range(2):
            for known in p[:k]:
                vector -= np.float32(_dot(vector, known)) * known
        after = np.sqrt(_dot(vector, vector))
        vector *= np.float32(1.0 / after) if after > _DEPENDENT * before else np.float32(0)


def _dot(a: Floats, b: Floats) -> np.float64:
    product: np.float64 = _sum(a.astype(np.float64) * b.astype(np.float64))
    return product


def project_back(residual: Floats, p: Floats) -> Floats:
    """q [rank, columns] = p M."""
    q = np.zeros((p.shape[0], residual.shape[1]), np.float32)
    for i, row in enumerate(residual):
        q += p[:, i, None] * row
    return q


def reconstruct(p: Floats, q: Floats, residual: Floats) -> Floats:
    """p^T q, taken off the residual."""
    out = np.zeros_like(residual)
    for vector_p, vector_q in zip(p, q, strict=True):
        out += vector_p[:, None] * vector_q
    residual -= out
    return out
