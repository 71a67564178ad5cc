"""The model, the optimizer and the loop of a file, and edits relative to them."""

from __future__ import annotations

import ast
import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from slipstream.source._function import Returned, find_function, inputs_of, returned_by
from slipstream.source._names import Function, Identity, last_name, nodes_in, position
from slipstream.source._optimizer import (
    Optimizer,
    assigned_to,
    models_of,
    optimizers_in,
    trained_by,
)
from slipstream.source._parts import code_of, local_class, mentions
from slipstream.source._source import AlreadyAppliedError, EditLocationError, Source
from slipstream.source._step import (
    StepSource,
    find_steps,
    inference_blocks,
    inference_calls,
    updates_of,
)
from slipstream.source._trainers import Training, argument_of, find_training

_TORCH = "torch"
# The method in which modules and data modules of Lightning make the training loader.
_LOADER_METHOD = "train_dataloader"


@dataclass(frozen=True)
class Model:
    """The variable that holds the model.

    Attributes:
        name: its name at `statement`: ``model``, ``self.net``.
        statement: after it the model is complete, and not yet trained or returned.
    """

    name: str
    statement: ast.stmt
    identity: Identity


def locate(source: Source, function: str | None, lines: range = range(0)) -> Places:
    """Return the places in `source`; each is found when it is read.

    Args:
        function: the workload's function, or None for a plain script.
        lines: if a single optimizer of a script steps on them, only its loop is edited.
    """
    places = Places(source.reparse(), function)
    return replace(places, only=places.stepping_on(lines)) if lines else places


@dataclass(frozen=True)
class Places:
    """The model, the optimizer and the loop of one file; see the package's docstring.

    Every attribute raises `EditLocationError` if it cannot be determined.
    """

    source: Source
    function_name: str | None
    only: int | None = None
    """Index of the optimizer whose loop is meant, among those of a plain script; None for all."""

    def on(self, source: Source) -> Places:
        """Return the same places in the edited text."""
        return replace(self, source=source.reparse())

    def stepping_on(self, lines: range) -> int | None:
        """Return the index of the only optimizer that steps on `lines`; None without one."""
        try:
            optimizers = self.optimizers
        except EditLocationError:
            return None
        found = [
            index
            for index, optimizer in enumerate(optimizers)
            if optimizer.identity is not None
            and any(call.lineno in lines for call in updates_of(self.source, optimizer.identity))
        ]
        return found[0] if len(found) == 1 else None

    @cached_property
    def function(self) -> Function | None:
        """The workload's function, or None for a plain script."""
        return find_function(self.source, self.function_name) if self.function_name else None

    @cached_property
    def returned(self) -> Returned:
        """Values that the workload's function returns, by field: ``model``, ``batch``, ..."""
        if self.function is None:
            raise self.source.location_error("a plain script returns nothing")
        return returned_by(self.source, self.function)

    @cached_property
    def training(self) -> Training | None:
        """Training of a plain script through a framework; None if it has its own loop."""
        return None if self.function_name else find_training(self.source)

    @cached_property
    def optimizer(self) -> Optimizer:
        """The call that makes the optimizer, and its class."""
        if len(self.optimizers) > 1:
            raise self._several_optimizers()
        return self.optimizers[0]

    @cached_property
    def optimizers(self) -> list[Optimizer]:
        """The calls that make the script's optimizers, or the one the function returns."""
        if self.function is None:
            found = optimizers_in(self.source)
            return found if self.only is None else [found[self.only]]
        return optimizers_in(self.source, self._returned_as("optimizer"))

    @cached_property
    def model(self) -> Model:
        """The model's variable, and the statement after which it is complete."""
        if (returned := self._returned_or_passed) is not None:
            expression = returned.get("model")
            if not isinstance(expression, (ast.Name, ast.Attribute)):
                missing = expression is None and self.function is None
                reason = "the trainer gets no model" if missing else "the model has no name"
                raise self.source.location_error(reason, returned.statement)
            identity = self.source.names.identity(expression)
        else:
            identity, expression = self._trained
        if identity is None:
            raise self.source.location_error(
                f"'{self.source.segment(expression)}' is not made in this file", expression
            )
        return self._made(identity)

    @cached_property
    def step(self) -> StepSource:
        """The training step of a script with one optimizer, one model and one ``backward``."""
        steps = self.steps
        if len({optimizer.identity for optimizer in self.optimizers}) > 1:
            raise self._several_optimizers()
        _ = self._trained
        if len(steps) > 1:
            how = f"called at {len(steps)} places"
            raise self.source.location_error(
                f"where the optimizer steps, backward is {how}", steps[0].update
            )
        return steps[0]

    @cached_property
    def steps(self) -> list[StepSource]:
        """Training steps, one for each ``backward`` in the innermost loop with an update."""
        if self.function is not None:
            raise self.source.location_error(
                f"{self.function.name}() has no training loop", self.function
            )
        if self.training is not None and self.training.owns_loop:
            raise self.source.location_error(
                f"{self.training.framework} runs the training loop", self.training.start
            )
        optimizers: dict[Identity, None] = {}
        for optimizer in self.optimizers:
            if optimizer.identity is None:
                raise self.source.location_error("the optimizer has no name", optimizer.call)
            optimizers[optimizer.identity] = None
        return find_steps(self.source, optimizers, self.models)

    @cached_property
    def models(self) -> dict[Identity, ast.expr]:
        """Every model that the script's optimizers train, with an expression that reads it."""
        return models_of(self.source, self.optimizers)

    @cached_property
    def only_infers(self) -> bool:
        """Whether a plain script neither makes an optimizer nor calls ``backward``."""
        if self.function_name or self.training or "backward" in self.source.names.attributes:
            return False
        try:
            return not self.optimizers
        except EditLocationError:
            return True

    @cached_property
    def forwards(self) -> Sequence[ast.Call]:
        """The calls of models in training steps, or in a script that only infers."""
        if self.only_infers:
            return inference_calls(self.source)
        return list(dict.fromkeys(call for step in self.steps for call in step.forwards))

    @cached_property
    def inputs(self) -> list[ast.expr]:
        """The model's input expressions: in the returned batch, or in the loop's calls."""
        if self.function:
            return inputs_of(self.source, self.returned)
        inputs = [step.inputs(self.source) for step in self.steps]
        return list(dict.fromkeys(itertools.chain(*inputs)))

    @cached_property
    def model_code(self) -> frozenset[ast.AST]:
        """The nodes of all code in the file that builds the model and its parts."""
        returned = self._returned_or_passed
        expression = returned.get("model") if returned is not None else None
        if self.function is not None:
            expression = self._returned_as("model")
        root = expression if expression is not None else self.model.statement
        return frozenset(code_of(self.source.names, [root]))

    @cached_property
    def model_class(self) -> ast.ClassDef:
        """The class of the model, if the file defines it."""
        statement = self.with_named_model().model.statement
        value = getattr(statement, "value", None)
        # model = Net().to(device)
        while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            if not isinstance(value.func.value, ast.Call):
                break
            value = value.func.value
        names = self.source.names
        kind = local_class(names, value.func) if isinstance(value, ast.Call) else None
        if kind is None:
            raise self.source.location_error(
                "the model's class is not defined in this file", statement
            )
        return kind

    @property
    def torch(self) -> str:
        """The file's name for torch, or ``torch`` if the file does not import it."""
        return self.source.names.module_name(_TORCH) or _TORCH

    def with_named_model(self) -> Places:
        """Return the places with ``model = ...`` added if the returned model has no name."""
        returned = self._returned_or_passed
        if returned is None:
            return self
        expression, statement = returned.get("model"), returned.statement
        if isinstance(expression, (ast.Name, ast.Attribute)):
            return self
        source = self.source
        if expression is None:
            raise source.location_error(
                "the function returns no model" if self.function else "the trainer gets no model",
                statement,
            )
        value = expression
        name = source.fresh_name("model", "net")
        if isinstance(expression, ast.NamedExpr):
            name, value = source.segment(expression.target), expression.value
        for field, other in returned.before("model"):
            if not isinstance(other, (ast.Name, ast.Constant, ast.Attribute)):
                raise source.location_error(
                    f"the model is made inside the statement, after its {field}", statement
                )
        return self._named(name, value, expression, name)

    def with_named_losses(self) -> Places:
        """Return the places with ``loss = ...`` before each ``backward`` of an unnamed loss.

        Raises:
            EditLocationError: that call of ``backward`` is not a statement.
        """
        source = self.source
        for step in self.steps:
            loss, call = step.undivided_loss, step.backward
            if isinstance(loss, ast.Name):
                continue
            if not isinstance(source.names.parent(call), ast.Expr):
                raise source.location_error("the call of backward is not a whole statement", call)
            name = source.fresh_name("loss", "batch_loss")
            place, text = loss, name
            if isinstance(call.func, ast.Attribute) and call.func.value is loss:
                # Without parentheses around a sum.
                arguments = ", ".join(map(source.segment, (*call.args, *call.keywords)))
                place, text = call, f"{name}.backward({arguments})"
            return self._named(name, loss, place, text).with_named_losses()
        return self

    def _named(self, name: str, value: ast.expr, place: ast.expr, text: str) -> Places:
        """Return the places with ``name = value`` before the statement of `place`, now `text`."""
        line = self.source.segment(value)
        if value.end_lineno != value.lineno:
            line = f"({line})"
        statement = self.source.names.statement(place)
        return self.on(
            self.source.insert_before(statement, f"{name} = {line}").replace(place, text)
        )

    def after_model(self, *lines: str) -> Source:
        """Insert `lines` after the statement that builds the model.

        Raises:
            EditLocationError: this statement cannot be determined.
            AlreadyAppliedError: the first line is present.
        """
        here = self.with_named_model()
        model = here.model
        source, written = here._written(lines, model.name, model.statement)
        return source.insert_after(model.statement, *written)

    def before_return(self, *lines: str) -> Source:
        """Insert `lines` before the ``return`` of the workload's function.

        If they replace the model by another module, which would lose a ``forward`` that the file
        assigns to the old one, that assignment is moved after them.

        Raises:
            EditLocationError: there is not exactly one, it hides the model, or the assignment to
                ``forward`` cannot be moved.
            AlreadyAppliedError: the first line is present.
        """
        here = self.with_named_model()
        expression = here.returned.get("model")
        assert expression is not None
        name = here.source.segment(expression)
        statement = here.returned.statement
        source, written = here._written(lines, name, statement)
        replaced = any(line.startswith(f"{name} = ") for line in written)
        for wrap in here._forward_assignments(name) if replaced else ():
            if wrap not in source.names.block(statement):
                raise source.location_error(f"'{name}.forward' is assigned in a block", wrap)
            written.append(source.segment(wrap))
            source = source.remove(wrap)
        return source.insert_before(statement, *written)

    def at_top(self, *lines: str) -> Source:
        """Insert `lines` after the imports of the file.

        Raises:
            AlreadyAppliedError: the first line is present.
        """
        source, written = self._written(lines)
        nodes = source.names.bindings(source.tree, self.torch)
        after = source.names.within(nodes[0], source.tree.body) if nodes else None
        return source.insert_at_top(*written, after=after)

    def set_optimizer(self, **keywords: str) -> Source:
        """Set keyword arguments of the optimizer's constructor, each value as source text.

        Raises:
            EditLocationError: this call cannot be determined.
            AlreadyAppliedError: it has them.
        """
        return self.source.set_keywords(self.optimizer.call, **keywords)

    def set_call(self, function: str, **keywords: str) -> Source:
        """Set keyword arguments of the call of `function`, such as ``torch.utils.data.DataLoader``.

        Of several calls it is the one the training loop iterates over; or, if `function` builds
        parts of the model, every one that does (a call in a class or a loop counts for many).

        Raises:
            EditLocationError: there is no such call, or it is ambiguous.
            AlreadyAppliedError: it has them; of several calls, all have them.
        """
        names = self.source.names
        calls = [call for call in names.calls() if names.qualified(call.func) == function]
        if not calls:
            raise self.source.location_error(f"{function} is not called in this file")
        if len(calls) > 1:
            with contextlib.suppress(EditLocationError):
                calls = self.of_training(calls) or calls
        if len(calls) > 1:
            parts: list[ast.Call] = []
            with contextlib.suppress(EditLocationError):
                parts = [call for call in calls if call in self.model_code]
            if not parts:
                short = function.rpartition(".")[2]
                raise self.source.location_error(
                    f"{short} is called on {_numbers([call.lineno for call in calls])}", calls[1]
                )
            calls = parts
        return _set_all(self.source, self.source, calls, keywords)

    def replace_class(self, old: str, new: str, **keywords: str) -> Source:
        """Replace a class wherever the code of the model builds one or passes the class on.

        Every call is edited in its place, so that other models of the file, subclasses and
        ``isinstance`` keep the old class. A call in the class of a block applies to all blocks.

        Args:
            old, new: qualified names, ``torch.nn.Dropout``; the module of `new` is imported.
            keywords: additional arguments of each call, as source text.

        Raises:
            EditLocationError: the model's code does not build `old`, or passes the class on so that
                `keywords` cannot be added to its calls.
            AlreadyAppliedError: the model's code builds `new`, and no `old`.
        """
        source, names = self.source, self.source.names
        nodes = mentions(names, self.model_code, old)
        short = old.removeprefix("torch.")
        if not nodes:
            if present := mentions(names, self.model_code, new):
                raise source.already_applied(f"{short} is {new}", present[0])
            raise source.location_error(f"the file does not build {short}")
        edited = source.with_import(new.rpartition(".")[0])
        calls = []
        for node in nodes:
            call = names.parent(node)
            if isinstance(call, ast.Call) and call.func is node:
                calls.append(call)
            elif keywords:
                raise source.location_error(f"{short} is passed on", node)
            edited = edited.replace(node, new)
        return _set_all(source, edited, calls, keywords) if keywords else edited

    def set_default(self, name: str, value: str) -> Source:
        """Set the default of an argument of the workload's function.

        Raises:
            EditLocationError: there is no such argument, or it has no default.
            AlreadyAppliedError: it has this default.
        """
        if self.function is None:
            raise self.source.location_error("a plain script has no arguments")
        return self.source.set_default(self.function, name, value)

    def wrap_forward(self, header: str) -> Source:
        """Put the statements from a model's call to each loss into blocks under `header`.

        A loss without a name that ``backward`` is called on gets one. In a script that only infers,
        each statement that calls the model is such a block.

        Raises:
            EditLocationError: they are not consecutive simple statements.
            AlreadyAppliedError: they are already in such a block.
        """
        if self.only_infers:
            blocks = inference_blocks(self.source, self.forwards)
        else:
            if (here := self.with_named_losses()) is not self:
                return here.wrap_forward(header)
            # If one forward pass has several losses, the last one ends the block.
            found = [step.forward_block(self.source) for step in self.steps]
            blocks = list({block.first: block for block in found}.values())
        edited, _ = self._filled([header], blocks[0].model)
        for block in blocks:
            source, (written,) = self._filled([header], block.model)
            target = _statement(f"{written} pass")
            for above in source.names.ancestors(block.first):
                if isinstance(above, ast.With) and isinstance(target, ast.With):
                    outer, inner = ([ast.dump(i) for i in w.items] for w in (above, target))
                    if outer == inner:
                        raise source.already_applied(f"'{written}' is present", above)
            edited = edited.wrap(block.first, block.last, written)
        return edited

    def of_training(self, calls: Sequence[ast.Call]) -> list[ast.Call]:
        """Select the calls whose value the training loop iterates over.

        Raises:
            EditLocationError: the training loop cannot be seen.
        """
        names = self.source.names
        if self.training is None or not self.training.owns_loop:
            over = self.step.iterates(names)
            return [call for call in calls if over and assigned_to(names, call) == over]
        loader = self.training.loader
        over = None if loader is None else names.identity(loader)
        chosen = [
            call
            for call in calls
            if call is loader or (over is not None and assigned_to(names, call) == over)
        ]
        return chosen or [
            call for call in calls if getattr(names.scope(call), "name", "") == _LOADER_METHOD
        ]

    @cached_property
    def _returned_or_passed(self) -> Returned | None:
        """Model that is returned or passed to a framework; None for a script with its own loop."""
        if self.function is not None:
            return self.returned
        training = self.training
        if training is None or not training.owns_loop:
            return None
        return Returned(self.source.names.statement(training.start), training.arguments)

    def _several_optimizers(self) -> EditLocationError:
        calls = [optimizer.call for optimizer in self.optimizers]
        lines = _numbers([call.lineno for call in calls])
        return self.source.location_error(f"{len(calls)} optimizers are made, on {lines}", calls[1])

    def _returned_as(self, part: str) -> ast.expr:
        """Return the expression that the workload's function returns as its `part`."""
        expression = self.returned.get(part)
        if expression is None:
            where = self.source.line(self.returned.statement)
            raise EditLocationError(f"the function returns no {part}", where=where)
        return expression

    @cached_property
    def _trained(self) -> tuple[Identity, ast.expr]:
        """The only model whose parameters the optimizers get."""
        return trained_by(self.source, self.optimizers)

    def _made(self, identity: Identity) -> Model:
        """Return the statement after which the variable holds the trained or returned model."""
        source, names = self.source, self.source.names
        owner, name = identity
        nodes = [n for n in names.bindings(owner, name) if not isinstance(n, ast.arg)]
        use = self._use(nodes)
        if use is not None:
            nodes = [n for n in nodes if position(n) < position(use)]
        if not nodes:
            raise source.location_error(f"'{name}' is not made in this file")
        last = names.statement(max(nodes, key=position))
        if not isinstance(last, (ast.Assign, ast.AnnAssign, ast.Expr)):
            raise source.location_error(f"'{name}' is assigned in a block", last)
        if use is None:
            parent = names.parent(last)
            if names.scope(last) is not parent and not is_main_guard(parent):
                raise source.location_error(f"'{name}' is made in a block", last)
            return Model(name, last, identity)
        for above in (use, *names.ancestors(use)):
            if not isinstance(above, ast.stmt):
                continue
            outermost = names.within(last, names.block(above))
            if outermost is None:
                continue
            if isinstance(outermost, (ast.For, ast.AsyncFor, ast.While, ast.ClassDef)):
                break
            if outermost is not above:
                return Model(name, self._loaded(identity, outermost, use), identity)
        raise source.location_error(f"'{name}' is made in a loop", last)

    def _loaded(self, identity: Identity, made: ast.stmt, use: ast.stmt) -> ast.stmt:
        """Return the last statement of `made`'s block before `use` that loads the model's weights.

        Their names in a checkpoint are those before an edit. It is `made` without such a statement.
        """
        names = self.source.names
        block = names.block(made)
        loads = [
            names.within(call, block)
            for call in names.calls()
            if isinstance(call.func, ast.Attribute)
            and call.func.attr == "load_state_dict"
            and names.identity(call.func.value) == identity
            and position(made) < position(call) < position(use)
        ]
        before = [
            load
            for load in loads
            if isinstance(load, (ast.Expr, ast.Assign, ast.If))
            and load is not names.within(use, block)
        ]
        return max([made, *before], key=position)

    def _use(self, nodes: list[ast.AST]) -> ast.stmt | None:
        """Return the statement of the same scope before which the model must be complete."""
        names = self.source.names
        scopes = {names.scope(node) for node in nodes}
        returned = self._returned_or_passed
        uses: list[ast.AST] = [] if returned is None else [returned.statement]
        try:
            uses += [optimizer.origin for optimizer in self.optimizers]
        except EditLocationError:
            if returned is None:
                raise
        statements = [names.statement(use) for use in uses if names.scope(use) in scopes]
        return min(statements, key=position, default=None)

    def _forward_assignments(self, name: str) -> list[ast.Assign]:
        """Return assignments to the ``forward`` of the model `name` in the workload's function."""
        scope = self.source.names.scope(self.returned.statement)
        return [
            node
            for node in nodes_in(ast.Assign, scope)
            if any(self.source.segment(target) == f"{name}.forward" for target in node.targets)
        ]

    def _filled(self, lines: Sequence[str], model: str) -> tuple[Source, list[str]]:
        """Return the file, with torch imported if `lines` need it, and the lines with its names."""
        needs_torch = any("{torch}" in line for line in lines)
        source = self.source.with_import(_TORCH) if needs_torch else self.source
        return source, [
            line.replace("{model}", model).replace("{torch}", self.torch) for line in lines
        ]

    def _written(
        self, lines: Sequence[str], model: str = "", neighbour: ast.stmt | None = None
    ) -> tuple[Source, list[str]]:
        """Return `_filled`, unless the first line is already in the scope of `neighbour`."""
        source, written = self._filled(lines, model)
        names = source.names
        scope = names.tree if neighbour is None else names.scope(neighbour)
        nodes = nodes_in(ast.stmt, scope)
        present = {ast.dump(node): node for node in nodes if names.scope(node) is scope}
        node = present.get(ast.dump(_statement(written[0])))
        if node is not None:
            raise self.source.already_applied(f"'{written[0]}' is present", node)
        return source, written


def _set_all(
    source: Source, edited: Source, calls: list[ast.Call], keywords: dict[str, str]
) -> Source:
    """Return `edited` with the arguments added to each call that lacks them.

    Raises:
        AlreadyAppliedError: every call has them.
    """
    present: AlreadyAppliedError | None = None
    changed = edited
    for call in calls:
        try:
            changed = changed.set_keywords(call, **keywords)
        except AlreadyAppliedError as error:
            present = error
    if present is not None and changed is source:
        raise present
    return changed


def refuse_inside(source: Source, node: ast.AST, context: str) -> None:
    """Refuse a node that is already in a ``with`` block of a call named `context` that is on.

    Raises:
        AlreadyAppliedError: it is.
    """
    for above in source.names.ancestors(node):
        for item in above.items if isinstance(above, ast.With) else ():
            call = item.context_expr
            if not isinstance(call, ast.Call) or last_name(call.func) != context:
                continue
            if not _may_be_off(call, source.names.qualified(call.func) or ""):
                raise source.already_applied(f"it is under {context}", above)


def _may_be_off(autocast: ast.Call, qualified: str) -> bool:
    """Whether the step may run without this autocast, as for a GPU on a machine without one."""
    import torch

    of_device = qualified.startswith(("torch.cuda.", "torch.cpu."))
    enabled = argument_of(autocast, 0 if of_device else 2, "enabled")
    if enabled is not None and not (isinstance(enabled, ast.Constant) and enabled.value is True):
        return True
    device = None if of_device else argument_of(autocast, 0, "device_type")
    of_gpu = isinstance(device, ast.Constant) and str(device.value).startswith("cuda")
    return (of_gpu or qualified.startswith("torch.cuda.")) and not torch.cuda.is_available()


def _statement(text: str) -> ast.stmt:
    return ast.parse(text).body[0]


def is_main_guard(node: ast.AST | None) -> bool:
    """Whether it is ``if __name__ == "__main__":``."""
    return isinstance(node, ast.If) and "__name__" in ast.dump(node.test)


def _numbers(lines: list[int]) -> str:
    return "lines " + " and ".join(map(str, sorted(lines)))
