"""The calls that make optimizers, and the model whose parameters they are given."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from slipstream.source._function import value_of
from slipstream.source._names import Identity, Names
from slipstream.source._refusals import NotPlacedError
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
        made = [returned]
        if not isinstance(returned, ast.Call):
            identity = names.identity(returned)
            nodes = names.bindings(*identity) if identity is not None else []
            parents = [names.parent(node) for node in nodes]
            made = [
                one.value
                for one in parents
                if isinstance(one, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and one.value
            ]
            if len(made) != len(nodes):
                made = []
        calls = [one for one in made if isinstance(one, ast.Call) and _kind(names, one)]
        if not made or len(calls) != len(made):
            raise NotPlacedError(
                f"'{source.segment(returned)}' is not made by an optimizer of torch.optim here",
                where=source.line(returned),
            )
    else:
        calls = [one for one in names.calls() if _kind(names, one)]
        if not calls:
            calls = [one for one in names.calls() if _is_foreign(source, one)]
        if not calls:
            raise NotPlacedError(
                "no optimizer is made in this file, such as torch.optim.SGD(model.parameters())",
                where=str(source.path),
            )
    return [Optimizer(one, _kind(names, one), assigned_to(names, one)) for one in calls]


def trained_by(source: Source, optimizers: list[Optimizer]) -> tuple[Identity, ast.expr]:
    """The one model whose parameters `optimizers` are given, and an expression that reads it.

    Raises:
        NotPlacedError: it is not to be seen, or there are several.
    """
    found: dict[Identity, ast.expr] = {}
    for optimizer in optimizers:
        for receiver in _receivers(source, optimizer.call):
            identity = source.names.identity(receiver)
            if identity is None:
                raise NotPlacedError(
                    f"the optimizer trains '{source.segment(receiver)}', which has no name",
                    where=source.line(receiver),
                )
            found.setdefault(identity, receiver)
    call = optimizers[0].call
    if not found:
        raise NotPlacedError(
            "it cannot be seen whose parameters the optimizer is given", where=source.line(call)
        )
    if len(found) > 1:
        several = " and ".join(f"'{source.segment(one)}'" for one in found.values())
        raise NotPlacedError(f"the optimizer trains {several}", where=source.line(call))
    ((identity, receiver),) = found.items()
    if isinstance(receiver, ast.Attribute) and not identity[1].count(".") == 1:
        raise NotPlacedError(
            f"the optimizer trains '{source.segment(receiver)}', a part of something",
            where=source.line(receiver),
        )
    if isinstance(receiver, ast.Attribute) and not identity[1].startswith("self."):
        raise NotPlacedError(
            f"the optimizer trains '{source.segment(receiver)}', a part of something",
            where=source.line(receiver),
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
    made = assigned_to(source.names, call)
    if made is None or not _receivers(source, call):
        return False
    return any(
        isinstance(one.func, ast.Attribute)
        and one.func.attr == "step"
        and source.names.identity(one.func.value) == made
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
        for one in given
        for node in ast.walk(one)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _PARAMETERS
    ]
