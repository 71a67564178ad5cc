"""`Call`: one operator with the shapes, strides, dtypes and scalars it was called with.

Durations are looked up by call: two calls with the same key take the same time on the same
machine, up to the state of the caches.

`Resize` derives the calls of a step at a number of samples that was never run, from two that were.
The operators of a step hardly ever depend on the number of samples; their integer arguments do, and
nearly all of them linearly: extents, strides, sizes of views, divisors of losses. Two recorded
forms of a call determine both coefficients, even if batch and layer happen to be equally wide.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

ITEM_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2,
    "int8": 1, "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip


@dataclass(frozen=True)
class TensorSpec:
    """A tensor without its values: ``dtype`` as torch prints it, shape and strides in elements."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: str = "cpu"

    @cached_property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of the elements, in bytes."""
        return self.numel * ITEM_BYTES.get(self.dtype, 4)

    def as_dtype(self, dtype: str) -> TensorSpec:
        """Return the tensor in another dtype."""
        return replace(self, dtype=dtype)

    def resized(self, shape: Sequence[int]) -> TensorSpec:
        """Return a dense tensor of another shape, with dimensions in the same order in memory.

        Dimensions with stride 0 stay expanded.
        """
        strides, size = [0] * len(shape), 1
        for axis in sorted(range(len(shape)), key=lambda axis: (self.strides[axis], -axis)):
            if self.strides[axis]:
                strides[axis], size = size, size * shape[axis]
        return replace(self, shape=tuple(shape), strides=tuple(strides))


Argument = Any
"""A `TensorSpec`, a list of them, or a JSON scalar or list."""


@dataclass(frozen=True)
class Call:
    """An operator call.

    Attributes:
        op: the schema, ``"aten::mm(Tensor self, Tensor mat2) -> Tensor"``.
        arguments: one per argument of the schema, in order.
        outputs: the tensors it returned.
    """

    op: str
    arguments: tuple[Argument, ...]
    outputs: tuple[TensorSpec, ...] = ()

    @cached_property
    def name(self) -> str:
        """``aten::add`` without overload and arguments."""
        return self.op.partition("(")[0].partition(".")[0]

    @cached_property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The tensors among the arguments, lists flattened, in order."""
        return tuple(_tensors(self.arguments))

    @property
    def moved_bytes(self) -> int:
        """The size of the tensors that the call reads and writes, in bytes."""
        return sum(spec.nbytes for spec in (*self.inputs, *self.outputs))

    @cached_property
    def key(self) -> str:
        """The identity of the call: canonical JSON of operator and arguments."""
        return json.dumps([self.op, encode(self.arguments)], separators=(",", ":"))

    def with_inputs(self, inputs: Sequence[TensorSpec]) -> Call:
        """Return the call with other tensors for `inputs`, in their order."""
        queue = iter(inputs)
        arguments = _map_tensors(self.arguments, lambda spec: next(queue))
        return Call(self.op, tuple(arguments), self.outputs)

    def with_dtypes(self, dtypes: Sequence[str], outputs: Sequence[str] | None = None) -> Call:
        """Return the call with other dtypes for `inputs` (in their order) and `outputs`."""
        pairs = zip(self.inputs, dtypes, strict=True)
        changed = self.with_inputs([spec.as_dtype(dtype) for spec, dtype in pairs])
        if outputs is None:
            return changed
        returned = zip(self.outputs, outputs, strict=True)
        return replace(changed, outputs=tuple(spec.as_dtype(dtype) for spec, dtype in returned))

    def to_json(self) -> list[Any]:
        """Return JSON for `from_json`."""
        return [self.op, encode(self.arguments), encode(self.outputs)]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> Call:
        """Return the call that `to_json` encoded.

        Raises:
            KeyError, TypeError, ValueError: `value` is not a call.
        """
        op, arguments, outputs = value
        return cls(str(op), tuple(decode(arguments)), tuple(decode(outputs)))

    def check(self) -> None:
        """Check arguments and outputs against the schema, if `op` has one.

        Raises:
            ValueError: the number or types of the arguments do not match the schema.
        """
        kinds = _argument_kinds(self.op)
        if kinds is not None and len(kinds) != len(self.arguments):
            raise ValueError(
                f"{self.op} takes {len(kinds)} arguments, but got {len(self.arguments)}"
            )
        for kind, argument in zip(kinds or (), self.arguments, strict=False):
            if not isinstance(argument, kind):
                raise ValueError(f"{argument!r:.80} is not a valid argument of {self.op}")
        if not all(isinstance(output, TensorSpec) for output in self.outputs):
            raise ValueError(f"an output of {self.op} is not a tensor")


@cache
def _argument_kinds(op: str) -> tuple[tuple[type, ...], ...] | None:
    """Return the allowed types of each argument of the schema `op`; None without a schema."""
    declared, arrow, _ = op.partition("(")[2].rpartition(") ->")
    if not arrow:
        return None
    kinds: list[tuple[type, ...]] = []
    for parameter in filter(None, declared.replace("*, ", "").split(", ")):
        kind = parameter.partition(" ")[0]
        if "[" in kind:
            # torch also accepts a single value.
            types: tuple[type, ...] = (tuple, int, float)
        elif kind.startswith("Tensor"):
            # All but the first may also be a number or undefined.
            types = (TensorSpec, int, float, type(None)) if kinds else (TensorSpec,)
        else:
            types = _SCALARS.get(kind.rstrip("?"), (object,))
        kinds.append((*types, type(None)) if "?" in kind else types)
    return tuple(kinds)


_SCALARS: dict[str, tuple[type, ...]] = {
    "int": (int,), "SymInt": (int,), "bool": (int,), "float": (int, float), "str": (str,),
    "Scalar": (int, float, str),
}  # fmt: skip


def cast(spec: TensorSpec, dtype: str) -> Call:
    """Return the copy of a tensor to another dtype that autocast makes: dense, same format."""
    schema = (
        "aten::_to_copy(Tensor self, *, ScalarType? dtype=None, Layout? layout=None, "
        "Device? device=None, bool? pin_memory=None, bool non_blocking=False, "
        "MemoryFormat? memory_format=None) -> Tensor"
    )
    arguments = (spec, SCALAR_TYPE[dtype], None, None, None, False, None)
    return Call(schema, arguments, (spec.as_dtype(dtype),))


SCALAR_TYPE = {
    "uint8": 0, "int8": 1, "int16": 2, "int32": 3, "int64": 4, "float16": 5, "float32": 6,
    "float64": 7, "complex64": 9, "complex128": 10, "bool": 11, "bfloat16": 15,
}  # fmt: skip
"""The c10::ScalarType of each dtype, which operators take as an integer."""


def _tensors(arguments: Sequence[Argument]) -> Iterator[TensorSpec]:
    for argument in arguments:
        if isinstance(argument, TensorSpec):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _tensors(argument)


def _map_tensors(
    arguments: Sequence[Argument], change: Callable[[TensorSpec], TensorSpec]
) -> list[Argument]:
    mapped: list[Argument] = []
    for argument in arguments:
        if isinstance(argument, TensorSpec):
            mapped.append(change(argument))
        elif isinstance(argument, (list, tuple)):
            mapped.append(tuple(_map_tensors(argument, change)))
        else:
            mapped.append(argument)
    return mapped


def encode(value: Argument) -> Any:
    """Return JSON in which tensors are ``{"t": [dtype, shape, strides, device]}``."""
    if isinstance(value, TensorSpec):
        return {"t": [value.dtype, list(value.shape), list(value.strides), value.device]}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"f": str(value)}
    return value


def decode(value: Any) -> Argument:
    """Invert `encode`."""
    if isinstance(value, dict):
        if "f" in value:
            return float(value["f"])
        dtype, shape, strides, device = value["t"]
        if not isinstance(dtype, str) or not isinstance(device, str):
            raise TypeError(f"dtype {dtype!r:.40} or device {device!r:.40} is not a string")
        return TensorSpec(dtype, tuple(map(int, shape)), tuple(map(int, strides)), device)
    if isinstance(value, list):
        return tuple(decode(item) for item in value)
    return value


class _OtherFormError(Exception):
    """The two recorded forms of a call differ in more than integers."""


@dataclass(frozen=True)
class Resize:
    """Extrapolation from steps of `recorded` and `other` samples to `target` samples.

    `recorded` and `other` must differ.
    """

    recorded: int
    other: int
    target: int

    @property
    def factor(self) -> float:
        """The ratio of target to recorded samples."""
        return self.target / self.recorded

    def number(self, recorded: int, other: int) -> int:
        """Extrapolate an integer from the two recorded steps to the target.

        Linear, except for values that grow with the square, such as pairs of samples.
        """
        squares = recorded * self.other**2 == other * self.recorded**2
        if recorded and squares and recorded != other:
            return round(recorded * self.factor**2)
        slope = (recorded - other) / (self.recorded - self.other)
        fitted = round(recorded + slope * (self.target - self.recorded))
        # A line through both points may reach 0, but an operator cannot run on an empty extent.
        return fitted if min(recorded, other) < 0 else max(fitted, min(recorded, other, 1))

    def tensor(self, recorded: TensorSpec, other: TensorSpec) -> TensorSpec:
        """Return the tensor in the target step; `recorded` if the two differ in dtype or rank."""
        try:
            return self._tensor(recorded, other)
        except _OtherFormError:
            return recorded

    def call(self, recorded: Call, other: Call) -> Call | None:
        """Return the call in the target step; None if its forms differ in more than integers."""
        if recorded.op != other.op:
            return None
        try:
            arguments = self._each(recorded.arguments, other.arguments)
            outputs = self._each(recorded.outputs, other.outputs)
        except _OtherFormError:
            return None
        if arguments == recorded.arguments and outputs == recorded.outputs:
            return recorded
        return Call(recorded.op, arguments, outputs)

    def _each(self, recorded: Sequence[Any], other: Sequence[Any]) -> tuple[Any, ...]:
        if len(recorded) != len(other):
            raise _OtherFormError
        return tuple(self._argument(*pair) for pair in zip(recorded, other, strict=True))

    def _argument(self, recorded: Argument, other: Argument) -> Argument:
        if isinstance(recorded, (list, tuple)) and isinstance(other, (list, tuple)):
            return self._each(recorded, other)
        if isinstance(recorded, TensorSpec) and isinstance(other, TensorSpec):
            return self._tensor(recorded, other)
        if type(recorded) is not type(other) or isinstance(recorded, TensorSpec):
            raise _OtherFormError
        if isinstance(recorded, int) and not isinstance(recorded, bool):
            return self.number(recorded, other)
        # Floats (such as one over the number of samples) and flags do not determine sizes.
        return recorded

    def _tensor(self, recorded: TensorSpec, other: TensorSpec) -> TensorSpec:
        if recorded.dtype != other.dtype:
            raise _OtherFormError
        return replace(
            recorded,
            shape=self._each(recorded.shape, other.shape),
            strides=self._each(recorded.strides, other.strides),
        )
