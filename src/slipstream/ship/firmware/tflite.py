"""Read ``.tflite`` files, checking every offset against the file's length.

The format is a FlatBuffer of TensorFlow Lite's schema (file identifier ``TFL3``), whose field
numbers are used below.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.files import read_bytes
from slipstream.ship.errors import ModelFileError, UnsupportedModelError
from slipstream.ship.firmware.network import Array, Network, Operator, Quantization, Tensor

# Larger tensors exceed any such device; the file is damaged.
_MAX_BYTES = 1 << 30
# Maximum average number of copies of each byte, an allowance for small files, and the cost of a
# table.
_MAX_COPIES, _FREE_BYTES, _TABLE_BYTES = 4, 1 << 16, 32
_DTYPES = {
    0: "float32", 1: "float16", 2: "int32", 3: "uint8", 4: "int64", 6: "bool", 7: "int16",
    9: "int8", 10: "float64", 12: "uint64", 15: "uint32", 16: "uint16",
}  # fmt: skip
ACTIVATIONS = ("none", "relu", "relu_n1_to_1", "relu6", "tanh", "sign_bit")
PADDINGS = ("same", "valid")
DTYPES = {name: code for code, name in _DTYPES.items()}
"""Codes of element types by NumPy's names."""

# Builtin operators by code; those rare on microcontrollers are omitted and keep their number.
_KINDS = dict(
    enumerate(
        """add average_pool_2d concatenation conv_2d depthwise_conv_2d depth_to_space dequantize
        embedding_lookup floor fully_connected hashtable_lookup l2_normalization l2_pool_2d
        local_response_normalization logistic lsh_projection lstm max_pool_2d mul relu
        relu_n1_to_1 relu6 reshape resize_bilinear rnn softmax space_to_depth svdf tanh
        concat_embeddings skip_gram call custom embedding_lookup_sparse pad
        unidirectional_sequence_rnn gather batch_to_space_nd space_to_batch_nd transpose mean sub
        div squeeze unidirectional_sequence_lstm strided_slice bidirectional_sequence_rnn exp
        topk_v2 split log_softmax delegate bidirectional_sequence_lstm cast prelu maximum arg_max
        minimum
        less neg padv2 greater greater_equal less_equal select slice sin transpose_conv
        sparse_to_dense tile expand_dims equal not_equal log sum sqrt rsqrt shape pow arg_min
        fake_quant reduce_prod reduce_max pack logical_or one_hot logical_and logical_not unpack
        reduce_min floor_div reduce_any square zeros_like fill floor_mod range
        resize_nearest_neighbor leaky_relu squared_difference mirror_pad abs split_v unique ceil
        reverse_v2 add_n gather_nd cos where rank elu reverse_sequence matrix_diag quantize
        matrix_set_diag round hard_swish if while""".split()  # noqa: SIM905 - names, not code
    )
)
CODES = {name: code for code, name in _KINDS.items()}
"""Codes of builtin operators by name."""

# (field, name, struct format, default) of the options' tables.
OPTIONS: dict[str, tuple[tuple[int, str, str, int | float], ...]] = {
    "conv_2d": (
        (0, "padding", "b", 0), (1, "stride_w", "i", 0), (2, "stride_h", "i", 0),
        (3, "activation", "b", 0), (4, "dilation_w", "i", 1), (5, "dilation_h", "i", 1),
    ),
    "depthwise_conv_2d": (
        (0, "padding", "b", 0), (1, "stride_w", "i", 0), (2, "stride_h", "i", 0),
        (3, "multiplier", "i", 0), (4, "activation", "b", 0), (5, "dilation_w", "i", 1),
        (6, "dilation_h", "i", 1),
    ),
    "average_pool_2d": (
        (0, "padding", "b", 0), (1, "stride_w", "i", 0), (2, "stride_h", "i", 0),
        (3, "filter_w", "i", 0), (4, "filter_h", "i", 0), (5, "activation", "b", 0),
    ),
    "fully_connected": ((0, "activation", "b", 0), (1, "weights_format", "b", 0)),
    "softmax": ((0, "beta", "f", 0.0),),
    "add": ((0, "activation", "b", 0),),
    "mul": ((0, "activation", "b", 0),),
    "concatenation": ((0, "axis", "i", 0), (1, "activation", "b", 0)),
    "mean": ((0, "keep_dims", "b", 0),),
    "leaky_relu": ((0, "alpha", "f", 0.0),),
    "transpose_conv": (
        (0, "padding", "b", 0), (1, "stride_w", "i", 0), (2, "stride_h", "i", 0),
        (3, "activation", "b", 0),
    ),
    "resize_nearest_neighbor": (
        (0, "align_corners", "b", 0), (1, "half_pixel_centers", "b", 0),
    ),
}  # fmt: skip
OPTIONS["max_pool_2d"] = OPTIONS["average_pool_2d"]


def read_network(path: Path | str) -> Network:
    """Read the network of a file.

    Raises:
        ModelFileError: it cannot be read, is damaged, or is not a model.
        UnsupportedModelError: it has several graphs, shapes that are not fixed, or unknown types.
    """
    path = Path(path)
    return parse_network(read_bytes(path, ModelFileError), path.stem, where=str(path))


def parse_network(data: bytes, name: str = "model", *, where: str | None = None) -> Network:
    """Read a network from the contents of a file; see `read_network`."""
    if data[4:8] != b"TFL3":
        raise ModelFileError(
            "the file is not a .tflite model: bytes 4 to 8 are not TFL3",
            where=where,
            remedy="pass a model for LiteRT or TensorFlow Lite, or for PyTorch model.py:Net",
        )
    try:
        return _network(_Table.root(data), name)
    except _DamagedError as damage:
        raise ModelFileError(
            f"the file is damaged: {damage}", where=where, remedy="export or download it again"
        ) from damage
    except UnsupportedModelError as error:
        error.where = ", ".join(filter(None, (where, error.where)))
        raise


class _DamagedError(Exception):
    """An offset or size beyond the file, or an index out of range."""


@dataclass
class _File:
    """Contents of a file, and how many bytes may still be copied.

    Valid tables share little data; thousands that point at the same bytes would expand a file of
    kilobytes to gigabytes.
    """

    data: bytes
    remaining: int

    def take(self, size: int) -> None:
        self.remaining -= size
        if self.remaining < 0:
            raise _DamagedError("its tables refer to the same bytes repeatedly")


class _Table:
    """A table of a FlatBuffer, whose fields are found through its vtable."""

    def __init__(self, file: _File, position: int) -> None:
        self._file, self._data, self._at = file, file.data, position
        self._offsets = position - self._read("<i", position)
        self._length = self._read("<H", self._offsets)
        if self._length < 4 or self._offsets + self._length > len(self._data):
            raise _DamagedError(f"the table at byte {position} has an invalid vtable")

    @classmethod
    def root(cls, data: bytes) -> _Table:
        """Return the table at the offset in the file's first word."""
        if len(data) < 8:
            raise _DamagedError("the file ends before its first table")
        allowed = _MAX_COPIES * len(data) + _FREE_BYTES
        return cls(_File(data, allowed), struct.unpack_from("<I", data)[0])

    def _read(self, form: str, at: int) -> Any:
        if at < 0 or at + struct.calcsize(form) > len(self._data):
            raise _DamagedError(f"byte {at} is beyond its {len(self._data)} bytes")
        return struct.unpack_from(form, self._data, at)[0]

    def _field(self, number: int) -> int:
        """Return the offset of a field; 0 if it is absent."""
        slot = 4 + 2 * number
        if slot + 2 > self._length:
            return 0
        offset = self._read("<H", self._offsets + slot)
        return self._at + offset if offset else 0

    def scalar(self, number: int, form: str, default: int | float) -> Any:
        at = self._field(number)
        return self._read("<" + form, at) if at else default

    def _vector(self, number: int, size: int) -> tuple[int, int]:
        """Return the offset of a vector's elements and their number."""
        at = self._field(number)
        if not at:
            return 0, 0
        at += self._read("<I", at)
        count = self._read("<I", at)
        if at + 4 + count * size > len(self._data):
            raise _DamagedError(f"{count} elements at byte {at} do not fit")
        self._file.take(count * size)
        return at + 4, count

    def array(self, number: int, dtype: str) -> Array:
        at, count = self._vector(number, np.dtype(dtype).itemsize)
        return np.frombuffer(self._data, np.dtype(dtype).newbyteorder("<"), count, at).astype(dtype)

    def raw(self, number: int) -> bytes:
        at, count = self._vector(number, 1)
        return self._data[at : at + count]

    def text(self, number: int) -> str:
        return self.raw(number).decode("utf-8", "replace")

    def table(self, number: int) -> _Table | None:
        """Return a table; None if it is absent."""
        at = self._field(number)
        return _Table(self._file, at + self._read("<I", at)) if at else None

    def tables(self, number: int) -> Iterator[_Table]:
        at, count = self._vector(number, 4)
        self._file.take(count * _TABLE_BYTES)
        for place in range(at, at + 4 * count, 4):
            yield _Table(self._file, place + self._read("<I", place))


def _network(model: _Table, name: str) -> Network:
    graphs = list(model.tables(2))
    if len(graphs) != 1:
        raise UnsupportedModelError(f"the model has {len(graphs)} graphs instead of one")
    graph = graphs[0]
    codes = list(model.tables(1))
    buffers = list(model.tables(4))
    tensors = tuple(_tensor(table, buffers) for table in graph.tables(0))
    indices = _checked_indices(len(tensors))
    operators = tuple(_operator(table, codes, indices) for table in graph.tables(3))
    network = Network(name, tensors, operators, indices(graph, 1, False), indices(graph, 2, False))
    if not operators or not network.outputs:
        raise _DamagedError("its graph has no operators or no outputs")
    _check_order(network)
    return network


def _checked_indices(count: int) -> Callable[[_Table, int, bool], tuple[int, ...]]:
    def indices(table: _Table, number: int, optional: bool) -> tuple[int, ...]:
        checked = tuple(int(index) for index in table.array(number, "int32"))
        for index in checked:
            if not (0 <= index < count or (optional and index == -1)):
                raise _DamagedError(f"tensor {index} of {count} is referenced")
        return checked

    return indices


def _tensor(table: _Table, buffers: list[_Table]) -> Tensor:
    name = table.text(3)
    shape = tuple(int(size) for size in table.array(0, "int32"))
    signature = table.array(7, "int32")
    # An open batch size runs with the stored one.
    if (signature[1:] < 0).any() or any(size < 1 for size in shape):
        raise UnsupportedModelError(
            "a tensor's shape is not fixed",
            where=f"tensor '{name}' of shape {signature.tolist() or list(shape)}",
            remedy="export the model with fixed shapes and a batch of 1",
        )
    code = table.scalar(1, "b", 0)
    if code not in _DTYPES:
        raise UnsupportedModelError(f"tensors of type {code}", where=f"tensor '{name}'")
    index = table.scalar(2, "I", 0)
    if index >= len(buffers):
        raise _DamagedError(f"buffer {index} of {len(buffers)} is referenced")
    raw = buffers[index].raw(0)
    tensor = Tensor(
        name, shape, _DTYPES[code], _quantization(table.table(4)), None,
        bool(table.scalar(5, "?", False)),
    )  # fmt: skip
    if tensor.nbytes > _MAX_BYTES:
        raise _DamagedError(f"tensor '{name}' would have {tensor.nbytes} bytes")
    if not raw:
        return tensor
    if len(raw) != tensor.nbytes:
        raise _DamagedError(f"tensor '{name}' of {tensor.nbytes} bytes has {len(raw)} of data")
    data = np.frombuffer(raw, np.dtype(tensor.dtype).newbyteorder("<")).reshape(shape)
    return Tensor(name, shape, tensor.dtype, tensor.quantization, data, tensor.variable)


def _quantization(table: _Table | None) -> Quantization | None:
    if table is None:
        return None
    scales, zeros = table.array(2, "float32"), table.array(3, "int64")
    if not len(scales):
        return None
    if len(scales) != len(zeros) and len(zeros):
        raise _DamagedError(f"{len(scales)} scales with {len(zeros)} zero points")
    if not (np.isfinite(scales) & (scales >= 0)).all():
        raise _DamagedError("a scale is negative or not a number")
    zeros = zeros if len(zeros) else np.zeros(len(scales), np.int64)
    return Quantization(scales, zeros, table.scalar(6, "i", 0))


def _operator(
    table: _Table, codes: list[_Table], indices: Callable[[_Table, int, bool], tuple[int, ...]]
) -> Operator:
    index = table.scalar(0, "I", 0)
    if index >= len(codes):
        raise _DamagedError(f"operator code {index} of {len(codes)} is referenced")
    code = max(codes[index].scalar(0, "b", 0), codes[index].scalar(3, "i", 0))
    kind = _KINDS.get(code, f"operator_{code}")
    if kind == "custom":
        kind = f"custom_{codes[index].text(1)}"
    stored = table.table(4)
    options: dict[str, Any] = {}
    for number, name, form, default in OPTIONS.get(kind, ()):
        value = default if stored is None else stored.scalar(number, form, default)
        options[name] = value
    for name, names in (("activation", ACTIVATIONS), ("padding", PADDINGS)):
        if name in options:
            if not 0 <= options[name] < len(names):
                raise _DamagedError(f"{kind.upper()} has {name} {options[name]}")
            options[name] = names[options[name]]
    return Operator(kind, indices(table, 1, True), indices(table, 2, False), options)


def _check_order(network: Network) -> None:
    """Check that every tensor is computed once, before it is read."""
    written = set(network.inputs) | {
        index for index, t in enumerate(network.tensors) if t.data is not None or t.variable
    }
    for number, operator in enumerate(network.operators):
        for index in operator.inputs:
            if index >= 0 and index not in written:
                raise _DamagedError(f"{network.where(number)} reads a tensor that nothing wrote")
        for index in operator.outputs:
            if index in written:
                raise _DamagedError(f"{network.where(number)} writes a tensor again")
            written.add(index)
    if not set(network.outputs) <= written:
        raise _DamagedError("an output is never computed")
