"""Codes of eight or four bits with a scale for every row: formats of trained tables."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from slipstream.errors import InvalidArgumentError
from slipstream.quant import Granularity, code_weights
from slipstream.techniques.embedding.formats.format import (
    Choice,
    Exchange,
    Start,
    TableFacts,
    TableFormat,
)
from slipstream.techniques.embedding.modules import Table, over
from slipstream.techniques.embedding.weighting import chunks, relative_error, row_weights_of

_SCALE_BYTES, _REACH_BYTES = 2, 4
_NIBBLE = 15


class QuantizedTable(Table):
    """Codes of rows; made from a trained table by `from_dense`, and not trained any further.

    Args:
        codes: uint8 [rows, bytes]: two codes a byte with four bits, the first one in the lower
            half.
        scale: float16 [rows], at most 1; a number is its code times its row's scale times `reach`.
        reach: float32 []; the largest row's.
        embedding_dim: numbers in a row.
        bits: 8 or 4.

    Raises:
        InvalidArgumentError: other bits, or shapes that do not go together.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    reach: torch.Tensor

    def __init__(
        self,
        codes: torch.Tensor,
        scale: torch.Tensor,
        reach: torch.Tensor,
        embedding_dim: int,
        bits: int,
    ) -> None:
        super().__init__()
        row = code_bytes(embedding_dim, bits)
        if codes.dim() != 2 or codes.shape[1] != row or codes.dtype is not torch.uint8:
            raise InvalidArgumentError("codes", f"must be uint8 [rows, {row}]")
        if scale.shape != codes.shape[:1] or scale.dtype is not torch.float16:
            raise InvalidArgumentError("scale", f"must be float16 [{codes.shape[0]}]")
        if reach.shape or reach.dtype is not torch.float32:
            raise InvalidArgumentError("reach", "must be one float32")
        self.num_embeddings, self.embedding_dim, self.bits = codes.shape[0], embedding_dim, bits
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)
        self.register_buffer("reach", reach)

    @classmethod
    def from_dense(cls, weight: torch.Tensor, bits: int = 8) -> QuantizedTable:
        """Symmetric codes of `weight`, [rows, columns]; at four bits with least squared error.

        Raises:
            InvalidArgumentError: other bits, or a table that is empty or holds NaN or infinity.
        """
        row_weights_of(weight, None)  # for its checks
        (rows, columns), weight = weight.shape, weight.detach()
        row = code_bytes(columns, bits)
        codes = torch.empty(rows, row, dtype=torch.uint8, device=weight.device)
        scale = torch.empty(rows, device=weight.device)
        for part in chunks(rows):
            signed, of_rows = code_weights(
                weight[part], bits, Granularity(axis=0), least_error=bits == 4, narrow=True
            )
            # That of an empty row is any number, and no measure of the largest.
            scale[part] = of_rows.masked_fill(~signed.any(1), 0)
            codes[part] = _packed(signed.view(torch.uint8), bits)
        # Half the bytes of float32, and never out of range: rows far below the largest are nothing.
        reach = scale.max().clamp(min=torch.finfo(torch.float32).tiny)
        return cls(codes, (scale / reach).half(), reach, columns, bits)

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of `ids` [count]: float32 [count, embedding_dim]."""
        codes = self.codes[ids]
        if torch.onnx.is_in_onnx_export():  # which has no bitwise operators for bytes
            codes = codes.long()
        if self.bits == 4:
            codes = torch.stack([codes & _NIBBLE, codes >> 4], 2).flatten(1)
            codes = codes[:, : self.embedding_dim]
        # Two's complement, as they were written.
        half = 1 << (self.bits - 1)
        return ((codes ^ half).float() - half) * (self.scale[ids, None].float() * self.reach)

    @property
    def parameter(self) -> torch.Tensor:
        """What tells device and dtype."""
        return self.reach

    @property
    def flops_per_id(self) -> int:
        """A multiplication for every number."""
        return self.embedding_dim

    @property
    def row_bytes(self) -> float:
        """Bytes that one id reads."""
        return float(self.codes.shape[1] + _SCALE_BYTES)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, bits={self.bits}"


def code_bytes(columns: int, bits: int) -> int:
    """Bytes of a row's codes.

    Raises:
        InvalidArgumentError: bits other than 4 and 8.
    """
    if bits not in (4, 8):
        raise InvalidArgumentError("bits", f"{bits} is neither 4 nor 8")
    return (columns * bits + 7) // 8


def table_bytes(rows: int, columns: int, bits: int) -> int:
    """Bytes of a table's codes and scales."""
    return rows * (code_bytes(columns, bits) + _SCALE_BYTES) + _REACH_BYTES


def _packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    if bits == 8:
        return codes
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return (codes[:, 0::2] & _NIBBLE) | (codes[:, 1::2] << 4)


class _Codes(TableFormat):
    trains: ClassVar[bool] = False
    bits: ClassVar[int]

    def choices(self, table: TableFacts) -> Iterator[Choice]:
        """One, where it has fewer bytes."""
        nbytes = table_bytes(table.rows, table.dim, self.bits)
        if nbytes < table.nbytes:
            yield Choice(self.name, {}, nbytes, rounding_error(table, self.bits))

    def module(self, one: Exchange, start: Start) -> Any:
        """Codes of the trained rows."""
        assert one.table.weight is not None
        return over(one.old, QuantizedTable.from_dense(one.table.weight, self.bits))


class Int8(_Codes):
    """A byte a number, and a scale a row."""

    name: ClassVar[str] = "int8"
    bits: ClassVar[int] = 8


class Int4(_Codes):
    """Half a byte a number, and a scale a row."""

    name: ClassVar[str] = "int4"
    bits: ClassVar[int] = 4


def rounding_error(table: TableFacts, bits: int) -> float:
    """What codes of `bits` bits lose of a table; of one to be trained, as of normal numbers."""
    if table.weight is None:
        reach = math.sqrt(2 * math.log(2 * table.dim))
        return (reach / ((1 << (bits - 1)) - 1)) ** 2 / 12

    def rounded(part: torch.Tensor) -> torch.Tensor:
        return QuantizedTable.from_dense(part, bits).look_up(
            torch.arange(len(part), device=part.device)
        )

    return relative_error(table.weight, rounded, table.shares)
