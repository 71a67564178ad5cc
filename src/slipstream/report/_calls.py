"""A call in one line: what goes in and what comes out."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.graph import Call, TensorSpec

_SHORT = {
    "float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16", "int64": "i64",
    "int32": "i32", "int16": "i16", "int8": "i8", "uint8": "u8",
}  # fmt: skip
# A list of tensors (a fused optimizer's) can have hundreds.
_SHOWN = 4


def describe_call(call: Call) -> str:
    """``f32[768], f32[2048,256], f32[256,768] → f32[2048,768]``."""
    made = _listed(call.outputs)
    return f"{_listed(call.inputs)} → {made}" if made else _listed(call.inputs)


def _listed(specs: Sequence[TensorSpec]) -> str:
    texts = [_spec(spec) for spec in specs[:_SHOWN]]
    more = len(specs) - len(texts)
    return ", ".join(texts) + (f" and {more} more" if more else "")


def _spec(spec: TensorSpec) -> str:
    shape = ",".join(map(str, spec.shape))
    return f"{_SHORT.get(spec.dtype, spec.dtype)}[{shape}]"
