"""Small programs for tests of the loop form, and compiled functions of them."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from slipstream.codegen import load
from slipstream.codegen.program import (
    Axis,
    Buffer,
    Index,
    Load,
    Program,
    Statement,
    apply,
    with_dtype,
)  # fmt: skip
from slipstream.codegen.schedule import Tree
from slipstream.codegen.walker import source
from slipstream.techniques.loops import generate

Arrays = dict[str, np.ndarray]


def matmul(m: int, n: int, k: int) -> Program:
    a, b, c = Buffer("a", (m, k)), Buffer("b", (k, n)), Buffer("c", (m, n), role="out")
    axes = (Axis("i", m), Axis("j", n), Axis("k", k, "reduce"))
    value = apply("mul", Load("a", a.at("i", "k")), Load("b", b.at("k", "j")))
    return Program(
        (a, b, c), axes, (Statement("c", c.at("i", "j"), value, ("i", "j", "k"), "sum"),)
    )


def seidel(steps: int, m: int, n: int) -> Program:
    a = Buffer("a", (m + 2, n + 2), role="inout")
    axes = tuple(
        Axis(name, extent, "sequential") for name, extent in (("t", steps), ("i", m), ("j", n))
    )
    near = [a.at({"i": 1, "": di}, {"j": 1, "": dj}) for di, dj in ((0, 1), (1, 0), (1, 2), (2, 1))]
    total = Load("a", near[0])
    for index in near[1:]:
        total = apply("add", total, Load("a", index))  # type: ignore[assignment]
    target = a.at({"i": 1, "": 1}, {"j": 1, "": 1})
    value = apply("mul", total, 0.25)
    return Program((a,), axes, (Statement("a", target, value, ("t", "i", "j")),))


def tiny_program(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> Program:
    """A random program whose iterations can be enumerated, in float64."""
    monkeypatch.setattr(generate, "_EXTENTS", (2, 3, 4, 5, 6, 7, 8))
    monkeypatch.setattr(generate, "_MIN_ITERATIONS", 12)
    monkeypatch.setattr(generate, "_MAX_ITERATIONS", 400)
    monkeypatch.setattr(generate, "TILE_SIZES", (2, 3, 4))
    return with_dtype(generate.random_program(rng), "float64")


def arrays_of(program: Program, symbols: Mapping[str, int] | None = None, seed: int = 0) -> Arrays:
    """Random values for every buffer; 0 for outputs."""
    rng, arrays = np.random.default_rng(seed), {}
    for buffer in program.buffers:
        shape = [e if isinstance(e, int) else (symbols or {})[e.name] for e in buffer.shape]
        size = 1 + sum((e - 1) * s for e, s in zip(shape, buffer.strides, strict=True))
        values = rng.uniform(0.5, 1.5, size)
        if buffer.role in ("out", "temp"):
            values[:] = 0
        arrays[buffer.name] = values.astype(buffer.dtype)
    return arrays


def executed(
    trees: Sequence[Tree], arrays: Arrays, symbols: Mapping[str, int] | None = None
) -> list[Arrays]:
    """Compile loop trees of one program and run each on a copy of the arrays."""
    library, results = load(source(trees), ("-O1",)), []
    for number, tree in enumerate(trees):
        copy = {name: array.copy() for name, array in arrays.items()}
        pointers = [copy[buffer.name].ctypes.data for buffer in tree.program.buffers]
        values = [(symbols or {})[name] for name in tree.program.symbols]
        getattr(library, f"loops_{number}")(
            (ctypes.c_void_p * len(pointers))(*pointers), (ctypes.c_int64 * len(values))(*values), 1
        )
        results.append(copy)
    return results


def element(name: str, *terms: tuple[str, int], offset: int = 0) -> Load:
    return Load(name, Index(terms, offset))
