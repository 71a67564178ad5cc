"""Models with compressed tables as ONNX: tables stay as small as they are.

Hashed blocks are found in the runtime by the same integer arithmetic (`robe_reference`), tensor
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
from slipstream.surgery import place
from slipstream.techniques.embedding.kernels import robe_reference as hashes
from slipstream.techniques.embedding.modules import Exportable

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
    exported = _exportable(copy.deepcopy(model).eval())
    every = [*names, *output_names]
    target = Path(path)
    try:
        with replacing(target) as part, _OurOperator(), torch.no_grad(), warnings.catch_warnings():
            # Of tracing, and that this exporter is the older one.
            warnings.simplefilter("ignore")
            torch.onnx.export(
                exported, arguments, str(part), dynamo=False, opset_version=OPSET,
                input_names=names, output_names=list(output_names),
                dynamic_axes={name: {0: "batch"} for name in every},
            )  # fmt: skip
    except OSError as error:
        raise SlipstreamError(f"cannot be written: {error.strerror}", where=str(target)) from error
    return target


def _exportable(model: nn.Module) -> nn.Module:
    """`model` with modules in the place of those that have no operators in ONNX.

    Raises:
        InvalidArgumentError: a table has the mode max, or there is no form for its dtype.
    """
    exchanged: list[str] = []
    for name, module in list(model.named_modules()):
        if not isinstance(module, Exportable) or any(name.startswith(f"{n}.") for n in exchanged):
            continue
        if module.mode == "max":
            raise InvalidArgumentError("model", f"'{name}' has the mode max, which is not exported")
        new = module.for_export()
        if new is module:
            continue
        new = _exportable(new)
        if not name:
            return new
        exchanged.append(name)
        place(model, name, new)
    return model


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
    whole_ids = g.op("Cast", ids, to_i=_INT)
    numbers = array.type().sizes()[0]
    at, signs = _hashed(g, whole_ids, key, dim, helper._get_const(block, "i", "block"), numbers)
    rows = g.op("Gather", array, at, axis_i=0)
    return g.op("Mul", rows, signs) if helper._get_const(sign, "i", "sign") else rows


def _hashed(g: Any, ids: Any, key: int, dim: int, block: int, size: int) -> tuple[Any, Any]:
    """Where the numbers of rows lie, and their signs, [count, dim] both; see `robe_reference`."""
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
    of_block = g.op("Mul", number, _whole(g, hashes._signed(hashes._BLOCK)))
    of_block = g.op("Add", of_block, _whole(g, key))
    x = _mixed(g, of_block if of_row is None else g.op("Add", of_row, of_block))
    # The upper 64 of 128 bits, by halves: see `robe_reference._upper_product`.
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
