"""The classes of a file that make up the model."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from slipstream.source._places import Places
from slipstream.source._refusals import NotPlacedError
from slipstream.source._source import Source


def class_of(where: Places) -> ast.ClassDef:
    """The class of the model.

    Raises:
        NotPlacedError: it is not defined in the file.
    """
    source, statement = where.source, where.with_named_model().model.statement
    value = getattr(statement, "value", None)
    # model = Net().to(device)
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        if not isinstance(value.func.value, ast.Call):
            break
        value = value.func.value
    found = local_class(source, value.func) if isinstance(value, ast.Call) else None
    if found is None:
        raise NotPlacedError(
            "the model's class is not defined in this file", where=f"line {statement.lineno}"
        )
    return found


def local_class(source: Source, expression: ast.expr) -> ast.ClassDef | None:
    """The class of this file that a name stands for, where that is plain."""
    if not isinstance(expression, ast.Name):
        return None
    nodes = source.names.bindings(source.tree, expression.id)
    return nodes[0] if len(nodes) == 1 and isinstance(nodes[0], ast.ClassDef) else None


def reachable(source: Source, kind: ast.ClassDef) -> Iterator[ast.ClassDef]:
    """`kind`, and the file's classes that it makes objects of."""
    seen, left = {kind}, [kind]
    while left:
        one = left.pop()
        yield one
        for call in ast.walk(one):
            found = local_class(source, call.func) if isinstance(call, ast.Call) else None
            if found is not None and found not in seen:
                seen.add(found)
                left.append(found)
