"""Models with compressed tables as ONNX: tables stay as small as they are.

Hashed blocks are found in the runtime by the same integer arithmetic (`_robe_reference`), tensor
trains are multiplied there, codes are scaled there. Which row a hashed id shares is written down,
four bytes each. Tensor trains with cached rows become the dense table.

PyTorch's TorchScript exporter writes the model; what a hashed block is, is told to it here.
"""

from __future__ import annotations

import copy
import importlib
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slipstream.errors import InvalidArgumentError, MissingExtraError, SlipstreamError
from slipstream.files import replacing
from slipstream.native import _robe_reference as hashes
from slipstream.native import _tt_reference as trains
from slipstream.surgery import place
from slipstream.techniques.embedding.quantized_rows import QuantizedTable
from slipstream.techniques.embedding.robe import (
    ROBEEmbedding,
    ROBEEmbeddingBag,
    ROBEEmbeddingCollection,
)
from slipstream.techniques.embedding.shared_array import SharedArray
from slipstream.techniques.embedding.shared_rows import HashedTable
from slipstream.techniques.embedding.table_modules import TableEmbedding, TableEmbeddingBag
from slipstream.techniques.embedding.tt import TTEmbedding, TTEmbeddingBag

OPSET = 18
"""The first whose bitwise operators take integers."""

_NAME = "slipstream::robe"
_INT, _FLOAT = 7, 1
_HALF = 2**32 - 1


def export(
    model: nn.Module,
    example: Any,
    path: str | Path,
    *,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] = ("output",),
) -> Path:
    """Write `model` as an ONNX file whose first dimensions may have any size.

    Args:
        model: with compressed tables or without; it is not changed. Exported as in evaluation.
        example: its argument, or a tuple of its arguments: ids int64, say. Bags must be rows of a
            two-dimensional input, all of one size in the exported model.
        input_names, output_names: in the file; ``input_0`` and so on by default.

    Returns:
        `path`.

    Raises:
        InvalidArgumentError: bags with offsets, mode max, float64 tables: names what there is no
            form for.
        MissingExtraError: the package onnx is not installed.
        SlipstreamError: the file cannot be written.
    """
    try:
        import onnx  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("export to ONNX", "onnx", "onnx") from error
    arguments = example if isinstance(example, tuple) else (example,)
    names = list(input_names or [f"input_{place}" for place in range(len(arguments))])
    if len(names) != len(arguments):
        raise InvalidArgumentError(
            "input_names", f"there are {len(names)} for {len(arguments)} arguments"
        )
    own = _exportable(copy.deepcopy(model).eval())
    every = [*names, *output_names]
    target = Path(path)
    try:
        with replacing(target) as part, _OurOperator(), torch.no_grad(), warnings.catch_warnings():
            # Of tracing, and that this exporter is the older one.
            warnings.simplefilter("ignore")
            torch.onnx.export(
                own, arguments, str(part), dynamo=False, opset_version=OPSET, input_names=names,
                output_names=list(output_names),
                dynamic_axes={name: {0: "batch"} for name in every},
            )  # fmt: skip
    except OSError as error:
        raise SlipstreamError(f"cannot be written: {error.strerror}", where=str(target)) from error
    return target


class _Hashed(nn.Module):
    """Rows of a shared array, by the operator that the exporter is told."""

    def __init__(self, pool: SharedArray, described: torch.Tensor) -> None:
        super().__init__()
        if pool.array.dtype is not torch.float32:
            raise InvalidArgumentError("model", f"an array is {pool.array.dtype}, not float32")
        self.array, self.block, self.sign = pool.array, pool.block, pool.sign
        self.described, self.width = described, int(described[0, 2])

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        how = (None, None, self.described, ids.shape[0], self.width, self.block, self.sign)
        made: torch.Tensor = torch.ops.slipstream.robe.default(self.array, ids, *how, 0)
        return made

    def widen(self, rows: torch.Tensor) -> torch.Tensor:
        return rows


class _Train(nn.Module):
    """Rows of a tensor train, multiplied."""

    def __init__(self, cores: nn.ParameterList) -> None:
        super().__init__()
        if cores[0].dtype is not torch.float32:
            raise InvalidArgumentError("model", f"a tensor train is {cores[0].dtype}, not float32")
        self.cores = cores

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        return trains.rows_of(list(self.cores), ids)

    def widen(self, rows: torch.Tensor) -> torch.Tensor:
        return rows


class _Placed(nn.Module):
    """Rows that are shared: which one an id reads is written down."""

    at: torch.Tensor

    def __init__(self, table: HashedTable) -> None:
        super().__init__()
        self.weight = table.weight
        places = table.places(torch.arange(table.num_embeddings, device=table.weight.device))
        self.register_buffer("at", places.to(torch.int32))

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(self.at[ids], self.weight)

    def widen(self, rows: torch.Tensor) -> torch.Tensor:
        return rows


class _Written(nn.Module):
    """Rows that are all written down."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(table, requires_grad=False)

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(ids, self.weight)

    def widen(self, rows: torch.Tensor) -> torch.Tensor:
        return rows


class _Coded(nn.Module):
    """Rows of codes, by arithmetic alone: ONNX has no bitwise operators for bytes."""

    codes: torch.Tensor
    scale: torch.Tensor

    def __init__(self, table: QuantizedTable) -> None:
        super().__init__()
        self.register_buffer("codes", table.codes)
        self.register_buffer("scale", table.scale)
        self.bits, self.width = table.bits, table.embedding_dim

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        codes = self.codes[ids].float()
        if self.bits == 4:
            high = torch.floor(codes / 16)
            codes = torch.stack([codes - 16 * high, high], 2).flatten(1)[:, : self.width]
        # Two's complement: the upper half of all codes are negative.
        top = 1 << self.bits
        return (codes - top * (codes >= top // 2).float()) * self.scale[ids, None]

    def widen(self, rows: torch.Tensor) -> torch.Tensor:
        return rows


class _Bags(nn.Module):
    """A module over rows, in operators that are exported well: bags of one size."""

    def __init__(self, module: Any, table: Any) -> None:
        super().__init__()
        self.table, self.padding_idx = table, module.padding_idx
        self.mode = getattr(module, "mode", None)

    def forward(self, input: torch.Tensor, offsets: None = None) -> torch.Tensor:
        if offsets is not None:
            raise InvalidArgumentError(
                "offsets", "bags with offsets are not exported",
                remedy="give bags of one size as rows of a two-dimensional input, padded",
            )  # fmt: skip
        rows: torch.Tensor = self.table.widen(self.table.look_up(input.long().reshape(-1)))
        rows = rows.reshape(*input.shape, rows.shape[-1])
        if self.mode is None and self.padding_idx is None:
            return rows
        present = torch.ones_like(input, dtype=rows.dtype)
        if self.padding_idx is not None:
            present = (input != self.padding_idx).to(rows.dtype)
        rows = rows * present[..., None]
        if self.mode is None:
            return rows
        made = rows.sum(1)
        return made if self.mode == "sum" else made / present.sum(1)[:, None].clamp(min=1)


class _SideBySide(nn.Module):
    """A collection's tables, one after the other."""

    def __init__(self, collection: ROBEEmbeddingCollection) -> None:
        super().__init__()
        found = [_Hashed(collection.pool, collection.table(one)[1]) for one in collection.tables]
        self.tables: Any = nn.ModuleList(found)
        self.mean = collection.mode == "mean"

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        apart = input.long().reshape(len(self.tables), -1, input.shape[1])
        made = []
        for number, table in enumerate(self.tables):
            rows = table.look_up(apart[number].reshape(-1))
            rows = rows.reshape(-1, input.shape[1], rows.shape[-1])
            made.append(rows.mean(1) if self.mean else rows.sum(1))
        return torch.cat(made, 1)


def _exportable(model: nn.Module) -> nn.Module:
    """`model` with modules in the place of those that have no operators in ONNX."""
    exchanged: list[str] = []
    for name, module in list(model.named_modules()):
        within = any(name.startswith(f"{one}.") for one in exchanged)
        new = None if within else _in_place_of(module)
        if new is None:
            continue
        exchanged.append(name)
        if getattr(module, "mode", None) == "max":
            raise InvalidArgumentError("model", f"'{name}' has the mode max, which is not exported")
        if not name:
            return new
        place(model, name, new)
    return model


def _in_place_of(module: Any) -> nn.Module | None:
    if isinstance(module, QuantizedTable):
        return _Coded(module)
    if isinstance(module, ROBEEmbeddingCollection):
        return _SideBySide(module)
    if isinstance(module, ROBEEmbedding | ROBEEmbeddingBag):
        return _Bags(module, _Hashed(module.pool, module.described))
    if isinstance(module, TTEmbedding | TTEmbeddingBag):
        return _Bags(module, _Train(module.cores)) if module.hot is None else _dense(module)
    if isinstance(module, TableEmbedding | TableEmbeddingBag):
        table: Any = module.table
        if isinstance(table, HashedTable):
            table = _Placed(table)
        elif isinstance(table, QuantizedTable):
            table = _Coded(table)
        else:
            table = _exportable(table)
        return _Bags(module, table)
    return None


def _dense(module: Any) -> nn.Module:
    """A tensor train and its cached rows as one table."""
    return _Bags(module, _Written(module.to_dense()))


class _OurOperator:
    """While it lasts, the exporter knows ``slipstream::robe``."""

    def __enter__(self) -> None:
        exporter: Any = torch.onnx
        exporter.register_custom_op_symbolic(_NAME, _robe, OPSET)

    def __exit__(self, *error: object) -> None:
        exporter: Any = torch.onnx
        exporter.unregister_custom_op_symbolic(_NAME, OPSET)


def _robe(
    g: Any, array: Any, ids: Any, offsets: Any, weights: Any, tables: Any, bags: Any, width: Any,
    block: Any, sign: Any, mode: Any,
) -> Any:  # fmt: skip
    """``slipstream::robe`` of one table, bags of one id each: [count, width]."""
    helper: Any = importlib.import_module("torch.onnx.symbolic_helper")
    ((key, _, dim, _),) = helper._get_const(tables, "t", "tables").tolist()
    own = g.op("Cast", ids, to_i=_INT)
    numbers = array.type().sizes()[0]
    at, signs = _hashed(g, own, key, dim, helper._get_const(block, "i", "block"), numbers)
    rows = g.op("Gather", array, at, axis_i=0)
    return g.op("Mul", rows, signs) if helper._get_const(sign, "i", "sign") else rows


def _hashed(g: Any, ids: Any, key: int, dim: int, block: int, size: int) -> tuple[Any, Any]:
    """Where the numbers of rows lie, and their signs, [count, dim] both; see `_robe_reference`."""
    element = torch.arange(dim)
    rows = g.op("Reshape", ids, _whole(g, [-1, 1]))
    of_row = g.op("Mul", rows, _whole(g, hashes._signed(hashes._ROW)))
    if block > dim:
        flat = g.op("Add", g.op("Mul", rows, _whole(g, dim)), _whole(g, element[None]))
        number = g.op("Div", flat, _whole(g, block))
        shift = g.op("Sub", flat, g.op("Mul", number, _whole(g, block)))
        start = _starts(g, key, None, number, size)
    else:
        number = _whole(g, torch.arange(math.ceil(dim / block))[None])
        shift = _whole(g, (element % block)[None])
        start = _starts(g, key, of_row, number, size)
        start = g.op("Gather", start, _whole(g, element // block), axis_i=1)
    at = g.op("Mod", g.op("Add", start, shift), _whole(g, size))
    word = torch.arange((dim + 63) // 64)[None] * hashes._signed(hashes._BLOCK)
    words = g.op("Add", of_row, _whole(g, word + (key ^ hashes._signed(hashes._SIGNS))))
    words = g.op("Gather", _mixed(g, words), _whole(g, element // 64), axis_i=1)
    one = torch.ones((), dtype=torch.int64) << (element % 64)[None]
    chosen = g.op("BitwiseAnd", words, _whole(g, one))
    even = g.op("Cast", g.op("Equal", chosen, _whole(g, 0)), to_i=_FLOAT)
    signs = g.op("Sub", g.op("Mul", even, _number(g, 2.0)), _number(g, 1.0))
    return at, signs


def _starts(g: Any, key: int, of_row: Any | None, number: Any, size: int) -> Any:
    own = g.op("Mul", number, _whole(g, hashes._signed(hashes._BLOCK)))
    own = g.op("Add", own, _whole(g, key))
    x = _mixed(g, own if of_row is None else g.op("Add", of_row, own))
    # The upper 64 of 128 bits, by halves: see `_robe_reference._upper_product`.
    high, low = _right(g, x, 32), _and(g, x, _HALF)
    size_high, size_low = size >> 32, size & _HALF
    cross = g.op(
        "Add", g.op("Mul", high, _whole(g, size_low)),
        _right(g, g.op("Mul", low, _whole(g, size_low)), 32),
    )  # fmt: skip
    other = g.op("Add", g.op("Mul", low, _whole(g, size_high)), _and(g, cross, _HALF))
    above = g.op("Add", g.op("Mul", high, _whole(g, size_high)), _right(g, cross, 32))
    return g.op("Add", above, _right(g, other, 32))


def _mixed(g: Any, x: Any) -> Any:
    for shift, factor in hashes._MIX:
        x = g.op("Mul", _xor(g, x, _right(g, x, shift)), _whole(g, hashes._signed(factor)))
    return _xor(g, x, _right(g, x, 31))


def _right(g: Any, x: Any, shift: int) -> Any:
    """Shifted as an unsigned number; by a division, since the exporter knows none of 64 bits."""
    low = _and(g, x, (1 << shift) - 1)
    above = g.op("Div", g.op("Sub", x, low), _whole(g, 1 << shift))
    return _and(g, above, (1 << (64 - shift)) - 1)


def _and(g: Any, x: Any, mask: int) -> Any:
    return g.op("BitwiseAnd", x, _whole(g, mask))


def _xor(g: Any, x: Any, y: Any) -> Any:
    return g.op("BitwiseXor", x, y)


def _whole(g: Any, value: int | Sequence[int] | torch.Tensor) -> Any:
    return g.op("Constant", value_t=torch.as_tensor(value, dtype=torch.int64))


def _number(g: Any, value: float) -> Any:
    return g.op("Constant", value_t=torch.tensor(value))
