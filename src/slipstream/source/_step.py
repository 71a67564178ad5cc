"""One training step of a script: the loop, the forward pass, the loss, backward, the update."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from slipstream.source._names import (
    Function,
    Identity,
    Loop,
    Names,
    is_written,
    last_name,
    nodes_in,
    position,
    variables_in,
)
from slipstream.source._optimizer import assigned_to
from slipstream.source._source import EditLocationError, Source

CONTAINERS = (ast.For, ast.AsyncFor, ast.While, ast.FunctionDef, ast.AsyncFunctionDef)
_NO_GRADIENTS = ("inference_mode", "no_grad")
# Expressions that may run after the statement that holds them.
_DEFERRED = (ast.GeneratorExp, ast.Lambda, ast.Yield, ast.YieldFrom)
_SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr)
# Functions that pass the items of their first argument through.
_PASSES_ON = ("enumerate", "tqdm")
# Classes of frameworks whose ``backward`` takes the loss.
_TAKES_LOSS = frozenset({"Accelerator", "Fabric"})


@dataclass(frozen=True)
class ForwardBlock:
    """Consecutive statements of one block that call the model, with its name there."""

    model: str
    first: ast.stmt
    last: ast.stmt


@dataclass(frozen=True)
class StepSource:
    """The parts of a step in the source.

    Attributes:
        container: the innermost loop, or function called from one, with both backward and update;
            the closure, if the optimizer steps with one.
        backward: the call ``loss.backward()``.
        loss: the tensor that it differentiates; without the factor of a GradScaler.
        update: the call ``optimizer.step()``, or ``scaler.step(optimizer)``.
        scaled: whether a GradScaler scales the loss.
        forwards: calls of a trained model before `backward` and, if there are any, after an
            earlier ``backward``.
        zero_grads: calls that clear gradients, of the optimizer or the model.
        others: ``.step()`` calls of anything else, such as learning rate schedulers.
    """

    container: Loop | Function
    backward: ast.Call
    loss: ast.expr
    update: ast.Call
    scaled: bool
    forwards: tuple[ast.Call, ...]
    zero_grads: tuple[ast.Call, ...]
    others: tuple[ast.Call, ...]

    def for_loop(self, source: Source) -> ast.For:
        """Return the for loop of the step.

        Raises:
            EditLocationError: it is another loop, or the step is in a function without one.
        """
        if isinstance(self.container, ast.For):
            return self.container
        reason = "the training loop is not a for loop"
        if isinstance(self.container, (ast.FunctionDef, ast.AsyncFunctionDef)):
            reason = f"the optimizer steps in {self.container.name}(), which has no for loop"
        raise source.location_error(reason, self.container)

    @property
    def undivided_loss(self) -> ast.expr:
        """The loss without the number that divides it."""
        loss = self.loss
        while isinstance(loss, ast.BinOp) and isinstance(loss.op, ast.Div):
            if not set(self.forwards).isdisjoint(nodes_in(ast.Call, loss.right)):
                break
            loss = loss.left
        return loss

    def blocks_around(self, node: ast.AST, names: Names) -> Iterable[ast.AST]:
        """Return the ancestors of `node` inside `container`, innermost first."""
        return itertools.takewhile(lambda above: above is not self.container, names.ancestors(node))

    def accumulation(self, names: Names) -> ast.stmt | None:
        """Return the block that makes one update for several backward passes, or None."""
        for above in self.blocks_around(self.update, names):
            if isinstance(above, ast.If) and any(nodes_in(ast.Mod, above.test)):
                return above
        for above in self.blocks_around(self.backward, names):
            if isinstance(above, (ast.For, ast.AsyncFor, ast.While)):
                return above
        return None

    def inputs(self, source: Source) -> list[ast.expr]:
        """Return the only argument of every call of the model.

        Raises:
            EditLocationError: the model is not called, or with several arguments.
        """
        for call in (self._forward(source), *self.forwards):
            alone = len(call.args) == 1 and not isinstance(call.args[0], ast.Starred)
            if not alone or call.keywords:
                what = "the model's only input cannot be identified in its arguments"
                raise source.location_error(what, call)
        return [call.args[0] for call in self.forwards]

    def iterates(self, names: Names) -> Identity | None:
        """Return the variable the loop iterates over, through ``enumerate`` and progress bars."""
        if not isinstance(self.container, (ast.For, ast.AsyncFor)):
            return None
        over = self.container.iter
        while isinstance(over, ast.Call) and over.args:
            if last_name(over.func) not in _PASSES_ON:
                return None
            over = over.args[0]
        return names.identity(over)

    def model_name(self, source: Source) -> str:
        """Return the model's name in the loop.

        Raises:
            EditLocationError: the loop does not call it.
        """
        return source.segment(_callee(self._forward(source)))

    def forward_block(self, source: Source) -> ForwardBlock:
        """Return the simple statements from the model's call to the loss.

        Raises:
            EditLocationError: there are other statements between, or the loss has no name.
        """
        names, loss = source.names, self.undivided_loss
        trained = [call for call in self.forwards if not _is_without_gradients(names, call)]
        forward = trained[0] if trained else self._forward(source)
        if not isinstance(loss, ast.Name):
            raise source.location_error(
                f"backward is called on '{source.segment(loss)}', which has no name", self.backward
            )
        writes = [
            names.statement(node)
            for node in variables_in(self.container, name=loss.id)
            if is_written(node) and position(node) < position(self.backward)
        ]
        if not writes:
            raise source.location_error(f"'{loss.id}' is not computed in the loop", self.backward)
        last = max(writes, key=lambda statement: statement.lineno)
        block = names.block(last)
        first = names.within(forward, block)
        if first is None:
            raise source.location_error(
                "the model's call and the loss are in different blocks", forward
            )
        begin, end_at = block.index(first), block.index(last)
        for statement in block[begin : end_at + 1]:
            calls = list(nodes_in(ast.Call, statement))
            steps = any(last_name(call.func) == "backward" or call is self.update for call in calls)
            if not isinstance(statement, _SIMPLE) or steps:
                raise source.location_error(
                    "not all code between the model's call and the loss is simple statements",
                    statement,
                )
        if begin > end_at or first.lineno > last.lineno:
            raise source.location_error("the model is called after the loss is computed", first)
        return ForwardBlock(self.model_name(source), first, last)

    def _forward(self, source: Source) -> ast.Call:
        if not self.forwards:
            raise source.location_error(
                "the training loop does not call the model itself", self.container
            )
        return self.forwards[0]


def find_steps(
    source: Source, optimizers: Collection[Identity], models: Collection[Identity]
) -> list[StepSource]:
    """Return the training steps of a script, one per call of ``backward``, in their order.

    Raises:
        EditLocationError: none can be identified, or an optimizer steps at several places.
    """
    names = source.names
    methods = [call for call in names.calls() if isinstance(call.func, ast.Attribute)]

    def receiver(call: ast.Call) -> Identity | None:
        assert isinstance(call.func, ast.Attribute)
        return names.identity(call.func.value)

    def called(name: str) -> list[ast.Call]:
        return [call for call in methods if last_name(call.func) == name]

    cleared = {*optimizers, *models}
    steps: dict[ast.Call, StepSource] = {}
    for optimizer in optimizers:
        updates = updates_of(source, optimizer)
        if len(updates) != 1:
            how = "not called in this file" if not updates else f"called at {len(updates)} places"
            raise EditLocationError(
                f"{optimizer[1]}.step() is {how}",
                where=source.line(updates[1]) if updates else str(source.path),
            )
        update = updates[0]
        scaled = _scales(names, update, optimizer)
        container, backwards = _container(source, update, called("backward"), scaled=scaled)
        inside = set(ast.walk(container))
        forwards: tuple[ast.Call, ...] = ()
        end = (0, 0)
        for backward in backwards:
            begin, end = end, _end(backward)
            between = tuple(
                call
                for call in names.calls()
                if call in inside
                and names.identity(_callee(call)) in models
                and begin < position(call) < end
            )
            forwards = between or forwards
            zero_grads = (call for call in called("zero_grad") if receiver(call) in cleared)
            step = StepSource(
                container,
                backward,
                _loss(names, backward, scaled=scaled),
                update,
                scaled,
                forwards,
                tuple(call for call in zero_grads if call in inside),
                tuple(call for call in called("step") if call in inside and call is not update),
            )
            steps.setdefault(backward, step)
    return sorted(steps.values(), key=lambda step: position(step.backward))


def updates_of(source: Source, optimizer: Identity) -> list[ast.Call]:
    """Return the calls with which an optimizer steps, ``scaler.step(optimizer)`` among them."""
    names = source.names
    return [
        call
        for call in names.calls()
        if isinstance(call.func, ast.Attribute)
        and call.func.attr == "step"
        and (names.identity(call.func.value) == optimizer or _scales(names, call, optimizer))
    ]


def _scales(names: Names, update: ast.Call, optimizer: Identity) -> bool:
    """Whether it is ``scaler.step(optimizer)``."""
    return bool(update.args) and names.identity(update.args[0]) == optimizer


def _container(
    source: Source, update: ast.Call, backwards: Sequence[ast.Call], *, scaled: bool
) -> tuple[Loop | Function, list[ast.Call]]:
    """Return the innermost loop or function around `update` that calls ``backward``, with calls.

    Raises:
        EditLocationError: there is none.
    """
    closure = None if scaled else _closure(source, update)
    for container in source.names.ancestors(update) if closure is None else (closure,):
        if not isinstance(container, CONTAINERS):
            continue
        inside = set(ast.walk(container))
        if here := [call for call in backwards if call in inside]:
            return container, here
        if isinstance(container, (ast.FunctionDef, ast.AsyncFunctionDef)):
            raise source.location_error("where the optimizer steps, backward is not called", update)
    raise source.location_error("no loop around the optimizer's step calls backward", update)


def _loss(names: Names, backward: ast.Call, *, scaled: bool) -> ast.expr:
    """Return the tensor that a call of ``backward`` differentiates."""
    assert isinstance(backward.func, ast.Attribute)
    receiver = backward.func.value
    if scaled and isinstance(receiver, ast.Call) and last_name(receiver.func) == "scale":
        return receiver.args[0] if receiver.args else receiver
    makers = (value.func for value in names.values(receiver) if isinstance(value, ast.Call))
    takes_loss = backward.args and any(last_name(maker) in _TAKES_LOSS for maker in makers)
    return backward.args[0] if takes_loss else receiver


def _end(node: ast.expr) -> tuple[int, int]:
    return node.end_lineno or node.lineno, node.end_col_offset or 0


def inference_calls(source: Source) -> list[ast.Call]:
    """Return the calls of a script's model without gradients; ``eval()`` identifies the model.

    Raises:
        EditLocationError: there is no such call, or several models are called.
    """
    names = source.names
    evaluated: set[Identity | None] = set()
    for call in names.calls():
        if isinstance(call.func, ast.Attribute) and call.func.attr == "eval":
            evaluated |= {
                names.identity(call.func.value),
                assigned_to(names, _chained(names, call)),
            }
    calls: dict[Identity, list[ast.Call]] = {}
    for call in names.calls():
        model = names.identity(_callee(call))
        if model is not None and model in evaluated and _is_without_gradients(names, call):
            calls.setdefault(model, []).append(call)
    if not calls:
        raise source.location_error(
            "no model in evaluation mode is called under torch.inference_mode() or torch.no_grad()"
        )
    if len(calls) > 1:
        models = " and ".join(f"'{name}'" for _, name in calls)
        raise source.location_error(
            f"several models are called: {models}", next(iter(calls.values()))[0]
        )
    return calls.popitem()[1]


def inference_blocks(source: Source, calls: Sequence[ast.Call]) -> list[ForwardBlock]:
    """Return the statements that hold `calls`.

    Raises:
        EditLocationError: one is not a simple statement, or the call may run after it.
    """
    blocks: dict[ast.stmt, ForwardBlock] = {}
    for call in calls:
        statement = source.names.statement(call)
        deferred = any(isinstance(node, _DEFERRED) for node in ast.walk(statement))
        if deferred or not isinstance(statement, (*_SIMPLE, ast.Return)):
            raise source.location_error("the model is not called in a simple statement", call)
        name = source.segment(_callee(call))
        blocks.setdefault(statement, ForwardBlock(name, statement, statement))
    return list(blocks.values())


def _chained(names: Names, call: ast.Call) -> ast.Call:
    """Return the last call of a method chain such as ``Net().eval().to(device)`` from its first."""
    method = names.parent(call)
    after = names.parent(method) if isinstance(method, ast.Attribute) else None
    if isinstance(after, ast.Call) and after.func is method:
        return _chained(names, after)
    return call


def _is_without_gradients(names: Names, call: ast.Call) -> bool:
    """Whether a context or a decorator around the call turns gradients off."""
    around: list[ast.expr] = []
    for above in names.ancestors(call):
        if isinstance(above, ast.With):
            around += [item.context_expr for item in above.items]
        elif isinstance(above, (ast.FunctionDef, ast.AsyncFunctionDef)):
            around += above.decorator_list
    made_by = [context.func if isinstance(context, ast.Call) else context for context in around]
    return any(last_name(function) in _NO_GRADIENTS for function in made_by)


def _closure(source: Source, update: ast.Call) -> Function | None:
    """Return the function of the file that the optimizer steps with, or None without a closure.

    Raises:
        EditLocationError: the closure is something else.
    """
    values = [*update.args, *(keyword.value for keyword in update.keywords)]
    if not values:
        return None
    names = source.names
    owner = names.owner(values[0]) if isinstance(values[0], ast.Name) else None
    bound = [] if owner is None else names.bindings(owner, last_name(values[0]))
    if len(values) != 1 or len(bound) != 1 or not isinstance(bound[0], ast.FunctionDef):
        raise source.location_error(
            "the optimizer steps with a closure that is not a function of this file", update
        )
    return bound[0]


def _callee(call: ast.Call) -> ast.expr:
    """Return the called object: for ``model.forward(x)`` the model."""
    if isinstance(call.func, ast.Attribute) and call.func.attr == "forward":
        return call.func.value
    return call.func
