"""Arithmetic and memory traffic of an operator call, from its shapes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from slipstream.graph import Call, TensorSpec
from slipstream.graph.traffic import traffic

# Names in torch's table of operators with the same arithmetic.
_KNOWN_AS = {
    "_scaled_dot_product_flash_attention_for_cpu": "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        "_scaled_dot_product_flash_attention_backward"
    ),
    "mkldnn_convolution": "_convolution_of_library",
}
# Operators whose arithmetic does not follow from the shapes of tensors.
_UNKNOWN = ("rnn_layer", "linalg_", "fft_", "optimizer_step", "take_batch", "in_mode", "checkpoint")


@dataclass(frozen=True)
class Work:
    """Work of a call.

    Attributes:
        flops: floating-point operations of matrix products and convolutions, two per multiply-add;
            0 for other calls.
        nbytes: bytes of inputs read once and outputs written once; 0 for views.
        dtype: of the arithmetic, that of the first floating-point input.
    """

    flops: int
    nbytes: int
    dtype: str


@lru_cache(maxsize=1 << 14)
def work(call: Call) -> Work | None:
    """Return the work of `call`; None if shapes do not determine it (RNNs, decompositions).

    ``torch.utils.flop_counter`` counts the floating-point operations.
    """
    if not call.inputs or any(part in call.name for part in _UNKNOWN):
        return None
    specs = [*call.inputs, *call.outputs]
    dtype = next(
        (spec.dtype for spec in specs if spec.dtype.startswith(("float", "bfloat"))),
        specs[0].dtype,
    )
    return Work(_flops(call), traffic(call).total, dtype)


def _flops(call: Call) -> int:
    name = call.name.removeprefix("aten::")
    name = _KNOWN_AS.get(name, name)
    if name == "_convolution_of_library":
        return _convolution(call)
    formula = _formulas().get(name)
    if formula is None:
        return 0
    # Formulas do not accept keyword-only arguments.
    arguments = [_meta(value) for value in call.arguments[: _positional(call.op)]]
    outputs = [_meta(spec) for spec in call.outputs]
    try:
        return int(formula(*arguments, out_val=outputs[0] if len(outputs) == 1 else tuple(outputs)))
    except (TypeError, ValueError, IndexError, AssertionError):
        # The formula does not expect these arguments.
        return 0


@lru_cache(maxsize=1024)
def _positional(op: str) -> int | None:
    """Return the number of positional arguments of a schema; None for all."""
    before, star, _ = op.partition("*,")
    return before.count(",") - _inner_commas(before) if star else None


def _inner_commas(text: str) -> int:
    """Count commas within brackets, as in ``int[2] stride=[1, 1]``."""
    depth = commas = 0
    for character in text:
        depth += (character == "[") - (character == "]")
        commas += character == "," and depth > 0
    return commas


def _convolution(call: Call) -> int:
    """Return the operations of a oneDNN convolution: one filter per output element."""
    filters = call.inputs[1].shape
    per_output = 1
    for extent in filters[1:]:
        per_output *= extent
    return 2 * sum(spec.numel for spec in call.outputs) * per_output


@lru_cache(maxsize=1)
def _formulas() -> dict[str, Any]:
    from torch.utils.flop_counter import flop_registry

    return {str(op).partition(".")[2]: formula for op, formula in flop_registry.items()}


def _meta(value: Any) -> Any:
    if isinstance(value, TensorSpec):
        import torch

        dtype = getattr(torch, value.dtype)
        return torch.empty_strided(value.shape, value.strides, dtype=dtype, device="meta")
    if isinstance(value, (list, tuple)):
        return [_meta(item) for item in value]
    return value
