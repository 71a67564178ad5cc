"""Number columns beside a JSON document: one compressed block, and references into it.

JSON writes a number in a dozen characters; 200 000 tasks have two million numbers. They go into
one block of little-endian typed arrays, each at a multiple of eight bytes, which a page views
without copying.
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
    """Collects columns; each becomes a reference ``{"type", "at", "length"}`` in the document."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def whole(self, values: ArrayLike) -> dict[str, Any]:
        """A column of integers, in the narrowest of u8, u16 and i32 that holds them."""
        column = np.asarray(values, np.int64)
        low, high = int(column.min(initial=0)), int(column.max(initial=0))
        for kind in _WHOLE:
            limits = np.iinfo(kind)
            if limits.min <= low and high <= limits.max:
                return self._add(column.astype(kind))
        raise ValueError(f"{low} to {high} are more than 32 bits")

    def real(self, values: ArrayLike) -> dict[str, Any]:
        """A column of float32: sizes and lengths, of which seven digits are plenty."""
        return self._add(np.asarray(values, np.float32))

    def times(self, values: ArrayLike) -> dict[str, Any]:
        """A column of float64: moments of a long step need more digits than its tasks."""
        return self._add(np.asarray(values, np.float64))

    def base64(self) -> str:
        """All columns, compressed with zlib, as text that any document may hold."""
        return base64.b64encode(self.compressed()).decode()

    def compressed(self) -> bytes:
        """All columns, compressed with zlib."""
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
