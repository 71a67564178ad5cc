"""Files of three providers, as Skyline and DeepView took them, are workloads as they are.

``skyline_model_provider()`` makes the module, ``skyline_input_provider(batch_size=N)`` the inputs
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
    """The name of a provider: ``skyline_model_provider``."""
    return f"{family}_{part}_provider"


def family_of(function: str | None) -> str | None:
    """Of which family this is the model's provider; None where it is another function."""
    return next((one for one in FAMILIES if function == provider(one, "model")), None)


def provider_in(tree: ast.Module) -> str | None:
    """The model's provider that a file defines; None where it defines none."""
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    return next((name for one in FAMILIES if (name := provider(one, "model")) in defined), None)


def build_from_providers(module: Any, family: str, arguments: Mapping[str, Any]) -> BuiltWorkload:
    """The workload that the three providers in `module` describe.

    Args:
        arguments: ``batch_size`` at most, in place of the input provider's default.

    Raises:
        WorkloadError: a provider is missing, takes other arguments, or returns something else than
            it should; names its file and line.
        UnknownNameError: another argument than ``batch_size``.
    """
    import torch

    make_model, make_inputs, make_iteration = (_checked(module, family, one) for one in _PARTS)
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
            f"{make_inputs.__name__}() returned a bare tensor, which would be taken apart",
            where=_place(make_inputs),
            remedy="return a tuple: (tensor,)",
        )
    if not isinstance(inputs, Iterable):
        raise _returned(make_inputs, inputs, "an iterable of inputs, as a tuple")
    iteration = make_iteration(model)
    if not callable(iteration):
        raise _returned(make_iteration, iteration, "a function that runs one step on *inputs")
    built = BuiltWorkload(
        model, batch=tuple(inputs), optimizer=_optimizer_in(iteration), samples=samples
    )
    built.step = lambda: iteration(*built.batch)
    # Another batch may be put there if its tensors have their samples in front.
    built.reads_batch = count_samples(built.batch) == samples
    return built


def _checked(module: Any, family: str, part: str) -> Callable[..., Any]:
    """The provider, of which `inspect` says that it can be called as it will be."""
    name, shape = provider(family, part), _SHAPES[part]
    function = getattr(module, name, None)
    if not inspect.isfunction(function):
        kind = "not defined" if function is None else with_article(type(function).__name__)
        raise WorkloadError(
            f"{name} is {kind}", where=_place(module), remedy=f"define it: def {name}{shape}: ..."
        )
    parameters = list(inspect.signature(function).parameters.values())
    names = [one.name for one in parameters]
    wanted = {"model": [], "input": [BATCH_SIZE], "iteration": ["model"]}[part]
    free = part == "iteration" and len(names) == 1
    if (names != wanted and not free) or any(
        one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in parameters
    ):
        given = ", ".join(map(str, parameters)) or "no arguments"
        takes = {"model": "no arguments", "input": f"exactly one, {BATCH_SIZE}"}
        raise WorkloadError(
            f"{name} takes {takes.get(part, 'exactly one argument, the model')}; this one: {given}",
            where=_place(function),
            remedy=f"def {name}{shape}: ...",
        )
    if part == "input" and type(parameters[0].default) is not int:
        default = parameters[0].default
        given = "has none" if default is inspect.Parameter.empty else f"is {default!r}"
        raise WorkloadError(
            f"the default of {BATCH_SIZE} in {name} is the profiled batch size, and {given}",
            where=_place(function),
            remedy=f"give it an integer: def {name}{shape}: ...",
        )
    return function


def _returned(function: Callable[..., Any], value: Any, wanted: str) -> WorkloadError:
    given = "nothing" if value is None else with_article(type(value).__name__)
    return WorkloadError(
        f"{function.__name__}() returned {given}", where=_place(function), remedy=f"return {wanted}"
    )


def _place(thing: Any) -> str:
    """File and line of a function; the file of a module."""
    code = getattr(inspect.unwrap(thing) if callable(thing) else thing, "__code__", None)
    if code is not None:
        return f"{code.co_filename}:{code.co_firstlineno}"
    return str(getattr(thing, "__file__", thing))


def _optimizer_in(iteration: Any) -> Any:
    """The optimizer that a step holds on to, in a closure or as an attribute; None: not found.

    It tells what the optimizer keeps in memory, and when the parameters are updated.
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
    return next((one for one in held if isinstance(one, torch.optim.Optimizer)), None)
