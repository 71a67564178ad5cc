"""Run a workload under a *program*: a generator that asks for one step at a time.

A function's step can be called; a plain script cannot: it runs its own loop. So code that needs
steps (the profiler, a measurement) is written as a generator that receives the `BuiltWorkload` and
yields whenever it wants one step to happen; the yield returns the step's result. For a function,
`drive` calls the step at each yield; for a script, each optimizer step of the script resumes the
generator with the loss that ``backward`` was called on. Both run in one thread, as the profiler
and autograd's thread-local state demand.

Everything here runs in a child process (`slipstream.child`), never in a long-lived one.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from slipstream.child import describe_error
from slipstream.errors import SlipstreamError, UnknownNameError, WorkloadError
from slipstream.units import with_article
from slipstream.workload.built import BuiltWorkload, build_from, prepare
from slipstream.workload.guard import FileGuard
from slipstream.workload.lines import UserLines, project_root
from slipstream.workload.providers import build_from_providers, family_of
from slipstream.workload.recipe import Workload
from slipstream.workload.relative import relative_import
from slipstream.workload.script import ARGPARSE, run_script

T = TypeVar("T")
Program = Callable[[BuiltWorkload], Generator[None, Any, T]]


def drive(
    workload: Workload,
    program: Program[T],
    leave: Callable[[T], NoReturn],
    *,
    keep_in: Path,
    seed: int = 0,
    repeats: bool = False,
) -> T:
    """Build `workload`, run `program` over it, and return what the program returns.

    Args:
        program: yields once for every step it wants; its return value is the result.
        leave: for a plain script: called with the result in place of returning, because the
            script's own code must not go on; it ends the process.
        repeats: whether a short script may run again, see `slipstream.workload.script.run_script`.
        keep_in: the parent's folder of `file_backups`, for what the user's code overwrites.

    Raises:
        WorkloadError: the user's code cannot be imported, returns the wrong thing, or ends before
            the program had its steps.
    """
    if workload.live is not None:
        return run_steps(workload.build(seed), program)
    # No __pycache__ of ours beside the user's modules.
    sys.dont_write_bytecode = True
    with FileGuard(workload.path.parent, keep_in):
        if workload.function is None:
            return run_script(workload, program, leave, seed, repeats=repeats)
        built, where = _build_function(workload, seed)
        return run_steps(built, program, where)


def run_steps(built: BuiltWorkload, program: Program[T], where: str | None = None) -> T:
    """Run `program` over the steps of what is built already, here; what it returns.

    Args:
        where: ``file:line`` that chose model and batch, for errors that name no line themselves.

    Raises:
        WorkloadError: a step fails, at no line of the user's.
    """
    running = program(built)
    value = None
    while True:
        try:
            running.send(value)
        except StopIteration as end:
            result: T = end.value
            return result
        try:
            value = built.step()
        except Exception as error:
            if isinstance(error, SlipstreamError) or describe_error(error)["where"]:
                raise
            # No line of the user's is involved but the one that chose the model and the batch.
            raise WorkloadError(
                f"one step fails: {type(error).__name__}: {error}",
                where=where,
                remedy=_remedy(error),
            ) from error


def _remedy(error: Exception) -> str:
    text = str(error)
    if "does not require grad" in text:
        return "nothing the loss depends on is trained: is the model frozen, or detached?"
    if "shapes cannot be multiplied" in text or "size of tensor" in text:
        return "the batch's shape does not fit the model's layers, or the loss's targets"
    return "does the batch fit the model and the loss?"


def _build_function(workload: Workload, seed: int) -> tuple[BuiltWorkload, str]:
    """What the user's function makes, and the function's place."""
    import torch

    _leave_process_group()
    path = workload.path.resolve()
    # As `python file.py` would: its own folder first, so that its imports work.
    sys.path.insert(0, str(path.parent))
    # Under its own name, for pickling and self-imports of the user's code; but a file called
    # random.py must not take the place of the module that torch has imported.
    name = path.stem if path.stem not in sys.modules else f"slipstream_workload_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    lines = UserLines(project_root(path))
    prepare(workload.techniques)
    torch.manual_seed(seed)
    with lines:
        try:
            spec.loader.exec_module(module)
        except ImportError as error:
            remedy = relative_import(path)
            if remedy is None:
                raise
            described = describe_error(error)
            raise WorkloadError(
                described["what"], where=described["where"], remedy=remedy
            ) from error
    where = f"{path}:{workload.function}"
    if (family := family_of(workload.function)) is not None:
        torch.manual_seed(seed)
        with lines:
            provided = build_from_providers(module, family, workload.arguments)
        built = build_from(provided, workload.techniques, seed, workload.name, where)
        built.lines = lines
        return built, where
    function: Any = getattr(module, workload.function or "", None)
    if not callable(function):
        kind = "not defined" if function is None else with_article(type(function).__name__)
        raise WorkloadError(
            f"'{workload.function}' is {kind}, not a function",
            where=str(path),
            remedy="name a function that returns (model, batch, loss, optimizer)",
        )
    code = getattr(function, "__code__", None)
    if code is not None:
        where = f"{path}:{code.co_firstlineno}"
        _check_arguments(function, workload, where)
    lines.note_return(function)
    torch.manual_seed(seed)
    try:
        with lines:
            result = function(**workload.arguments)
    except SystemExit as left:
        # What argparse leaves with: it reads the arguments of a script, and here is none.
        if left.code != ARGPARSE:
            raise
        raise WorkloadError(
            f"{workload.function}() parses the arguments of a command line, and left with exit(2)",
            where=where,
            remedy=f"drop :{workload.function} to run the whole script: {path.name} -- ARGS",
        ) from left
    built = build_from(result, workload.techniques, seed, workload.name, where)
    built.lines = lines
    return built, where


def _leave_process_group() -> None:
    """So that the user's code may join one again: a workload is built once for every seed."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def _check_arguments(function: Any, workload: Workload, where: str) -> None:
    signature = inspect.signature(function)
    parameters = signature.parameters
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    for name in workload.arguments:
        if name not in parameters and not open_ended:
            raise UnknownNameError(
                f"argument of {workload.function}()", name, parameters, where=where
            )
    try:
        signature.bind(**workload.arguments)
    except TypeError as error:
        without_default = [n for n, one in parameters.items() if one.default is one.empty]
        missing = next((n for n in without_default if n not in workload.arguments), "NAME")
        raise WorkloadError(
            f"{workload.function}(): {error}",
            where=where,
            remedy=f"give it with --set {missing}=VALUE, or a default in the code",
        ) from error
