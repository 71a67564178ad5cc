"""Loop nests of image processing, stencils and neural networks, as programs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from slipstream.techniques import loops
from slipstream.techniques.loops import Axis, Buffer, Load, Program, Statement, apply


def matmul(n: int) -> Program:
    """Return a square product."""
    return loops.einsum("ik,kj->ij", i=n, j=n, k=n)


def _at(buffer: Buffer, *indices: Any) -> Load:
    return Load(buffer.name, buffer.at(*indices))


def _sum(*values: Any) -> Any:
    return functools.reduce(lambda a, b: apply("add", a, b), values)


def blur(n: int = 1024) -> Program:
    """Return a box blur of 3 x 3 in two passes."""
    x, t, y = Buffer("x", (n + 2, n + 2)), Buffer("t", (n + 2, n), role="out"), Buffer(
        "y", (n, n), role="out")  # fmt: skip
    rows = _sum(*(_at(x, "i", {"j": 1, "": d}) for d in range(3)))
    columns = _sum(*(_at(t, {"u": 1, "": d}, "v") for d in range(3)))
    third = 1 / 3
    return Program(
        (x, t, y), (Axis("i", n + 2), Axis("j", n), Axis("u", n), Axis("v", n)),
        (Statement("t", t.at("i", "j"), apply("mul", rows, third), ("i", "j")),
         Statement("y", y.at("u", "v"), apply("mul", columns, third), ("u", "v"))),
    )  # fmt: skip


def convolution(channels: int = 16, size: int = 64, taps: int = 3) -> Program:
    """Return a convolution in two dimensions with ReLU."""
    x = Buffer("x", (channels, size + taps - 1, size + taps - 1))
    w = Buffer("w", (channels, channels, taps, taps))
    t, y = (Buffer(n, (channels, size, size), role="out") for n in ("t", "y"))
    value = apply(
        "mul", _at(x, "c", {"i": 1, "u": 1}, {"j": 1, "v": 1}), _at(w, "o", "c", "u", "v")
    )
    axes = [Axis(n, e) for n, e in (("o", channels), ("i", size), ("j", size))]
    axes += [Axis(n, e, "reduce") for n, e in (("c", channels), ("u", taps), ("v", taps))]
    axes += [Axis(n, e) for n, e in (("p", channels), ("q", size), ("r", size))]
    relu = apply("relu", _at(t, "p", "q", "r"))
    return Program((x, w, t, y), tuple(axes), (
        Statement("t", t.at("o", "i", "j"), value, ("o", "i", "j", "c", "u", "v"), "sum"),
        Statement("y", y.at("p", "q", "r"), relu, ("p", "q", "r")),
    ))  # fmt: skip


def heat(n: int = 512, steps: int = 10, in_place: bool = False) -> Program:
    """Return a heat equation in two dimensions: Jacobi, or Gauss-Seidel in place."""
    buffers = [Buffer(name, (n + 2, n + 2), role="inout") for name in ("a", "b")[: 2 - in_place]]
    axes, statements = [Axis("t", steps, "sequential")], []
    for number, source in enumerate(buffers):
        i, j, target = f"i{number}", f"j{number}", buffers[number - 1]
        axes += [Axis(name, n, "sequential" if in_place else "free") for name in (i, j)]
        points = ((1, 1), (0, 1), (2, 1), (1, 0), (1, 2))
        value = _sum(*(_at(source, {i: 1, "": u}, {j: 1, "": v}) for u, v in points))
        index = target.at({i: 1, "": 1}, {j: 1, "": 1})
        statements.append(Statement(target.name, index, apply("mul", value, 0.2), ("t", i, j)))
    return Program(tuple(buffers), tuple(axes), tuple(statements))


def softmax(n: int = 1024, m: int = 256) -> Program:
    """Return a softmax over the columns."""
    x, y, e = Buffer("x", (n, m)), Buffer("y", (n, m), role="out"), Buffer("e", (n, m), role="out")
    top, total = Buffer("top", (n,), role="out"), Buffer("total", (n,), role="out")
    axes = [Axis(f"i{s}", n) for s in range(4)]
    axes += [Axis(f"j{s}", m, "reduce" if s in (0, 2) else "free") for s in range(4)]
    shifted = apply("exp", apply("sub", _at(x, "i1", "j1"), _at(top, "i1")))
    return Program((x, y, e, top, total), tuple(axes), (
        Statement("top", top.at("i0"), _at(x, "i0", "j0"), ("i0", "j0"), "max"),
        Statement("e", e.at("i1", "j1"), shifted, ("i1", "j1")),
        Statement("total", total.at("i2"), _at(e, "i2", "j2"), ("i2", "j2"), "sum"),
        Statement("y", y.at("i3", "j3"), apply("div", _at(e, "i3", "j3"), _at(total, "i3")),
                  ("i3", "j3")),
    ))  # fmt: skip


def bias_gelu(n: int = 1024, m: int = 768) -> Program:
    """Return a bias and GELU, with the input transposed."""
    x, b, y = Buffer("x", (m, n)), Buffer("b", (m,)), Buffer("y", (n, m), role="out")
    biased = apply("add", _at(x, "j", "i"), _at(b, "j"))
    gelu = apply("mul", biased, apply("sigmoid", apply("mul", biased, 1.702)))
    statement = Statement("y", y.at("i", "j"), gelu, ("i", "j"))
    return Program((x, b, y), (Axis("i", n), Axis("j", m)), (statement,))


def chain() -> Program:
    """Return three statements, the first of which has four loops."""
    a, b = Buffer("a", (32, 64, 48)), Buffer("b", (48, 64))
    outs = [Buffer(name, (32, 64, 64), role="out") for name in ("c", "d", "e")]
    axes = [Axis(n, e) for n, e in (("i", 32), ("j", 64), ("k", 64))] + [Axis("l", 48, "reduce")]
    axes += [Axis(f"{n}{s}", e) for s in (1, 2) for n, e in (("i", 32), ("j", 64), ("k", 64))]
    c, d, e = outs
    value = apply("mul", _at(a, "i", "j", "l"), _at(b, "l", "k"))
    return Program((a, b, *outs), tuple(axes), (
        Statement("c", c.at("i", "j", "k"), value, ("i", "j", "k", "l"), "sum"),
        Statement("d", d.at("i1", "j1", "k1"), apply("tanh", _at(c, "i1", "j1", "k1")),
                  ("i1", "j1", "k1")),
        Statement("e", e.at("i2", "j2", "k2"), apply("square", _at(d, "i2", "j2", "k2")),
                  ("i2", "j2", "k2")),
    ))  # fmt: skip


KERNELS: dict[str, Callable[[], Program]] = {
    "blur": blur,
    "convolution": convolution,
    "bias and GELU": bias_gelu,
    "mvt": lambda: loops.einsum("ij,j->i", i=2048, j=2048),
    "mvt transposed": lambda: loops.einsum("ji,j->i", i=2048, j=2048),
    "doitgen": lambda: loops.einsum("qrs,sp->qrp", q=64, r=64, s=64, p=64),
    "attention scores": lambda: loops.einsum("hid,hjd->hij", h=8, i=256, j=256, d=64),
    "convolution 1 x 1": lambda: loops.einsum("cij,oc->oij", c=64, o=64, i=32, j=32),
    "softmax": softmax,
    "jacobi2d": heat,
    "seidel2d": functools.partial(heat, in_place=True),
    "matmul 512": functools.partial(matmul, 512),
}
