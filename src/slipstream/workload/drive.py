"""Run a workload under a *program*: a generator that asks for one step at a time.

A function's step can be called; a plain script cannot: it runs its own loop. So whoever needs
steps (the profiler, a measurement) is written as a generator that is given the `Built` and yields
whenever it wants one step to happen; the yield gives what the step returned. For a function,
`drive` calls the step at each yield; for a script, each optimizer step of the script resumes the
generator (with nothing). Both run in one thread, as the profiler and autograd's thread-local
state demand.

Everything here runs in a child process (`slipstream.child`), never in a long-lived one.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from slipstream.errors import WorkloadError
from slipstream.workload.built import Built, build_from
from slipstream.workload.recipe import Workload
from slipstream.workload.script import run_script

T = TypeVar("T")
Program = Callable[[Built], Generator[None, Any, T]]


def drive(
    workload: Workload,
    program: Program[T],
    leave: Callable[[T], NoReturn],
    *,
    keep_in: Path,
    seed: int = 0,
) -> T:
    """Build `workload`, run `program` over it, and return what the program returns.

    Args:
        program: yields once for every step it wants; its return value is the result.
        leave: for a plain script: called with the result in place of returning, because the
            script's own code must not go on; it ends the process.
        keep_in: an empty folder for copies of files a script overwrites; the parent process gives
            it to `restore_files` afterwards.

    Raises:
        WorkloadError: the user's code cannot be imported, returns the wrong thing, or ends before
            the program had its steps.
    """
    if workload.live is not None:
        return _steps(workload.build(seed), program)
    if workload.function is None:
        return run_script(workload, program, leave, keep_in, seed)
    return _steps(_build_function(workload, seed), program)


def _steps(built: Built, program: Program[T]) -> T:
    running = program(built)
    value = None
    while True:
        try:
            running.send(value)
        except StopIteration as end:
            result: T = end.value
            return result
        value = built.step()


def _build_function(workload: Workload, seed: int) -> Built:
    import torch

    path = workload.path.resolve()
    # As `python file.py` would: its own folder first, so that its imports work.
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Registered under its name, for dataclasses, pickling and self-imports of the user's code.
    sys.modules[path.stem] = module
    torch.manual_seed(seed)
    spec.loader.exec_module(module)
    where = f"{path}:{workload.function}"
    function: Any = getattr(module, workload.function or "", None)
    if not callable(function):
        raise WorkloadError(f"'{workload.function}' is not a function", where=where)
    code = getattr(function, "__code__", None)
    if code is not None:
        where = f"{path}:{code.co_firstlineno}"
        _check_arguments(function, workload, where)
    torch.manual_seed(seed)
    return build_from(
        function(**workload.arguments), workload.techniques, seed, workload.name, where
    )


def _check_arguments(function: Any, workload: Workload, where: str) -> None:
    import inspect

    try:
        inspect.signature(function).bind(**workload.arguments)
    except TypeError as error:
        raise WorkloadError(
            f"{workload.function}(): {error}",
            where=where,
            remedy="give arguments with --set name=value",
        ) from error
