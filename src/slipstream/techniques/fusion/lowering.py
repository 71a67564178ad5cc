"""Lower the operators of a region to a `Nest`: choose rows and columns, and locate tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from slipstream.codegen.rows import (
    Access,
    Nest,
    RowStatement,
    Shape,
    Store,
    UnsupportedError,
    access,
    broadcast,
    cut,
    refinement,
)
from slipstream.codegen.rows_triton import tiling
from slipstream.graph import Call, TensorSpec
from slipstream.graph.traffic import short_name
from slipstream.surgery.fx import Source
from slipstream.techniques.fusion import operators

_DTYPES = ("float32", "bfloat16", "float64", "bool", "uint8")
# Triton also supports float16.
_DEVICE_DTYPES = (*_DTYPES, "float16")
_DEVICES = ("cpu", "cuda")
_REDUCTIONS = ("sum", "mean", "amax")
_MIN_COLUMNS = 256
DROPOUT, JOIN = "dropout", "cat"


@dataclass(frozen=True)
class RegionOp:
    """An operator of a region.

    Attributes:
        inputs, outputs: a value per tensor of the call.
        sources: a source per input.
    """

    call: Call
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    sources: tuple[Source, ...]

    @property
    def name(self) -> str:
        return short_name(self.call)

    @property
    def shape(self) -> Shape:
        """Shape of the iteration space."""
        tensors = [*self.call.outputs, *self.call.inputs]
        return max(tensors, key=lambda spec: spec.numel).shape


@dataclass(frozen=True)
class Region:
    """Operators with their loops.

    Attributes:
        reads: ``Source.value`` of each of the nest's inputs.
        makes: the value of each of its outputs.
    """

    steps: tuple[RegionOp, ...]
    nest: Nest
    reads: tuple[Any, ...]
    makes: tuple[int, ...]


def columns_of(step: RegionOp) -> int | None:
    """Return the number of columns that an operator requires; None if any number is possible.

    Raises:
        UnsupportedError: it reduces neither the innermost dimensions nor all others.
    """
    call, name = step.call, step.name
    if name in ("native_layer_norm", "native_layer_norm_backward"):
        return math.prod(call.arguments[1 if name == "native_layer_norm" else 2])
    if "softmax" in name:
        dim = call.arguments[1 if "backward" not in name else 2]
        shape = call.inputs[0].shape
        if not shape or dim % len(shape) != len(shape) - 1:
            raise UnsupportedError("a softmax over an outer dimension")
        return shape[-1]
    if name == JOIN:
        return call.outputs[0].shape[-1] // parts_of(step)
    if name in _REDUCTIONS:
        shape = call.inputs[0].shape
        over = _reduced_dims(call)
        first = [dim for dim in range(len(shape)) if dim not in over]
        if over == set(range(len(first), len(shape))) and first:
            return math.prod(shape[dim] for dim in over)
        if over == set(range(len(over))) and first:
            return math.prod(shape[dim] for dim in first)
        raise UnsupportedError("a reduction over dimensions between others")
    return None


def parts_of(step: RegionOp) -> int:
    """Return the number of equal parts that an operator concatenates along the innermost dimension.

    Raises:
        UnsupportedError: the parts differ in size, or it concatenates along another dimension.
    """
    shape, dim = step.call.outputs[0].shape, step.call.arguments[1]
    if not shape or dim % len(shape) != len(shape) - 1:
        raise UnsupportedError("a concatenation along an outer dimension")
    if len({spec.shape for spec in step.call.inputs}) != 1 or len(step.call.inputs) < 2:
        raise UnsupportedError("a concatenation of parts of different sizes")
    return len(step.call.inputs)


def reduces_columns(step: RegionOp) -> bool:
    """Whether an operator reduces each row to a value."""
    if step.name not in _REDUCTIONS:
        return False
    return len(step.call.inputs[0].shape) - 1 in _reduced_dims(step.call)


def _reduced_dims(call: Call) -> set[int]:
    shape = call.inputs[0].shape
    dims = call.arguments[1] if len(call.arguments) > 1 else None
    if isinstance(dims, int) and not isinstance(dims, bool):
        dims = (dims,)
    if not isinstance(dims, (tuple, list)) or not dims:
        return set(range(len(shape)))
    return {dim % len(shape) for dim in dims}


def _dtypes(device: str) -> tuple[str, ...]:
    return _DTYPES if device == "cpu" else _DEVICE_DTYPES


def can_lower(step: RegionOp) -> bool:
    """Whether an operator may be part of a nest, judged by the operator alone."""
    tensors = (*step.call.inputs, *step.call.outputs)
    if step.name not in (DROPOUT, JOIN, *_REDUCTIONS) and not operators.has_rule(step.name):
        return False
    if step.name == DROPOUT:
        tensors = (step.call.inputs[0], *step.call.outputs)
    device = tensors[0].device if tensors else ""
    if device not in _DEVICES or any(spec.device != device for spec in tensors):
        return False
    if any(spec.dtype not in _dtypes(device) for spec in tensors):
        return False
    # For a half-precision input and float32 weights, torch's CPU kernel returns statistics in
    # float32, but its fake kernel, and so the traced graph, in the dtype of the input.
    norm = step.name.startswith("native_layer_norm") and device == "cpu"
    if norm and len({spec.dtype for spec in step.call.inputs}) > 1:
        return False
    if not step.call.outputs or not any("float" in spec.dtype for spec in tensors):
        return False
    try:
        columns = columns_of(step)
    except UnsupportedError:
        return False
    return columns is None or columns > 1


@dataclass(frozen=True)
class _Numbered:
    """A step with values numbered within its region, so that equal regions compare equal."""

    call: Call = field(compare=False)
    key: str
    specs: tuple[TensorSpec, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    sources: tuple[Source, ...]


def lower(steps: Sequence[RegionOp], makes: Sequence[int]) -> Region:
    """Lower a region to loops.

    Args:
        makes: values that the region writes.

    Raises:
        UnsupportedError: it cannot be lowered; `operation` is the index of the step responsible.
    """
    numbers: dict[Any, int] = {}

    def numbered(values: Iterable[Any]) -> tuple[int, ...]:
        return tuple(numbers.setdefault(value, len(numbers)) for value in values)

    renumbered = tuple(
        _Numbered(
            step.call, step.call.key, step.call.outputs, numbered(step.inputs),
            numbered(step.outputs),
            tuple(Source(numbered([s.value])[0], s.spec, s.start) for s in step.sources),
        )
        for step in steps
    )  # fmt: skip
    lowered = _lowered(renumbered, numbered(makes))
    if isinstance(lowered, UnsupportedError):
        raise UnsupportedError(str(lowered), lowered.operation)
    values = list(numbers)
    reads = tuple(values[number] for number in lowered.reads)
    return Region(tuple(steps), lowered.nest, reads, tuple(makes))


@lru_cache(maxsize=4096)
def _lowered(numbered: tuple[_Numbered, ...], makes: tuple[int, ...]) -> Region | UnsupportedError:
    """Lower a region, cached: the layers of a model have equal regions."""
    steps = [RegionOp(step.call, step.inputs, step.outputs, step.sources) for step in numbered]
    try:
        return _lower(steps, makes)
    except UnsupportedError as error:
        # A cached traceback would keep frames alive.
        return error.with_traceback(None)


def _lower(steps: Sequence[RegionOp], makes: Sequence[int]) -> Region:
    """Lower a region; if it has a concatenation and fails, blame that."""
    joins = [number for number, step in enumerate(steps) if step.name == JOIN]
    try:
        return _lower_in_parts(steps, makes, parts_of(steps[joins[0]]) if joins else 1)
    except UnsupportedError as error:
        if joins:
            error.operation = joins[0]
        raise


def _lower_in_parts(steps: Sequence[RegionOp], makes: Sequence[int], parts: int) -> Region:
    required = None
    for number, step in enumerate(steps):
        columns = columns_of(step)
        if columns is not None and required is not None and columns != required:
            raise UnsupportedError(f"{columns} columns where others have {required}", number)
        required = required if columns is None else columns
    size = max(math.prod(step.shape) for step in steps) // parts
    last: UnsupportedError | None = None
    for columns in [required] if required else _candidates(steps, size):
        if size % columns or columns < 2:
            continue
        try:
            return _Builder(steps, size // columns, columns, parts).build(makes)
        except UnsupportedError as error:
            last = error
    raise last or UnsupportedError("no number of columns divides it")


def _candidates(steps: Sequence[RegionOp], size: int) -> list[int]:
    """Return numbers of columns to try: the fewest that fill vectors first, to get many rows."""
    shapes = [step.shape for step in steps if math.prod(step.shape) == size]
    extents = refinement(shapes) or ()
    sizes, product = [], 1
    for extent in reversed(extents):
        product *= extent
        sizes.append(product)
    enough = [size for size in sizes if size >= _MIN_COLUMNS]
    return [*enough, *reversed([size for size in sizes if size < _MIN_COLUMNS])]


class _Builder:
    """Builds the nest of a region, operator by operator.

    If operators concatenate `parts` of rows, the columns of the nest are those of a part, and a
    tensor with all columns is a statement per part. Splitting and concatenating then only select
    statements.
    """

    def __init__(self, steps: Sequence[RegionOp], rows: int, columns: int, parts: int) -> None:
        self._steps, self._parts = steps, parts
        tensors = [s for step in steps for s in (*step.call.inputs, *step.call.outputs)]
        double = any(spec.dtype == "float64" for spec in tensors)
        device = steps[0].call.outputs[0].device
        if any(spec.device != device for spec in tensors):
            raise UnsupportedError("tensors on two devices")
        self.nest = Nest(rows, columns, "double" if double else "float", device)
        self._extents, self._inner = self._cut_extents()
        self._statements: dict[int, tuple[int, ...]] = {}
        self._columns: dict[int, int] = {}
        self._specs: dict[int, TensorSpec] = {}
        self._external: dict[tuple[Any, int, tuple[int, ...]], int] = {}
        self._reads: list[Any] = []

    def _in_parts(self, shape: Shape) -> bool:
        """Whether a tensor of a shape has the columns of all parts.

        Raises:
            UnsupportedError: it has, but not along its innermost dimension.
        """
        columns = self.nest.columns * self._parts
        if self._parts == 1 or math.prod(shape) != self.nest.rows * columns:
            return False
        if shape[-1] != columns:
            raise UnsupportedError("parts of a tensor with other columns")
        return True

    def _part(self, shape: Shape) -> Shape:
        """Return the shape of a part if the shape has several, else the shape."""
        return (*shape[:-1], self.nest.columns) if self._in_parts(shape) else shape

    def _cut_extents(self) -> tuple[tuple[int, ...], int]:
        """Return the finest common dimensions, and how many of the last are columns."""
        rows, columns = self.nest.rows, self.nest.columns
        shapes: list[Shape] = [(rows, columns)]
        for step in self._steps:
            for full in (step.shape, *(spec.shape for spec in step.call.outputs)):
                shape = self._part(full)
                if math.prod(shape) == rows * columns:
                    shapes.append(shape)
                elif math.prod(shape) == rows:
                    shapes.append((*(e for e in shape if e != 1), columns))
        extents = refinement(shapes)
        if extents is None:
            raise UnsupportedError("shapes without common dimensions")
        inner, product = 0, 1
        while product < columns:
            inner += 1
            product *= extents[-inner]
        return extents, inner

    def _strides(self, spec: TensorSpec, full: Shape) -> tuple[list[int], int]:
        """Return a tensor's strides over the finest dimensions, in an operator of shape `full`.

        Also return the distance between its parts in elements, or 0.
        """
        strides, shape = broadcast(spec, full), self._part(full)
        between = strides[-1] * self.nest.columns if self._in_parts(full) else 0
        size = math.prod(shape)
        outer = self._extents[: len(self._extents) - self._inner]
        if size == self.nest.rows * self.nest.columns:
            cut_strides = cut(shape, strides, self._extents)
        elif size == self.nest.rows:
            pairs = [(e, s) for e, s in zip(shape, strides, strict=True) if e != 1]
            cut_strides = cut(tuple(e for e, _ in pairs), tuple(s for _, s in pairs), outer)
            cut_strides += [0] * self._inner
        elif size == 1:
            cut_strides = [0] * len(self._extents)
        else:
            raise UnsupportedError(f"{shape} matches neither rows and columns nor rows")
        return cut_strides, between

    def build(self, makes: Sequence[int]) -> Region:
        for number, step in enumerate(self._steps):
            try:
                self._step(step)
            except UnsupportedError as error:
                if error.operation < 0:
                    error.operation = number
                raise
        for value in makes:
            self.nest.stores.extend(self._store(value))
        if self.nest.device != "cpu":
            tiling(self.nest)
        return Region(tuple(self._steps), self.nest, tuple(self._reads), tuple(makes))

    def _step(self, step: RegionOp) -> None:
        call, shape = step.call, step.shape
        if step.name == DROPOUT:
            results: Sequence[Any] = [(self._dropout(step, shape),)]
        elif step.name == JOIN:
            parts = zip(step.inputs, call.inputs, step.sources, strict=True)
            joined = [self._operand(*part, part[1].shape) for part in parts]
            results = [tuple(numbers[0] for numbers in joined)]
        else:
            tensors = iter(zip(step.inputs, call.inputs, step.sources, strict=True))
            arguments = [self._argument(value, tensors, shape) for value in call.arguments]
            count = self._parts if self._in_parts(shape) else 1
            if step.name in _REDUCTIONS and count > 1:
                raise UnsupportedError("a sum of parts")
            by_part = [self._lowered(step, _of_part(arguments, part)) for part in range(count)]
            results = [
                output[0] if isinstance(output[0], operators.Column) else output
                for output in zip(*by_part, strict=True) if output[0] is not None
            ]  # fmt: skip
        for value, spec, lowered in zip(step.outputs, call.outputs, results, strict=False):
            if isinstance(lowered, operators.Column):
                self._columns[value] = lowered.value
            else:
                self._statements[value] = lowered
            self._specs[value] = spec

    def _lowered(self, step: RegionOp, arguments: Sequence[Any]) -> operators.Result:
        if step.name in _REDUCTIONS:
            over_rows = 0 in _reduced_dims(step.call) and self._is_outer(step.call)
            return operators.reduced(self.nest, step.name, arguments[0], over_rows)
        return operators.lower(self.nest, step.name, arguments)

    def _is_outer(self, call: Call) -> bool:
        reduced = math.prod(call.inputs[0].shape[dim] for dim in _reduced_dims(call))
        return call.inputs[0].numel // max(reduced, 1) == self.nest.columns

    def _argument(
        self, value: Any, tensors: Iterator[tuple[int, TensorSpec, Source]], shape: Shape
    ) -> Any:
        if isinstance(value, TensorSpec):
            return _Parts(self._operand(*next(tensors), shape))
        if isinstance(value, tuple) and any(isinstance(item, TensorSpec) for item in value):
            raise UnsupportedError("an operator on a list of tensors")
        return value

    def _operand(
        self, value: int, spec: TensorSpec, source: Source, shape: Shape
    ) -> tuple[int, ...]:
        """Return the statements of an operand of an operator of `shape`, one per part."""
        if value in self._columns:
            raise UnsupportedError("a sum over rows is used within the rows")
        broad = shape
        if math.prod(spec.shape) > math.prod(shape):
            broad = spec.shape
        aligned = self._aligned(spec, broad)
        strides, between = self._strides(spec, aligned)
        count = self._parts if self._in_parts(aligned) else 1
        if value not in self._statements:
            return tuple(self._load(source, spec, strides, n * between) for n in range(count))
        numbers = self._statements[value]
        stored = self._specs[value]
        extent = self.nest.statements[numbers[0]].extent
        stored_strides, stored_between = self._strides(stored, stored.shape)
        if extent == "row" and math.prod(stored.shape) == self.nest.rows * self.nest.columns:
            return numbers
        if stored_strides != strides and extent != "one":
            raise UnsupportedError("a value of the region is read in another order")
        if len(numbers) > count and math.prod(spec.shape) < math.prod(stored.shape):
            if source.start is None or source.start % stored_between:
                raise UnsupportedError("a part at an unknown offset")
            return (numbers[source.start // stored_between],)
        return numbers

    def _aligned(self, spec: TensorSpec, shape: Shape) -> Shape:
        """Return the operator's shape if the operand is broadcast to it, else the operand's."""
        return shape if len(spec.shape) <= len(shape) else spec.shape

    def _load(self, source: Source, spec: TensorSpec, strides: list[int], offset: int) -> int:
        if spec.dtype not in _dtypes(self.nest.device):
            raise UnsupportedError(f"elements of {spec.dtype}")
        start = (source.start or 0) + offset
        key = source.value, start, tuple(strides)
        if key not in self._external:
            place = access(strides, self._extents, self._inner, start)
            if place is None:
                raise UnsupportedError("columns without a constant stride")
            self.nest.inputs.append(source.spec)
            self.nest.reads.append(place)
            self._reads.append(source.value)
            number = len(self.nest.inputs) - 1
            extent = "full" if place.column else "row" if any(s for _, s in place.rows) else "one"
            self._external[key] = self.nest.put(RowStatement("load", (), extent, 0, number))  # type: ignore[arg-type]
        return self._external[key]

    def _dropout(self, step: RegionOp, shape: Shape) -> int:
        """Multiply by factors drawn from the seed; elements are numbered in memory order."""
        if self._parts > 1:
            raise UnsupportedError("dropout of parts")
        (x,) = self._operand(step.inputs[0], step.call.inputs[0], step.sources[0], shape)
        contiguous = _contiguous(shape)
        if self.nest.statements[x].extent != "full":
            raise UnsupportedError("dropout of a value that is constant within a row")
        if cut(shape, contiguous, self._extents) != cut(
            (self.nest.rows, self.nest.columns), (self.nest.columns, 1), self._extents
        ):
            raise UnsupportedError("dropout in another order than that in memory")
        self.nest.inputs.append(step.sources[1].spec)
        self.nest.reads.append(Access((), 1, step.sources[1].start or 0))
        self._reads.append(step.sources[1].value)
        p = float(step.call.arguments[2])
        drawn = self.nest.put(RowStatement(f"draw {p!r}", (), "full", 0, len(self.nest.inputs) - 1))
        return self.nest.add("keep({0}, {1})", x, drawn)

    def _store(self, value: int) -> list[Store]:
        spec = self._specs[value]
        if spec.dtype not in _dtypes(self.nest.device):
            raise UnsupportedError(f"elements of {spec.dtype}")
        if spec.dtype == "uint8":
            raise UnsupportedError("integers as results")
        number = len(self.nest.outputs)
        self.nest.outputs.append(spec)
        if value in self._columns:
            if spec.numel != self.nest.columns or not _dense(spec):
                raise UnsupportedError("a sum over rows with a layout that is not dense")
            self.nest.writes.append(Access((), 1))
            return [Store(self._columns[value], number, column=True)]
        strides, between = self._strides(spec, spec.shape)
        place = access(strides, self._extents, self._inner)
        if place is None:
            raise UnsupportedError("results with columns without a constant stride")
        self.nest.writes.append(place)
        return [
            Store(statement, number, start=n * between)
            for n, statement in enumerate(self._statements[value])
        ]


@dataclass(frozen=True)
class _Parts:
    """A tensor argument: a statement per part, or a single one for all parts."""

    statements: tuple[int, ...]


def _of_part(arguments: Sequence[Any], part: int) -> list[Any]:
    return [
        operators.Tensor(argument.statements[min(part, len(argument.statements) - 1)])
        if isinstance(argument, _Parts) else argument
        for argument in arguments
    ]  # fmt: skip


def _contiguous(shape: Shape) -> Shape:
    strides, product = [], 1
    for extent in reversed(shape):
        strides.append(product)
        product *= extent
    return tuple(reversed(strides))


def _dense(spec: TensorSpec) -> bool:
    pairs = zip(spec.shape, spec.strides, _contiguous(spec.shape), strict=True)
    return all(stride == dense for extent, stride, dense in pairs if extent != 1)


__all__ = ["Region", "RegionOp", "can_lower", "columns_of", "lower"]
