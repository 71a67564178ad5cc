"""Elementwise operations of generated code: one table for C++, Triton, cost and folding.

The C++ and Triton texts call functions of the preludes; ``real`` is the type of values. A kernel's
comparisons return 1 or 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Op:
    """An elementwise operation.

    Attributes:
        arity: number of arguments.
        c: C++ text, with ``{0}``, ``{1}`` for arguments; each must be a name or parenthesised.
        triton: Triton text.
        flops: floating-point operations per element, as cost models count them.
        fold: the result for constant arguments.
    """

    name: str
    arity: int
    c: str
    triton: str
    flops: int
    fold: Callable[..., float]


def _guarded(function: Callable[..., float]) -> Callable[..., float]:
    """Return `function` with the results of IEEE arithmetic instead of Python's exceptions."""

    def folded(*arguments: float) -> float:
        try:
            return function(*arguments)
        except OverflowError:
            return math.inf
        except (ValueError, ZeroDivisionError):
            return math.nan

    return folded


def _divided(a: float, b: float) -> float:
    if b:
        return a / b
    return math.nan if a == 0 or a != a else math.copysign(math.inf, a) * math.copysign(1.0, b)


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x > 0 else math.exp(x) / (1.0 + math.exp(x))


def _log(x: float) -> float:
    return -math.inf if x == 0 else math.log(x)


def _max(a: float, b: float) -> float:
    return a if a > b or a != a else b


def _min(a: float, b: float) -> float:
    return a if a < b or a != a else b


def _op(name: str, c: str, flops: int, fold: Callable[..., float]) -> Op:
    arity = 1 + max(n for n in range(3) if f"{{{n}}}" in c)
    return Op(name, arity, c, c.replace("real(", "("), flops, _guarded(fold))


def _comparison(name: str, sign: str, fold: Callable[[float, float], bool]) -> Op:
    return _op(name, f"f_where({{0}} {sign} {{1}}, real(1.0), real(0.0))", 1, fold)


OPS: dict[str, Op] = {
    op.name: op
    for op in (
        _op("neg", "-{0}", 1, lambda x: -x),
        _op("exp", "f_exp({0})", 12, math.exp),
        _op("log", "f_log({0})", 12, _log),
        _op("sqrt", "f_sqrt({0})", 4, math.sqrt),
        _op("rsqrt", "real(1.0) / f_sqrt({0})", 8, lambda x: _divided(1.0, math.sqrt(x))),
        _op("reciprocal", "real(1.0) / {0}", 4, lambda x: _divided(1.0, x)),
        _op("abs", "f_where({0} < 0, -{0}, {0})", 1, abs),
        _op("erf", "f_erf({0})", 16, math.erf),
        _op("tanh", "f_tanh({0})", 24, math.tanh),
        _op("sigmoid", "real(1.0) / (real(1.0) + f_exp(-{0}))", 18, _sigmoid),
        _op("relu", "f_where({0} < 0, real(0.0), {0})", 1, lambda x: 0.0 if x < 0 else x),
        _op("silu", "{0} / (real(1.0) + f_exp(-{0}))", 18, lambda x: x * _sigmoid(x)),
        _op("square", "{0} * {0}", 1, lambda x: x * x),
        _op("add", "{0} + {1}", 1, lambda a, b: a + b),
        _op("sub", "{0} - {1}", 1, lambda a, b: a - b),
        _op("mul", "{0} * {1}", 1, lambda a, b: a * b),
        _op("div", "{0} / {1}", 4, _divided),
        _op("max", "f_max({0}, {1})", 1, _max),
        _op("min", "f_min({0}, {1})", 1, _min),
        _op("where", "f_where({0} != 0, {1}, {2})", 1, lambda c, a, b: a if c != 0 else b),
        _op("masked_fill", "f_where({1} != 0, {2}, {0})", 1, lambda x, c, v: v if c != 0 else x),
        _comparison("gt", ">", lambda a, b: a > b),
        _comparison("ge", ">=", lambda a, b: a >= b),
        _comparison("lt", "<", lambda a, b: a < b),
        _comparison("le", "<=", lambda a, b: a <= b),
        _comparison("eq", "==", lambda a, b: a == b),
        _comparison("ne", "!=", lambda a, b: a != b),
        _op("logical_not", "f_where({0} == 0, real(1.0), real(0.0))", 1, lambda x: x == 0),
        _op("logical_and", "f_where(({0} != 0) & ({1} != 0), real(1.0), real(0.0))", 1,
            lambda a, b: a != 0 and b != 0),
        _op("threshold_backward", "f_where({1} <= {2}, real(0.0), {0})", 1,
            lambda g, x, t: 0.0 if x <= t else g),
        _op("sigmoid_backward", "{0} * {1} * (real(1.0) - {1})", 3, lambda g, y: g * y * (1 - y)),
        _op("tanh_backward", "{0} * (real(1.0) - {1} * {1})", 3, lambda g, y: g * (1 - y * y)),
        _op("native_dropout_backward", "{0} * {1} * {2}", 2, lambda g, k, s: g * k * s),
        # The product, or 0 where the second factor is 0, also of infinity.
        _op("keep", "keep({0}, {1})", 1, lambda x, factor: x * factor if factor else 0.0),
    )
}  # fmt: skip
"""The operations, by name. ``maximum`` and ``minimum`` of torch are ``max`` and ``min``."""


@dataclass(frozen=True)
class Argument:
    """The result of `folded` that an operation equals one of its arguments, or its negation."""

    number: int
    negative: bool = False


def folded(
    name: str, arguments: tuple[float | None, ...], absent: frozenset[int] = frozenset()
) -> float | Argument | None:
    """Return the simpler form of an operation with constant arguments; None if there is none.

    A product with 0 is not folded, because the other factor may be infinite or NaN, unless the 0
    is the value of an absent term.

    Args:
        arguments: the value of each constant argument; None for others.
        absent: numbers of arguments that are the 0 of an absent term, such as the state of a child
            that does not exist.
    """
    if (name in ("mul", "keep") and absent) or (name == "div" and 0 in absent):
        return 0.0
    constants = [value for value in arguments if value is not None]
    if len(constants) == len(arguments):
        return float(OPS[name].fold(*constants))
    first, second = arguments[0], arguments[-1]
    if name == "add" and (first == 0 or second == 0):
        return Argument(1 if first == 0 else 0)
    if name == "sub" and (first == 0 or second == 0):
        return Argument(1, negative=True) if first == 0 else Argument(0)
    if name == "mul" and (first == 1 or second == 1):
        return Argument(1 if first == 1 else 0)
    if name in ("div", "keep") and second == 1:
        return Argument(0)
    if name == "where" and first is not None:
        return Argument(1 if first != 0 else 2)
    if name == "masked_fill" and arguments[1] is not None:
        return Argument(2 if arguments[1] != 0 else 0)
    return None
