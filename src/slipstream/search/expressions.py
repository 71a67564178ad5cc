"""Rules over parameters as short expressions: ``"depth * net.width > 512"``.

Text instead of functions makes a space plain data: it has a canonical form, can be written in YAML
or JSON, is identical in every process, and can be evaluated over arrays of candidates.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from slipstream.errors import InvalidArgumentError

_ALLOWED = (
    ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.BinOp, ast.Add,
    ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.Compare, ast.Eq, ast.NotEq,
    ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn, ast.IfExp, ast.Call, ast.Name, ast.Load,
    ast.Constant, ast.Tuple, ast.List,
)  # fmt: skip
_FUNCTIONS = {"min": min, "max": max, "abs": abs, "round": round, "len": len, "int": int}
# 9 ** 9 ** 9 would not terminate in practice.
_MAX_EXPONENT = 64


class Expression:
    """An expression over parameters, named by their dotted paths.

    It may use arithmetic, comparisons, ``and or not in``, ``a if b else c``, and the functions min,
    max, abs, round, len and int.

    Args:
        text: the expression.
        prefix: path of the enclosing group, with a trailing dot; paths are relative to it.

    Raises:
        InvalidArgumentError: the text is malformed or uses anything else.
    """

    def __init__(self, text: str, prefix: str = "") -> None:
        self.text = text
        try:
            tree = ast.parse(text.strip(), mode="eval")
        except SyntaxError as error:
            raise InvalidArgumentError("rule", f"'{text}' is malformed: {error.msg}") from None
        paths: dict[str, str] = {}
        self._tree = _Paths(prefix, paths, text).visit(tree)
        for node in ast.walk(self._tree):
            if not isinstance(node, _ALLOWED):
                raise InvalidArgumentError(
                    "rule", f"'{text}' uses {type(node).__name__}, which is not allowed in a rule",
                    remedy=f"use comparisons, arithmetic, and/or/not/in, {', '.join(_FUNCTIONS)}",
                )  # fmt: skip
            if isinstance(node, ast.Call) and not (
                isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS
            ):
                raise InvalidArgumentError(
                    "rule", f"'{text}' calls a function that is not allowed in a rule",
                    remedy=f"use only {', '.join(_FUNCTIONS)}",
                )  # fmt: skip
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
                power = node.right.value if isinstance(node.right, ast.Constant) else None
                if not isinstance(power, int | float) or abs(power) > _MAX_EXPONENT:
                    raise InvalidArgumentError(
                        "rule", f"'{text}': an exponent must be a constant up to {_MAX_EXPONENT}"
                    )
        self.paths: tuple[str, ...] = tuple(sorted(paths))
        """Full paths of the parameters in it."""
        self._variables = tuple((path, paths[path]) for path in self.paths)
        self._code = compile(ast.fix_missing_locations(self._tree), f"<rule {text}>", "eval")

    @property
    def canonical(self) -> str:
        """The expression with full paths and normalised spacing."""
        text = ast.unparse(self._tree)
        for path, variable in self._variables:
            text = text.replace(variable, path)
        return text

    def __call__(self, values: Mapping[str, Any]) -> Any:
        """Return its value, or None if one of its parameters is inactive.

        Raises:
            InvalidArgumentError: a division by zero, or operands of unsupported types.
        """
        names: dict[str, Any] = {"__builtins__": {}, **_FUNCTIONS}
        for path, variable in self._variables:
            if path not in values:
                return None
            names[variable] = values[path]
        try:
            return eval(self._code, names)
        except (ArithmeticError, TypeError, ValueError) as error:
            at = ", ".join(f"{path}={values[path]!r}" for path in self.paths)
            raise InvalidArgumentError(
                "rule", f"'{self.text}' cannot be evaluated at {at}: {error}",
                remedy="exclude such values first, for example 'x != 0 and 1 / x > 2'",
            ) from None  # fmt: skip

    def over(self, columns: Mapping[str, Any]) -> Any:
        """Evaluate the expression over arrays of values; return an array [n].

        Args:
            columns: values by path, each an array [n].
        """
        import numpy as np

        names = {"__builtins__": {}, "_np": _array_functions()}
        names |= {variable: columns[path] for path, variable in self._variables}
        # Both sides of "x != 0 and 1 / x > 2" are evaluated over all candidates.
        with np.errstate(all="ignore"):
            return eval(self._array_code, names)

    @cached_property
    def _array_code(self) -> Any:
        copy = ast.parse(ast.unparse(self._tree), mode="eval")
        tree = ast.fix_missing_locations(_OverArrays().visit(copy))
        return compile(tree, f"<rule {self.text}>", "eval")


class _Paths(ast.NodeTransformer):
    """Replaces every dotted name by one variable."""

    def __init__(self, prefix: str, paths: dict[str, str], text: str) -> None:
        self._prefix, self._paths, self._text = prefix, paths, text

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        parts = [node.attr]
        inner: ast.expr = node.value
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if not isinstance(inner, ast.Name):
            raise InvalidArgumentError("rule", f"'{self._text}': a dot must follow a name")
        return self._variable(".".join([inner.id, *reversed(parts)]))

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self._variable(node.id)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        node.args = [self.visit(argument) for argument in node.args]
        return node

    def _variable(self, path: str) -> ast.Name:
        full = self._prefix + path
        name = self._paths.setdefault(full, f"_v_{full.replace('.', '__')}_v")
        return ast.Name(name, ast.Load())


class _OverArrays(ast.NodeTransformer):
    """Replaces operators that test truth by NumPy functions over arrays."""

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        name = "logical_and" if isinstance(node.op, ast.And) else "logical_or"
        joined, *operands = [self.visit(operand) for operand in node.values]
        for operand in operands:
            joined = _call(name, joined, operand)
        return joined  # type: ignore[no-any-return]

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        inner = self.visit(node.operand)
        if isinstance(node.op, ast.Not):
            return _call("logical_not", inner)
        return ast.UnaryOp(node.op, inner)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        left = self.visit(node.left)
        joined: ast.expr | None = None
        for op, right in zip(node.ops, map(self.visit, node.comparators), strict=True):
            comparison: ast.expr
            if isinstance(op, ast.In | ast.NotIn):
                comparison = _call("isin", left, right)
                comparison = (
                    _call("logical_not", comparison) if isinstance(op, ast.NotIn) else comparison
                )
            else:
                comparison = ast.Compare(left, [op], [right])
            joined = comparison if joined is None else _call("logical_and", joined, comparison)
            left = right
        assert joined is not None
        return joined

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        return _call("where", *(self.visit(part) for part in (node.test, node.body, node.orelse)))

    def visit_Call(self, node: ast.Call) -> ast.AST:
        assert isinstance(node.func, ast.Name)
        return _call(node.func.id, *(self.visit(argument) for argument in node.args))


def _call(name: str, *arguments: ast.expr) -> ast.expr:
    function = ast.Subscript(ast.Name("_np", ast.Load()), ast.Constant(name), ast.Load())
    return ast.Call(function, list(arguments), [])


def _array_functions() -> dict[str, Any]:
    import functools

    import numpy as np

    def fold(function: Any) -> Any:
        return lambda *values: functools.reduce(function, values if len(values) > 1 else values[0])

    return {
        "logical_and": np.logical_and, "logical_or": np.logical_or, "logical_not": np.logical_not,
        "isin": np.isin, "where": np.where, "min": fold(np.minimum), "max": fold(np.maximum),
        "abs": np.abs, "round": np.round, "int": lambda value: np.trunc(value).astype(np.int64),
        "len": lambda value: np.vectorize(len, otypes=[np.int64])(value),
    }  # fmt: skip
