"""The literal that sets a file's batch size, if there is exactly one."""

from __future__ import annotations

import ast
import contextlib
from dataclasses import dataclass, replace

from slipstream.source._names import Function, default_of, is_written, last_name, variables_in
from slipstream.source._places import Places
from slipstream.source._source import EditLocationError, Source
from slipstream.source._trainers import Framework, argument_of

_NAME = "batch_size"
_LOADER = "torch.utils.data.DataLoader"
# An argument of Hugging Face's TrainingArguments, and its default.
_TRAINER_NAME, _TRAINER_DEFAULT = "per_device_train_batch_size", 8
# Functions of other profilers, whose default is the batch size that is profiled.
_PROVIDERS = ("skyline_input_provider", "deepview_input_provider")


@dataclass(frozen=True)
class BatchSize:
    """The batch size and its place in the file.

    Attributes:
        value: samples.
        node: the literal in ``source.tree``, or the call of ``TrainingArguments`` without one.
        flags: command-line options that override the literal, such as ``--batch-size``.
    """

    source: Source
    value: int
    node: ast.Constant | ast.Call
    flags: tuple[str, ...] = ()

    @property
    def line(self) -> int:
        """Line of the literal, from 1."""
        return self.node.lineno

    def set(self, value: int) -> Source:
        """Return the file with another batch size and every other byte unchanged."""
        if isinstance(self.node, ast.Call):
            return self.source.set_keywords(self.node, **{_TRAINER_NAME: str(value)})
        return self.source.replace(self.node, str(value))


def find_batch_size(where: Places) -> BatchSize:
    """Return the only literal that sets the batch size.

    It is the default of the function's argument ``batch_size``, or of that of a provider's; in a
    script, the argument of its only ``DataLoader``. A name there is followed to its constant, if
    that is assigned once, and ``args.batch_size`` to its default in argparse.

    Raises:
        EditLocationError: there is no such literal, or it is ambiguous, with the reason.
    """
    source = where.source
    function = where.function
    if function is None:
        tree = source.tree
        providers = [
            node
            for node in tree.body
            if isinstance(node, ast.FunctionDef) and node.name in _PROVIDERS
        ]
        function = providers[0] if len(providers) == 1 else None
    value = _default(source, function) if function is not None else _script_value(where)
    training = where.training
    if training is not None and value is training.settings:
        return BatchSize(source, _TRAINER_DEFAULT, training.settings)
    return _literal(source, value)


def _default(source: Source, function: Function) -> ast.expr:
    if (default := default_of(function, _NAME)) is not None:
        for node in variables_in(function, name=_NAME):
            if is_written(node):
                raise source.location_error(f"{function.name}() sets {_NAME} itself", node)
        return default
    raise EditLocationError(
        f"{function.name}() has no argument {_NAME} with a default",
        where=source.line(function),
        remedy=f"declare def {function.name}({_NAME}=32): and use it where the batch is made",
    )


def _script_value(where: Places) -> ast.expr:
    """Return the script's batch size, or the ``TrainingArguments(...)`` that leaves the default."""
    source, training = where.source, where.training
    if training is not None and training.framework is Framework.HUGGING_FACE:
        maker, name = "TrainingArguments", _TRAINER_NAME
        calls = [] if training.settings is None else [training.settings]
        if calls and all(keyword.arg not in (name, None) for keyword in calls[0].keywords):
            return calls[0]
    else:
        maker, name = "DataLoader", _NAME
        calls = [
            call for call in source.names.calls() if source.names.qualified(call.func) == _LOADER
        ]
        if len(calls) > 1:
            with contextlib.suppress(EditLocationError):
                calls = where.of_training(calls)
    place = len(calls[0].args) if maker == "TrainingArguments" and calls else 1
    value = argument_of(calls[0], place, name) if len(calls) == 1 else None
    if value is None:
        several = f"several {maker}s" if len(calls) > 1 else f"no {maker} with a {name}"
        raise EditLocationError(
            f"the script has {several}, so that the literal of the batch size is unclear",
            where=str(source.path),
            remedy="name a function with an argument batch_size: train.py:make_workload",
        )
    return value


def _literal(source: Source, value: ast.expr) -> BatchSize:
    """Return the batch size of a literal, or of the constant that `value` names."""
    if isinstance(value, ast.Constant) and type(value.value) is int:
        return BatchSize(source, value.value, value)
    text = source.segment(value)
    if isinstance(value, ast.Attribute) and (option := _option(source, value)) is not None:
        flags = tuple(str(flag.value) for flag in option.args if isinstance(flag, ast.Constant))
        default = argument_of(option, len(option.args), "default")
        if default is None:
            raise source.location_error(f"'{text}' has no default", option)
        return replace(_literal(source, default), flags=flags)
    if isinstance(value, ast.Name):
        # A default is evaluated where the function is defined.
        bound = source.names.bindings(source.tree, value.id)
        if len(bound) != 1:
            how = f"assigned {len(bound)} times" if bound else "not a constant of this file"
            raise source.location_error(f"'{text}' is {how}", value)
        statement = source.names.statement(bound[0])
        number = getattr(statement, "value", None)
        simple = isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement in (
            source.tree.body
        )
        if simple and isinstance(number, ast.Constant) and type(number.value) is int:
            return BatchSize(source, number.value, number)
        raise source.location_error(f"'{text}' is not a plain number", statement)
    raise source.location_error(f"'{text}' is not a plain number", value)


def _option(source: Source, value: ast.Attribute) -> ast.Call | None:
    """Return the ``add_argument`` of the option that ``args.batch_size`` reads, or None."""
    names = source.names
    makers = [call.func for call in names.values(value.value) if isinstance(call, ast.Call)]
    if not makers or any(last_name(maker) != "parse_args" for maker in makers):
        return None
    for call in names.calls():
        if last_name(call.func) == "add_argument":
            dest = argument_of(call, len(call.args), "dest")
            flags = call.args if dest is None else [dest]
            spelled = [str(flag.value) for flag in flags if isinstance(flag, ast.Constant)]
            if value.attr in [flag.lstrip("-").replace("-", "_") for flag in spelled]:
                return call
    return None
