"""Base of both low-bit layers: packed weights, codes of the input, and the epilogue."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar, cast

import torch
from torch import nn

from slipstream.errors import InvalidArgumentError
from slipstream.native.family import tensor_pointer
from slipstream.native.operators import plainly, profiled
from slipstream.quant import Format, Granularity, code_weights, grid_of_range
from slipstream.techniques.lowbit.coded import HeldTensor
from slipstream.techniques.lowbit.convolve import (
    Codes,
    Epilogue,
    Outcome,
    Prepared,
    convolved,
    quantise,
)
from slipstream.techniques.lowbit.kernels import PackedWeights, check_vector, pack_weights
from slipstream.techniques.lowbit.operators import stored
from slipstream.techniques.lowbit.windows import Convolution

_Module = TypeVar("_Module", bound=nn.Module)
_VERSION = 3
# Version 2 added codes for several successors, version 3 ceilings.
_READ_VERSIONS = (1, 2, 3)
# Attributes whose change invalidates the cached call.
_INVALIDATING = frozenset(
    {"_packed", "input_codes", "output_codes", "relu", "ceiling", "after_sum", "scale", "bias"}
)
# Attributes that refer to this process's memory.
_NOT_SAVED = frozenset({"_call", "_prepared"})


@dataclass(frozen=True)
class AfterSum:
    """Operations on the sum of a layer's output and another tensor.

    Attributes:
        relu: whether the sum is clipped at zero.
        codes: codes that are passed on next to floats; None for floats only.
    """

    relu: bool
    codes: Codes | None


class LowBitLayer(nn.Module):
    """Base of `LowBitLinear` and `LowBitConv2d`.

    Attributes:
        wbits, abits: bits of weights and activations, 1 to 8.
        granularity: extent of the weights' scales.
        input_codes: quantisation of inputs.
        output_codes: codes in which outputs are passed to other layers; None for floats.
        after_sum: operations on the sum of the output and another tensor; None without a sum.
        relu: whether the output is clipped at zero.
        ceiling: maximum of the output; infinity without one.
        absorbed: names of the model's modules that are fused into this layer.
        scale: scale of products, with a fused batch norm; float32 [n], or [n, blocks].
        bias: float32 [n] or None.

    Scale and bias stay float32 if the model's dtype changes; inputs of another dtype are converted,
    and outputs have the inputs' dtype.
    """

    scale: torch.Tensor
    bias: torch.Tensor | None
    # Cached call for the common case: for linear layers a compiled function and its arguments, or
    # () if not applicable; for convolutions a `Prepared`; None if not computed yet.
    _call: Any
    # By image shape, and whether another tensor is added.
    _prepared: dict[tuple[torch.Size, bool], Prepared]

    def __init__(self, n: int, k: int, bias: bool, wbits: int, abits: int, scales: str) -> None:
        super().__init__()
        for name, bits in (("wbits", wbits), ("abits", abits)):
            if not isinstance(bits, int) or not 1 <= bits <= 8:
                raise InvalidArgumentError(name, f"{bits} is not an integer from 1 to 8")
        for name, count in (("in_features", k), ("out_features", n)):
            if count < 1:
                raise InvalidArgumentError(name, f"{count} is not positive")
        self.wbits, self.abits = wbits, abits
        self.granularity = Granularity.of(scales)
        # A single matrix, or one per block of columns.
        self._packed: tuple[PackedWeights, ...] = ()
        self.input_codes = Codes(abits, 1.0)
        self.output_codes: Codes | None = None
        self.after_sum: AfterSum | None = None
        self.relu, self.ceiling = False, math.inf
        self.absorbed: tuple[str, ...] = ()
        self._n, self._k = n, k
        blocks = self._blocks()
        self.register_buffer("scale", torch.ones(n if len(blocks) == 1 else (n, len(blocks))))
        self.register_buffer("bias", torch.zeros(n) if bias else None)

    @classmethod
    def shaped_like(cls, module: Any, bias: bool, wbits: int, abits: int, scales: str) -> Self:
        """Create a layer of a float layer's sizes, without weights."""
        raise NotImplementedError

    @classmethod
    def from_float(
        cls,
        module: Any,
        wbits: int,
        abits: int,
        ranges: Any,
        *,
        scales: str = "channel",
        least_error: bool = True,
    ) -> Self:
        """Quantise a float layer.

        Args:
            module: ``nn.Linear``, ``nn.Conv2d``, or Hugging Face's ``Conv1D``.
            ranges: range of inputs: a `slipstream.quant.Range`, or (low, high).
            least_error: whether the weights' scales minimise the error, see
                `slipstream.quant.code_weights`.

        Raises:
            InvalidArgumentError: `module` is a grouped but not depthwise convolution, its padding
                is not zeros, a weight or range is not finite, or bits are out of range.
        """
        if (reason := why_unsupported(module)) is not None:
            raise InvalidArgumentError("module", reason, remedy="keep it in float32")
        module = as_torch(module)
        layer = cls.shaped_like(module, module.bias is not None, wbits, abits, scales)
        codes, scale = code_weights(
            as_rows(module.weight), wbits, layer.granularity, least_error=least_error
        )
        layer.set_weights(codes, scale, codes_of_range(ranges, abits), module.bias)
        layer.training = module.training
        return layer

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in _INVALIDATING:
            self.__dict__["_call"] = None
            self.__dict__["_prepared"] = {}

    def _usual_call(self) -> tuple[Any, ...]:
        """Return the compiled function of the whole layer and its fixed arguments, or ()."""
        packed = self.packed
        if not self._is_single_call() or packed[0]._linear is None:
            return ()
        codes, weights = self.input_codes, packed[0]
        check_vector("scale", self.scale, weights.n)
        if self.bias is not None:
            check_vector("bias", self.bias, weights.n)
        floor = 0.0 if self.relu else -math.inf
        buffers = self.scale, self.scale.data_ptr(), self.bias, tensor_pointer(self.bias)
        return weights._linear, weights, codes.scale, codes.zero, floor, weights.n, buffers

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        buffers = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in buffers.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype is not old.dtype:
                self._buffers[name] = old.to(new.device)
        self.__dict__["_call"] = None
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in _NOT_SAVED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.update(_call=None, _prepared={})

    @property
    def packed(self) -> tuple[PackedWeights, ...]:
        """The weights: a single matrix, or one per block of columns.

        Raises:
            InvalidArgumentError: the layer has no weights yet.
        """
        if not self._packed:
            raise InvalidArgumentError(
                "layer",
                "has no weights yet",
                remedy="create it by from_float(module), or call load_state_dict",
            )
        return self._packed

    def expect_rows(self, rows: int) -> None:
        """Use the best kernels for inputs of `rows` rows or output pixels per call."""
        self._packed = tuple(weights.for_rows(rows) for weights in self.packed)

    def codes(self) -> torch.Tensor:
        """Return the weights' codes, int8 [n, k]; -1 and 1 for one bit."""
        parts = [weights.weights() for weights in self.packed]
        if self.wbits == 1:
            parts = [2 * part[:-1].to(torch.int8) - 1 for part in parts]
        return torch.cat(parts, dim=1)

    def set_weights(
        self,
        codes: torch.Tensor,
        scale: torch.Tensor,
        input_codes: Codes,
        bias: torch.Tensor | None = None,
    ) -> None:
        """Set the weights from codes and scales.

        Args:
            codes: int8 [n, k]; -1 and 1 for one bit.
            scale: float32, of the granularity's shape for [n, k].
            input_codes: quantisation of inputs, of `abits` bits.
            bias: float32 [n], or None if the layer has no bias.

        Raises:
            InvalidArgumentError: a shape does not match, or codes are out of range.
        """
        if tuple(codes.shape) != (self._n, self._k):
            raise InvalidArgumentError(
                "codes", f"have shape {tuple(codes.shape)} instead of {(self._n, self._k)}"
            )
        expected = self.granularity.scales_shape((self._n, self._k))
        if tuple(scale.shape) != expected:
            raise InvalidArgumentError(
                "scale", f"has shape {tuple(scale.shape)} instead of {expected}"
            )
        if input_codes.bits != self.abits:
            raise InvalidArgumentError(
                "input_codes", f"have {input_codes.bits} bits, the layer {self.abits}"
            )
        if (bias is None) != (self.bias is None):
            raise InvalidArgumentError("bias", "must be given if and only if the layer has a bias")
        self.input_codes = input_codes
        self._packed = tuple(
            self._pack(codes[:, first:last].contiguous()) for first, last in self._blocks()
        )
        scale = scale.detach().float() * input_codes.scale
        self.scale = scale.expand(self._n).contiguous() if scale.dim() < 2 else scale.contiguous()
        if self.scale.dim() == 2 and self.scale.shape[1] == 1:
            self.scale = self.scale[:, 0].contiguous()
        if bias is not None:
            self.bias = bias.detach().float().clone()

    def multiply_add(self, factor: torch.Tensor, addend: torch.Tensor) -> None:
        """Fold a multiplication by `factor` and addition of `addend` (float32 [n]) into the output.

        Raises:
            InvalidArgumentError: the layer already clips or quantises its output.
        """
        if self.relu or self.output_codes is not None:
            raise InvalidArgumentError("layer", "already clips or quantises its output")
        rows = factor if self.scale.dim() == 1 else factor[:, None]
        self.scale = (self.scale * rows).contiguous()
        self.bias = addend.clone() if self.bias is None else self.bias * factor + addend

    def get_extra_state(self) -> dict[str, Any]:
        """Return settings and packed weights, loadable with ``weights_only=True``.

        Raises:
            InvalidArgumentError: ``torch.onnx`` exports the model.
        """
        _refuse_onnx()
        parts = [weights.to_bytes() for weights in self._packed]
        sum_ = self.after_sum
        return {
            "version": _VERSION,
            "wbits": self.wbits,
            "scales": str(self.granularity),
            "relu": self.relu,
            "ceiling": self.ceiling,
            "absorbed": list(self.absorbed),
            "input": _numbers(self.input_codes),
            "output": _numbers(self.output_codes),
            "after_sum": None if sum_ is None else [sum_.relu, _numbers(sum_.codes)],
            "weights": [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts],
        }

    def set_extra_state(self, state: Any) -> None:
        """Restore the result of `get_extra_state`.

        Raises:
            InvalidArgumentError: `state` is of another layer, or damaged.
        """
        if not isinstance(state, Mapping) or state.get("version") not in _READ_VERSIONS:
            raise InvalidArgumentError("state", "is not a low-bit layer's of a supported version")
        same = (state["wbits"], state["scales"]) == (self.wbits, str(self.granularity))
        if not same or state["input"][0] != self.abits:
            raise InvalidArgumentError(
                "state",
                f"is of a layer with W{state['wbits']}A{state['input'][0]} and scales per "
                f"{state['scales']}; this one has W{self.wbits}A{self.abits} per "
                f"{self.granularity}",
            )
        packed = [PackedWeights.from_bytes(part.numpy().tobytes()) for part in state["weights"]]
        expected = [self._rows(last - first) for first, last in self._blocks()]
        if packed and [(weights.n, weights.k) for weights in packed] != expected:
            raise InvalidArgumentError("state", "contains weights of another shape")
        self._packed = tuple(packed)
        self.relu = bool(state["relu"])
        self.ceiling = float(state.get("ceiling", math.inf))
        self.absorbed = tuple(map(str, state["absorbed"]))
        self.input_codes = Codes(*state["input"])
        self.output_codes = _codes_or_none(state["output"])
        sum_ = state.get("after_sum")
        self.after_sum = None if sum_ is None else AfterSum(sum_[0], _codes_or_none(sum_[1]))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = memo[id(self)] = shallow_copy(self, type(self))
        copied.__dict__.update(_call=None, _prepared={})
        # Copies share packed weights, which are immutable.
        copied._buffers = {
            name: None if buffer is None else buffer.clone()
            for name, buffer in self._buffers.items()
        }
        return copied

    def _rows(self, columns: int) -> tuple[int, int]:
        # With one bit, a row of ones yields the sums of activations.
        return self._n + (self.wbits == 1), columns

    def _blocks(self) -> list[tuple[int, int]]:
        size = self.granularity.block or self._k
        return [(first, min(first + size, self._k)) for first in range(0, self._k, size)]

    def _pack(self, codes: torch.Tensor) -> PackedWeights:
        if self.wbits == 1:
            if not bool((codes.abs() == 1).all()):
                raise InvalidArgumentError("codes", "must be -1 or 1 with one bit")
            bits = (codes + 1).to(torch.uint8) // 2
            codes = torch.cat([bits, torch.ones_like(bits[:1])])
        return pack_weights(codes, self.wbits, activation_bits=self.abits)

    def _epilogue(self, summed: AfterSum | None) -> Epilogue:
        """Return the epilogue of a product, or of its sum with another tensor."""
        binary = self.wbits == 1
        if summed is not None:
            return Epilogue(self.scale, self.bias, summed.relu, binary, summed.codes, both=True)
        return Epilogue(
            self.scale, self.bias, self.relu, binary, self.output_codes, ceiling=self.ceiling
        )

    def _is_single_call(self) -> bool:
        """Return whether a single call of `linear` from floats to floats computes the layer."""
        codes = self.output_codes is not None or self.after_sum is not None
        plain = self.wbits > 1 and not codes and self.ceiling == math.inf
        return plain and len(self.packed) == 1

    def _runs_plainly(self, x: torch.Tensor) -> bool:
        """Return whether to call kernels directly, not through a torch operator."""
        if isinstance(x, HeldTensor):
            return True
        if not plainly(x) or x.dtype not in (torch.float32, torch.uint8):
            return False
        if x.requires_grad and torch.is_grad_enabled():
            return False
        emits_codes = self.output_codes is not None or self.after_sum is not None
        return emits_codes or not profiled()

    def _operands(self, x: torch.Tensor) -> tuple[Any, ...]:
        """Return the operands of the torch operators, beginning with `x`.

        Raises:
            InvalidArgumentError: the dtype or device is not supported, or `x` needs a gradient in
                training mode.
        """
        if self.training and x.requires_grad and torch.is_grad_enabled():
            raise InvalidArgumentError(
                "x", "needs a gradient, which low-bit layers do not have",
                remedy="call model.eval() to infer, or slipstream.lowbit.prepare_training to train",
            )  # fmt: skip
        self._check(x)
        _refuse_onnx()
        if not x.is_floating_point():
            raise InvalidArgumentError("x", f"is {x.dtype}; torch operators require floats")
        weights = [stored(matrix) for matrix in self.packed]
        if x.is_meta:
            weights = [weight.to("meta") for weight in weights]
        codes = self.input_codes
        return (
            x.to(torch.float32), weights, self.scale, self.bias, codes.scale, codes.zero,
            self.wbits == 1, self.relu, self.ceiling,
        )  # fmt: skip

    def _check(self, x: torch.Tensor) -> None:
        if not x.is_floating_point() and x.dtype is not torch.uint8:
            raise InvalidArgumentError(
                "x", f"is {x.dtype}", remedy="pass floats, or uint8 codes of this layer's input"
            )
        device = x.device.type
        if device not in ("cpu", "meta"):
            raise InvalidArgumentError("x", f"is on '{x.device}'; these layers run on the CPU")
        if self.scale.device.type != device:
            raise InvalidArgumentError(
                "x", f"is on '{x.device}', the layer on '{self.scale.device}'",
                remedy="move one of them",
            )  # fmt: skip

    def _read(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` as uint8 codes if it holds those of this layer's input, else as floats."""
        if not isinstance(x, HeldTensor):
            return x
        codes = x.codes_for(self.input_codes)
        return x.dense() if codes is None else codes

    def _coded(self, x: torch.Tensor) -> tuple[torch.Tensor, bool]:
        return (x, True) if x.dtype is torch.uint8 else quantise(x, self.input_codes)

    def _multiply(
        self, image: torch.Tensor, shape: Convolution, added: torch.Tensor | None = None
    ) -> Outcome:
        """Compute the output from codes, or that of its sum with `added`; all NHWC."""
        if len(self.packed) == 1:
            return self._prepare(image.shape, shape, added is not None)(image, added)
        epilogue = self._epilogue(None if added is None else self.after_sum)
        return convolved(image, shape, self.packed, epilogue, self.input_codes.zero, added)

    def _prepare(self, image: torch.Size, shape: Convolution, sums: bool) -> Prepared:
        """Return the cached call for images of this shape."""
        prepared = self._prepared.get((image, sums))
        # A buffer may have been replaced, as by `to`.
        if prepared is not None and prepared.matches(self.scale, self.bias):
            return prepared
        epilogue = self._epilogue(self.after_sum if sums else None)
        prepared = Prepared(self.packed[0], shape, epilogue, self.input_codes.zero)
        self._prepared[image, sums] = prepared
        return prepared

    def _described(self) -> str:
        parts = [f"W{self.wbits}A{self.abits}", f"scales per {self.granularity}"]
        parts += ["relu"] * self.relu
        return ", ".join(parts + [f"at most {self.ceiling:g}"] * (self.ceiling < math.inf))


def _refuse_onnx() -> None:
    """Raise InvalidArgumentError while ``torch.onnx`` exports."""
    if torch.onnx.is_in_onnx_export():
        raise InvalidArgumentError(
            "model", "has low-bit layers, which torch.onnx cannot export",
            remedy="call slipstream.lowbit.to_onnx(model, path), for linear layers of 2, 4, 8 bits",
        )  # fmt: skip


def _numbers(codes: Codes | None) -> list[Any] | None:
    return None if codes is None else [codes.bits, codes.scale, codes.zero]


def _codes_or_none(numbers: Any) -> Codes | None:
    return None if numbers is None else Codes(*numbers)


def shallow_copy(module: nn.Module, kind: type[_Module]) -> _Module:
    """Return a module of class `kind` that shares tensors, modules and hooks with another."""
    copied = kind.__new__(kind)
    copied.__dict__.update(module.__dict__)
    for name in ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"):
        copied.__dict__[name] = module.__dict__[name].copy()
    return copied


def why_unsupported(module: nn.Module) -> str | None:
    """Return why `module` has no low-bit form and stays in float32, or None."""
    if isinstance(module, nn.Linear) or is_transposed_linear(module):
        return None
    if not isinstance(module, nn.Conv2d):
        return f"a {type(module).__name__} is neither linear nor a two-dimensional convolution"
    if module.groups != 1 and not is_depthwise(module):
        return "a grouped convolution is neither a single matmul nor depthwise"
    if module.padding_mode != "zeros":
        return f"it pads with '{module.padding_mode}', not with zeros"
    if module.padding == "same" and any((k - 1) * d % 2 for k, d in zip(
        module.kernel_size, module.dilation, strict=True
    )):  # fmt: skip
        return "its padding is larger on one side than on the other"
    return None


def is_depthwise(module: Any) -> bool:
    """Return whether `module` is a depthwise convolution, one output per input channel."""
    groups = getattr(module, "groups", 1)
    return bool(1 < groups == module.in_channels == module.out_channels)


def is_transposed_linear(module: Any) -> bool:
    """Return whether `module` is Hugging Face's ``Conv1D``, linear with weight [in, out]."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def as_torch(module: Any) -> nn.Module:
    """Convert Hugging Face's ``Conv1D`` to ``nn.Linear``; return other modules unchanged."""
    if not is_transposed_linear(module):
        return cast(nn.Module, module)
    inputs, outputs = module.weight.shape
    layer = nn.Linear(inputs, outputs, device="meta")
    layer.weight = nn.Parameter(module.weight.detach().T.contiguous())
    layer.bias = module.bias
    return layer.train(module.training)


def codes_of_range(ranges: Any, bits: int) -> Codes:
    """Return the codes for inputs of a range (a `slipstream.quant.Range`, or low and high).

    Raises:
        InvalidArgumentError: the range is not finite.
    """
    low, high = (ranges.low, ranges.high) if hasattr(ranges, "low") else ranges
    grid = grid_of_range(low, high, Format(bits))
    return Codes(bits, float(grid.scale), int(grid.zero))


def as_rows(weight: torch.Tensor) -> torch.Tensor:
    """Reshape a weight [n, channels, height, width] to [n, height * width * channels]."""
    if weight.dim() == 2:
        return weight
    return weight.permute(0, 2, 3, 1).reshape(weight.shape[0], -1)
