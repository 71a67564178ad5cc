"""The model, batch and optimizer among the values that a workload's function returns."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass

from slipstream.source._names import Function, nodes_in
from slipstream.source._source import Source

_FIELDS = ("model", "batch", "loss", "optimizer")
_SEVERAL = (ast.Tuple, ast.List, ast.Dict, ast.Starred)
_BUILT = ("slipstream.BuiltWorkload", "slipstream.workload.BuiltWorkload")


@dataclass(frozen=True)
class Returned:
    """The only ``return`` of a function, or a trainer's call, by field.

    Attributes:
        fields: expressions by name, in the order of evaluation.
    """

    statement: ast.stmt
    fields: Mapping[str, ast.expr]

    def get(self, field: str) -> ast.expr | None:
        """Return the expression of `field`; None if it is missing or ``None``."""
        expression = self.fields.get(field)
        nothing = isinstance(expression, ast.Constant) and expression.value is None
        return None if nothing else expression

    def before(self, field: str) -> list[tuple[str, ast.expr]]:
        """Return the fields evaluated before `field`, with their expressions."""
        names = list(self.fields)
        return [(name, self.fields[name]) for name in names[: names.index(field)]]


def find_function(source: Source, name: str) -> Function:
    """Return the module's only definition of `name`.

    Raises:
        EditLocationError: there is none, or several.
    """
    bindings = source.names.bindings(source.tree, name)
    if len(bindings) == 1 and isinstance(bindings[0], (ast.FunctionDef, ast.AsyncFunctionDef)):
        return bindings[0]
    what = "is defined several times" if len(bindings) > 1 else "is not a function of this file"
    raise source.location_error(f"'{name}' {what}")


def returned_by(source: Source, function: Function) -> Returned:
    """Return the parts of the value that `function` returns.

    Raises:
        EditLocationError: it returns at several places, or the parts cannot be determined.
    """
    returns = nodes_in(ast.Return, function)
    statements = [node for node in returns if source.names.scope(node) is function]
    if len(statements) != 1:
        how = f"returns at {len(statements)} places" if statements else "returns nothing"
        raise source.location_error(f"{function.name}() {how}", function)
    statement = statements[0]
    value = statement.value
    if isinstance(value, ast.Name):
        value = value_of(source, value) or value
    fields = _fields(source, value)
    if fields is None or "model" not in fields:
        raise source.location_error(
            f"the model cannot be identified among the values that {function.name}() returns",
            statement,
        )
    return Returned(statement, fields)


def inputs_of(source: Source, returned: Returned) -> list[ast.expr]:
    """Return the part of the batch that is the model's input, if it is one tensor.

    Raises:
        EditLocationError: the batch's parts cannot be determined, or there are several inputs.
    """
    batch = returned.get("batch")
    if isinstance(batch, ast.Name):
        value = value_of(source, batch)
        batch = value if isinstance(value, (ast.Tuple, ast.List)) else batch
    if isinstance(batch, (ast.Tuple, ast.List)):
        inputs = batch.elts if returned.get("loss") is None else batch.elts[:1]
        whole = returned.get("loss") is None or len(batch.elts) == 2
        if whole and len(inputs) == 1 and not isinstance(inputs[0], _SEVERAL):
            return [inputs[0]]
    elif isinstance(batch, (ast.Name, ast.Call)) and returned.get("loss") is None:
        value = value_of(source, batch) if isinstance(batch, ast.Name) else batch
        called = source.names.qualified(value.func) if isinstance(value, ast.Call) else None
        if (called or "").startswith("torch."):
            return [batch]
    raise source.location_error(
        "the model's only input cannot be identified in the batch",
        batch or returned.statement,
    )


def value_of(source: Source, name: ast.expr) -> ast.expr | None:
    """Return the value of a variable that is assigned exactly once, in a simple statement."""
    values = source.names.values(name)
    return values[0] if len(values) == 1 else None


def _fields(source: Source, value: ast.expr | None) -> dict[str, ast.expr] | None:
    if isinstance(value, (ast.Tuple, ast.List)):
        if any(isinstance(element, ast.Starred) for element in value.elts):
            return None
        return dict(zip(_FIELDS, value.elts, strict=False))
    if isinstance(value, ast.Dict):
        keys = [key.value if isinstance(key, ast.Constant) else None for key in value.keys]
        if all(isinstance(key, str) for key in keys):
            return dict(zip(map(str, keys), value.values, strict=True))
        return None
    if isinstance(value, ast.Call):
        called = source.names.qualified(value.func)
        builtin = isinstance(value.func, ast.Name) and value.func.id == "dict"
        starred = any(isinstance(argument, ast.Starred) for argument in value.args)
        if starred or any(keyword.arg is None for keyword in value.keywords):
            return None
        if called in _BUILT or (builtin and called is None and not value.args):
            fields = dict(zip(_FIELDS, value.args, strict=False))
            return fields | {str(keyword.arg): keyword.value for keyword in value.keywords}
    return None
