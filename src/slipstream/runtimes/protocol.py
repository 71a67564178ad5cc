"""Arrays over HTTP, as the Open Inference Protocol (KServe V2) with its binary extension has them.

A JSON header describes tensors; their bytes follow, little-endian and C-contiguous. The header's
length is in `LENGTH`. Without it all is JSON, and numbers stand in ``data``.
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
    """A message's body and the length of its header.

    Args:
        kind: ``inputs`` or ``outputs``.
        tensors: (name, array).
        more: what else stands in the header.
    """
    described, parts = [], []
    for name, array in tensors:
        data = np.ascontiguousarray(array).tobytes()
        datatype = _FROM_NUMPY.get(array.dtype.name)
        if datatype is None:
            raise ModelError(f"{name} is {array.dtype.name}, which the protocol does not carry")
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
    """The tensors of a message by name, in its order; arrays over `body` where it is binary.

    Args:
        kind: ``inputs`` or ``outputs``.
        header_length: the value of the header `LENGTH`; None without it.

    Raises:
        ModelError: it is no message of the protocol, with the tensor that is wrong.
    """
    digits = str(len(body)) if header_length is None else header_length
    if not re.fullmatch("[0-9]{1,12}", digits) or int(digits) > len(body):
        raise ModelError(f"{LENGTH} is {digits[:20]!r}, and the message has {len(body)} bytes")
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
    """The error's message; a `KeyError` has only the key that is missing."""
    text = f"{error} is missing" if isinstance(error, KeyError) else str(error)
    return text if len(text) <= _MAX_ERROR else f"{text[:_MAX_ERROR]}..."


def _tensor(described: Mapping[str, Any], body: bytes | bytearray, at: int) -> tuple[Array, int]:
    """One tensor, and how many bytes of `body` from `at` on are its data."""
    datatype, shape = described["datatype"], described["shape"]
    if str(datatype) not in _TO_NUMPY:
        raise ValueError(f"the datatype {datatype!r} is none of {', '.join(_TO_NUMPY)}")
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
    """`data`, flat or nested as `shape` is, if every number is one that `dtype` can hold."""
    values = np.asarray(data, object)
    if values.shape not in (tuple(shape), (math.prod(shape),)):
        raise ValueError(f"data of the shape {list(values.shape)} is not flat, nor {shape}")
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
    """The tensors of a request in the order of a model's inputs, as many samples in each.

    Args:
        specs: the model's inputs; empty where it does not say: any names and shapes will do.

    Raises:
        ModelError: a name, datatype, shape or number of samples is not what the model expects.
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
        had = ", ".join(f"input '{name}' has {count}" for name, count in counts.items())
        raise ModelError(
            f"expected inputs of the same number of samples, at least 1; {had or 'there are none'}"
        )
    return [tensors[name] for name in expected]


def describe(name: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> Any:
    """A model's metadata as JSON can hold it."""

    def listed(specs: Sequence[TensorSpec]) -> list[dict[str, Any]]:
        return [
            {
                "name": one.name,
                "datatype": _FROM_NUMPY.get(one.dtype, one.dtype),
                "shape": [-1 if size is None else size for size in one.shape],
                "parameters": {"scale": one.scale, "zero_point": one.zero_point},
            }
            for one in specs
        ]

    return {
        "name": name,
        "platform": "slipstream",
        "inputs": listed(inputs),
        "outputs": listed(outputs),
    }


def specs(described: Sequence[Mapping[str, Any]]) -> list[TensorSpec]:
    """What `describe` wrote, or another server's metadata.

    Raises:
        ModelError: it is no such metadata.
    """
    try:
        return [
            TensorSpec(
                str(one["name"]),
                _TO_NUMPY[one["datatype"]],
                tuple(None if int(n) < 0 else int(n) for n in one["shape"]),
                float(one.get("parameters", {}).get("scale", 0.0)),
                int(one.get("parameters", {}).get("zero_point", 0)),
            )
            for one in described
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"not a model's metadata: {error!r}") from error
