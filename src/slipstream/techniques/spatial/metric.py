"""Metrics that a process without torch computes; see `slipstream.techniques.spatial.evaluation`."""

from __future__ import annotations

import contextlib
import importlib
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import InvalidArgumentError

_functions: dict[str, Callable[[Any], Any]] = {}


def warm_up(module: str, name: str, script: str) -> None:
    """Import the metric, in the child; a failure is reported by `compute`."""
    with contextlib.suppress(Exception):
        _imported(module, name, script)


def compute(scores: str, module: str, name: str, script: str) -> dict[str, Any]:
    """Return the metric of a file of scores and the seconds that it took, in the child."""
    values = np.load(scores)
    Path(scores).unlink()
    function = _imported(module, name, script)
    began = time.perf_counter()
    value = function(values)
    value = value.item() if isinstance(value, np.generic) else value
    return {"value": value, "seconds": time.perf_counter() - began}


def _imported(module: str, name: str, script: str) -> Callable[[Any], Any]:
    if name not in _functions:
        home: Any = runpy.run_path(script, run_name="__metric__") if script else None
        _functions[name] = home[name] if script else getattr(importlib.import_module(module), name)
    return _functions[name]


def address(metric: Any) -> dict[str, str]:
    """Return where a new process finds the function: arguments of `compute`.

    Raises:
        InvalidArgumentError: it cannot be imported there.
    """
    module, name = getattr(metric, "__module__", ""), getattr(metric, "__qualname__", "")
    script = str(getattr(sys.modules.get("__main__"), "__file__", "")) * (module == "__main__")
    if not module or not name.isidentifier() or (module == "__main__" and not script):
        raise InvalidArgumentError(
            "metric", f"{name or metric!r} cannot be imported in another process",
            remedy="pass a function that is defined at the top of a module or script",
        )  # fmt: skip
    return {"module": module, "name": name, "script": script}
