"""Run a workload under a *program*: a generator that requests one step at a time.

A function's step can be called, but a plain script runs its own loop. So code that needs steps
(the profiler, a measurement) is a generator that receives the `BuiltWorkload` and yields for each
step; the yield returns the step's result. For a function, `drive` calls the step at each yield; for
a script, each optimizer step resumes the generator with the loss that ``backward`` was called on.
Both run in one thread, as the profiler and autograd's thread-local state require.

Everything here runs in a child process (`slipstream.child`), never in a long-lived one.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from slipstream.child import describe_error
from slipstream.errors import SlipstreamError, UnknownNameError, WorkloadError
from slipstream.units import with_article
from slipstream.workload.built import BuiltWorkload, build_from, prepare, seed_all
from slipstream.workload.guard import FileGuard
from slipstream.workload.lines import UserLines, project_root
from slipstream.workload.packages import extend_path
from slipstream.workload.providers import build_from_providers, family_of
from slipstream.workload.recipe import Workload
from slipstream.workload.script import ARGPARSE, leave_process_group, run_script

T = TypeVar("T")
Program = Callable[[BuiltWorkload], Generator[None, Any, T]]
# A tracker would upload each launch of the user's code as an experiment.
_WITHOUT_TRACKERS = {
    "WANDB_MODE": "disabled", "SWANLAB_MODE": "disabled", "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
}  # fmt: skip


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
        program: yields once for every step; its return value is the result.
        leave: called with the result of a plain script instead of returning, because the script
            must not continue; it ends the process.
        repeats: whether a short script may run again, see `slipstream.workload.script.run_script`.
        keep_in: the parent's folder of `file_backups`, for files that the user's code overwrites.

    Raises:
        WorkloadError: the user's code cannot be imported, returns a wrong value, or ends before
            the program received its steps.
    """
    if workload.live is not None:
        return run_steps(workload.build(seed), program)
    # Do not write __pycache__ folders next to the user's modules.
    sys.dont_write_bytecode = True
    os.environ.update(_WITHOUT_TRACKERS)
    with FileGuard(workload.path.parent, keep_in):
        if workload.function is None:
            return run_script(workload, program, leave, seed, repeats=repeats)
        built, where = _build_function(workload, seed)
        return run_steps(built, program, where)


def run_steps(built: BuiltWorkload, program: Program[T], where: str | None = None) -> T:
    """Run `program` over the steps of a built workload, and return its result.

    Args:
        where: ``file:line`` that chose model and batch, for errors without a line.

    Raises:
        WorkloadError: a step fails outside the user's lines.
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
            # The only line of the user is the one that chose the model and the batch.
            raise WorkloadError(
                f"one step fails: {type(error).__name__}: {error}",
                where=where,
                remedy=_remedy(error),
            ) from error


def _remedy(error: Exception) -> str:
    text = str(error)
    if "does not require grad" in text:
        return (
            "check that the model is not frozen or detached: the loss depends on no trained tensor"
        )
    if "shapes cannot be multiplied" in text or "size of tensor" in text:
        return "make the batch's shape fit the model's layers and the loss's targets"
    return "check that the batch fits the model and the loss"


def _build_function(workload: Workload, seed: int) -> tuple[BuiltWorkload, str]:
    """Build the workload of the user's function; return it with the function's location."""
    leave_process_group()
    path = workload.path.resolve()
    package = extend_path(path)
    # Under the file's name, for pickling and self-imports of the user's code; but a file called
    # random.py must not replace the module that torch has imported.
    name = f"{package}.{path.stem}" if package else path.stem
    if name in sys.modules:
        name = f"{package}.slipstream_workload_{path.stem}".lstrip(".")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    lines = UserLines(project_root(path))
    prepare(workload.techniques)
    seed_all(seed)
    with lines:
        spec.loader.exec_module(module)
    where = f"{path}:{workload.function}"
    if (family := family_of(workload.function)) is not None:
        seed_all(seed)
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
            remedy="choose a function that returns (model, batch, loss, optimizer)",
        )
    code = getattr(function, "__code__", None)
    if code is not None:
        where = f"{path}:{code.co_firstlineno}"
        _check_arguments(function, workload, where)
    lines.note_return(function)
    seed_all(seed)
    try:
        with lines:
            result = function(**workload.arguments)
    except SystemExit as left:
        # argparse exits with this status: it expects the arguments of a script.
        if left.code != ARGPARSE:
            raise
        raise WorkloadError(
            f"{workload.function}() parsed command-line arguments and exited with status 2",
            where=where,
            remedy=f"omit :{workload.function} to run the whole script: {path.name} -- ARGS",
        ) from left
    built = build_from(result, workload.techniques, seed, workload.name, where)
    built.lines = lines
    return built, where


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
        without_default = [n for n, p in parameters.items() if p.default is p.empty]
        missing = next((n for n in without_default if n not in workload.arguments), "NAME")
        raise WorkloadError(
            f"{workload.function}(): {error}",
            where=where,
            remedy=f"pass --set {missing}=VALUE, or add a default in the code",
        ) from error
