"""The calls through which a script trains with Hugging Face, Lightning, Accelerate or Fabric."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from slipstream.source._names import Identity, Names, last_name
from slipstream.source._optimizer import assigned_to
from slipstream.source._parts import local_class
from slipstream.source._source import Source

# Libraries whose trainers are Hugging Face's, or subclasses with additional arguments.
_HUGGING_FACE = frozenset({"transformers", "trl", "sentence_transformers"})
_LIGHTNING = frozenset({"lightning", "pytorch_lightning"})
_MAX_BASES = 5


class Framework(StrEnum):
    """A training framework, as messages name it."""

    HUGGING_FACE = "Hugging Face's Trainer"
    LIGHTNING = "Lightning's Trainer"
    ACCELERATE = "Accelerate"
    FABRIC = "Lightning Fabric"


# Frameworks that leave the loop to the script, by the class that has their settings.
_WITHOUT_LOOP = {
    "accelerate.Accelerator": Framework.ACCELERATE,
    "lightning.Fabric": Framework.FABRIC,
    "lightning.fabric.Fabric": Framework.FABRIC,
    "lightning_fabric.Fabric": Framework.FABRIC,
}


@dataclass(frozen=True)
class Training:
    """Training of a script through a framework.

    Attributes:
        start: the call that starts or configures the training, for messages.
        settings: the call whose keyword arguments are the framework's switches; None if it is
            not in the file.
        flag: prefix of the switches on the command line, ``--``, if they are read from there.
        model, loader: the trained model and the training ``DataLoader`` as the framework gets
            them; None if they are not visible.
    """

    framework: Framework
    start: ast.Call
    settings: ast.Call | None
    flag: str | None = None
    model: ast.expr | None = None
    loader: ast.expr | None = None

    @property
    def arguments(self) -> dict[str, ast.expr]:
        """Arguments of `start` in the order of evaluation, the model as ``model``."""
        arguments = {f"argument {n}": value for n, value in enumerate(self.start.args, start=1)}
        arguments |= {str(keyword.arg): keyword.value for keyword in self.start.keywords}
        return {"model" if v is self.model else name: v for name, v in arguments.items()}

    @property
    def owns_loop(self) -> bool:
        """Whether the framework runs the training loop rather than the script."""
        return self.framework not in _WITHOUT_LOOP.values()


def find_training(source: Source) -> Training | None:
    """Return how a script trains through a framework, or None for a script with its own loop."""
    names = source.names
    calls = list(names.calls())
    return (
        _hugging_face(names, [call for call in calls if _is_hugging_face(names, call.func)])
        or _lightning(names, [call for call in calls if _is_from(names, call.func, _LIGHTNING)])
        or _without_loop(names, calls)
    )


def _hugging_face(names: Names, trainers: list[ast.Call]) -> Training | None:
    trainers = [trainer for trainer in trainers if _uses(names, trainer, "train")] or trainers
    if not trainers:
        return None
    resolved = [_arguments_call(names, argument_of(trainer, 1, "args")) for trainer in trainers]
    settings = resolved[0] if all(call is resolved[0] for call in resolved) else None
    flag = "--" if settings is None and "HfArgumentParser" in names.used else None
    models = [argument_of(trainer, 0, "model") for trainer in trainers]
    return Training(
        Framework.HUGGING_FACE,
        trainers[0],
        settings,
        flag,
        models[0] if len(models) == 1 else None,
    )


def _lightning(names: Names, calls: list[ast.Call]) -> Training | None:
    for call in calls:
        if (names.qualified(call.func) or "").endswith(".LightningCLI"):
            return Training(Framework.LIGHTNING, call, None, "--trainer.")
    trainers = [call for call in calls if (names.qualified(call.func) or "").endswith(".Trainer")]
    fits = [(trainer, fit) for trainer in trainers for fit in _uses(names, trainer, "fit")]
    if len(fits) == 1:
        trainer, fit = fits[0]
        return Training(
            Framework.LIGHTNING,
            fit,
            trainer,
            model=argument_of(fit, 0, "model"),
            loader=argument_of(fit, 1, "train_dataloaders"),
        )
    if not trainers:
        return None
    return Training(Framework.LIGHTNING, trainers[0], trainers[0] if len(trainers) == 1 else None)


def _without_loop(names: Names, calls: Iterable[ast.Call]) -> Training | None:
    made = [call for call in calls if names.qualified(call.func) in _WITHOUT_LOOP]
    if len(made) != 1:
        return None
    return Training(_WITHOUT_LOOP[names.qualified(made[0].func) or ""], made[0], made[0])


def _is_from(names: Names, function: ast.expr, libraries: Iterable[str]) -> bool:
    return (names.qualified(function) or "").partition(".")[0] in libraries


def _is_hugging_face(names: Names, function: ast.expr, depth: int = 0) -> bool:
    """Whether it is a trainer of Hugging Face, or a class of the file derived from one."""
    kind = local_class(names, function)
    if kind is not None:
        return depth < _MAX_BASES and any(
            _is_hugging_face(names, base, depth + 1) for base in kind.bases
        )
    qualified = names.qualified(function) or ""
    return _is_from(names, function, _HUGGING_FACE) and qualified.endswith("Trainer")


def _uses(names: Names, trainer: ast.Call, method: str) -> list[ast.Call]:
    """Return calls of a method of `trainer`, directly or through its variable."""
    variable = assigned_to(names, trainer)

    def is_trainer(receiver: ast.expr) -> bool:
        identity: Identity | None = names.identity(receiver)
        return receiver is trainer or (identity is not None and identity == variable)

    return [
        call
        for call in names.calls()
        if isinstance(call.func, ast.Attribute)
        and call.func.attr == method
        and is_trainer(call.func.value)
    ]


def argument_of(call: ast.Call, place: int, name: str) -> ast.expr | None:
    """Return the argument of a call by name or position, or None."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    positional = call.args[: place + 1]
    if len(positional) <= place or any(isinstance(value, ast.Starred) for value in positional):
        return None
    return positional[place]


def _arguments_call(names: Names, expression: ast.expr | None) -> ast.Call | None:
    """Return the call that makes a trainer's arguments: ``TrainingArguments(...)``."""
    values = [expression]
    if isinstance(expression, (ast.Name, ast.Attribute)):
        values = names.values(expression)
    call = values[0] if len(values) == 1 else None
    if not isinstance(call, ast.Call):
        return None
    return call if last_name(call.func).endswith(("Arguments", "Config")) else None
