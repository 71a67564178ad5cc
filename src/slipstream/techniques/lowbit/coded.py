"""Tensors whose numbers are held as codes from one low-bit layer to the next.

Rounding does not change which of two numbers is the greater. What a layer rounds its input to can
therefore be made where the input is: ReLUs, maxima over windows, concatenations and changes of
shape then work on bytes, and give the very codes that rounding behind them would. A sum would not:
it is taken in float32 by the layer that makes one of its terms, and rounded as it is written.

Every other operator gets the float32 numbers, so that a tensor of these can go wherever one of
PyTorch's can.
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
    """A float32 tensor whose numbers PyTorch cannot see; what it cannot do gets them from `dense`.

    Attributes:
        written: the numbers, once something has written to them or may do so later.
        became: what it is now, since something was added to it in place.
    """

    written: torch.Tensor | None
    became: HeldTensor | None

    @staticmethod
    def _made(cls: type, shape: Sequence[int], strides: Sequence[int]) -> Any:
        held: Any = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, dtype=torch.float32
        )
        held.written, held.became = None, None
        return held

    def numbers(self) -> torch.Tensor:
        """What it holds as float32; may be memory of its own, which is not to be written to."""
        raise NotImplementedError

    def dense(self) -> torch.Tensor:
        """The numbers as a plain tensor, to be read."""
        if self.became is not None:
            return self.became.dense()
        return self.numbers() if self.written is None else self.written

    def codes_for(self, wanted: Codes) -> torch.Tensor | None:
        """The codes, where they are the ones that a layer wants."""
        return None if self.became is None else self.became.codes_for(wanted)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _POOLS:
                x = _now(args[0]) if isinstance(args[0], HeldTensor) else None
                pooled = x._max_pooled(*args[1:], **kwargs) if isinstance(x, CodedTensor) else None
                if pooled is not None:
                    return pooled
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = _each(_now, args), kwargs or {}
        operator = _OPERATORS.get(func)
        if operator is not None:
            output = operator(*args, **kwargs)
            if output is not None:
                return output
        schema = func._schema
        aliases = any(one.alias_info is not None for one in (*schema.arguments, *schema.returns))
        plain = _written if aliases else _dense
        held = args[0] if args else None
        out = func(*_each(plain, args), **{key: _each(plain, one) for key, one in kwargs.items()})
        # What has been written to is what it was, under the same name.
        return held if isinstance(held, HeldTensor) and out is held.written else out

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.dense()!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dense().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.dense().clone()


def _each(change: Callable[[HeldTensor], Any], value: Any) -> Any:
    """`change` of every held tensor in an operator's argument."""
    if isinstance(value, HeldTensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)([_each(change, one) for one in value])
    return value


def _now(one: HeldTensor) -> HeldTensor:
    return one if one.became is None else one.became


def _dense(one: HeldTensor) -> torch.Tensor:
    return one.dense()


def _written(one: HeldTensor) -> torch.Tensor:
    if one.written is None:
        one.written = one.numbers().clone()
    return one.written


class CodedTensor(HeldTensor):
    """Numbers as codes for the layers that will read them; and as they are, where others do.

    Attributes:
        codes: uint8, of the tensor's shape and strides.
        of: what they are codes of.
        exact: float32, the numbers before they were rounded; None where only layers with these
            codes are to read them: to others it then is what the codes stand for.
        clipped: no number is below 0.
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
        """See the class's attributes."""
        coded: Self = cls._made(cls, codes.shape, codes.stride())
        coded.codes, coded.of, coded.exact, coded.clipped = codes, of, exact, clipped
        return coded

    def numbers(self) -> torch.Tensor:
        """See `HeldTensor.numbers`."""
        if self.exact is not None:
            return self.exact
        return (self.codes.float() - self.of.zero) * self.of.scale

    def codes_for(self, wanted: Codes) -> torch.Tensor | None:
        """See `HeldTensor.codes_for`."""
        same = self.of is wanted or self.of == wanted
        return self.codes if same and self.written is None else None

    def _bare(self) -> bool:
        return self.written is None and self.exact is None

    # ---- operators on codes: None where it takes the numbers ----

    def _relu(self) -> torch.Tensor | None:
        """Every number below 0 becomes 0."""
        if self.written is not None:
            return None
        zero, codes, exact = self.of.zero, self.codes, self.exact
        if not self.clipped:
            codes = codes if zero == 0 else codes.clamp(min=zero)
            exact = None if exact is None else exact.relu()
        return CodedTensor(codes, self.of, exact, clipped=True)

    def _hardtanh(self, low: float = -1.0, high: float = 1.0) -> torch.Tensor | None:
        """Every number is held within `low` and `high`, as by a ReLU6."""
        if self.written is not None:
            return None
        ends = quantise(torch.tensor([low, high], dtype=torch.float32), self.of)[0].tolist()
        exact = None if self.exact is None else self.exact.clamp(low, high)
        return CodedTensor(self.codes.clamp(*ends), self.of, exact, self.clipped or low >= 0)

    def _relu_(self) -> torch.Tensor | None:
        """The same in place."""
        return self._becomes(CodedTensor._relu(self))

    def _hardtanh_(self, low: float = -1.0, high: float = 1.0) -> torch.Tensor | None:
        """The same in place."""
        return self._becomes(CodedTensor._hardtanh(self, low, high))

    def _becomes(self, other: torch.Tensor | None) -> torch.Tensor | None:
        if not isinstance(other, CodedTensor):
            return None
        self.codes, self.exact, self.clipped = other.codes, other.exact, other.clipped
        return self

    def _cloned(self, *, memory_format: Any = None) -> torch.Tensor | None:
        """A copy in another order."""
        if not self._bare():
            return None
        memory_format = torch.preserve_format if memory_format is None else memory_format
        return CodedTensor(
            self.codes.clone(memory_format=memory_format), self.of, clipped=self.clipped
        )

    def _reshaped(self, size: Any) -> torch.Tensor | None:
        """The same numbers in another shape, where nobody else sees them."""
        if not self._bare():
            return None
        return CodedTensor(self.codes.view(size), self.of, clipped=self.clipped)

    @staticmethod
    def _joined(tensors: Any, dim: int = 0) -> torch.Tensor | None:
        """One after the other along `dim`."""
        if not isinstance(tensors[0], CodedTensor):
            return None
        first = tensors[0]
        same = all(
            isinstance(one, CodedTensor) and one._bare() and one.of == first.of for one in tensors
        )
        if not same:
            return None
        parts = [one.codes for one in tensors]
        clipped = all(one.clipped for one in tensors)
        if dim == 1 and all(_is_nhwc(one) for one in parts):
            # Along the last dimension torch copies runs, and keeps the order.
            codes = torch.cat([one.permute(0, 2, 3, 1) for one in parts], 3).permute(0, 3, 1, 2)
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
        """The greatest number in each window."""
        if not self._bare() or return_indices or not _is_nhwc(self.codes):
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


class Unfinished(HeldTensor):
    """What a layer will give; if the next to happen is a sum, the layer takes it along.

    Args:
        out: images, height, width and channels of it; it lies in this order in memory.
        finish: gives the output, or given another term, what `after_sum` makes of their sum.
    """

    _finish: Callable[[torch.Tensor | None], torch.Tensor]
    _alone: torch.Tensor | None

    def __new__(
        cls,
        out: tuple[int, int, int, int],
        finish: Callable[[torch.Tensor | None], torch.Tensor],
    ) -> Self:
        """See the class's arguments."""
        images, height, width, channels = out
        unfinished: Self = cls._made(
            cls, (images, channels, height, width),
            (height * width * channels, 1, width * channels, channels),
        )  # fmt: skip
        unfinished._finish, unfinished._alone = finish, None
        return unfinished

    def numbers(self) -> torch.Tensor:
        """See `HeldTensor.numbers`."""
        if self._alone is None:
            self._alone = self._finish(None)
        return self._alone

    @staticmethod
    def _added(one: Any, other: Any, *, alpha: Any = 1) -> torch.Tensor | None:
        """The sum of both."""
        if not isinstance(one, Unfinished) or one.written is not None:
            one, other = other, one
        unfinished = isinstance(one, Unfinished) and one.written is None
        if not unfinished or alpha != 1 or not isinstance(other, torch.Tensor):
            return None
        if other.shape != one.shape or other.dtype is not torch.float32:
            return None
        term = other.dense() if isinstance(other, HeldTensor) else other
        total: torch.Tensor = one._finish(term)
        return total

    @staticmethod
    def _add_(one: Any, other: Any, *, alpha: Any = 1) -> torch.Tensor | None:
        """The sum of both, which `one` is from then on."""
        if not isinstance(one, Unfinished):
            return None
        total = Unfinished._added(one, other, alpha=alpha)
        if isinstance(total, HeldTensor):
            one.became = total
        elif total is not None:
            one.written = total
        return total


def _of_codes(operator: Callable[..., Any]) -> Callable[..., Any]:
    """`operator`, where what it is asked of is held as codes; else None."""
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
    _aten.add.Tensor: Unfinished._added,
    _aten.add_.Tensor: Unfinished._add_,
}


def _is_nhwc(codes: torch.Tensor) -> bool:
    return codes.dim() == 4 and codes.permute(0, 2, 3, 1).is_contiguous()


@functools.lru_cache(maxsize=1024)
def pooled_size(shape: Convolution, up: bool) -> tuple[int, int] | None:
    """Height and width after a pooling, in torch's way; None where torch knows a reason against.

    Args:
        up: whether sizes are rounded up.
    """
    window = (shape.kernel, shape.stride, shape.padding, shape.dilation, up)
    try:
        pooled = _POOLS[1](torch.empty((1, *shape.image[1:3]), device="meta"), *window)
    except RuntimeError:
        return None
    return pooled.shape[1], pooled.shape[2]
