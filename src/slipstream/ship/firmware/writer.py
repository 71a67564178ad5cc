"""Write ``.tflite`` files: a FlatBuffer of TensorFlow Lite's schema, with constants at 16 bytes.

Fields are numbered as in the schema; operators have the options that the reader supports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from slipstream.errors import MissingExtraError
from slipstream.ship.errors import UnsupportedModelError
from slipstream.ship.firmware.network import Network, Operator, Tensor
from slipstream.ship.firmware.tflite import ACTIVATIONS, CODES, DTYPES, OPTIONS, PADDINGS

_ALIGN = 16
# Index of each kind's table in the union of options, and the version of its int8 kernel.
_UNION = {
    "conv_2d": 1, "depthwise_conv_2d": 2, "average_pool_2d": 5, "max_pool_2d": 5,
    "fully_connected": 8, "softmax": 9, "concatenation": 10, "add": 11, "reshape": 17, "mul": 21,
    "pad": 22, "mean": 27, "leaky_relu": 75, "transpose_conv": 49,
    "resize_nearest_neighbor": 74,
}  # fmt: skip
_VERSIONS = {
    "conv_2d": 3, "depthwise_conv_2d": 3, "average_pool_2d": 2, "max_pool_2d": 2,
    "fully_connected": 4, "softmax": 2, "add": 2, "reshape": 1, "pad": 2, "quantize": 1,
    "dequantize": 2, "mul": 2, "concatenation": 2, "mean": 2, "logistic": 2, "hard_swish": 1,
    "leaky_relu": 2, "expand_dims": 1, "squeeze": 1, "transpose_conv": 3,
    "resize_nearest_neighbor": 2,
}  # fmt: skip


def write_network(network: Network, metadata: Mapping[str, bytes] | None = None) -> bytes:
    """Return the contents of a file for LiteRT, tflite-micro and `parse_network`.

    Args:
        metadata: entries by name; their buffers are the last ones.

    Raises:
        MissingExtraError: `flatbuffers` is not installed.
        UnsupportedModelError: the writer does not support an operator.
    """
    unknown = sorted({operator.kind for operator in network.operators} - set(_VERSIONS))
    if unknown:
        raise UnsupportedModelError(f"cannot write the operators {', '.join(unknown)}")
    try:
        import flatbuffers
    except ImportError as error:
        raise MissingExtraError("writing .tflite", "flatbuffers", "edge") from error
    return _Writer(flatbuffers.Builder(1 << 16), network).write(metadata or {})


class _Writer:
    """Writer of a FlatBuffer, leaves first: a table can only refer to those written before it."""

    def __init__(self, builder: Any, network: Network) -> None:
        self._to, self._network = builder, network

    def write(self, metadata: Mapping[str, bytes]) -> bytes:
        to, network = self._to, self._network
        kinds = sorted({item.kind for item in network.operators})
        constants = [item for item in network.tensors if item.data is not None]
        # Buffer 0 is that of everything without data.
        numbers = {id(item): number for number, item in enumerate(constants, 1)}
        datas = [np.ascontiguousarray(item.data).tobytes() for item in constants]
        buffers = [self._table(lambda: None, 3), *map(self._buffer, [*datas, *metadata.values()])]
        tensors = [self._tensor(item, numbers.get(id(item), 0)) for item in network.tensors]
        operators = [self._operator(item, kinds.index(item.kind)) for item in network.operators]
        graph = self._graph(tensors, operators)
        codes = [self._code(kind) for kind in kinds]
        signature = self._signature()
        entries = [
            self._entry(name, 1 + len(constants) + number) for number, name in enumerate(metadata)
        ]
        tables = (codes, [graph], buffers, entries, [signature])
        vectors = [self._offsets(table) for table in tables]
        description = to.CreateString(network.name)

        def fields() -> None:
            to.PrependUint32Slot(0, 3, 0)
            for number, vector in zip((1, 2, 4, 6, 7), vectors, strict=True):
                to.PrependUOffsetTRelativeSlot(number, vector, 0)
            to.PrependUOffsetTRelativeSlot(3, description, 0)

        to.Finish(self._table(fields, 8), b"TFL3")
        return bytes(to.Output())

    def _table(self, fields: Callable[[], object], count: int) -> int:
        self._to.StartObject(count)
        fields()
        return int(self._to.EndObject())

    def _offsets(self, tables: Sequence[int]) -> int:
        self._to.StartVector(4, len(tables), 4)
        for offset in reversed(tables):
            self._to.PrependUOffsetTRelative(offset)
        return int(self._to.EndVector())

    def _numbers(self, values: Any, dtype: str) -> int:
        return int(self._to.CreateNumpyVector(np.asarray(values, np.dtype(dtype))))

    def _entry(self, name: str, buffer: int) -> int:
        to, text = self._to, self._to.CreateString(name)

        def fields() -> None:
            to.PrependUOffsetTRelativeSlot(0, text, 0)
            to.PrependUint32Slot(1, buffer, 0)

        return self._table(fields, 2)

    def _buffer(self, data: bytes) -> int:
        to = self._to
        to.StartVector(1, len(data), _ALIGN)
        to.head = to.head - len(data)
        to.Bytes[to.head : to.head + len(data)] = data
        vector = to.EndVector()
        return self._table(lambda: to.PrependUOffsetTRelativeSlot(0, vector, 0), 3)

    def _tensor(self, tensor: Tensor, buffer: int) -> int:
        to = self._to
        shape = self._numbers(tensor.shape, "int32")
        name = to.CreateString(tensor.name)
        quantization = tensor.quantization
        grid = 0
        if quantization is not None:
            scales = self._numbers(quantization.scales, "float32")
            zeros = self._numbers(quantization.zero_points, "int64")

            def quantized() -> None:
                to.PrependUOffsetTRelativeSlot(2, scales, 0)
                to.PrependUOffsetTRelativeSlot(3, zeros, 0)
                to.PrependInt32Slot(6, quantization.axis, 0)

            grid = self._table(quantized, 7)

        def fields() -> None:
            to.PrependUOffsetTRelativeSlot(0, shape, 0)
            to.PrependInt8Slot(1, DTYPES[tensor.dtype], 0)
            to.PrependUint32Slot(2, buffer, 0)
            to.PrependUOffsetTRelativeSlot(3, name, 0)
            if grid:
                to.PrependUOffsetTRelativeSlot(4, grid, 0)

        return self._table(fields, 10)

    def _operator(self, operator: Operator, code: int) -> int:
        to, kind = self._to, operator.kind
        inputs = self._numbers(operator.inputs, "int32")
        outputs = self._numbers(operator.outputs, "int32")

        def options_fields() -> None:
            for number, name, form, default in OPTIONS.get(kind, ()):
                value = operator.options.get(name, default)
                if name == "activation":
                    value = ACTIVATIONS.index(value) if isinstance(value, str) else value
                elif name == "padding":
                    value = PADDINGS.index(value) if isinstance(value, str) else value
                put = {
                    "b": to.PrependInt8Slot,
                    "i": to.PrependInt32Slot,
                    "f": to.PrependFloat32Slot,
                }
                put[form](number, value, default)

        options = self._table(options_fields, 8)

        def fields() -> None:
            to.PrependUint32Slot(0, code, 0)
            to.PrependUOffsetTRelativeSlot(1, inputs, 0)
            to.PrependUOffsetTRelativeSlot(2, outputs, 0)
            if kind in _UNION:
                to.PrependUint8Slot(3, _UNION[kind], 0)
                to.PrependUOffsetTRelativeSlot(4, options, 0)

        return self._table(fields, 9)

    def _code(self, kind: str) -> int:
        to = self._to

        def fields() -> None:
            to.PrependInt8Slot(0, CODES[kind], 0)
            to.PrependInt32Slot(2, _VERSIONS[kind], 1)
            to.PrependInt32Slot(3, CODES[kind], 0)

        return self._table(fields, 4)

    def _graph(self, tensors: Sequence[int], operators: Sequence[int]) -> int:
        to, network = self._to, self._network
        vectors = [
            self._offsets(tensors), self._numbers(network.inputs, "int32"),
            self._numbers(network.outputs, "int32"), self._offsets(operators),
            to.CreateString("main"),
        ]  # fmt: skip

        def fields() -> None:
            for number, vector in enumerate(vectors):
                to.PrependUOffsetTRelativeSlot(number, vector, 0)

        return self._table(fields, 5)

    def _signature(self) -> int:
        to, network = self._to, self._network

        def maps(indices: Sequence[int]) -> int:
            tables = []
            for index in indices:
                name = to.CreateString(network.tensors[index].name)

                def fields(name: int = name, index: int = index) -> None:
                    to.PrependUOffsetTRelativeSlot(0, name, 0)
                    to.PrependUint32Slot(1, index, 0)

                tables.append(self._table(fields, 2))
            return self._offsets(tables)

        vectors = [maps(network.inputs), maps(network.outputs), to.CreateString("serving_default")]

        def fields() -> None:
            for number, vector in enumerate(vectors):
                to.PrependUOffsetTRelativeSlot(number, vector, 0)

        return self._table(fields, 5)
