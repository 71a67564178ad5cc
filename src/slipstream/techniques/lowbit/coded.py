"""Tensors that hold values as codes between low-bit layers.

Quantisation preserves order. So a layer's input can be quantised where it is computed: ReLUs, max
pooling, concatenations and reshapes then work on bytes, with the same codes as quantisation after
them. A sum does not commute with quantisation: the layer that computes a term adds the other in
float32, and quantises the result as it is written.

All other operators receive float32 values, so these tensors can be used like any tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch

from slipstream.techniques.lowbit.convolve import Codes, max_pool, quantise
from slipstream.techniques.lowbit.windows import Convolution, pair

_aten = torch.ops.aten
_POOLS = (torch.max_pool2d, torch.nn.functional.max_pool2d)


class HeldTensor(torch.Tensor):
    """A float32 tensor with hidden values; unsupported operators get them from `dense`.

    Attributes:
        written: the values, once an operator has written to them or may do so later.
        replacement: the present tensor, after an addition in place.
    """

    written: torch.Tensor | None
    replacement: HeldTensor | None

    @staticmethod
    def _wrapper(cls: type, shape: Sequence[int], strides: Sequence[int]) -> Any:
        held: Any = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, dtype=torch.float32
        )
        held.written, held.replacement = None, None
        return held

    def float_values(self) -> torch.Tensor:
        """Return the values as float32, possibly without a copy; not to be written to."""
        raise NotImplementedError

    def dense(self) -> torch.Tensor:
        """Return the values as a plain tensor for reading."""
        if self.replacement is not None:
            return self.replacement.dense()
        return self.float_values() if self.written is None else self.written

    def codes_for(self, requested: Codes) -> torch.Tensor | None:
        """Return the codes if they are of the requested quantisation, else None."""
        return None if self.replacement is None else self.replacement.codes_for(requested)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _POOLS:
                x = _current(args[0]) if isinstance(args[0], HeldTensor) else None
                pooled = x._max_pooled(*args[1:], **kwargs) if isinstance(x, CodedTensor) else None
                if pooled is not None:
                    return pooled
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = _each(_current, args), kwargs or {}
        operator = _OPERATORS.get(func)
        if operator is not None:
            output = operator(*args, **kwargs)
            if output is not None:
                return output
        schema = func._schema
        aliases = any(
            argument.alias_info is not None for argument in (*schema.arguments, *schema.returns)
        )
        plain = _writable if aliases else _dense
        first = args[0] if args else None
        out = func(
            *_each(plain, args), **{key: _each(plain, value) for key, value in kwargs.items()}
        )
        # An in-place operator returns the tensor on which it was called.
        return first if isinstance(first, HeldTensor) and out is first.written else out

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.dense()!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dense().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.dense().clone()


def _each(change: Callable[[HeldTensor], Any], value: Any) -> Any:
    """Apply `change` to every held tensor in an operator's argument."""
    if isinstance(value, HeldTensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)([_each(change, element) for element in value])
    return value


def _current(held: HeldTensor) -> HeldTensor:
    return held if held.replacement is None else held.replacement


def _dense(held: HeldTensor) -> torch.Tensor:
    return held.dense()


def _writable(held: HeldTensor) -> torch.Tensor:
    if held.written is None:
        held.written = held.float_values().clone()
    return held.written


class CodedTensor(HeldTensor):
    """A tensor that holds codes for low-bit layers, and optionally exact values for others.

    Attributes:
        codes: uint8, of the tensor's shape and strides.
        of: quantisation of the codes.
        exact: float32, the values before quantisation; None if only layers with these codes should
            read the tensor. Others then read dequantised values.
        clipped: whether no value is negative.
    """

    codes: torch.Tensor
    of: Codes
    exact: torch.Tensor | None
    clipped: bool

    def __new__(
        cls,
        codes: torch.Tensor,
        of: Codes,
        exact: torch.Tensor | None = None,
        clipped: bool = False,
    ) -> Self:
        coded: Self = cls._wrapper(cls, codes.shape, codes.stride())
        coded.codes, coded.of, coded.exact, coded.clipped = codes, of, exact, clipped
        return coded

    def float_values(self) -> torch.Tensor:
        if self.exact is not None:
            return self.exact
        return (self.codes.float() - self.of.zero) * self.of.scale

    def codes_for(self, requested: Codes) -> torch.Tensor | None:
        same = self.of is requested or self.of == requested
        return self.codes if same and self.written is None else None

    def _only_codes(self) -> bool:
        return self.written is None and self.exact is None

    # ---- operators on codes; None if they need float values ----

    def _relu(self) -> torch.Tensor | None:
        """Clip at 0."""
        if self.written is not None:
            return None
        zero, codes, exact = self.of.zero, self.codes, self.exact
        if not self.clipped:
            codes = codes if zero == 0 else codes.clamp(min=zero)
            exact = None if exact is None else exact.relu()
        return CodedTensor(codes, self.of, exact, clipped=True)

    def _hardtanh(self, low: float = -1.0, high: float = 1.0) -> torch.Tensor | None:
        """Clip to `low` and `high`, like ReLU6."""
        if self.written is not None:
            return None
        ends = quantise(torch.tensor([low, high], dtype=torch.float32), self.of)[0].tolist()
        exact = None if self.exact is None else self.exact.clamp(low, high)
        return CodedTensor(self.codes.clamp(*ends), self.of, exact, self.clipped or low >= 0)

    def _relu_(self) -> torch.Tensor | None:
        return self._assign(CodedTensor._relu(self))

    def _hardtanh_(self, low: float = -1.0, high: float = 1.0) -> torch.Tensor | None:
        return self._assign(CodedTensor._hardtanh(self, low, high))

    def _assign(self, other: torch.Tensor | None) -> torch.Tensor | None:
        if not isinstance(other, CodedTensor):
            return None
        self.codes, self.exact, self.clipped = other.codes, other.exact, other.clipped
        return self

    def _cloned(self, *, memory_format: Any = None) -> torch.Tensor | None:
        """Copy, possibly to another memory format."""
        if not self._only_codes():
            return None
        memory_format = torch.preserve_format if memory_format is None else memory_format
        return CodedTensor(
            self.codes.clone(memory_format=memory_format), self.of, clipped=self.clipped
        )

    def _reshaped(self, size: Any) -> torch.Tensor | None:
        """Reshape without sharing values with another tensor."""
        if not self._only_codes():
            return None
        return CodedTensor(self.codes.view(size), self.of, clipped=self.clipped)

    @staticmethod
    def _joined(tensors: Any, dim: int = 0) -> torch.Tensor | None:
        """Concatenate along `dim`."""
        if not isinstance(tensors[0], CodedTensor):
            return None
        first = tensors[0]
        same = all(
            isinstance(tensor, CodedTensor) and tensor._only_codes() and tensor.of == first.of
            for tensor in tensors
        )
        if not same:
            return None
        parts = [tensor.codes for tensor in tensors]
        clipped = all(tensor.clipped for tensor in tensors)
        if dim == 1 and all(_is_nhwc(part) for part in parts):
            # Along the last dimension torch copies contiguous runs, and preserves the layout.
            codes = torch.cat([part.permute(0, 2, 3, 1) for part in parts], 3).permute(0, 3, 1, 2)
        else:
            codes = torch.cat(parts, dim)
        return CodedTensor(codes, first.of, clipped=clipped)

    def _max_pooled(
        self,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> torch.Tensor | None:
        """Compute the maximum of each window."""
        if not self._only_codes() or return_indices or not _is_nhwc(self.codes):
            return None
        images, channels, height, width = self.codes.shape
        shape = Convolution(
            (images, height, width, channels), pair(kernel_size), pair(stride or kernel_size),
            pair(padding), pair(dilation),
        )  # fmt: skip
        sizes = pooled_size(shape, ceil_mode)
        if sizes is None:
            return None
        pooled = max_pool(self.codes.permute(0, 2, 3, 1), shape, sizes)
        return CodedTensor(pooled.permute(0, 3, 1, 2), self.of, clipped=self.clipped)


class DeferredOutput(HeldTensor):
    """Output of a layer that is computed on first use, so that the layer can fuse a sum.

    Args:
        out: images, height, width and channels of the output, in memory order.
        finish: computes the output, or, with another term, the result of `after_sum` on their sum.
    """

    _finish: Callable[[torch.Tensor | None], torch.Tensor]
    _alone: torch.Tensor | None

    def __new__(
        cls,
        out: tuple[int, int, int, int],
        finish: Callable[[torch.Tensor | None], torch.Tensor],
    ) -> Self:
        images, height, width, channels = out
        deferred: Self = cls._wrapper(
            cls, (images, channels, height, width),
            (height * width * channels, 1, width * channels, channels),
        )  # fmt: skip
        deferred._finish, deferred._alone = finish, None
        return deferred

    def float_values(self) -> torch.Tensor:
        if self._alone is None:
            self._alone = self._finish(None)
        return self._alone

    @staticmethod
    def _added(deferred: Any, other: Any, *, alpha: Any = 1) -> torch.Tensor | None:
        """Compute the sum within the layer, if one operand is deferred."""
        if not isinstance(deferred, DeferredOutput) or deferred.written is not None:
            deferred, other = other, deferred
        usable = isinstance(deferred, DeferredOutput) and deferred.written is None
        if not usable or alpha != 1 or not isinstance(other, torch.Tensor):
            return None
        if other.shape != deferred.shape or other.dtype is not torch.float32:
            return None
        term = other.dense() if isinstance(other, HeldTensor) else other
        total: torch.Tensor = deferred._finish(term)
        return total

    @staticmethod
    def _add_(target: Any, other: Any, *, alpha: Any = 1) -> torch.Tensor | None:
        """Compute the sum in place: `target` is replaced by it."""
        if not isinstance(target, DeferredOutput):
            return None
        total = DeferredOutput._added(target, other, alpha=alpha)
        if isinstance(total, HeldTensor):
            target.replacement = total
        elif total is not None:
            target.written = total
        return total


def _of_codes(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Restrict `operator` to a `CodedTensor`; return None for others."""
    return lambda x, *args, **kwargs: (
        operator(x, *args, **kwargs) if isinstance(x, CodedTensor) else None
    )


_OPERATORS: dict[Any, Callable[..., torch.Tensor | None]] = {
    _aten.relu.default: _of_codes(CodedTensor._relu),
    _aten.relu_.default: _of_codes(CodedTensor._relu_),
    _aten.hardtanh.default: _of_codes(CodedTensor._hardtanh),
    _aten.hardtanh_.default: _of_codes(CodedTensor._hardtanh_),
    _aten.clone.default: _of_codes(CodedTensor._cloned),
    _aten._unsafe_view.default: _of_codes(CodedTensor._reshaped),
    _aten.cat.default: CodedTensor._joined,
    _aten.add.Tensor: DeferredOutput._added,
    _aten.add_.Tensor: DeferredOutput._add_,
}


def _is_nhwc(codes: torch.Tensor) -> bool:
    return codes.dim() == 4 and codes.permute(0, 2, 3, 1).is_contiguous()


@functools.lru_cache(maxsize=1024)
def pooled_size(shape: Convolution, up: bool) -> tuple[int, int] | None:
    """Return height and width after torch's pooling; None if torch rejects the window.

    Args:
        up: whether sizes are rounded up.
    """
    window = (shape.kernel, shape.stride, shape.padding, shape.dilation, up)
    try:
        pooled = _POOLS[1](torch.empty((1, *shape.image[1:3]), device="meta"), *window)
    except RuntimeError:
        return None
    return pooled.shape[1], pooled.shape[2]
