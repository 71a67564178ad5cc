"""What an operator call has to do, from its shapes alone: arithmetic and memory traffic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from slipstream.durations.traffic import traffic
from slipstream.graph import Call, TensorSpec

# The same arithmetic under another name than the one torch's table knows.
_KNOWN_AS = {
    "_scaled_dot_product_flash_attention_for_cpu": "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        "_scaled_dot_product_flash_attention_backward"
    ),
    "mkldnn_convolution": "_convolution_of_library",
}
# Much arithmetic that the shapes of tensors do not tell.
_UNTOLD = ("rnn_layer", "linalg_", "fft_", "optimizer_step", "take_batch", "in_mode", "checkpoint")


@dataclass(frozen=True)
class Work:
    """Work of a call.

    Attributes:
        flops: floating-point operations of matrix products and convolutions, a multiply-add
            counting as two; 0 for calls that only stream over their tensors.
        nbytes: bytes of inputs read once and outputs written once; 0 for views.
        dtype: of the arithmetic: that of the first floating-point input.
    """

    flops: int
    nbytes: int
    dtype: str


@lru_cache(maxsize=1 << 14)
def work(call: Call) -> Work | None:
    """The work of `call`; None where shapes do not tell it (recurrent layers, decompositions).

    Floating-point operations are counted by ``torch.utils.flop_counter``.
    """
    if not call.inputs or any(part in call.name for part in _UNTOLD):
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
    # What an operator takes by name alone, formulas do not take.
    arguments = [_meta(value) for value in call.arguments[: _positional(call.op)]]
    outputs = [_meta(spec) for spec in call.outputs]
    try:
        return int(formula(*arguments, out_val=outputs[0] if len(outputs) == 1 else tuple(outputs)))
    except (TypeError, ValueError, IndexError, AssertionError):
        # Called with arguments the formula does not expect.
        return 0


@lru_cache(maxsize=1024)
def _positional(op: str) -> int | None:
    """How many arguments of a schema are taken by their place; None for all."""
    before, star, _ = op.partition("*,")
    return before.count(",") - _inner_commas(before) if star else None


def _inner_commas(text: str) -> int:
    """Commas within brackets, as of ``int[2] stride=[1, 1]``."""
    depth = commas = 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        commas += letter == "," and depth > 0
    return commas


def _convolution(call: Call) -> int:
    """A convolution of oneDNN: per output element the products of one filter."""
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
