"""The code that makes the model: which statements and definitions of a file it is."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator

from slipstream.source._names import Identity, Names, is_written, nodes_in, position, variables_in

# What only asks about a class, and makes none of its objects.
_ASKING = ("isinstance", "issubclass")


def code_of(names: Names, roots: Iterable[ast.AST]) -> set[ast.AST]:
    """Every node of the code that `roots` are made by.

    Followed are the names in it: functions and classes of the file with all that stands in them,
    and variables with what they are assigned, and what is done to them by a method or through an
    attribute (``layers.append(...)``, ``model.head = ...``).
    """
    reached: set[ast.AST] = set()
    variables: set[Identity] = set()
    left = list(roots)
    while left:
        node = left.pop()
        if node in reached:
            continue
        for one in ast.walk(node):
            reached.add(one)
            if isinstance(one, ast.Name) and not is_written(one):
                owner = names.owner(one)
                if owner is None or (owner, one.id) in variables:
                    continue
                variables.add((owner, one.id))
                left += definitions(names, (owner, one.id))
    return reached


def definitions(names: Names, variable: Identity) -> Iterator[ast.AST]:
    """What a variable stands for, and what is done to it where it belongs."""
    owner, name = variable
    for node in names.bindings(owner, name):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node
        elif isinstance(node, ast.arg):
            # With its defaults; what calls give stands in the code that calls.
            if (arguments := names.parent(node)) is not None:
                yield arguments
        elif not isinstance(node, ast.alias):
            statement = names.statement(node)
            # Not the body of a loop, or of a `with`.
            simple = isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr))
            yield from [statement] if simple else _heads(statement)
    for node in variables_in(owner, name=name):
        if names.owner(node) is owner:
            statement = names.statement(node)
            if isinstance(statement, ast.Expr):
                changed = [statement.value.func] if isinstance(statement.value, ast.Call) else []
            else:
                changed = statement.targets if isinstance(statement, ast.Assign) else []
            if any(node in _roots(one) for one in changed):
                yield statement


def _heads(statement: ast.stmt) -> Iterator[ast.AST]:
    """The expressions of a compound statement, without its blocks."""
    for child in ast.iter_child_nodes(statement):
        if not isinstance(child, (ast.stmt, ast.ExceptHandler)):
            yield child


def _roots(expression: ast.expr) -> list[ast.expr]:
    """``layers`` of ``layers.append`` and ``model.blocks[0]``; both of ``(a if b else c).append``.

    A plain name has none.
    """
    inner = expression
    while isinstance(inner, (ast.Attribute, ast.Subscript)):
        inner = inner.value
    if inner is expression:
        return []
    return [inner.body, inner.orelse] if isinstance(inner, ast.IfExp) else [inner]


def local_class(names: Names, expression: ast.expr) -> ast.ClassDef | None:
    """The class of this file that a name stands for, where that is plain."""
    if not isinstance(expression, ast.Name):
        return None
    nodes = names.bindings(names.tree, expression.id)
    return nodes[0] if len(nodes) == 1 and isinstance(nodes[0], ast.ClassDef) else None


def reachable(names: Names, kind: ast.ClassDef) -> Iterator[ast.ClassDef]:
    """`kind`, and the file's classes that it makes objects of."""
    seen, left = {kind}, [kind]
    while left:
        one = left.pop()
        yield one
        for call in nodes_in(ast.Call, one):
            inner = local_class(names, call.func)
            if inner is not None and inner not in seen:
                seen.add(inner)
                left.append(inner)


def mentions(names: Names, code: Collection[ast.AST], function: str) -> list[ast.expr]:
    """Where `code` reads the qualified name `function`, other than to ask about it, in order.

    Left out are annotations, bases of classes, ``isinstance`` and comparisons such as
    ``type(module) is nn.Linear``.
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
