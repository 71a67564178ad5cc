"""Rows of hashed blocks of a shared array, in torch's operators.

Implements ``native/src/robe/hash.h`` for any dtype and device, and is differentiable any number of
times, but ten times slower, since it materializes the position of every number. Exported models use
these operators (`onnx_export`).
"""

from __future__ import annotations

import torch

from slipstream.techniques.embedding.kernels.bags import reduced

_WORD = 2**64
_HALF = 2**32 - 1
_ROW = 0x9E3779B97F4A7C15
_BLOCK = 0xC2B2AE3D27D4EB4F
_SIGNS = 0xD6E8FEB86659FD93
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def mix(number: int) -> int:
    """Return the finaliser of SplitMix64 of a 64-bit number."""
    for shift, factor in _MIX:
        number = (number ^ (number >> shift)) * factor % _WORD
    return number ^ (number >> 31)


def table_key(seed: int, table: int) -> int:
    """Return the key of a table's hashes as a signed 64-bit integer."""
    return _signed(mix((mix((seed + _ROW) % _WORD) + (table + 1) * _BLOCK) % _WORD))


def _signed(number: int) -> int:
    return (number + 2**63) % _WORD - 2**63


def _right(x: torch.Tensor, shift: int) -> torch.Tensor:
    """Shift `x` right as an unsigned integer; torch's shift keeps the sign."""
    return (x >> shift) & ((1 << (64 - shift)) - 1)


def _mixed(x: torch.Tensor) -> torch.Tensor:
    for shift, factor in _MIX:
        x = (x ^ _right(x, shift)) * _signed(factor)
    return x ^ _right(x, 31)


def _upper_product(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return the upper 64 of the 128 bits of `x` (unsigned) times `size`."""
    high, low = _right(x, 32), x & _HALF
    size_high, size_low = size >> 32, size & _HALF
    cross = high * size_low + _right(low * size_low, 32)
    other = low * size_high + (cross & _HALF)
    return high * size_high + _right(cross, 32) + _right(other, 32)


def starts(key: int, row: torch.Tensor, block: torch.Tensor, size: int) -> torch.Tensor:
    """Return starts of blocks in an array of `size`, int64 of the broadcast shape."""
    return _upper_product(_mixed(key + row * _signed(_ROW) + block * _signed(_BLOCK)), size)


def places(key: int, ids: torch.Tensor, dim: int, block: int, size: int) -> torch.Tensor:
    """Return the positions of the rows' numbers, int64 [len(ids), dim]."""
    rows = ids.to(torch.int64)[:, None]
    element = torch.arange(dim, device=ids.device)[None]
    if block > dim:
        element, rows = rows * dim + element, torch.zeros_like(rows)
    start = starts(key, rows, torch.div(element, block, rounding_mode="floor"), size)
    return (start + element % block) % size


def signs(key: int, ids: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Return 1 or -1 per number of the rows: [len(ids), dim]."""
    rows = ids.to(torch.int64)[:, None]
    element = torch.arange(dim, device=ids.device)
    word = torch.arange((dim + 63) // 64, device=ids.device)[None]
    words = _mixed((key ^ _signed(_SIGNS)) + rows * _signed(_ROW) + word * _signed(_BLOCK))
    bit = torch.tensor([_signed(1 << place % 64) for place in range(dim)], device=ids.device)
    return 2 * ((words[:, element // 64] & bit) == 0).to(dtype) - 1


def rows_of(
    array: torch.Tensor, key: int, ids: torch.Tensor, dim: int, block: int, sign: bool
) -> torch.Tensor:
    """Return the rows `ids` of a table: [len(ids), dim] of the array's dtype."""
    rows = array[places(key, ids, dim, block, array.numel())]
    return rows * signs(key, ids, dim, array.dtype) if sign else rows


def bags_of(
    array: torch.Tensor,
    ids: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    tables: torch.Tensor,
    bags: int,
    block: int,
    sign: bool,
    mode: str,
) -> torch.Tensor:
    """Compute ``slipstream::robe`` by ``embedding_bag`` over materialized rows."""
    if bags == 0:
        return array.new_zeros(0, int(tables[:, 2].sum()))
    count = ids.numel()
    if offsets is None:
        each = count // (len(tables) * bags)
        offsets = torch.arange(len(tables) * bags, device=ids.device) * each
    edges = offsets.tolist()
    columns = []
    for number, (key, _, dim, padding) in enumerate(tables.tolist()):
        begin = edges[number * bags]
        end = edges[(number + 1) * bags] if (number + 1) * bags < len(edges) else count
        ids_of_table = ids[begin:end]
        rows = rows_of(array, key, ids_of_table, dim, block, sign)
        begins = offsets[number * bags : (number + 1) * bags] - begin
        weights_of_table = None if weights is None else weights[begin:end]
        columns.append(reduced(rows, ids_of_table, begins, mode, weights_of_table, padding))
    return torch.cat(columns, 1)
