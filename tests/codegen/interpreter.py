"""A plain interpreter of `Program`: the reference for generated code."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import numpy as np

from slipstream.codegen.ops import OPS
from slipstream.codegen.program import (
    Apply,
    Axis,
    Const,
    Expr,
    Index,
    Load,
    Program,
    Statement,
)  # fmt: skip

Arrays = dict[str, np.ndarray]


def run(program: Program, arrays: Arrays, symbols: Mapping[str, int] | None = None) -> Arrays:
    """Execute a program on flat arrays of its buffers, changed in place, and return them."""
    _execute(program, list(range(len(program.statements))), dict(symbols or {}), 0, arrays)
    return arrays


def _execute(
    program: Program, numbers: list[int], values: dict[str, int], depth: int, arrays: Arrays
) -> None:
    """Execute consecutive statements that share `depth` sequential loops."""
    while numbers:
        last = 1
        while last < len(numbers) and program.shared(numbers[0], numbers[last]) > depth:
            last += 1
        group, numbers = numbers[:last], numbers[last:]
        if len(group) == 1:
            _statement(program, program.statements[group[0]], values, arrays)
            continue
        axis = program.axis[program.statements[group[0]].axes[depth]]
        for value in range(_extent(axis.extent, values)):
            _execute(program, group, {**values, axis.name: value}, depth + 1, arrays)


def _statement(
    program: Program, statement: Statement, values: dict[str, int], arrays: Arrays
) -> None:
    axes = [program.axis[name] for name in statement.axes if name not in values]
    outer = [axis for axis in axes if axis.kind != "reduce"]
    inner = [axis for axis in axes if axis.kind == "reduce"]
    for at in _points(outer, values):
        terms = [
            _value(program, statement.value, point, arrays)
            for point in _points(inner, at)
            if all(_affine(limit, point) >= 0 for limit in statement.where)
        ]
        if terms:
            combine = max if statement.reduce == "max" else sum
            arrays[statement.target][_affine(statement.index, at)] = combine(terms)


def _points(axes: list[Axis], values: dict[str, int]) -> Iterator[dict[str, int]]:
    for point in itertools.product(*(range(_extent(a.extent, values)) for a in axes)):
        yield values | dict(zip((a.name for a in axes), point, strict=True))


def _extent(extent: object, values: Mapping[str, int]) -> int:
    return extent if isinstance(extent, int) else values[extent.name]  # type: ignore[attr-defined]


def _affine(index: Index, at: Mapping[str, int]) -> int:
    return index.offset + sum(k * at[name] for name, k in index.terms)


def _value(program: Program, value: Expr, at: Mapping[str, int], arrays: Arrays) -> float:
    if isinstance(value, Const):
        return value.value
    if isinstance(value, Load):
        element = _affine(value.index, at)
        if value.index.through is not None:
            table, inner = value.index.through
            row = int(arrays[table][_affine(inner, at)])
            element += row * program.buffer[value.buffer].strides[0]
        return float(arrays[value.buffer][element])
    assert isinstance(value, Apply), "a program of the walker draws no random numbers"
    return OPS[value.op].fold(*(_value(program, a, at, arrays) for a in value.args))
