"""Models with compressed tables as ONNX: tables stay as small as they are.

Hashed blocks are found in the runtime by the same integer arithmetic (`robe_reference`), tensor
trains are multiplied there, codes are scaled there. Which row a hashed id shares is written down,
four bytes each. Tensor trains with cached rows become the dense table.

PyTorch's TorchScript exporter writes the model; operators on integers that it lacks are told to it
here.
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
    arguments = example if isinstance(example, tuple) else (example,)
    names = list(input_names or [f"input_{place}" for place in range(len(arguments))])
    if len(names) != len(arguments):
        raise InvalidArgumentError(
            "input_names", f"there are {len(names)} for {len(arguments)} arguments"
        )
    exported = _exportable(copy.deepcopy(model).eval())
    with _IntegerOperators():
        return write(exported, arguments, path, names, output_names)


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


class _IntegerOperators:
    """While it lasts, the exporter knows the operators that find hashed blocks."""

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
    """``x >> shift`` of 64 bits; by a division, which is exact without the bits that go."""
    bits = shift.node().t("value").item()
    below, unit = (
        g.op("Constant", value_t=torch.tensor(value)) for value in ((1 << bits) - 1, 1 << bits)
    )
    return g.op("Div", g.op("Sub", x, g.op("BitwiseAnd", x, below)), unit)
