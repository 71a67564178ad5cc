"""Workloads from files with the three providers of Skyline and DeepView.

``skyline_model_provider()`` returns the module, ``skyline_input_provider(batch_size=N)`` the inputs
of one step, ``skyline_iteration_provider(model)`` a function that runs one step on ``*inputs``;
``deepview_...`` likewise. Source: Yu, Grossman and Pekhimenko, "Skyline: Interactive in-editor
computational performance profiling for deep neural network training", UIST 2020.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from slipstream.errors import UnknownNameError, WorkloadError
from slipstream.units import with_article
from slipstream.workload.built import BuiltWorkload, count_samples

FAMILIES = ("skyline", "deepview")
_PARTS = ("model", "input", "iteration")
BATCH_SIZE = "batch_size"
_SHAPES = {
    "model": "()",
    "input": f"({BATCH_SIZE}=32)",
    "iteration": "(model)",
}


def provider(family: str, part: str) -> str:
    """Return the name of a provider, such as ``skyline_model_provider``."""
    return f"{family}_{part}_provider"


def family_of(function: str | None) -> str | None:
    """Return the family whose model provider has this name; None for other functions."""
    return next((family for family in FAMILIES if function == provider(family, "model")), None)


def provider_in(tree: ast.Module) -> str | None:
    """Return the name of the model provider that a file defines; None if it has none."""
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    names = (provider(family, "model") for family in FAMILIES)
    return next((name for name in names if name in defined), None)


def build_from_providers(module: Any, family: str, arguments: Mapping[str, Any]) -> BuiltWorkload:
    """Build the workload of the three providers in `module`.

    Args:
        arguments: may contain ``batch_size``, which replaces the input provider's default.

    Raises:
        WorkloadError: a provider is missing, takes other arguments or returns a wrong type; the
            error names its file and line.
        UnknownNameError: another argument than ``batch_size``.
    """
    import torch

    make_model, make_inputs, make_iteration = (_checked(module, family, part) for part in _PARTS)
    for name in arguments:
        if name != BATCH_SIZE:
            raise UnknownNameError(
                f"argument of {make_inputs.__name__}()", name, [BATCH_SIZE], where=_place(module)
            )
    default = inspect.signature(make_inputs).parameters[BATCH_SIZE].default
    samples = int(arguments.get(BATCH_SIZE, default))
    model = make_model()
    if not isinstance(model, torch.nn.Module):
        raise _returned(make_model, model, "a torch.nn.Module")
    inputs = make_inputs(**{BATCH_SIZE: samples})
    if isinstance(inputs, torch.Tensor):
        raise WorkloadError(
            f"{make_inputs.__name__}() returned a bare tensor, which would be unpacked by rows",
            where=_place(make_inputs),
            remedy="return a tuple: (tensor,)",
        )
    if not isinstance(inputs, Iterable):
        raise _returned(make_inputs, inputs, "an iterable of inputs, such as a tuple")
    iteration = make_iteration(model)
    if not callable(iteration):
        raise _returned(make_iteration, iteration, "a function that runs one step on *inputs")
    built = BuiltWorkload(
        model, batch=tuple(inputs), optimizer=_optimizer_in(iteration), samples=samples
    )
    built.step = lambda: iteration(*built.batch)
    # The batch can be replaced if samples are the first dimension of its tensors.
    built.reads_batch = count_samples(built.batch) == samples
    return built


def _checked(module: Any, family: str, part: str) -> Callable[..., Any]:
    """Return the provider after checking its signature."""
    name, shape = provider(family, part), _SHAPES[part]
    function = getattr(module, name, None)
    if not inspect.isfunction(function):
        kind = "not defined" if function is None else with_article(type(function).__name__)
        raise WorkloadError(
            f"{name} is {kind}", where=_place(module), remedy=f"define it: def {name}{shape}: ..."
        )
    parameters = list(inspect.signature(function).parameters.values())
    names = [parameter.name for parameter in parameters]
    expected = {"model": [], "input": [BATCH_SIZE], "iteration": ["model"]}[part]
    free = part == "iteration" and len(names) == 1
    if (names != expected and not free) or any(
        parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        for parameter in parameters
    ):
        actual = ", ".join(map(str, parameters)) or "no arguments"
        takes = {"model": "no arguments", "input": f"exactly one, {BATCH_SIZE}"}
        raise WorkloadError(
            f"{name} takes {takes.get(part, 'exactly one argument, the model')}, but got {actual}",
            where=_place(function),
            remedy=f"define it as def {name}{shape}: ...",
        )
    if part == "input" and type(parameters[0].default) is not int:
        default = parameters[0].default
        actual = "missing" if default is inspect.Parameter.empty else repr(default)
        raise WorkloadError(
            f"the default of {BATCH_SIZE} in {name}, the profiled batch size, is {actual}",
            where=_place(function),
            remedy=f"use an integer: def {name}{shape}: ...",
        )
    return function


def _returned(function: Callable[..., Any], value: Any, expected: str) -> WorkloadError:
    actual = "nothing" if value is None else with_article(type(value).__name__)
    return WorkloadError(
        f"{function.__name__}() returned {actual}",
        where=_place(function),
        remedy=f"return {expected}",
    )


def _place(thing: Any) -> str:
    """Return file and line of a function, or the file of a module."""
    code = getattr(inspect.unwrap(thing) if callable(thing) else thing, "__code__", None)
    if code is not None:
        return f"{code.co_filename}:{code.co_firstlineno}"
    return str(getattr(thing, "__file__", thing))


def _optimizer_in(iteration: Any) -> Any:
    """Return the optimizer in a step's closure or attributes; None if not found.

    It provides the optimizer's state in memory and the time of parameter updates.
    """
    import torch

    held: list[Any] = []
    while isinstance(iteration, functools.partial):
        held += [*iteration.args, *iteration.keywords.values()]
        iteration = iteration.func
    held += vars(getattr(iteration, "__self__", iteration)).values()
    for cell in getattr(inspect.unwrap(iteration), "__closure__", None) or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:
            continue  # not set yet
    return next((value for value in held if isinstance(value, torch.optim.Optimizer)), None)
