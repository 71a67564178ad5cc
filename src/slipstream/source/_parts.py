"""The statements and definitions of a file that build the model."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator

from slipstream.source._names import Identity, Names, is_written, nodes_in, position

# Functions that only inspect a class and build no objects of it.
_ASKING = ("isinstance", "issubclass")


def code_of(names: Names, roots: Iterable[ast.AST]) -> set[ast.AST]:
    """Return every node of the code that builds `roots`.

    Names are followed: to functions and classes of the file with their bodies, to the values
    assigned to variables, and to changes of these by a method or through an attribute
    (``layers.append(...)``, ``model.head = ...``).
    """
    reached: set[ast.AST] = set()
    variables: set[Identity] = set()
    pending = list(roots)
    while pending:
        node = pending.pop()
        if node in reached:
            continue
        for inner in ast.walk(node):
            reached.add(inner)
            if isinstance(inner, ast.Name) and not is_written(inner):
                owner = names.owner(inner)
                if owner is None or (owner, inner.id) in variables:
                    continue
                variables.add((owner, inner.id))
                pending += definitions(names, (owner, inner.id))
    return reached


def definitions(names: Names, variable: Identity) -> Iterator[ast.AST]:
    """Yield the definitions of a variable, and the statements that change it in its scope."""
    owner, name = variable
    for node in names.bindings(owner, name):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node
        elif isinstance(node, ast.arg):
            # With its defaults; the values passed belong to the calling code.
            if (arguments := names.parent(node)) is not None:
                yield arguments
        elif not isinstance(node, ast.alias):
            statement = names.statement(node)
            # Not the body of a loop, or of a `with`.
            simple = isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr))
            yield from [statement] if simple else _heads(statement)
    for node in names.occurrences(variable):
        statement = names.statement(node)
        if isinstance(statement, ast.Expr):
            changed = [statement.value.func] if isinstance(statement.value, ast.Call) else []
        else:
            changed = statement.targets if isinstance(statement, ast.Assign) else []
        if any(node in _roots(target) for target in changed):
            yield statement


def _heads(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the expressions of a compound statement, without its blocks."""
    for child in ast.iter_child_nodes(statement):
        if not isinstance(child, (ast.stmt, ast.ExceptHandler)):
            yield child


def _roots(expression: ast.expr) -> list[ast.expr]:
    """Return ``layers`` for ``layers.append``; both names for ``(a if b else c).append``.

    A plain name has no root.
    """
    inner = expression
    while isinstance(inner, (ast.Attribute, ast.Subscript)):
        inner = inner.value
    if inner is expression:
        return []
    return [inner.body, inner.orelse] if isinstance(inner, ast.IfExp) else [inner]


def local_class(names: Names, expression: ast.expr) -> ast.ClassDef | None:
    """Return the only class of this file that a name refers to, or None."""
    if not isinstance(expression, ast.Name):
        return None
    nodes = names.bindings(names.tree, expression.id)
    return nodes[0] if len(nodes) == 1 and isinstance(nodes[0], ast.ClassDef) else None


def reachable(names: Names, kind: ast.ClassDef) -> Iterator[ast.ClassDef]:
    """Yield `kind` and the file's classes that it builds objects of."""
    seen, pending = {kind}, [kind]
    while pending:
        owner = pending.pop()
        yield owner
        for call in nodes_in(ast.Call, owner):
            inner = local_class(names, call.func)
            if inner is not None and inner not in seen:
                seen.add(inner)
                pending.append(inner)


def mentions(names: Names, code: Collection[ast.AST], function: str) -> list[ast.expr]:
    """Return the places where `code` uses the qualified name `function`, in order.

    Annotations, base classes, ``isinstance`` and comparisons such as
    ``type(module) is nn.Linear`` are left out.
    """
    nodes = [
        node
        for node in code
        if isinstance(node, (ast.Name, ast.Attribute))
        and not is_written(node)
        and names.qualified(node) == function
        and not _asks(names, node)
    ]
    return sorted(nodes, key=position)


def _asks(names: Names, node: ast.expr) -> bool:
    child: ast.AST = node
    for above in names.ancestors(node):
        if isinstance(above, ast.ClassDef):
            return child in above.bases
        if isinstance(above, ast.Compare):
            return True
        if isinstance(above, (ast.arg, ast.AnnAssign)) and child is above.annotation:
            return True
        if isinstance(above, (ast.FunctionDef, ast.AsyncFunctionDef)) and child is above.returns:
            return True
        if isinstance(above, ast.Call) and child is not above.func:
            called = above.func
            if isinstance(called, ast.Name) and called.id in _ASKING:
                return True
        if isinstance(above, ast.stmt):
            return False
        child = above
    return False
