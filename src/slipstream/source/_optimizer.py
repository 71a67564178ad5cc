"""The calls that make optimizers, and the model whose parameters they are given."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from slipstream.source._function import value_of
from slipstream.source._names import Identity, Names, nodes_in
from slipstream.source._source import Source

_ROOM = "torch.optim."
_PARAMETERS = ("parameters", "named_parameters")


@dataclass(frozen=True)
class Optimizer:
    """The call that makes it.

    Attributes:
        kind: the class of ``torch.optim``, such as ``AdamW``; None for another library's.
        identity: the variable it is assigned to, if it is.
    """

    call: ast.Call
    kind: str | None
    identity: Identity | None


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
    return [Optimizer(one, _kind(names, one), assigned_to(names, one)) for one in calls]


def trained_by(source: Source, optimizers: list[Optimizer]) -> tuple[Identity, ast.expr]:
    """The one model whose parameters `optimizers` are given, and an expression that reads it.

    Raises:
        NotPlacedError: it is not to be seen, or there are several.
    """
    models: dict[Identity, ast.expr] = {}
    for optimizer in optimizers:
        for receiver in _receivers(source, optimizer.call):
            identity = source.names.identity(receiver)
            if identity is None:
                raise source.not_placed(
                    f"the optimizer trains '{source.segment(receiver)}', which has no name",
                    receiver,
                )
            models.setdefault(identity, receiver)
    call = optimizers[0].call
    if not models:
        raise source.not_placed("it cannot be seen whose parameters the optimizer is given", call)
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
    identity = assigned_to(source.names, call)
    if identity is None or not _receivers(source, call):
        return False
    return any(
        isinstance(one.func, ast.Attribute)
        and one.func.attr == "step"
        and source.names.identity(one.func.value) == identity
        for one in source.names.calls()
    )


def _receivers(source: Source, call: ast.Call) -> list[ast.expr]:
    """The expressions whose ``parameters()`` go into `call`, perhaps through a variable."""
    given: list[ast.expr] = [*call.args, *(keyword.value for keyword in call.keywords)]
    for one in list(given):
        if isinstance(one, ast.Name):
            value = value_of(source, one)
            given += [value] if value is not None else []
    return [
        node.func.value
        for node in nodes_in(ast.Call, *given)
        if isinstance(node.func, ast.Attribute) and node.func.attr in _PARAMETERS
    ]
