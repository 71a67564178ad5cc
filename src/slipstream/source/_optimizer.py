"""The calls that make optimizers, and the models whose parameters they train."""

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

_PREFIX = "torch.optim."
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_PARAMETERS = ("parameters", "named_parameters", "modules", "named_modules")


@dataclass(frozen=True)
class Optimizer:
    """The call that makes an optimizer.

    Attributes:
        kind: the class of ``torch.optim``, such as ``AdamW``; None for that of another library.
        identity: the variable it is assigned to; None without one.
        origin: the call whose value is assigned to this variable: `call`, or that of a function of
            the file that returns the optimizer.
    """

    call: ast.Call
    kind: str | None
    identity: Identity | None
    origin: ast.Call


def optimizers_in(source: Source, returned: ast.expr | None = None) -> list[Optimizer]:
    """Return the optimizers of a script, or the one that a function returns as `returned`.

    Raises:
        EditLocationError: no call that makes an optimizer can be identified.
    """
    names = source.names
    if returned is not None:
        values = [returned] if isinstance(returned, ast.Call) else names.values(returned)
        calls = [value for value in values if isinstance(value, ast.Call) and _kind(names, value)]
        if not values or len(calls) != len(values):
            raise source.location_error(
                f"'{source.segment(returned)}' is not made by an optimizer of torch.optim here",
                returned,
            )
    else:
        calls = [call for call in names.calls() if _kind(names, call)]
        if not calls:
            called = _called(names)
            calls = [call for call in names.calls() if _is_foreign(source, call, called)]
        if not calls:
            raise source.location_error(
                "no optimizer is made in this file, such as torch.optim.SGD(model.parameters())"
            )
    optimizers = []
    for call in calls:
        origin = _returned_to(names, call) or call
        optimizers.append(Optimizer(call, _kind(names, call), assigned_to(names, origin), origin))
    return optimizers


def models_of(source: Source, optimizers: list[Optimizer]) -> dict[Identity, ast.expr]:
    """Return the models whose parameters `optimizers` train, each with an expression that reads it.

    Raises:
        EditLocationError: none can be identified, or one has no name.
    """
    names = source.names
    called = _called(names)
    models: dict[Identity, ast.expr] = {}
    for optimizer in optimizers:
        receivers, passed = _receivers(names, optimizer.call, called)
        for receiver in receivers or passed:
            receiver = _whole(names, receiver, called)
            identity = names.identity(receiver)
            if identity is None:
                raise source.location_error(
                    f"the optimizer trains '{source.segment(receiver)}', which has no name",
                    receiver,
                )
            models.setdefault(identity, receiver)
    if not models:
        raise source.location_error(
            "the model whose parameters the optimizer gets cannot be identified",
            optimizers[0].call,
        )
    return models


def trained_by(source: Source, optimizers: list[Optimizer]) -> tuple[Identity, ast.expr]:
    """Return the only model of `models_of`.

    Raises:
        EditLocationError: it cannot be identified, or there are several.
    """
    models, call = models_of(source, optimizers), optimizers[0].call
    if len(models) > 1:
        several = " and ".join(f"'{source.segment(model)}'" for model in models.values())
        raise source.location_error(f"the optimizer trains {several}", call)
    ((identity, receiver),) = models.items()
    of_self = identity[1].startswith("self.") and identity[1].count(".") == 1
    if isinstance(receiver, ast.Attribute) and not of_self:
        raise source.location_error(
            f"the optimizer trains '{source.segment(receiver)}', a part of an object", receiver
        )
    return identity, receiver


def assigned_to(names: Names, call: ast.expr) -> Identity | None:
    """Return the variable to which the value of `call` is assigned directly, or None."""
    parent = names.parent(call)
    if isinstance(parent, ast.Assign) and len(parent.targets) == 1:
        return names.identity(parent.targets[0])
    if isinstance(parent, (ast.AnnAssign, ast.NamedExpr)):
        return names.identity(parent.target)
    return None


def _kind(names: Names, call: ast.Call) -> str | None:
    full = names.qualified(call.func) or ""
    last = full.rpartition(".")[2]
    if full.startswith(_PREFIX) and "lr_scheduler" not in full and "swa_utils" not in full:
        return last if last[:1].isupper() else None
    return None


def _is_foreign(source: Source, call: ast.Call, called: Collection[Identity | None]) -> bool:
    """Whether other code makes an optimizer in `call`: it gets parameters, or is a model's method.

    The optimizer also steps in this file, alone or through ``scaler.step(optimizer)``.
    """
    names = source.names
    identity = assigned_to(names, call)
    if identity is None:
        return False
    for update in names.calls():
        if not isinstance(update.func, ast.Attribute) or update.func.attr != "step":
            continue
        argument = update.args[0] if update.args else None
        scaled = argument is not None and not _is_function(names, argument)
        if names.identity(argument if scaled and argument else update.func.value) == identity:
            return bool(_receivers(names, call, called)[0])
    return False


def _called(names: Names) -> set[Identity | None]:
    """Return the variables that the file calls."""
    return {names.identity(call.func) for call in names.calls()} - {None}


def _is_function(names: Names, expression: ast.expr) -> bool:
    """Whether `expression` is a lambda or the name of a function of the file."""
    if not isinstance(expression, ast.Name):
        return isinstance(expression, ast.Lambda)
    owner = names.owner(expression)
    bound = [] if owner is None else names.bindings(owner, expression.id)
    return any(isinstance(node, ast.FunctionDef) for node in bound)


def _returned_to(names: Names, call: ast.Call) -> ast.Call | None:
    """Return the only call of the function that returns the value of `call`, or None."""
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
    """Find the owners of the parameters passed to `call`, also through variables and functions.

    Args:
        called: variables that the file calls, such as models; their definitions are not followed,
            and a method of one, such as ``model.configure_optimizers``, gets its parameters.

    Returns:
        The expressions whose ``parameters()`` are read, and the variables of `called` that are
        read in another way, for example by a function that makes parameter groups.
    """
    if isinstance(call.func, ast.Attribute) and names.identity(call.func.value) in called:
        return [call.func.value], []
    receivers: list[ast.expr] = []
    passed: list[ast.expr] = []
    reached: set[ast.AST] = set()
    followed: set[Identity] = set()
    pending: list[ast.AST] = [*call.args, *(keyword.value for keyword in call.keywords)]
    while pending:
        node = pending.pop()
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
                passed.append(node)
            elif owner is not None and (owner, node.id) not in followed:
                followed.add((owner, node.id))
                pending += definitions(names, (owner, node.id))
        pending += ast.iter_child_nodes(node)
    return sorted(receivers, key=position), sorted(passed, key=position)


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
    """Return the outermost object of ``model.blocks[0].head`` that the file calls, or `part`."""
    whole, inner = part, part
    while isinstance(inner, (ast.Attribute, ast.Subscript)):
        inner = inner.value
        if names.identity(inner) in called:
            whole = inner
    return whole
