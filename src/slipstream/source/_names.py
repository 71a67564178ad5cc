"""Meaning of the names in a file: imports, scopes, and one object under two names."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import TypeAlias, TypeVar, cast

Scope: TypeAlias = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
Loop: TypeAlias = ast.For | ast.AsyncFor | ast.While
Identity: TypeAlias = tuple[ast.AST, str]
"""Owner and name: a variable of a scope, or an attribute of a class's ``self``."""

_SCOPES = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# Maximum number of calls through which an argument is followed.
_MAX_DEPTH = 5
_Node = TypeVar("_Node", bound=ast.AST)


def nodes_in(kind: type[_Node], *trees: ast.AST) -> Iterator[_Node]:
    """Return the nodes of a class in `trees`, one tree after another."""
    return (node for tree in trees for node in ast.walk(tree) if isinstance(node, kind))


def variables_in(*trees: ast.AST, name: str | None = None) -> list[ast.Name]:
    """Return the places where variables (or the one called `name`) are read or assigned."""
    return [node for node in nodes_in(ast.Name, *trees) if name in (None, node.id)]


def is_written(node: ast.Name | ast.Attribute) -> bool:
    """Whether the node is assigned or deleted there."""
    return not isinstance(node.ctx, ast.Load)


def default_of(function: Function, argument: str) -> ast.expr | None:
    """Return the default of an argument; None if the argument or its default is missing."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    with_default = positional[len(positional) - len(arguments.defaults) :]
    named = [parameter.arg for parameter in (*with_default, *arguments.kwonlyargs)]
    defaults = (*arguments.defaults, *arguments.kw_defaults)
    return dict(zip(named, defaults, strict=True)).get(argument)


def last_name(expression: ast.AST) -> str:
    """Return ``step`` for ``optimizer.step`` and ``step``; empty for what has no name."""
    if isinstance(expression, ast.Attribute):
        return expression.attr
    return expression.id if isinstance(expression, ast.Name) else ""


def position(node: ast.AST) -> tuple[int, int]:
    """Return the line and column where a node begins."""
    return node.lineno, node.col_offset  # type: ignore[attr-defined]


class Names:
    """Scopes and bindings of a syntax tree."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self._parents: dict[ast.AST, ast.AST] = {}
        self._bound: dict[ast.AST, dict[str, list[ast.AST]]] = {}
        self._outside: dict[ast.AST, dict[str, ast.AST]] = {}
        self._variables: dict[str, list[ast.Name]] = {}
        self._occurrences: dict[Identity, list[ast.Name]] = {}
        self._calls: list[ast.Call] = []
        self._identities: dict[tuple[ast.AST, int], Identity | None] = {}
        self.used: set[str] = set()
        """Names of all variables in the file."""
        self.attributes: set[str] = set()
        """Names of all attributes: ``step`` of ``optimizer.step``."""
        for node in ast.walk(tree):
            for child in ast.iter_child_nodes(node):
                self._parents[child] = node
        for node in ast.walk(tree):
            self._note(node)
        self._calls.sort(key=position)
        # Found before all bindings were noted.
        self._identities.clear()

    def parent(self, node: ast.AST) -> ast.AST | None:
        """Return the node that holds `node`."""
        return self._parents.get(node)

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes that hold `node`, from the inside."""
        ancestor = self.parent(node)
        while ancestor is not None:
            yield ancestor
            ancestor = self.parent(ancestor)

    def statement(self, node: ast.AST) -> ast.stmt:
        """Return the innermost statement that is or holds `node`."""
        while not isinstance(node, ast.stmt):
            node = self._parents[node]
        return node

    def scope(self, node: ast.AST) -> Scope:
        """Return the innermost scope that holds `node`."""
        before = node
        for above in self.ancestors(node):
            if isinstance(above, _SCOPES) and not _evaluated_outside(above, before):
                return above
            before = above
        return self.tree

    def block(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return the list of statements that contains `statement`."""
        parent = self._parents[statement]
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(parent, name, None)
            if isinstance(statements, list) and statement in statements:
                return statements
        raise LookupError(f"line {statement.lineno} is not in a block")

    def within(self, node: ast.AST, block: list[ast.stmt]) -> ast.stmt | None:
        """Return the statement of `block` that is or holds `node`."""
        for holder in (node, *self.ancestors(node)):
            if isinstance(holder, ast.stmt) and holder in block:
                return holder
        return None

    def bindings(self, owner: ast.AST, name: str) -> list[ast.AST]:
        """Return the nodes that assign `name` of `owner`: see `Identity`."""
        return self._bound.get(owner, {}).get(name, [])

    def occurrences(self, variable: Identity) -> Sequence[ast.Name]:
        """Return the places where a variable of a scope is read or assigned."""
        if variable not in self._occurrences:
            owner, name = variable
            nodes = self._variables.get(name, [])
            self._occurrences[variable] = [node for node in nodes if self.owner(node) is owner]
        return self._occurrences[variable]

    def values(self, expression: ast.AST) -> list[ast.expr | None]:
        """Return each value assigned to a variable; None for one bound in another way."""
        identity = self.identity(expression)
        parents = map(self.parent, self.bindings(*identity) if identity is not None else [])
        return [
            node.value if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) else None
            for node in parents
        ]

    def is_taken(self, name: str) -> bool:
        """Whether the module itself binds `name`."""
        return bool(self.bindings(self.tree, name))

    def module_name(self, module: str) -> str | None:
        """Return the file's name of an imported module, such as ``th`` for torch, or None."""
        for name, nodes in self._bound.get(self.tree, {}).items():
            if self._imported(nodes) == module:
                return name
        return None

    def qualified(self, expression: ast.AST) -> str | None:
        """Return the full name of an imported object: ``torch.optim.Adam``; None for others."""
        if isinstance(expression, ast.Attribute):
            base = self.qualified(expression.value)
            return f"{base}.{expression.attr}" if base else None
        if not isinstance(expression, ast.Name):
            return None
        owner = self.owner(expression)
        return self._imported(self.bindings(owner, expression.id)) if owner is not None else None

    def identity(self, expression: ast.AST, depth: int = 0) -> Identity | None:
        """Return the variable of an expression, or None.

        An argument is identified with the variable that every call in the file passes for it.
        """
        key = expression, depth
        if key not in self._identities:
            self._identities[key] = self._identity(expression, depth)
        return self._identities[key]

    def _identity(self, expression: ast.AST, depth: int) -> Identity | None:
        if isinstance(expression, ast.Attribute):
            if isinstance(expression.value, ast.Name) and expression.value.id == "self":
                for above in self.ancestors(expression):
                    if isinstance(above, ast.ClassDef):
                        return above, f"self.{expression.attr}"
            base = self.identity(expression.value, depth)
            return None if base is None else (base[0], f"{base[1]}.{expression.attr}")
        if not isinstance(expression, ast.Name):
            return None
        owner = self.owner(expression)
        if owner is None:
            return None
        variable = owner, expression.id
        arguments = any(isinstance(node, ast.arg) for node in self.bindings(*variable))
        if not arguments or depth > _MAX_DEPTH or not isinstance(owner, _FUNCTIONS):
            return variable
        passed = [self._argument(call, owner, expression.id) for call in self.calls_of(owner)]
        identities = {
            None if value is None else self.identity(value, depth + 1) for value in passed
        }
        only = identities.pop() if len(identities) == 1 else None
        return only or variable

    def calls(self) -> Sequence[ast.Call]:
        """Return every call in the file, in its order."""
        return self._calls

    def calls_of(self, function: Function) -> list[ast.Call]:
        """Return the direct calls of a function; for a method, all calls of its name."""
        owner = self.parent(function)
        method = isinstance(owner, ast.ClassDef)
        calls = []
        for call in self.calls():
            if method and isinstance(call.func, ast.Attribute) and call.func.attr == function.name:
                calls.append(call)
            elif not method and isinstance(call.func, ast.Name) and call.func.id == function.name:
                scope = self.owner(call.func)
                if scope is not None and function in self.bindings(scope, function.name):
                    calls.append(call)
        if method and function.name == "__init__" and isinstance(owner, ast.ClassDef):
            calls += [
                call
                for call in self.calls()
                if isinstance(call.func, ast.Name) and call.func.id == owner.name
            ]
        return calls

    def _argument(self, call: ast.Call, function: Function, name: str) -> ast.expr | None:
        """Return the expression that `call` passes for the argument `name` of `function`."""
        for keyword in call.keywords:
            if keyword.arg == name:
                return keyword.value
        names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
        static = any(
            last_name(decorator) == "staticmethod" for decorator in function.decorator_list
        )
        if isinstance(self.parent(function), ast.ClassDef) and not static:
            if name in names[:1]:
                return call.func.value if isinstance(call.func, ast.Attribute) else None
            names = names[1:]
        if name not in names or any(isinstance(value, ast.Starred) for value in call.args):
            return None
        place = names.index(name)
        return call.args[place] if place < len(call.args) else None

    def owner(self, variable: ast.Name) -> ast.AST | None:
        """Return the scope of the variable that a name refers to; None if the file binds none."""
        name, scope = variable.id, cast(ast.AST, self.scope(variable))
        innermost = True
        while True:
            if name in self._outside.get(scope, {}):
                outer = self._outside[scope][name]
                scope = self.tree if isinstance(outer, ast.Global) else self.scope(scope)
                continue
            # Functions in a class do not see the names of the class.
            visible = innermost or not isinstance(scope, ast.ClassDef)
            if visible and name in self._bound.get(scope, {}):
                return scope
            if scope is self.tree:
                return None
            scope, innermost = self.scope(scope), False

    def _imported(self, nodes: list[ast.AST]) -> str | None:
        """Return the only object that these bindings import, or None."""
        origins = set()
        for node in nodes:
            if not isinstance(node, ast.alias):
                return None
            origin = self._parents[node]
            if isinstance(origin, ast.ImportFrom):
                if origin.level:
                    return None
                origins.add(f"{origin.module}.{node.name}")
            else:
                # `import torch.optim` binds the name torch.
                origins.add(node.name if node.asname else node.name.partition(".")[0])
        return origins.pop() if len(origins) == 1 else None

    def _note(self, node: ast.AST) -> None:
        if isinstance(node, ast.Name):
            self.used.add(node.id)
            self._variables.setdefault(node.id, []).append(node)
        elif isinstance(node, ast.Call):
            self._calls.append(node)
        elif isinstance(node, ast.Attribute):
            self.attributes.add(node.attr)
        if isinstance(node, ast.Name) and is_written(node):
            if not self._in_comprehension(node):
                self._bind(node, node.id)
        elif isinstance(node, ast.Attribute) and is_written(node):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                owner = self.identity(node)
                if owner is not None:
                    self._bound.setdefault(owner[0], {}).setdefault(owner[1], []).append(node)
        elif isinstance(node, (*_FUNCTIONS, ast.ClassDef, ast.alias, ast.arg)):
            name = node.arg if isinstance(node, ast.arg) else node.name
            if isinstance(node, ast.alias):
                name = node.asname or node.name.partition(".")[0]
            self.used.add(name)
            self._bind(node, name)
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)):
            if node.name:
                self._bind(node, node.name)
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            for name in node.names:
                self._outside.setdefault(self.scope(node), {})[name] = node

    def _bind(self, node: ast.AST, name: str) -> None:
        scope: ast.AST = self.scope(node)
        if isinstance(self._outside.get(scope, {}).get(name), ast.Global):
            scope = self.tree
        self._bound.setdefault(scope, {}).setdefault(name, []).append(node)

    def _in_comprehension(self, node: ast.AST) -> bool:
        before = node
        for above in self.ancestors(node):
            if isinstance(above, ast.comprehension):
                return before is above.target
            if isinstance(above, ast.stmt):
                return False
            before = above
        return False


def _evaluated_outside(scope: Scope, child: ast.AST) -> bool:
    """Whether `child` of a definition is evaluated in the scope around the definition."""
    if isinstance(scope, (*_FUNCTIONS, ast.ClassDef)):
        if child in scope.decorator_list:
            return True
        if isinstance(scope, ast.ClassDef):
            return child in scope.bases or child in scope.keywords
        return child is scope.returns
    return False
