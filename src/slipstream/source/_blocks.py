"""Activation checkpointing of the repeated blocks of a model whose classes are in the file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from slipstream.source._names import last_name, nodes_in, variables_in
from slipstream.source._parts import local_class, reachable
from slipstream.source._places import Places
from slipstream.source._source import Source

_LIST, _ROW = "torch.nn.ModuleList", "torch.nn.Sequential"
_LAYERS = ("torch.nn.TransformerEncoderLayer", "torch.nn.TransformerDecoderLayer")
_NN = "torch.nn."
# Arguments of checkpoint itself: a block's own of these names would not reach it.
_OWN = {"use_reentrant", "preserve_rng_state", "context_fn", "determinism_check"}
_OWN |= {"debug", "early_stop"}


@dataclass(frozen=True)
class _Blocks:
    """An attribute of a class that holds blocks one after another.

    Attributes:
        owner: the class.
        name: the attribute of ``self``.
        kind: the class of the blocks; None for one of torch's.
        row: whether it is called as a whole (``nn.Sequential``), not looped over.
    """

    owner: ast.ClassDef
    name: str
    kind: ast.ClassDef | None
    row: bool


def checkpoint_blocks(where: Places) -> Source:
    """The file with every repeated block of the model called through ``checkpoint``.

    These are what a loop over ``self.NAME``, an ``nn.ModuleList`` of one class, calls, and what an
    ``nn.Sequential`` of one class holds; where blocks hold blocks, the outermost.

    Raises:
        NotPlacedError: there is no such loop, or it cannot be told what runs in it.
        AlreadyThereError: the blocks are checkpointed.
    """
    source = where.source
    model = where.model_class
    reached = list(reachable(source.names, model))
    blocks = [one for kind in reached for one in _blocks_of(source, kind)]
    inner = {kind for one in blocks if one.kind for kind in reachable(source.names, one.kind)}
    blocks = [one for one in blocks if one.owner not in inner]
    if not blocks:
        raise source.not_placed(
            f"{model.name} holds no nn.ModuleList or nn.Sequential of blocks", model
        )
    torch, edited = where.torch, source.with_import("torch")
    for one in blocks:
        edited = (_in_row if one.row else _in_loop)(source, edited, one, torch)
    return edited


def _blocks_of(source: Source, owner: ast.ClassDef) -> list[_Blocks]:
    blocks = []
    single: dict[str, ast.stmt] = {}
    for statement in nodes_in(ast.Assign, owner):
        target, value = statement.targets[0], statement.value
        if len(statement.targets) != 1 or not (_is_self(target) and isinstance(value, ast.Call)):
            continue
        assert isinstance(target, ast.Attribute)
        if source.names.qualified(value.func) in (_LIST, _ROW):
            row = source.names.qualified(value.func) == _ROW
            element = _element(value, row)
            if element is not None:
                blocks += _as_blocks(source, owner, target.attr, element, row)
            continue
        kind = local_class(source.names, value.func)
        if kind is not None and _has_parts(source, kind):
            if kind.name in single:
                raise source.not_placed(
                    f"{owner.name} holds several {kind.name} one by one", statement
                )
            single[kind.name] = statement
    return blocks


def _element(value: ast.Call, row: bool) -> ast.Call | None:
    """The call that makes each of the modules: ``[Block() for ...]``, ``[Block(), Block()]``."""
    given = value.args[0] if len(value.args) == 1 and not value.keywords else None
    if isinstance(given, ast.Starred):
        given = given.value
    elif row:
        return None
    if isinstance(given, (ast.ListComp, ast.GeneratorExp)) and isinstance(given.elt, ast.Call):
        return given.elt
    if isinstance(given, ast.List) and len(given.elts) > 1:
        calls = [one for one in given.elts if isinstance(one, ast.Call)]
        if len(calls) == len(given.elts) and len({ast.dump(one.func) for one in calls}) == 1:
            return calls[0]
    return None


def _as_blocks(
    source: Source, owner: ast.ClassDef, name: str, made: ast.Call, row: bool
) -> list[_Blocks]:
    kind = local_class(source.names, made.func)
    if kind is not None:
        return [_Blocks(owner, name, kind, row)] if _has_parts(source, kind) else []
    full = source.names.qualified(made.func) or ""
    if full in _LAYERS:
        return [_Blocks(owner, name, None, row)]
    if full.startswith(_NN):
        return []  # a layer without parts is no block
    raise source.not_placed(f"what self.{name} holds is not defined in this file", made)


def _has_parts(source: Source, kind: ast.ClassDef) -> bool:
    """Whether a class assigns modules, of torch's or of the file's classes, to ``self``."""
    return any(
        (source.names.qualified(call.func) or "").startswith(_NN)
        or local_class(source.names, call.func)
        for node in nodes_in(ast.Assign, kind)
        if any(map(_is_self, _targets(node)))
        for call in nodes_in(ast.Call, node.value)
    )


def _targets(statement: ast.Assign) -> Iterator[ast.expr]:
    for target in statement.targets:
        yield from target.elts if isinstance(target, ast.Tuple) else (target,)


def _is_self(node: ast.AST, name: str | None = None) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
        and name in (None, node.attr)
    )


def _running(owner: ast.ClassDef) -> Iterator[ast.AST]:
    """The nodes of a class that run after its objects are made."""
    for statement in owner.body:
        if getattr(statement, "name", "") != "__init__":
            yield from ast.walk(statement)


def _uses(one: _Blocks) -> list[ast.expr]:
    """Where the class reads the attribute."""
    return [
        node
        for node in _running(one.owner)
        if isinstance(node, ast.Attribute)
        and _is_self(node, one.name)
        and isinstance(node.ctx, ast.Load)
    ]


def _in_loop(source: Source, edited: Source, one: _Blocks, torch: str) -> Source:
    """``for block in self.blocks: x = block(x)``, each call checkpointed."""
    names = source.names
    loops = [
        loop
        for loop in _running(one.owner)
        if isinstance(loop, ast.For) and any(_is_self(n, one.name) for n in ast.walk(loop.iter))
    ]
    called = False
    for loop in loops:
        variable = _variable(source, loop, one)
        uses = variables_in(*loop.body, name=variable)
        calls = [names.parent(use) for use in uses]
        if any(map(_is_checkpoint, calls)):
            raise source.already_there("blocks are checkpointed", loop)
        for use, call in zip(uses, calls, strict=True):
            if not isinstance(call, ast.Call) or call.func is not use:
                raise source.not_placed(f"the loop does more with '{variable}' than call it", use)
            edited = _through_checkpoint(source, edited, call, variable, torch)
            called = True
    inside = {node for loop in loops for node in ast.walk(loop.iter)}
    if not called or any(use not in inside for use in _uses(one)):
        what = "is used apart from a loop" if called else "is not called in a loop"
        raise source.not_placed(f"self.{one.name} {what}", one.owner)
    return edited


def _variable(source: Source, loop: ast.For, one: _Blocks) -> str:
    """What the loop calls a block: over ``self.blocks``, or ``enumerate(self.blocks)``."""
    over, target = loop.iter, loop.target
    if isinstance(over, ast.Call) and isinstance(over.func, ast.Name):
        counts = over.func.id == "enumerate" and not source.names.is_taken("enumerate")
        if counts and isinstance(target, ast.Tuple) and len(target.elts) == 2 and over.args:
            over, target = over.args[0], target.elts[1]
    if not _is_self(over, one.name) or not isinstance(target, ast.Name):
        raise source.not_placed(f"the loop over self.{one.name} is no plain one", loop)
    return target.id


def _is_checkpoint(call: ast.AST | None) -> bool:
    return isinstance(call, ast.Call) and "checkpoint" in last_name(call.func)


def _through_checkpoint(
    source: Source, edited: Source, call: ast.Call, block: str, torch: str
) -> Source:
    names = [keyword.arg for keyword in call.keywords]
    if not call.args or isinstance(call.args[0], ast.Starred) or None in names:
        raise source.not_placed("it cannot be seen what the block is called with", call)
    if not _OWN.isdisjoint(names):
        raise source.not_placed("the block takes an argument that checkpoint takes, too", call)
    first = call.args[0]
    edited = edited.replace(call.func, f"{torch}.utils.checkpoint.checkpoint")
    edited = edited.replace(first, f"{block}, {source.segment(first)}")
    return edited.set_keywords(call, use_reentrant="False")


def _in_row(source: Source, edited: Source, one: _Blocks, torch: str) -> Source:
    """``x = self.blocks(x)`` as a loop over the blocks, each call checkpointed."""
    names = source.names
    uses = _uses(one)
    call = names.parent(uses[0]) if len(uses) == 1 else None
    if not isinstance(call, ast.Call) or call.func is not uses[0]:
        if call is not None and _is_checkpoint(call):
            raise source.already_there("blocks are checkpointed", call)
        raise source.not_placed(f"self.{one.name} is not called at one place alone", one.owner)
    statement = names.parent(call)
    plain = isinstance(statement, ast.Assign) and len(statement.targets) == 1
    target = statement.targets[0] if isinstance(statement, ast.Assign) else None
    alone = len(call.args) == 1 and not call.keywords and not isinstance(call.args[0], ast.Starred)
    if not plain or not isinstance(target, ast.Name) or not alone:
        raise source.not_placed(
            f"self.{one.name} is not called in a statement 'x = self.{one.name}(x)'", call
        )
    assert isinstance(statement, ast.Assign)
    given = call.args[0]
    block = source.fresh_name("block", "layer")
    if not (isinstance(given, ast.Name) and given.id == target.id):
        edited = edited.insert_before(statement, f"{target.id} = {source.segment(given)}")
    checkpoint = f"{torch}.utils.checkpoint.checkpoint"
    edited = edited.replace(call, f"{checkpoint}({block}, {target.id}, use_reentrant=False)")
    return edited.wrap(statement, statement, f"for {block} in self.{one.name}:")
