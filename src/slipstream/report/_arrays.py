"""Numeric columns of a JSON document, as one compressed block with references into it.

A number takes a dozen characters in JSON, and 200,000 tasks have two million numbers. The block
holds little-endian typed arrays, each aligned to eight bytes, which a page views without copying.
"""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

_ALIGNMENT = 8
_WHOLE = (np.uint8, np.uint16, np.int32)


class Arrays:
    """Collector of columns; each becomes a reference ``{"type", "at", "length"}``."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def integers(self, values: ArrayLike) -> dict[str, Any]:
        """Add integers, in the narrowest of u8, u16 and i32 that holds them."""
        column = np.asarray(values, np.int64)
        low, high = int(column.min(initial=0)), int(column.max(initial=0))
        for kind in _WHOLE:
            limits = np.iinfo(kind)
            if limits.min <= low and high <= limits.max:
                return self._add(column.astype(kind))
        raise ValueError(f"{low} to {high} exceed 32 bits")

    def real(self, values: ArrayLike) -> dict[str, Any]:
        """Add float32, for sizes and lengths, which need no more than seven digits."""
        return self._add(np.asarray(values, np.float32))

    def times(self, values: ArrayLike) -> dict[str, Any]:
        """Add float64, for times within a long step, which need more digits."""
        return self._add(np.asarray(values, np.float64))

    def base64(self) -> str:
        """Return all columns, compressed with zlib and encoded as text."""
        return base64.b64encode(self.compressed()).decode()

    def compressed(self) -> bytes:
        """Return all columns, compressed with zlib."""
        return zlib.compress(b"".join(self._parts), 6)

    def _add(self, column: NDArray[Any]) -> dict[str, Any]:
        data = column.astype(column.dtype.newbyteorder("<")).tobytes()
        reference = {
            "type": f"{column.dtype.kind}{8 * column.dtype.itemsize}",
            "at": self._size,
            "length": len(column),
        }
        padding = -len(data) % _ALIGNMENT
        self._parts.append(data + bytes(padding))
        self._size += len(data) + padding
        return reference
