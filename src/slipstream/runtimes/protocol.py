"""Arrays over HTTP, as the Open Inference Protocol (KServe V2) with its binary extension has them.

A JSON header describes tensors; their bytes follow, little-endian and C-contiguous. The header's
length is in `LENGTH`. Without it all is JSON, and numbers stand in ``data``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slipstream.runtimes.runtime import Array, ModelError, TensorSpec

LENGTH = "inference-header-content-length"
_TO_NUMPY = {
    "BOOL": "bool", "UINT8": "uint8", "UINT16": "uint16", "UINT32": "uint32", "UINT64": "uint64",
    "INT8": "int8", "INT16": "int16", "INT32": "int32", "INT64": "int64", "FP16": "float16",
    "FP32": "float32", "FP64": "float64",
}  # fmt: skip
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


def decode(kind: str, body: bytes, header_length: int | None) -> list[Array]:
    """The tensors of a message, in its order; arrays over `body`, not copied where it is binary.

    Raises:
        ModelError: it is no message of the protocol.
    """
    try:
        end = len(body) if header_length is None else header_length
        tensors = json.loads(body[:end])[kind]
        arrays = []
        for one in tensors:
            dtype, shape = np.dtype(_TO_NUMPY[one["datatype"]]), [int(n) for n in one["shape"]]
            size = one.get("parameters", {}).get("binary_data_size")
            if size is None:
                arrays.append(np.asarray(one["data"], dtype).reshape(shape))
                continue
            if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != size:
                raise ValueError(f"{size} bytes for {shape}")
            arrays.append(np.frombuffer(body, dtype, math.prod(shape), end).reshape(shape))
            end += size
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"not a message of the Open Inference Protocol: {error}") from error
    return arrays


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
