"""Messages of the Open Inference Protocol (KServe V2) with its binary extension.

A JSON header describes tensors; their bytes follow, little-endian and C-contiguous. The HTTP header
`LENGTH` has the JSON header's length. Without it the message is JSON, with numbers in ``data``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from slipstream.runtimes.fitting import agree
from slipstream.runtimes.runtime import Array, ModelError, TensorSpec

LENGTH = "inference-header-content-length"
_TO_NUMPY = {
    "BOOL": "bool", "UINT8": "uint8", "UINT16": "uint16", "UINT32": "uint32", "UINT64": "uint64",
    "INT8": "int8", "INT16": "int16", "INT32": "int32", "INT64": "int64", "FP16": "float16",
    "FP32": "float32", "FP64": "float64",
}  # fmt: skip
_MAX_ERROR, _MAX_DIMENSIONS = 200, 32
_MALFORMED = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
_FROM_NUMPY = {ours: theirs for theirs, ours in _TO_NUMPY.items()}


def encode(kind: str, tensors: Sequence[tuple[str, Array]], **more: Any) -> tuple[bytes, int]:
    """Return a message's body and the length of its header.

    Args:
        kind: ``inputs`` or ``outputs``.
        tensors: pairs (name, array).
        more: further entries of the header.
    """
    described, parts = [], []
    for name, array in tensors:
        data = np.ascontiguousarray(array).tobytes()
        datatype = _FROM_NUMPY.get(array.dtype.name)
        if datatype is None:
            raise ModelError(f"{name} is {array.dtype.name}, which the protocol does not support")
        described.append(
            {
                "name": name,
                "shape": list(array.shape),
                "datatype": datatype,
                "parameters": {"binary_data_size": len(data)},
            }
        )
        parts.append(data)
    header = json.dumps({**more, kind: described}).encode()
    return b"".join([header, *parts]), len(header)


def decode(kind: str, body: bytes | bytearray, header_length: str | None) -> dict[str, Array]:
    """Decode a message to tensors by name; binary tensors are views of `body`.

    Args:
        kind: ``inputs`` or ``outputs``.
        header_length: the value of the header `LENGTH`; None without it.

    Raises:
        ModelError: the message is malformed; names the tensor.
    """
    digits = str(len(body)) if header_length is None else header_length
    if not re.fullmatch("[0-9]{1,12}", digits) or int(digits) > len(body):
        raise ModelError(f"{LENGTH} is {digits[:20]!r}, but the message has {len(body)} bytes")
    end = int(digits)
    try:
        described = json.loads(body[:end])[kind]
        names = [str(tensor["name"]) for tensor in described]
    except _MALFORMED as error:
        raise ModelError(
            f"expected a JSON object with a list of named {kind}: {_short(error)}"
        ) from error
    tensors: dict[str, Array] = {}
    for name, tensor in zip(names, described, strict=True):
        if name in tensors:
            raise ModelError(f"'{name}' appears twice in {kind}")
        try:
            tensors[name], size = _tensor(tensor, body, end)
        except _MALFORMED as error:
            raise ModelError(f"{kind[:-1]} '{name}': {_short(error)}") from error
        end += size
    if end != len(body):
        raise ModelError(f"{len(body) - end} bytes follow the last of {kind}")
    return tensors


def _short(error: Exception) -> str:
    """Return the error's message, shortened; a `KeyError` has only the key."""
    text = f"{error} is missing" if isinstance(error, KeyError) else str(error)
    return text if len(text) <= _MAX_ERROR else f"{text[:_MAX_ERROR]}..."


def _tensor(described: Mapping[str, Any], body: bytes | bytearray, at: int) -> tuple[Array, int]:
    """Decode one tensor from `at` in `body`; return it with its number of bytes."""
    datatype, shape = described["datatype"], described["shape"]
    if str(datatype) not in _TO_NUMPY:
        raise ValueError(f"the datatype {datatype!r} is not one of {', '.join(_TO_NUMPY)}")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"the shape {shape!r} is not a list of integers of 0 or more")
    if len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"the shape has {len(shape)} dimensions, more than {_MAX_DIMENSIONS}")
    dtype, count = np.dtype(_TO_NUMPY[datatype]), math.prod(shape)
    size = described.get("parameters", {}).get("binary_data_size")
    if size is None:
        return _from_json(described["data"], dtype, shape), 0
    if type(size) is not int or size != count * dtype.itemsize:
        raise ValueError(f"binary_data_size is {size!r} for {datatype} {shape}")
    array = np.frombuffer(body, dtype, count, at).reshape(shape)
    if dtype.kind == "b" and (array.view(np.uint8) > 1).any():
        raise ValueError("a BOOL is a byte of 0 or 1")
    return array, size


def _from_json(data: Any, dtype: np.dtype[Any], shape: list[int]) -> Array:
    """Convert `data`, flat or nested like `shape`, if `dtype` can hold every number."""
    values = np.asarray(data, object)
    if values.shape not in (tuple(shape), (math.prod(shape),)):
        raise ValueError(f"data of the shape {list(values.shape)} is neither flat nor {shape}")
    flat = values.reshape(-1).tolist()
    kinds: dict[str, set[type]] = {"b": {bool}, "f": {int, float}}
    if not set(map(type, flat)) <= kinds.get(dtype.kind, {int}):
        raise ValueError(f"a value in data is not a {'bool' if dtype.kind == 'b' else dtype.name}")
    if dtype.kind in "iu" and flat:
        limits = np.iinfo(dtype)
        fits = limits.min <= min(flat) and max(flat) <= limits.max
    else:
        try:
            with np.errstate(over="ignore"):
                fits = bool(np.isfinite(np.array(flat, np.float64).astype(dtype)).all())
        except OverflowError:  # an integer that no float64 can hold
            fits = False
    if not fits:
        raise ValueError(f"a number in data is NaN, infinite or beyond {dtype.name}")
    return np.array(flat, dtype).reshape(shape)


def match(tensors: Mapping[str, Array], specs: Sequence[TensorSpec]) -> list[Array]:
    """Return a request's tensors in the order of a model's inputs.

    Args:
        specs: the model's inputs; empty if unknown: then any names and shapes are valid.

    Raises:
        ModelError: a name, datatype, shape or number of samples differs from the model's.
    """
    expected: dict[str, TensorSpec | None] = dict.fromkeys(() if specs else tensors)
    expected |= {spec.name: replace(spec, shape=(None, *spec.shape[1:])) for spec in specs}
    listed = ", ".join(map(str, expected.values()))
    for name in (*expected, *tensors):
        if name not in tensors:
            raise ModelError(f"input '{name}' is missing; the model expects {listed}")
        if name not in expected:
            raise ModelError(f"the model has no input '{name}'; it expects {listed}")
    for name, spec in expected.items():
        array = tensors[name]
        if spec and (array.dtype.name != spec.dtype or not agree(array.shape, spec.shape)):
            raise ModelError(
                f"input '{name}' is {array.dtype.name}{list(array.shape)}; the model expects {spec}"
            )
    counts = {name: len(tensors[name]) if tensors[name].ndim else 0 for name in expected}
    if len(set(counts.values())) != 1 or 0 in counts.values():
        found = ", ".join(f"input '{name}' has {count}" for name, count in counts.items())
        raise ModelError(
            f"inputs must have the same number of samples, at least 1; {found or 'there are none'}"
        )
    return [tensors[name] for name in expected]


def describe(name: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> Any:
    """Return a model's metadata as JSON."""

    def listed(specs: Sequence[TensorSpec]) -> list[dict[str, Any]]:
        return [
            {
                "name": spec.name,
                "datatype": _FROM_NUMPY.get(spec.dtype, spec.dtype),
                "shape": [-1 if size is None else size for size in spec.shape],
                "parameters": {"scale": spec.scale, "zero_point": spec.zero_point},
            }
            for spec in specs
        ]

    return {
        "name": name,
        "platform": "slipstream",
        "inputs": listed(inputs),
        "outputs": listed(outputs),
    }


def specs(described: Sequence[Mapping[str, Any]]) -> list[TensorSpec]:
    """Parse the metadata of `describe` or of another server.

    Raises:
        ModelError: the metadata is malformed.
    """
    try:
        return [
            TensorSpec(
                str(tensor["name"]),
                _TO_NUMPY[tensor["datatype"]],
                tuple(None if int(n) < 0 else int(n) for n in tensor["shape"]),
                float(tensor.get("parameters", {}).get("scale", 0.0)),
                int(tensor.get("parameters", {}).get("zero_point", 0)),
            )
            for tensor in described
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"not a model's metadata: {error!r}") from error
