"""The calls that make optimizers, and the model whose parameters they are given."""

from __future__ import annotations

import ast
from collections.abc import Collection
from dataclasses import dataclass

from slipstream.source._names import (
    Identity,
    Names,
    is_written,
    last_name,
    nodes_in,
    position,
    variables_in,
)
from slipstream.source._parts import definitions
from slipstream.source._source import Source

_ROOM = "torch.optim."
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_PARAMETERS = ("parameters", "named_parameters", "modules", "named_modules")


@dataclass(frozen=True)
class Optimizer:
    """The call that makes it.

    Attributes:
        kind: the class of ``torch.optim``, such as ``AdamW``; None for another library's.
        identity: the variable it is assigned to, if it is.
        origin: the call that this variable is assigned: `call`, or that of a function of the file
            that returns the optimizer.
    """

    call: ast.Call
    kind: str | None
    identity: Identity | None
    origin: ast.Call


def optimizers_in(source: Source, returned: ast.expr | None = None) -> list[Optimizer]:
    """The optimizers of a script, or the one a function returns as `returned`.

    Raises:
        NotPlacedError: none is made by a call that can be seen.
    """
    names = source.names
    if returned is not None:
        values = [returned] if isinstance(returned, ast.Call) else names.values(returned)
        calls = [one for one in values if isinstance(one, ast.Call) and _kind(names, one)]
        if not values or len(calls) != len(values):
            raise source.not_placed(
                f"'{source.segment(returned)}' is not made by an optimizer of torch.optim here",
                returned,
            )
    else:
        calls = [one for one in names.calls() if _kind(names, one)]
        if not calls:
            calls = [one for one in names.calls() if _is_foreign(source, one)]
        if not calls:
            raise source.not_placed(
                "no optimizer is made in this file, such as torch.optim.SGD(model.parameters())"
            )
    optimizers = []
    for call in calls:
        origin = _returned_to(names, call) or call
        optimizers.append(Optimizer(call, _kind(names, call), assigned_to(names, origin), origin))
    return optimizers


def models_of(source: Source, optimizers: list[Optimizer]) -> dict[Identity, ast.expr]:
    """The models whose parameters `optimizers` are given, each with an expression that reads it.

    Raises:
        NotPlacedError: none can be seen, or one has no name.
    """
    names = source.names
    called = {names.identity(call.func) for call in names.calls()} - {None}
    models: dict[Identity, ast.expr] = {}
    for optimizer in optimizers:
        receivers, handed = _receivers(names, optimizer.call, called)
        for receiver in receivers or handed:
            receiver = _whole(names, receiver, called)
            identity = names.identity(receiver)
            if identity is None:
                raise source.not_placed(
                    f"the optimizer trains '{source.segment(receiver)}', which has no name",
                    receiver,
                )
            models.setdefault(identity, receiver)
    if not models:
        raise source.not_placed(
            "it cannot be seen whose parameters the optimizer is given", optimizers[0].call
        )
    return models


def trained_by(source: Source, optimizers: list[Optimizer]) -> tuple[Identity, ast.expr]:
    """The one model of `models_of`.

    Raises:
        NotPlacedError: it is not to be seen, or there are several.
    """
    models, call = models_of(source, optimizers), optimizers[0].call
    if len(models) > 1:
        several = " and ".join(f"'{source.segment(one)}'" for one in models.values())
        raise source.not_placed(f"the optimizer trains {several}", call)
    ((identity, receiver),) = models.items()
    of_self = identity[1].startswith("self.") and identity[1].count(".") == 1
    if isinstance(receiver, ast.Attribute) and not of_self:
        raise source.not_placed(
            f"the optimizer trains '{source.segment(receiver)}', a part of something", receiver
        )
    return identity, receiver


def assigned_to(names: Names, call: ast.expr) -> Identity | None:
    """The variable that is given the value of `call`, and nothing else, directly."""
    parent = names.parent(call)
    if isinstance(parent, ast.Assign) and len(parent.targets) == 1:
        return names.identity(parent.targets[0])
    if isinstance(parent, (ast.AnnAssign, ast.NamedExpr)):
        return names.identity(parent.target)
    return None


def _kind(names: Names, call: ast.Call) -> str | None:
    full = names.qualified(call.func) or ""
    last = full.rpartition(".")[2]
    if full.startswith(_ROOM) and "lr_scheduler" not in full and "swa_utils" not in full:
        return last if last[:1].isupper() else None
    return None


def _is_foreign(source: Source, call: ast.Call) -> bool:
    """Whether the call makes what is stepped, from parameters: an optimizer of another library."""
    names = source.names
    identity = assigned_to(names, call)
    stepped = identity is not None and any(
        isinstance(one.func, ast.Attribute)
        and one.func.attr == "step"
        and names.identity(one.func.value) == identity
        for one in names.calls()
    )
    return stepped and bool(_receivers(names, call, ())[0])


def _returned_to(names: Names, call: ast.Call) -> ast.Call | None:
    """The only call of the function that returns the value of `call`; None without one."""
    function = names.scope(call)
    if not isinstance(function, ast.FunctionDef):
        return None
    variable = assigned_to(names, call)
    returned = [node.value for node in nodes_in(ast.Return, function) if node.value is not None]
    if not returned or not all(
        value is call or (variable is not None and names.identity(value) == variable)
        for value in returned
    ):
        return None
    calls = names.calls_of(function)
    return calls[0] if len(calls) == 1 else None


def _receivers(
    names: Names, call: ast.Call, called: Collection[Identity | None]
) -> tuple[list[ast.expr], list[ast.expr]]:
    """Find whose parameters go into `call`, also through variables, loops and functions.

    Args:
        called: variables that the file calls, such as models; what they are made of is not
            followed.

    Returns:
        The expressions whose ``parameters()`` are read, and the variables of `called` that are
        read otherwise, as by a function that makes groups of them.
    """
    receivers: list[ast.expr] = []
    handed: list[ast.expr] = []
    reached: set[ast.AST] = set()
    left: list[ast.AST] = [*call.args, *(keyword.value for keyword in call.keywords)]
    while left:
        node = left.pop()
        if node in reached or isinstance(node, ast.ClassDef):
            continue
        reached.add(node)
        if isinstance(node, ast.Call) and last_name(node.func) in _PARAMETERS:
            assert isinstance(node.func, ast.Attribute)
            receiver = node.func.value
            if not _is_loop_variable(names, receiver):
                receivers.append(receiver)
                continue
        if isinstance(node, ast.Name) and not is_written(node) and not _comprehended(names, node):
            owner = names.owner(node)
            functions = [] if owner is None else names.bindings(owner, node.id)
            is_function = any(isinstance(bound, ast.FunctionDef) for bound in functions)
            if not is_function and names.identity(node) in called:
                handed.append(node)
            elif owner is not None:
                left += definitions(names, (owner, node.id))
        left += ast.iter_child_nodes(node)
    return sorted(receivers, key=position), sorted(handed, key=position)


def _is_loop_variable(names: Names, expression: ast.expr) -> bool:
    """Whether a name takes its values from an iterable, in a loop or a comprehension."""
    if not isinstance(expression, ast.Name):
        return False
    if _comprehended(names, expression):
        return True
    owner = names.owner(expression)
    bound = [] if owner is None else names.bindings(owner, expression.id)
    return bool(bound) and all(isinstance(names.statement(node), ast.For) for node in bound)


def _comprehended(names: Names, name: ast.Name) -> bool:
    """Whether a name is a variable of a comprehension around it."""
    return any(
        variables_in(generator.target, name=name.id)
        for above in names.ancestors(name)
        if isinstance(above, _COMPREHENSIONS)
        for generator in above.generators
    )


def _whole(names: Names, part: ast.expr, called: Collection[Identity | None]) -> ast.expr:
    """The outermost object of ``model.blocks[0].head`` that the file calls; else all of it."""
    whole, inner = part, part
    while isinstance(inner, (ast.Attribute, ast.Subscript)):
        inner = inner.value
        if names.identity(inner) in called:
            whole = inner
    return whole
