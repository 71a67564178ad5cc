"""Rules that write torch's operators as statements of a `Nest`.

A rule takes the nest and the operator's arguments, with tensors as indices of statements. For each
output it returns the index of a statement, or a `Column`, a sum over all rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.codegen.ops import OPS
from slipstream.codegen.rows import Nest, UnsupportedError


@dataclass(frozen=True)
class Column:
    """The sum of a value over all rows."""

    value: int


Result = Sequence[int | Column | None]
Rule = Callable[..., Result]
RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def put(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return put


def _number(nest: Nest, value: Any) -> int:
    """Return the statement of a tensor, or add a constant for a scalar."""
    if isinstance(value, Tensor):
        return value.statement
    if isinstance(value, (bool, int, float)):
        return nest.constant(float(value))
    raise UnsupportedError(f"{value!r} is not a number")


@dataclass(frozen=True)
class Tensor:
    """A tensor argument: its statement."""

    statement: int


# Operators by the operation that they are; the others have a rule.
_MAPS = {
    **{name: name for name in (
        "neg", "exp", "log", "sqrt", "rsqrt", "reciprocal", "abs", "erf", "tanh", "sigmoid", "relu",
        "silu", "square", "logical_not", "logical_and", "div", "mul", "where", "masked_fill", "gt",
        "ge", "lt", "le", "eq", "ne", "threshold_backward", "sigmoid_backward", "tanh_backward",
        "native_dropout_backward",
    )},
    "maximum": "max", "minimum": "min",
}  # fmt: skip
_COPIES = ("clone", "_to_copy", "alias", "detach")
_TANH_SCALE = math.sqrt(2 / math.pi)


def lower(nest: Nest, name: str, arguments: Sequence[Any]) -> Result:
    """Add the statements of an operator, and return those of its outputs.

    Raises:
        UnsupportedError: there is no rule for the operator, or not with these arguments.
    """
    if name in RULES:
        return RULES[name](nest, *arguments)
    if name in _MAPS:
        op = OPS[_MAPS[name]]
        operands = [_number(nest, value) for value in arguments[: op.arity]]
        if name == "div" and len(arguments) > 2 and arguments[2] is not None:
            raise UnsupportedError("a division with rounding")
        return [nest.add(op.c, *operands)]
    if name in _COPIES:
        return [nest.add("{0}", _number(nest, arguments[0]))]
    raise UnsupportedError(f"no rule for {name}")


def has_rule(name: str) -> bool:
    """Whether an operator has a rule."""
    return name in RULES or name in _MAPS or name in _COPIES


@_rule("add", "sub")
def _add(nest: Nest, a: Any, b: Any, alpha: float = 1, *, sign: str = "+") -> Result:
    x, y = _number(nest, a), _number(nest, b)
    if alpha != 1:
        y = nest.add("{0} * {1}", y, nest.constant(float(alpha)))
    return [nest.add(f"{{0}} {sign} {{1}}", x, y)]


RULES["sub"] = lambda nest, a, b, alpha=1: _add(nest, a, b, alpha, sign="-")
RULES["rsub"] = lambda nest, a, b, alpha=1: _add(nest, b, a, alpha, sign="-")


@_rule("addcmul")
def _addcmul(nest: Nest, x: Any, a: Any, b: Any, value: float = 1) -> Result:
    operands = [_number(nest, operand) for operand in (x, a, b, value)]
    return [nest.add("{0} + {3} * {1} * {2}", *operands)]


@_rule("full_like", "zeros_like", "ones_like")
def _like(nest: Nest, x: Any, value: Any = None, *rest: Any) -> Result:
    raise UnsupportedError("a constant tensor")


@_rule("pow")
def _pow(nest: Nest, x: Any, power: Any) -> Result:
    base = _number(nest, x)
    codes = {
        2: "{0} * {0}", 3: "{0} * {0} * {0}", 0.5: "f_sqrt({0})", -0.5: "real(1.0) / f_sqrt({0})",
        -1: "real(1.0) / {0}", -2: "real(1.0) / ({0} * {0})", 1: "{0}",
    }  # fmt: skip
    if isinstance(power, Tensor) or power not in codes:
        raise UnsupportedError(f"a power of {power}")
    return [nest.add(codes[power], base)]


@_rule("gelu")
def _gelu(nest: Nest, x: Any, approximate: str = "none") -> Result:
    value = _number(nest, x)
    if approximate == "tanh":
        return [
            nest.add(
                "real(0.5) * {0} * (real(1.0) + f_tanh({1}))", value, _tanh_argument(nest, value)
            )
        ]
    return [nest.add("{0} * {1}", value, _normal_share(nest, value))]


def _tanh_argument(nest: Nest, x: int) -> int:
    code = "real(%r) * ({0} + real(0.044715) * {0} * {0} * {0})"
    return nest.add(code % _TANH_SCALE, x)


def _normal_share(nest: Nest, x: int) -> int:
    """Add the cumulative distribution function of the normal distribution."""
    root = math.sqrt(0.5)
    return nest.add(f"real(0.5) * (real(1.0) + f_erf({{0}} * real({root!r})))", x)


@_rule("gelu_backward")
def _gelu_backward(nest: Nest, gradient: Any, x: Any, approximate: str = "none") -> Result:
    g, value = _number(nest, gradient), _number(nest, x)
    if approximate == "tanh":
        tanh = nest.add("f_tanh({0})", _tanh_argument(nest, value))
        inner = nest.add("real(1.0) + real(0.134145) * {0} * {0}", value)
        slope = nest.add(
            "real(0.5) * (real(1.0) + {1} + {0} * (real(1.0) - {1} * {1}) * {3} * {2})",
            value, tanh, inner, nest.constant(_TANH_SCALE),
        )  # fmt: skip
        return [nest.add("{0} * {1}", g, slope)]
    phi = _normal_share(nest, value)
    density = nest.add(
        "f_exp(real(-0.5) * {0} * {0}) * real(%r)" % (1 / math.sqrt(2 * math.pi)), value
    )
    return [nest.add("{0} * ({1} + {2} * {3})", g, phi, value, density)]


@_rule("silu_backward")
def _silu_backward(nest: Nest, gradient: Any, x: Any) -> Result:
    g, value = _number(nest, gradient), _number(nest, x)
    s = nest.add("real(1.0) / (real(1.0) + f_exp(-{0}))", value)
    return [nest.add("{0} * {1} * (real(1.0) + {2} * (real(1.0) - {1}))", g, s, value)]


@_rule("_softmax")
def _softmax(nest: Nest, x: Any, dim: int, half_to_float: bool) -> Result:
    value = _number(nest, x)
    power = nest.add("f_exp({0} - {1})", value, nest.reduce("max", value))
    scale = nest.add("real(1.0) / {0}", nest.reduce("sum", power))
    return [nest.add("{0} * {1}", power, scale)]


@_rule("_log_softmax")
def _log_softmax(nest: Nest, x: Any, dim: int, half_to_float: bool) -> Result:
    value = _number(nest, x)
    shifted = nest.add("{0} - {1}", value, nest.reduce("max", value))
    total = nest.reduce("sum", nest.add("f_exp({0})", shifted))
    return [nest.add("{0} - f_log({1})", shifted, total)]


@_rule("_softmax_backward_data")
def _softmax_backward(nest: Nest, gradient: Any, y: Any, dim: int, dtype: Any) -> Result:
    g, value = _number(nest, gradient), _number(nest, y)
    product = nest.add("{0} * {1}", g, value)
    return [nest.add("{0} - {1} * {2}", product, value, nest.reduce("sum", product))]


@_rule("_log_softmax_backward_data")
def _log_softmax_backward(nest: Nest, gradient: Any, y: Any, dim: int, dtype: Any) -> Result:
    g, value = _number(nest, gradient), _number(nest, y)
    return [nest.add("{0} - f_exp({1}) * {2}", g, value, nest.reduce("sum", g))]


def _mean(nest: Nest, value: int) -> int:
    return nest.add("{0} * real(%r)" % (1.0 / nest.columns), nest.reduce("sum", value))


@_rule("native_layer_norm")
def _layer_norm(nest: Nest, x: Any, shape: Any, weight: Any, bias: Any, eps: float) -> Result:
    value = _number(nest, x)
    mean = _mean(nest, value)
    centred = nest.add("{0} - {1}", value, mean)
    variance = _mean(nest, nest.add("{0} * {0}", centred))
    rstd = nest.add(f"real(1.0) / f_sqrt({{0}} + real({float(eps)!r}))", variance)
    normalised = nest.add("{0} * {1}", centred, rstd)
    if weight is not None:
        normalised = nest.add("{0} * {1}", normalised, _number(nest, weight))
    if bias is not None:
        normalised = nest.add("{0} + {1}", normalised, _number(nest, bias))
    return [normalised, mean, rstd]


@_rule("native_layer_norm_backward")
def _layer_norm_backward(
    nest: Nest, gradient: Any, x: Any, shape: Any, mean: Any, rstd: Any, weight: Any, bias: Any,
    output_mask: Sequence[bool],
) -> Result:  # fmt: skip
    g, value = _number(nest, gradient), _number(nest, x)
    scale = _number(nest, rstd)
    hat = nest.add("({0} - {1}) * {2}", value, _number(nest, mean), scale)
    gradients: list[int | Column | None] = [None, None, None]
    if output_mask[0]:
        scaled = g if weight is None else nest.add("{0} * {1}", g, _number(nest, weight))
        first = _mean(nest, scaled)
        second = _mean(nest, nest.add("{0} * {1}", scaled, hat))
        gradients[0] = nest.add("{0} * ({1} - {2} - {3} * {4})", scale, scaled, first, hat, second)
    if output_mask[1]:
        gradients[1] = Column(nest.add("{0} * {1}", g, hat))
    if output_mask[2]:
        gradients[2] = Column(g)
    return gradients


@_rule("sum", "mean", "amax")
def _reduced(nest: Nest, *arguments: Any) -> Result:
    raise AssertionError("`reduced` lowers reductions")


def reduced(nest: Nest, name: str, x: Tensor, over_rows: bool) -> Result:
    """Add a reduction over all columns, or over all rows.

    Raises:
        UnsupportedError: a reduction over rows is not a sum or mean.
    """
    value = x.statement
    if over_rows:
        if name == "amax" or nest.statements[value].extent != "full":
            raise UnsupportedError(f"{name} over rows")
        if name == "mean":
            value = nest.add("{0} * real(%r)" % (1.0 / nest.rows), value)
        return [Column(value)]
    if name == "mean":
        return [_mean(nest, value)]
    if name == "amax":
        return [_amax(nest, value)]
    return [nest.reduce("sum", value)]


def _amax(nest: Nest, value: int) -> int:
    """Add a maximum that is NaN if any element is; comparisons alone would drop NaN."""
    nans = nest.reduce("sum", nest.add("f_where({0} == {0}, real(0.0), real(1.0))", value))
    largest = nest.reduce("max", value)
    return nest.add("f_where({0} > 0, {1}, {2})", nans, nest.constant(math.nan), largest)
