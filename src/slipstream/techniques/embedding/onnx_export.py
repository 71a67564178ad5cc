"""ONNX export of models with compressed tables, which stay compressed.

The runtime locates hashed blocks by the same integer arithmetic (`robe_reference`), multiplies
tensor trains and scales codes. The row of each hashed id is stored, in four bytes. Tensor trains
with cached rows become the dense table.

PyTorch's TorchScript exporter writes the model; this module registers the integer operators that
the exporter lacks.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slipstream.errors import InvalidArgumentError
from slipstream.surgery import place
from slipstream.techniques._onnx import OPSET, write
from slipstream.techniques.embedding.modules import Exportable

_XOR, _RIGHT = "aten::__xor_", "aten::__rshift_"


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
        model: the model, which is not modified. It is exported in evaluation mode.
        example: its argument, or a tuple of its arguments, such as int64 ids. Bags must be rows of
            a two-dimensional input, of equal size in the exported model.
        input_names, output_names: names in the file; ``input_0`` and so on by default.

    Returns:
        `path`.

    Raises:
        InvalidArgumentError: the model has bags with offsets, mode max or float64 tables, which
            cannot be exported.
        MissingExtraError: the package onnx is not installed.
        SlipstreamError: the file cannot be written.
    """
    arguments = example if isinstance(example, tuple) else (example,)
    names = list(input_names or [f"input_{place}" for place in range(len(arguments))])
    if len(names) != len(arguments):
        raise InvalidArgumentError(
            "input_names", f"has {len(names)} names for {len(arguments)} arguments"
        )
    exported = _exportable(copy.deepcopy(model).eval())
    with _IntegerOperators():
        return write(exported, arguments, path, names, output_names)


def _exportable(model: nn.Module) -> nn.Module:
    """Return `model` with exportable modules instead of those without ONNX operators.

    Raises:
        InvalidArgumentError: a table has mode max, or a dtype that cannot be exported.
    """
    exchanged: list[str] = []
    for name, module in list(model.named_modules()):
        if not isinstance(module, Exportable) or any(name.startswith(f"{n}.") for n in exchanged):
            continue
        if module.mode == "max":
            raise InvalidArgumentError("model", f"'{name}' has mode max, which cannot be exported")
        new = module.for_export()
        if new is module:
            continue
        new = _exportable(new)
        if not name:
            return new
        exchanged.append(name)
        place(model, name, new)
    return model


class _IntegerOperators:
    """Context in which the exporter supports the operators that locate hashed blocks."""

    def __enter__(self) -> None:
        exporter: Any = torch.onnx
        exporter.register_custom_op_symbolic(_XOR, _bitwise_xor, OPSET)
        exporter.register_custom_op_symbolic(_RIGHT, _right_shift, OPSET)

    def __exit__(self, *error: object) -> None:
        exporter: Any = torch.onnx
        exporter.unregister_custom_op_symbolic(_XOR, OPSET)
        exporter.unregister_custom_op_symbolic(_RIGHT, OPSET)


def _bitwise_xor(g: Any, x: Any, y: Any) -> Any:
    return g.op("BitwiseXor", x, y)


def _right_shift(g: Any, x: Any, shift: Any) -> Any:
    """Return ``x >> shift`` of 64 bits as a division, exact after the low bits are cleared."""
    bits = shift.node().t("value").item()
    low_bits, unit = (
        g.op("Constant", value_t=torch.tensor(value)) for value in ((1 << bits) - 1, 1 << bits)
    )
    return g.op("Div", g.op("Sub", x, g.op("BitwiseAnd", x, low_bits)), unit)
