"""Activation checkpointing of the repeated blocks of a model whose classes are in the file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from slipstream.source._names import last_name, nodes_in, variables_in
from slipstream.source._parts import local_class, reachable
from slipstream.source._places import Places
from slipstream.source._source import Source

_LIST, _SEQUENTIAL = "torch.nn.ModuleList", "torch.nn.Sequential"
_LAYERS = ("torch.nn.TransformerEncoderLayer", "torch.nn.TransformerDecoderLayer")
_NN = "torch.nn."
# Arguments of checkpoint itself: a block's arguments of these names would not reach the block.
_RESERVED = {"use_reentrant", "preserve_rng_state", "context_fn", "determinism_check"}
_RESERVED |= {"debug", "early_stop"}


@dataclass(frozen=True)
class _Blocks:
    """An attribute of a class that holds consecutive blocks.

    Attributes:
        owner: the class.
        name: the attribute of ``self``.
        kind: the class of the blocks; None for a class of torch.
        sequential: whether it is an ``nn.Sequential``, called as a whole, and not looped over.
    """

    owner: ast.ClassDef
    name: str
    kind: ast.ClassDef | None
    sequential: bool


def checkpoint_blocks(where: Places) -> Source:
    """Edit the file so that every repeated block of the model runs through ``checkpoint``.

    Blocks are the modules that a loop over ``self.NAME``, an ``nn.ModuleList`` of one class, calls,
    and those of an ``nn.Sequential`` of one class; of nested blocks, the outermost.

    Raises:
        EditLocationError: there is no such loop, or its calls cannot be determined.
        AlreadyAppliedError: the blocks are checkpointed.
    """
    source = where.source
    model = where.model_class
    reached = list(reachable(source.names, model))
    found = [blocks for kind in reached for blocks in _blocks_of(source, kind)]
    inner = {
        kind for blocks in found if blocks.kind for kind in reachable(source.names, blocks.kind)
    }
    found = [blocks for blocks in found if blocks.owner not in inner]
    if not found:
        raise source.location_error(
            f"{model.name} has no nn.ModuleList or nn.Sequential of blocks", model
        )
    torch, edited = where.torch, source.with_import("torch")
    for blocks in found:
        edit = _edit_sequential if blocks.sequential else _edit_loop
        edited = edit(source, edited, blocks, torch)
    return edited


def _blocks_of(source: Source, owner: ast.ClassDef) -> list[_Blocks]:
    blocks = []
    single: dict[str, ast.stmt] = {}
    for statement in nodes_in(ast.Assign, owner):
        target, value = statement.targets[0], statement.value
        if len(statement.targets) != 1 or not (_is_self(target) and isinstance(value, ast.Call)):
            continue
        assert isinstance(target, ast.Attribute)
        if source.names.qualified(value.func) in (_LIST, _SEQUENTIAL):
            sequential = source.names.qualified(value.func) == _SEQUENTIAL
            element = _element(value, sequential)
            if element is not None:
                blocks += _as_blocks(source, owner, target.attr, element, sequential)
            continue
        kind = local_class(source.names, value.func)
        if kind is not None and _has_parts(source, kind):
            if kind.name in single:
                raise source.location_error(
                    f"{owner.name} has several {kind.name} as separate attributes", statement
                )
            single[kind.name] = statement
    return blocks


def _element(value: ast.Call, sequential: bool) -> ast.Call | None:
    """Return the call that builds each module: ``[Block() for ...]``, ``[Block(), Block()]``."""
    modules = value.args[0] if len(value.args) == 1 and not value.keywords else None
    if isinstance(modules, ast.Starred):
        modules = modules.value
    elif sequential:
        return None
    if isinstance(modules, (ast.ListComp, ast.GeneratorExp)) and isinstance(modules.elt, ast.Call):
        return modules.elt
    if isinstance(modules, ast.List) and len(modules.elts) > 1:
        calls = [call for call in modules.elts if isinstance(call, ast.Call)]
        if len(calls) == len(modules.elts) and len({ast.dump(call.func) for call in calls}) == 1:
            return calls[0]
    return None


def _as_blocks(
    source: Source, owner: ast.ClassDef, name: str, call: ast.Call, sequential: bool
) -> list[_Blocks]:
    kind = local_class(source.names, call.func)
    if kind is not None:
        return [_Blocks(owner, name, kind, sequential)] if _has_parts(source, kind) else []
    full = source.names.qualified(call.func) or ""
    if full in _LAYERS:
        return [_Blocks(owner, name, None, sequential)]
    if full.startswith(_NN):
        return []  # a layer without parts is not a block
    raise source.location_error(f"the modules of self.{name} are not defined in this file", call)


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
    """Yield the nodes of a class that run after its objects are built."""
    for statement in owner.body:
        if getattr(statement, "name", "") != "__init__":
            yield from ast.walk(statement)


def _reads(blocks: _Blocks) -> list[ast.expr]:
    """Return the places where the class reads the attribute."""
    return [
        node
        for node in _running(blocks.owner)
        if isinstance(node, ast.Attribute)
        and _is_self(node, blocks.name)
        and isinstance(node.ctx, ast.Load)
    ]


def _edit_loop(source: Source, edited: Source, blocks: _Blocks, torch: str) -> Source:
    """Checkpoint each call of ``for block in self.blocks: x = block(x)``."""
    names = source.names
    loops = [
        loop
        for loop in _running(blocks.owner)
        if isinstance(loop, ast.For) and any(_is_self(n, blocks.name) for n in ast.walk(loop.iter))
    ]
    called = False
    for loop in loops:
        variable = _variable(source, loop, blocks)
        uses = variables_in(*loop.body, name=variable)
        calls = [names.parent(use) for use in uses]
        if any(map(_is_checkpoint, calls)):
            raise source.already_applied("blocks are checkpointed", loop)
        for use, call in zip(uses, calls, strict=True):
            if not isinstance(call, ast.Call) or call.func is not use:
                raise source.location_error(f"the loop does not only call '{variable}'", use)
            edited = _through_checkpoint(source, edited, call, variable, torch)
            called = True
    inside = {node for loop in loops for node in ast.walk(loop.iter)}
    if not called or any(use not in inside for use in _reads(blocks)):
        what = "is used apart from a loop" if called else "is not called in a loop"
        raise source.location_error(f"self.{blocks.name} {what}", blocks.owner)
    return edited


def _variable(source: Source, loop: ast.For, blocks: _Blocks) -> str:
    """Return the loop's variable over ``self.blocks`` or ``enumerate(self.blocks)``."""
    over, target = loop.iter, loop.target
    if isinstance(over, ast.Call) and isinstance(over.func, ast.Name):
        counts = over.func.id == "enumerate" and not source.names.is_taken("enumerate")
        if counts and isinstance(target, ast.Tuple) and len(target.elts) == 2 and over.args:
            over, target = over.args[0], target.elts[1]
    if not _is_self(over, blocks.name) or not isinstance(target, ast.Name):
        raise source.location_error(f"the loop over self.{blocks.name} is not a plain one", loop)
    return target.id


def _is_checkpoint(call: ast.AST | None) -> bool:
    return isinstance(call, ast.Call) and "checkpoint" in last_name(call.func)


def _through_checkpoint(
    source: Source, edited: Source, call: ast.Call, block: str, torch: str
) -> Source:
    names = [keyword.arg for keyword in call.keywords]
    if not call.args or isinstance(call.args[0], ast.Starred) or None in names:
        raise source.location_error("the block's arguments cannot be determined", call)
    if not _RESERVED.isdisjoint(names):
        raise source.location_error("the block takes an argument that checkpoint also takes", call)
    first = call.args[0]
    edited = edited.replace(call.func, f"{torch}.utils.checkpoint.checkpoint")
    edited = edited.replace(first, f"{block}, {source.segment(first)}")
    return edited.set_keywords(call, use_reentrant="False")


def _edit_sequential(source: Source, edited: Source, blocks: _Blocks, torch: str) -> Source:
    """Turn ``x = self.blocks(x)`` into a loop over the blocks, each call checkpointed."""
    names = source.names
    uses = _reads(blocks)
    call = names.parent(uses[0]) if len(uses) == 1 else None
    if not isinstance(call, ast.Call) or call.func is not uses[0]:
        if call is not None and _is_checkpoint(call):
            raise source.already_applied("blocks are checkpointed", call)
        raise source.location_error(
            f"self.{blocks.name} is not called at exactly one place", blocks.owner
        )
    statement = names.parent(call)
    plain = isinstance(statement, ast.Assign) and len(statement.targets) == 1
    target = statement.targets[0] if isinstance(statement, ast.Assign) else None
    alone = len(call.args) == 1 and not call.keywords and not isinstance(call.args[0], ast.Starred)
    if not plain or not isinstance(target, ast.Name) or not alone:
        raise source.location_error(
            f"self.{blocks.name} is not called in a statement 'x = self.{blocks.name}(x)'", call
        )
    assert isinstance(statement, ast.Assign)
    argument = call.args[0]
    block = source.fresh_name("block", "layer")
    if not (isinstance(argument, ast.Name) and argument.id == target.id):
        edited = edited.insert_before(statement, f"{target.id} = {source.segment(argument)}")
    checkpoint = f"{torch}.utils.checkpoint.checkpoint"
    edited = edited.replace(call, f"{checkpoint}({block}, {target.id}, use_reentrant=False)")
    return edited.wrap(statement, statement, f"for {block} in self.{blocks.name}:")
