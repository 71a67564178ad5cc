"""Codes of eight or four bits with a scale per row: formats of trained tables."""

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
    """Codes of the rows of a trained table, which are not trainable.

    Args:
        codes: uint8 [rows, bytes]; with four bits two codes per byte, the first in the lower half.
        scale: float16 [rows], at most 1; a number is its code times its row's scale times `reach`.
        reach: float32 []; the maximum scale.
        embedding_dim: numbers per row.
        bits: 8 or 4.

    Raises:
        InvalidArgumentError: `bits` is invalid, or shapes do not match.
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
            raise InvalidArgumentError("reach", "must be a float32 scalar")
        self.num_embeddings, self.embedding_dim, self.bits = codes.shape[0], embedding_dim, bits
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)
        self.register_buffer("reach", reach)

    @classmethod
    def from_dense(cls, weight: torch.Tensor, bits: int = 8) -> QuantizedTable:
        """Quantize `weight`, [rows, columns], symmetrically; four bits with least squared error.

        Raises:
            InvalidArgumentError: `bits` is invalid, or the table is empty or not finite.
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
            # The scale of a zero row is arbitrary and must not affect the maximum.
            scale[part] = of_rows.masked_fill(~signed.any(1), 0)
            codes[part] = _packed(signed.view(torch.uint8), bits)
        # float16 relative to the maximum cannot overflow; rows far below it underflow to zero.
        reach = scale.max().clamp(min=torch.finfo(torch.float32).tiny)
        return cls(codes, (scale / reach).half(), reach, columns, bits)

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of `ids` [count]: float32 [count, embedding_dim]."""
        codes = self.codes[ids]
        if torch.onnx.is_in_onnx_export():  # ONNX lacks bitwise operators for bytes
            codes = codes.long()
        if self.bits == 4:
            codes = torch.stack([codes & _NIBBLE, codes >> 4], 2).flatten(1)
            codes = codes[:, : self.embedding_dim]
        # Sign extension of two's complement.
        half = 1 << (self.bits - 1)
        return ((codes ^ half).float() - half) * (self.scale[ids, None].float() * self.reach)

    @property
    def parameter(self) -> torch.Tensor:
        """A tensor with the device and dtype of the table."""
        return self.reach

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, bits={self.bits}"


def code_bytes(columns: int, bits: int) -> int:
    """Return the bytes of a row's codes.

    Raises:
        InvalidArgumentError: `bits` is not 4 or 8.
    """
    if bits not in (4, 8):
        raise InvalidArgumentError("bits", f"{bits} is not 4 or 8")
    return (columns * bits + 7) // 8


def table_bytes(rows: int, columns: int, bits: int) -> int:
    """Return the bytes of a table's codes and scales."""
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
        """Yield one choice if it is smaller than the table."""
        nbytes = table_bytes(table.rows, table.dim, self.bits)
        if nbytes < table.nbytes:
            yield Choice(self.name, {}, nbytes, rounding_error(table, self.bits))

    def module(self, exchange: Exchange, start: Start) -> Any:
        """Quantize the trained rows."""
        assert exchange.table.weight is not None
        return over(exchange.old, QuantizedTable.from_dense(exchange.table.weight, self.bits))


class Int8(_Codes):
    """Eight bits per number, and a scale per row."""

    name: ClassVar[str] = "int8"
    bits: ClassVar[int] = 8


class Int4(_Codes):
    """Four bits per number, and a scale per row."""

    name: ClassVar[str] = "int4"
    bits: ClassVar[int] = 4


def rounding_error(table: TableFacts, bits: int) -> float:
    """Return the error of codes of `bits` bits; of an untrained table, for normal numbers."""
    if table.weight is None:
        reach = math.sqrt(2 * math.log(2 * table.dim))
        return (reach / ((1 << (bits - 1)) - 1)) ** 2 / 12

    def rounded(part: torch.Tensor) -> torch.Tensor:
        return QuantizedTable.from_dense(part, bits).look_up(
            torch.arange(len(part), device=part.device)
        )

    return relative_error(table.weight, rounded, table.shares)
