"""Gradient accumulation in a script's training loop."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from slipstream.source._frameworks import find_switch
from slipstream.source._names import (
    Loop,
    Names,
    is_written,
    last_name,
    nodes_in,
    position,
    variables_in,
)
from slipstream.source._optimizer import assigned_to
from slipstream.source._places import Places, is_main_guard
from slipstream.source._source import Source
from slipstream.source._step import CONTAINERS, StepSource, updates_of

_WRAPPERS = frozenset(
    [
        "torch.nn.parallel.DistributedDataParallel",
        "torch.nn.parallel.distributed.DistributedDataParallel",
        "torch.distributed.fsdp.FullyShardedDataParallel",
    ]
)
_COUNTERS = ("step", "batch_index", "turn")


def accumulate(where: Places, batches: int) -> Source:
    """Edit the training loop, or a framework's, to update once for every `batches` batches.

    The loss is divided where ``backward`` is called, so that the loss the loop prints does not
    change. Gradient clipping, the learning rate schedule and clearing gradients move with the
    update, and so does the gradient exchange of replicas (DistributedDataParallel).

    Raises:
        EditLocationError: the loop is not a sequence of batch, backward, update.
        AlreadyAppliedError: several batches already precede an update.
    """
    switch = find_switch(where, f"accumulation:{batches}", {"batches": batches})
    if switch is not None:
        return switch(where)
    block = _periodic_update(where)
    if block is None:
        block = where.step.accumulation(where.source.names)
    if block is not None:
        raise where.source.already_applied(
            f"the loop accumulates gradients: multiply its number of batches by {batches}", block
        )
    source, names, step = where.source, where.source.names, where.step
    if step.scaled:
        raise source.location_error("the loop scales its loss (GradScaler)", step.update)
    if step.update.args or step.update.keywords:
        raise source.location_error("the optimizer steps with a closure", step.update)
    loop = step.for_loop(source)
    update = _own_statement(source, loop, step.update)
    backward = names.within(step.backward, loop.body)
    for above in step.blocks_around(step.backward, names):
        if not isinstance(above, (ast.Expr, ast.With)):
            raise source.location_error("backward is called under a condition", step.backward)
    assert backward is not None
    for node in nodes_in(ast.Continue, loop):
        if _loop_of(names, node) is loop:
            raise source.location_error("the loop skips batches", node)
    first, last = _update_group(source, step, loop.body, loop.body.index(update), backward)
    group = loop.body[first : last + 1]
    cleared = [_own_statement(source, loop, call) for call in step.zero_grads]
    if not cleared:
        raise source.location_error("the loop does not clear gradients", loop)
    source, counter, begin = _counter(source, loop)
    for statement in cleared:
        if statement in group:
            continue
        if loop.body.index(statement) > loop.body.index(backward):
            raise where.source.location_error(
                "gradients are cleared apart from the update", statement
            )
        source = source.wrap(statement, statement, f"if {_minus(counter, begin)} % {batches} == 0:")
    # No parentheses around an argument: `fabric.backward(loss)`.
    before, after = ("", "") if step.loss in step.backward.args else ("(", ")")
    source = source.surround(step.loss, before, f" / {batches}{after}")
    last_one = f"{_minus(counter, begin - 1)} % {batches}"
    source = source.wrap(group[0], group[-1], f"if {last_one} == 0:")
    if replicas := _replicas(where):
        return _without_exchange(where.on(source), replicas, last_one)
    return source


def _periodic_update(where: Places) -> ast.stmt | None:
    """Return the block of every n-th update of an optimizer that also updates elsewhere, or None.

    The other update is for the batches that remain at the end of an epoch.
    """
    names = where.source.names
    for optimizer in where.optimizers if where.function is None else ():
        updates = updates_of(where.source, optimizer.identity) if optimizer.identity else []
        for update in updates if len(updates) > 1 else ():
            for above in names.ancestors(update):
                if isinstance(above, CONTAINERS):
                    break
                if isinstance(above, ast.If) and any(nodes_in(ast.Mod, above.test)):
                    called = (last_name(call.func) for call in nodes_in(ast.Call, above))
                    return None if "backward" in called else above
    return None


def _replicas(where: Places) -> str | None:
    """Return the loop's name for the model that exchanges gradients with replicas, or None.

    Raises:
        EditLocationError: a model is wrapped for replicas, and it is unclear whether the loop
            calls it.
    """
    source, names, step = where.source, where.source.names, where.step
    wraps = [call for call in names.calls() if names.qualified(call.func) in _WRAPPERS]
    if not wraps:
        return None
    for above in names.ancestors(wraps[0]):
        if isinstance(above, (ast.If, ast.IfExp, ast.Try)) and not is_main_guard(above):
            raise source.location_error(
                "whether replicas exchange gradients depends on a condition", above
            )
    wrapped = assigned_to(names, wraps[0])
    calls = nodes_in(ast.Call, step.container)
    called = [call for call in calls if wrapped and names.identity(call.func) == wrapped]
    if len(wraps) > 1 or not called:
        raise source.location_error(
            "which call of the loop exchanges replicas' gradients cannot be determined",
            wraps[0],
        )
    return source.segment(called[0].func)


def _without_exchange(where: Places, replicas: str, last_one: str) -> Source:
    """Put forward and backward of all batches but the last under ``no_sync``."""
    source, step = where.source, where.step
    names, loop = source.names, step.container
    assert isinstance(loop, ast.For)
    calls = [call for call in nodes_in(ast.Call, loop) if source.segment(call.func) == replicas]
    backward = names.within(step.backward, loop.body)
    begin = names.within(min(calls, key=position), loop.body)
    if begin is None or backward is None or loop.body.index(begin) > loop.body.index(backward):
        raise source.location_error("the model is not called before backward", loop)
    if names.module_name("contextlib") is None and names.is_taken("contextlib"):
        raise source.location_error("'contextlib' has another meaning in this file", loop)
    module = names.module_name("contextlib") or "contextlib"
    header = f"with {replicas}.no_sync() if {last_one} else {module}.nullcontext():"
    return source.with_import("contextlib").wrap(begin, backward, header)


def _own_statement(source: Source, loop: ast.For, call: ast.Call) -> ast.stmt:
    """Return the statement of the loop's body that consists of `call`."""
    parent = source.names.parent(call)
    if isinstance(parent, ast.Expr) and parent in loop.body:
        return parent
    raise source.location_error(
        f"{source.segment(call)} is not a statement of the loop itself", call
    )


def _update_group(
    source: Source, step: StepSource, body: list[ast.stmt], update: int, backward: ast.stmt
) -> tuple[int, int]:
    """Return the range of statements that belong to the update: clipping, schedules."""
    names = source.names

    def is_one_of(statement: ast.stmt, calls: Iterable[ast.expr]) -> bool:
        return isinstance(statement, ast.Expr) and statement.value in calls

    calls = nodes_in(ast.Call, *body)
    clips = [call for call in calls if "clip_grad" in source.segment(call.func)]
    first = last = update
    while first > body.index(backward) + 1 and _is_clip(body[first - 1], clips):
        first -= 1
    while last + 1 < len(body) and is_one_of(body[last + 1], (*step.zero_grads, *step.others)):
        last += 1
    for call in (*clips, *step.others):
        statement = names.within(call, body)
        if statement is None or not first <= body.index(statement) <= last:
            raise source.location_error(
                f"{source.segment(call.func)} belongs to the update but is apart from it", call
            )
    return first, last


def _is_clip(statement: ast.stmt, clips: list[ast.Call]) -> bool:
    return isinstance(statement, (ast.Expr, ast.Assign)) and statement.value in clips


def _loop_of(names: Names, node: ast.AST) -> Loop | None:
    for above in names.ancestors(node):
        if isinstance(above, (ast.For, ast.AsyncFor, ast.While)):
            return above
    return None


def _counter(source: Source, loop: ast.For) -> tuple[Source, str, int]:
    """Return the variable that counts the loop's iterations, added if missing, and its start."""
    names = source.names
    target, over = loop.target, loop.iter
    called = over.func.id if isinstance(over, ast.Call) and isinstance(over.func, ast.Name) else ""
    arguments = over.args if isinstance(over, ast.Call) and not over.keywords else []
    count: ast.expr | None = None
    begin: int | None = 0
    if called == "enumerate" and isinstance(target, ast.Tuple) and len(target.elts) == 2:
        count = target.elts[0]
        begin = _number(arguments[1]) if len(arguments) == 2 else 0 if len(arguments) == 1 else None
    elif called == "range" and arguments and len(arguments) <= 2:
        count = target
        begin = _number(arguments[0]) if len(arguments) == 2 else 0
    assigned = {node.id for node in variables_in(*loop.body) if is_written(node)}
    builtin = not names.is_taken(called)
    if isinstance(count, ast.Name) and begin is not None and builtin and count.id not in assigned:
        unread = variables_in(loop, name=count.id) == [count]
        if count.id.startswith("_") and unread:
            counter = source.fresh_name(*_COUNTERS)
            return source.replace(count, counter), counter, begin
        return source, count.id, begin
    if names.is_taken("enumerate"):
        raise source.location_error("'enumerate' has another meaning in this file", loop)
    counter = source.fresh_name(*_COUNTERS)
    source = source.replace(target, f"{counter}, {_parenthesized(source, target)}")
    return source.replace(over, f"enumerate({_parenthesized(source, over)})"), counter, 0


def _parenthesized(source: Source, expression: ast.expr) -> str:
    """Return the text of an expression, a tuple in parentheses."""
    text = source.segment(expression)
    return f"({text})" if isinstance(expression, ast.Tuple) and text[0] != "(" else text


def _number(expression: ast.expr) -> int | None:
    if isinstance(expression, ast.Constant) and isinstance(expression.value, int):
        return expression.value
    return None


def _minus(counter: str, number: int) -> str:
    if not number:
        return counter
    return f"({counter} {'-' if number > 0 else '+'} {abs(number)})"
