"""Export of low-bit linear layers to ONNX.

ONNX Runtime supports weights of two, four and eight bits (``com.microsoft.MatMulNBits``, scales per
block), but not one, three, five, six and seven bits, nor low-bit convolutions. ``QuantizeLinear``
and ``Clip`` quantise inputs to the layer's codes, so that results are equal up to the order of
float32 sums.

Source: ONNX Runtime, ``docs/ContribOperators.md``.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from slipstream.errors import InvalidArgumentError, MissingExtraError
from slipstream.files import replacing
from slipstream.techniques.lowbit.dense_rows import bit_rows
from slipstream.techniques.lowbit.layer import LowBitLayer
from slipstream.techniques.lowbit.nn import LowBitLinear

_BITS = (2, 4, 8)
_OPSET = 21
_IR_VERSION = 10
# Block size for layers with a scale per channel, which is repeated for each block.
_BLOCK = 128


def to_onnx(model: Any, path: str | Path, *, opset: int = _OPSET) -> Path:
    """Write `model` as an ONNX file: float32 [..., in] named ``input`` to float32 ``output``.

    Args:
        model: a `LowBitLinear`, or an ``nn.Sequential`` of such, ``nn.Linear``, ``nn.ReLU``,
            ``nn.Identity`` and ``nn.Dropout`` (which does nothing here).

    Returns:
        `path`.

    Raises:
        InvalidArgumentError: a module, its bits or block size cannot be exported; the message
            names the module.
        MissingExtraError: the package onnx is not installed.
    """
    try:
        import onnx
    except ImportError as error:
        raise MissingExtraError("export to ONNX", "onnx", "onnx") from error
    layers = list(model.named_modules()) if isinstance(model, nn.Sequential) else [("", model)]
    writer = _Writer(onnx)
    sizes: list[int] = []
    for name, module in layers:
        if not isinstance(module, nn.Sequential):
            writer.add(name, module)
            sizes += [
                size for key in ("in_features", "out_features")
                if (size := getattr(module, key, None)) is not None
            ]  # fmt: skip
    if not sizes:
        raise InvalidArgumentError("model", "has no linear layer")
    proto = writer.model(sizes[0], sizes[-1], opset)
    target = Path(path)
    with replacing(target) as part:
        part.write_bytes(proto.SerializeToString())
    return target


class _Writer:
    """Nodes and constants of a graph, in which each node reads the preceding one's output."""

    def __init__(self, onnx: Any) -> None:
        self._onnx = onnx
        self._nodes: list[Any] = []
        self._constants: list[Any] = []
        self._last = "input"

    def add(self, name: str, module: Any) -> None:
        place = f"the module '{name}'" if name else "the model"
        if isinstance(module, LowBitLinear):
            self._lowbit(place, module)
        elif isinstance(module, LowBitLayer):
            raise InvalidArgumentError(
                "model", f"{place} is a low-bit convolution, which ONNX does not support"
            )
        elif type(module) is nn.Linear:
            self._node("MatMul", self._constant(module.weight.detach().T.contiguous().numpy()))
            self._bias(module.bias)
        elif isinstance(module, nn.ReLU):
            self._node("Relu")
        elif not isinstance(module, (nn.Identity, nn.Dropout)):
            raise InvalidArgumentError(
                "model", f"{place} is a {type(module).__name__}, which is not exported",
                remedy="export the part of the model with linear layers",
            )  # fmt: skip

    def model(self, inputs: int, outputs: int, opset: int) -> Any:
        helper, proto = self._onnx.helper, self._onnx.TensorProto
        self._nodes.append(helper.make_node("Identity", [self._last], ["output"]))
        graph = helper.make_graph(
            self._nodes,
            "slipstream_lowbit",
            [helper.make_tensor_value_info("input", proto.FLOAT, ["rows", inputs])],
            [helper.make_tensor_value_info("output", proto.FLOAT, ["rows", outputs])],
            self._constants,
        )
        opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(
            graph, opset_imports=opsets, producer_name="slipstream", ir_version=_IR_VERSION
        )

    def _lowbit(self, place: str, layer: Any) -> None:
        if layer.wbits not in _BITS:
            raise InvalidArgumentError(
                "model",
                f"{place} has {layer.wbits}-bit weights; ONNX supports only 2, 4 and 8 bits",
                remedy="convert the model with one of these",
            )
        if layer.output_codes is not None:
            raise InvalidArgumentError(
                "model", f"{place} passes codes to another layer",
                remedy="call convert without run=, so that layers exchange floats",
            )  # fmt: skip
        block = layer.granularity.block or _BLOCK
        if block & (block - 1):
            raise InvalidArgumentError(
                "model", f"{place} has blocks of {block}; ONNX requires a power of two",
                remedy="convert the model with scales block32, block64 or block128",
            )  # fmt: skip
        self._round(layer.input_codes)
        packed, scales = _blocks(layer, block)
        self._node(
            "MatMulNBits", self._constant(packed), self._constant(scales.astype(np.float32)),
            domain="com.microsoft", K=layer.in_features, N=layer.out_features, bits=layer.wbits,
            block_size=block,
        )  # fmt: skip
        self._bias(layer.bias)
        if layer.relu:
            self._node("Relu")
        if layer.ceiling < math.inf:
            self._node("Clip", "", self._constant(np.float32(layer.ceiling)))

    def _round(self, codes: Any) -> None:
        scale = self._constant(np.float32(codes.scale))
        zero = self._constant(np.uint8(codes.zero))
        self._node("QuantizeLinear", scale, zero)
        if codes.bits < 8:
            self._node("Clip", "", self._constant(np.uint8(codes.top)))
        self._node("DequantizeLinear", scale, zero)

    def _bias(self, bias: Any) -> None:
        if bias is not None:
            self._node("Add", self._constant(bias.detach().numpy()))

    def _node(self, kind: str, *inputs: str, **attributes: Any) -> None:
        output = f"{kind}_{len(self._nodes)}"
        node = self._onnx.helper.make_node(kind, [self._last, *inputs], [output], **attributes)
        self._nodes.append(node)
        self._last = output

    def _constant(self, array: Any) -> str:
        name = f"constant_{len(self._constants)}"
        self._constants.append(self._onnx.numpy_helper.from_array(np.asarray(array), name))
        return name


def _blocks(layer: Any, block: int) -> tuple[Any, Any]:
    """Return uint8 weights [n, blocks, block * bits / 8], low bits first, and scales [n, blocks].

    Codes are offset by half their range, the operator's implicit zero point.
    """
    codes = layer.codes().to(torch.int16) + (1 << (layer.wbits - 1))
    n, k = codes.shape
    count = -(-k // block)
    padded = torch.full((n, count * block), 1 << (layer.wbits - 1), dtype=torch.uint8)
    padded[:, :k] = codes.to(torch.uint8)
    packed = bit_rows(padded.reshape(n * count, block), layer.wbits)
    # The weights' part of the products' scale.
    scales = layer.scale / layer.input_codes.scale
    if scales.dim() == 1:
        scales = scales[:, None].expand(n, count)
    return packed.reshape(n, count, -1).numpy(), scales.contiguous().numpy()
