"""What both low-bit layers share: packed weights, codes of the input, and what comes behind."""

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
# Before 2, layers handed codes to one successor only; before 3, none had a ceiling.
_READ_VERSIONS = (1, 2, 3)
# Attributes that say how a layer's usual input is multiplied.
_DECIDES = frozenset(
    {"_packed", "input_codes", "output_codes", "relu", "ceiling", "after_sum", "scale", "bias"}
)
# What refers to this process's memory.
_NOT_SAVED = frozenset({"_call", "_prepared"})


@dataclass(frozen=True)
class AfterSum:
    """What becomes of the sum of a layer's output and another tensor.

    Attributes:
        relu: whether it is clipped at zero.
        codes: as what codes it is handed on, besides floats; None: as floats alone.
    """

    relu: bool
    codes: Codes | None


class LowBitLayer(nn.Module):
    """A layer of a few bits; `LowBitLinear` and `LowBitConv2d` say of what shape.

    Attributes:
        wbits, abits: of weights and activations, 1 to 8.
        granularity: how far one scale of the weights reaches.
        input_codes: how inputs are rounded.
        output_codes: None, or as what codes outputs are handed to the layers that read them.
        after_sum: what becomes of the sum that the output is a term of; None: it goes elsewhere.
        relu: whether the output is clipped at zero.
        ceiling: what the output is clipped at from above; infinity where it is not.
        absorbed: names of modules of the model whose work this layer does, too.
        scale: float32 [n], or [n, blocks]: of a product; what follows in the same channel (a batch
            norm) is multiplied in.
        bias: float32 [n] or None.

    Scale and bias stay float32 whatever dtype the model is given; inputs of another are rounded
    from it, and outputs have it.
    """

    scale: torch.Tensor
    bias: torch.Tensor | None
    # What the usual input is given to: of a linear layer a compiled function and its arguments
    # (empty: there is none), of a convolution a `Prepared`; None: to be made.
    _call: Any
    # By the shape of an image, and whether a sum is taken along.
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
        # One matrix, or one for each block of columns.
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
        """A layer of the sizes of a float one, without weights."""
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
        """The layer that does what `module` does, with its weights rounded.

        Args:
            module: ``nn.Linear``, ``nn.Conv2d``, or Hugging Face's ``Conv1D``.
            ranges: of inputs: a `slipstream.quant.Range`, or (low, high).
            least_error: of the weights: see `slipstream.quant.code_weights`.

        Raises:
            InvalidArgumentError: groups other than depthwise, padding other than with zeros, NaN or
                infinity in a weight or range, or other bits.
        """
        if (reason := why_kept(module)) is not None:
            raise InvalidArgumentError("module", reason, remedy="leave it as it is")
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
        if name in _DECIDES:
            self.__dict__["_call"] = None
            self.__dict__["_prepared"] = {}

    def _usual_call(self) -> tuple[Any, ...]:
        """The compiled function that does all there is to do, and what it is given each time."""
        packed = self.packed
        if not self._floats_at_once() or packed[0]._linear is None:
            return ()
        codes, one = self.input_codes, packed[0]
        check_vector("scale", self.scale, one.n)
        if self.bias is not None:
            check_vector("bias", self.bias, one.n)
        floor = 0.0 if self.relu else -math.inf
        buffers = self.scale, self.scale.data_ptr(), self.bias, tensor_pointer(self.bias)
        return one._linear, one, codes.scale, codes.zero, floor, one.n, buffers

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        kept = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in kept.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype is not old.dtype:
                self._buffers[name] = old.to(new.device)
        self.__dict__["_call"] = None
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {key: one for key, one in self.__dict__.items() if key not in _NOT_SAVED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.update(_call=None, _prepared={})

    @property
    def packed(self) -> tuple[PackedWeights, ...]:
        """The weights: one matrix, or one for each block of columns.

        Raises:
            InvalidArgumentError: the layer was made without weights and none were loaded.
        """
        if not self._packed:
            raise InvalidArgumentError(
                "layer", "has no weights yet", remedy="from_float(module), or load_state_dict"
            )
        return self._packed

    def expect_rows(self, rows: int) -> None:
        """Take the kernels that are best for inputs of `rows` rows, or output pixels, a call."""
        self._packed = tuple(one.for_rows(rows) for one in self.packed)

    def codes(self) -> torch.Tensor:
        """The weights' codes, int8 [n, k]; with one bit -1 and 1."""
        parts = [one.weights() for one in self.packed]
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
        """Take weights as codes with their scales.

        Args:
            codes: int8 [n, k]; with one bit -1 and 1.
            scale: float32, of the granularity's shape for [n, k].
            input_codes: how inputs are rounded; of `abits` bits.
            bias: float32 [n] or None, as the layer was made for.

        Raises:
            InvalidArgumentError: a shape other than these, or codes out of range.
        """
        if tuple(codes.shape) != (self._n, self._k):
            raise InvalidArgumentError(
                "codes", f"have shape {tuple(codes.shape)} instead of {(self._n, self._k)}"
            )
        wanted = self.granularity.scales_shape((self._n, self._k))
        if tuple(scale.shape) != wanted:
            raise InvalidArgumentError(
                "scale", f"has shape {tuple(scale.shape)} instead of {wanted}"
            )
        if input_codes.bits != self.abits:
            raise InvalidArgumentError(
                "input_codes", f"have {input_codes.bits} bits, the layer {self.abits}"
            )
        if (bias is None) != (self.bias is None):
            raise InvalidArgumentError("bias", "is not as the layer was made for")
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
        """Let each output channel be multiplied by `factor`, then `addend` be added (float32 [n]).

        Raises:
            InvalidArgumentError: the output is clipped or rounded before that.
        """
        if self.relu or self.output_codes is not None:
            raise InvalidArgumentError("layer", "clips or rounds its output already")
        rows = factor if self.scale.dim() == 1 else factor[:, None]
        self.scale = (self.scale * rows).contiguous()
        self.bias = addend.clone() if self.bias is None else self.bias * factor + addend

    def get_extra_state(self) -> dict[str, Any]:
        """What is no tensor, and the weights without gaps; loaded with ``weights_only=True``.

        Raises:
            InvalidArgumentError: ``torch.onnx`` asks, which has no form for these layers.
        """
        _refuse_onnx()
        parts = [one.to_bytes() for one in self._packed]
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
        """The inverse of `get_extra_state`.

        Raises:
            InvalidArgumentError: it is of another layer, or damaged.
        """
        if not isinstance(state, Mapping) or state.get("version") not in _READ_VERSIONS:
            raise InvalidArgumentError("state", "is not that of a low-bit layer of this version")
        same = (state["wbits"], state["scales"]) == (self.wbits, str(self.granularity))
        if not same or state["input"][0] != self.abits:
            raise InvalidArgumentError(
                "state",
                f"is of a layer with W{state['wbits']}A{state['input'][0]} and scales per "
                f"{state['scales']}; this one has W{self.wbits}A{self.abits} per "
                f"{self.granularity}",
            )
        packed = [PackedWeights.from_bytes(part.numpy().tobytes()) for part in state["weights"]]
        wanted = [self._rows(last - first) for first, last in self._blocks()]
        if packed and [(one.n, one.k) for one in packed] != wanted:
            raise InvalidArgumentError("state", "holds weights of another shape")
        self._packed = tuple(packed)
        self.relu = bool(state["relu"])
        self.ceiling = float(state.get("ceiling", math.inf))
        self.absorbed = tuple(map(str, state["absorbed"]))
        self.input_codes = Codes(*state["input"])
        self.output_codes = _codes_or_none(state["output"])
        sum_ = state.get("after_sum")
        self.after_sum = None if sum_ is None else AfterSum(sum_[0], _codes_or_none(sum_[1]))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = memo[id(self)] = shallow_copy(self, type(self))
        twin.__dict__.update(_call=None, _prepared={})
        # Packed weights are never written to: copies share them.
        twin._buffers = {
            name: None if one is None else one.clone() for name, one in self._buffers.items()
        }
        return twin

    def _rows(self, columns: int) -> tuple[int, int]:
        # With one bit, a row of ones gives the activations' sums.
        return self._n + (self.wbits == 1), columns

    def _blocks(self) -> list[tuple[int, int]]:
        size = self.granularity.block or self._k
        return [(first, min(first + size, self._k)) for first in range(0, self._k, size)]

    def _pack(self, codes: torch.Tensor) -> PackedWeights:
        if self.wbits == 1:
            if not bool((codes.abs() == 1).all()):
                raise InvalidArgumentError("codes", "with one bit are -1 and 1")
            bits = (codes + 1).to(torch.uint8) // 2
            codes = torch.cat([bits, torch.ones_like(bits[:1])])
        return pack_weights(codes, self.wbits, activation_bits=self.abits)

    def _epilogue(self, summed: AfterSum | None) -> Epilogue:
        """What comes behind a product, or behind the sum it is a term of."""
        binary = self.wbits == 1
        if summed is not None:
            return Epilogue(self.scale, self.bias, summed.relu, binary, summed.codes, both=True)
        return Epilogue(
            self.scale, self.bias, self.relu, binary, self.output_codes, ceiling=self.ceiling
        )

    def _floats_at_once(self) -> bool:
        """Whether `linear`, which reads and writes floats, does all there is to do."""
        codes = self.output_codes is not None or self.after_sum is not None
        plain = self.wbits > 1 and not codes and self.ceiling == math.inf
        return plain and len(self.packed) == 1

    def _runs_plainly(self, x: torch.Tensor) -> bool:
        """Whether `x` is for kernels as it is, and nobody has to see an operator."""
        if isinstance(x, HeldTensor):
            return True
        if not plainly(x) or x.dtype not in (torch.float32, torch.uint8):
            return False
        if x.requires_grad and torch.is_grad_enabled():
            return False
        hands_on = self.output_codes is not None or self.after_sum is not None
        return hands_on or not profiled()

    def _operands(self, x: torch.Tensor) -> tuple[Any, ...]:
        """What the operators of torch take, from `x` on.

        Raises:
            InvalidArgumentError: another dtype or device, or `x` needs a gradient in training mode.
        """
        if self.training and x.requires_grad and torch.is_grad_enabled():
            raise InvalidArgumentError(
                "x", "needs a gradient, and low-bit layers have none",
                remedy="model.eval() to infer, slipstream.lowbit.prepare_training to train",
            )  # fmt: skip
        self._check(x)
        _refuse_onnx()
        if not x.is_floating_point():
            raise InvalidArgumentError("x", f"is {x.dtype}; operators of torch take floats")
        weights = [stored(one) for one in self.packed]
        if x.is_meta:
            weights = [one.to("meta") for one in weights]
        codes = self.input_codes
        return (
            x.to(torch.float32), weights, self.scale, self.bias, codes.scale, codes.zero,
            self.wbits == 1, self.relu, self.ceiling,
        )  # fmt: skip

    def _check(self, x: torch.Tensor) -> None:
        if not x.is_floating_point() and x.dtype is not torch.uint8:
            raise InvalidArgumentError(
                "x", f"is {x.dtype}", remedy="floats, or uint8 codes of this layer's input"
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
        """`x` as floats, or as codes (uint8) of this layer's input where it holds them."""
        if not isinstance(x, HeldTensor):
            return x
        codes = x.codes_for(self.input_codes)
        return x.dense() if codes is None else codes

    def _coded(self, x: torch.Tensor) -> tuple[torch.Tensor, bool]:
        return (x, True) if x.dtype is torch.uint8 else quantise(x, self.input_codes)

    def _multiply(
        self, image: torch.Tensor, shape: Convolution, added: torch.Tensor | None = None
    ) -> Outcome:
        """From codes to the layer's output, or what becomes of its sum with `added`; all NHWC."""
        if len(self.packed) == 1:
            return self._prepare(image.shape, shape, added is not None)(image, added)
        epilogue = self._epilogue(None if added is None else self.after_sum)
        return convolved(image, shape, self.packed, epilogue, self.input_codes.zero, added)

    def _prepare(self, image: torch.Size, shape: Convolution, sums: bool) -> Prepared:
        """The call for images of this shape, made at the first."""
        prepared = self._prepared.get((image, sums))
        # A buffer may have been replaced, as `to` does.
        if prepared is not None and prepared.serves(self.scale, self.bias):
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
            "model", "has low-bit layers, for which torch.onnx has no form",
            remedy="slipstream.lowbit.to_onnx(model, path), for linear layers of 2, 4 and 8 bits",
        )  # fmt: skip


def _numbers(codes: Codes | None) -> list[Any] | None:
    return None if codes is None else [codes.bits, codes.scale, codes.zero]


def _codes_or_none(numbers: Any) -> Codes | None:
    return None if numbers is None else Codes(*numbers)


def shallow_copy(module: nn.Module, kind: type[_Module]) -> _Module:
    """A module of class `kind` with the very tensors, modules and hooks of another."""
    twin = kind.__new__(kind)
    twin.__dict__.update(module.__dict__)
    for name in ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"):
        twin.__dict__[name] = module.__dict__[name].copy()
    return twin


def why_kept(module: nn.Module) -> str | None:
    """None, or why `module` has no low-bit form; it then stays in float32."""
    if isinstance(module, nn.Linear) or is_transposed_linear(module):
        return None
    if not isinstance(module, nn.Conv2d):
        return f"a {type(module).__name__} is neither linear nor a two-dimensional convolution"
    if module.groups != 1 and not is_depthwise(module):
        return "a grouped convolution is neither one matrix product nor depthwise"
    if module.padding_mode != "zeros":
        return f"it pads with '{module.padding_mode}', not with zeros"
    if module.padding == "same" and any((k - 1) * d % 2 for k, d in zip(
        module.kernel_size, module.dilation, strict=True
    )):  # fmt: skip
        return "it pads one side more than the other"
    return None


def is_depthwise(module: Any) -> bool:
    """Whether it is a convolution in which each channel sees itself alone."""
    groups = getattr(module, "groups", 1)
    return bool(1 < groups == module.in_channels == module.out_channels)


def is_transposed_linear(module: Any) -> bool:
    """Whether it is ``transformers.pytorch_utils.Conv1D``: a linear layer, its weight [in, out]."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def as_torch(module: Any) -> nn.Module:
    """A layer of Hugging Face's as that of torch which computes the same; others as they are."""
    if not is_transposed_linear(module):
        return cast(nn.Module, module)
    wide, narrow = module.weight.shape
    layer = nn.Linear(wide, narrow, device="meta")
    layer.weight = nn.Parameter(module.weight.detach().T.contiguous())
    layer.bias = module.bias
    return layer.train(module.training)


def codes_of_range(ranges: Any, bits: int) -> Codes:
    """How inputs of that range (a `slipstream.quant.Range`, or low and high) are rounded.

    Raises:
        InvalidArgumentError: no finite range.
    """
    low, high = (ranges.low, ranges.high) if hasattr(ranges, "low") else ranges
    grid = grid_of_range(low, high, Format(bits))
    return Codes(bits, float(grid.scale), int(grid.zero))


def as_rows(weight: torch.Tensor) -> torch.Tensor:
    """A weight [n, channels, height, width] as [n, height * width * channels]; a matrix stays."""
    if weight.dim() == 2:
        return weight
    return weight.permute(0, 2, 3, 1).reshape(weight.shape[0], -1)
