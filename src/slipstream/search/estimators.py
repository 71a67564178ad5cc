"""Estimators: user functions that evaluate candidates, and the metrics that they declare."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.errors import InvalidArgumentError, WorkloadError
from slipstream.provenance import Provenance
from slipstream.search.metrics import Value


@dataclass(frozen=True)
class Cost:
    """Expected device usage of a candidate.

    Attributes:
        seconds: time on one otherwise idle device, per unit of fidelity.
        gamma: scaling loss; the speed-up on w devices is w / (1 + gamma (w - 1)).
        utilisation: fraction of an otherwise idle device that it uses; the rest is available to
            other trials packed onto it.
        memory: fraction of one device's memory.
    """

    seconds: float
    gamma: float = 0.1
    utilisation: float = 1.0
    memory: float = 0.0


@dataclass(frozen=True)
class Estimator:
    """A function that measures, or predicts, metrics of a candidate.

    It is called with the candidate's values by path and, if it takes a second argument, a
    `TrialRun`; it returns a number (the only objective's value) or a mapping of metrics to
    numbers or `Value`s.

    Attributes:
        metrics: units by metric; None if not declared.
        provenance: default provenance of the returned values.
        cost: function from a candidate's values to its expected cost; None if unknown.
    """

    function: Callable[..., Any]
    metrics: Mapping[str, str] | None = None
    provenance: Provenance = Provenance.MEASURED
    cost: Callable[[Mapping[str, Any]], Cost] | None = None

    @property
    def name(self) -> str:
        """Qualified name of the function."""
        return str(getattr(self.function, "__qualname__", type(self.function).__name__))

    def target(self) -> str:
        """Return ``file.py:function`` or ``module:function``, for other processes to import.

        Raises:
            InvalidArgumentError: the function is not an attribute of a module.
        """
        module, name = getattr(self.function, "__module__", None), self.name
        found: Any = sys.modules.get(module or "")
        for part in name.split("."):
            found = getattr(found, part, None)
        if isinstance(found, Estimator):
            found = found.function
        if found is not self.function:
            raise InvalidArgumentError(
                "estimator", f"{name} is not defined at module level, so workers cannot import it",
                remedy="define it with def at the top level of a file, or run the study inline",
            )  # fmt: skip
        file = getattr(sys.modules[str(module)], "__file__", None)
        # Other processes may not have the folder of a top-level module on their path.
        if "." not in str(module) and file and Path(file).name != "__init__.py":
            return f"{Path(file).resolve()}:{name}"
        return f"{module}:{name}"


@dataclass(frozen=True)
class TrialRun:
    """Settings of one evaluation, passed to the estimator.

    Attributes:
        fidelity: amount to spend, in the unit of the rung policy, for example epochs.
        seed: random seed, determined by the study and the candidate.
        folder: folder for the candidate's checkpoints, shared by its rungs; None without a store
            or without a rung policy.
        parent: fidelity that the candidate has reached before; 0.0 in its first evaluation.
        width: number of devices that it may use; below 2, one device or a part of it.
        medians: median values of the first objective over complete trials, by reported step.
        sign: 1.0 if the first objective is minimised, -1.0 if it is maximised.
        reports: values passed to `report`, by step.
    """

    fidelity: float
    seed: int
    folder: str | None = None
    parent: float = 0.0
    width: int = 1
    medians: Sequence[tuple[int, float]] = ()
    sign: float = 1.0
    reports: dict[int, float] = field(default_factory=dict, compare=False)

    def report(self, value: float, step: int) -> None:
        """Record the value of the first objective at `step`, for example after an epoch.

        Raises:
            InvalidArgumentError: `step` is negative or not below 2 ** 53.
        """
        if not 0 <= step < 2**53:
            raise InvalidArgumentError(
                "step", f"{step} is not a valid step", remedy="pass 0, 1, 2, ..."
            )
        self.reports.pop(int(step), None)
        self.reports[int(step)] = float(value)

    def should_prune(self) -> bool:
        """Whether the best value reported so far is worse than the median at the latest step.

        The median is over the trials that were complete when this one began. The result is False
        before the first report, if fewer than five of those trials reported that step, and with
        several objectives. To end the trial, raise `TrialPruned`.
        """
        if not self.reports:
            return False
        step, value = next(reversed(self.reports.items()))
        if math.isnan(value):
            return True
        median = dict(self.medians).get(step)
        best = min(self.sign * value for value in self.reports.values() if not math.isnan(value))
        return median is not None and best > self.sign * median

    def checkpointed(self) -> None:
        """Signal that the checkpoint in `folder` is complete, so that the trial can be resized.

        If the trial is to move to other devices, this evaluation ends, and the estimator is called
        again with another `width` to resume from its checkpoint. Otherwise nothing happens.

        Raises:
            Resized: the evaluation ends here; an estimator must not catch it.
        """
        if self.folder is not None and Path(self.folder, RESIZE).exists():
            raise Resized


class TrialPruned(Exception):  # noqa: N818 - as Optuna's TrialPruned: not an error
    """Raised by an estimator to end an unpromising trial, which is not ranked."""


class Resized(BaseException):
    """Raised to end an evaluation whose trial will resume on other devices."""


RESIZE = ".resize"
"""Name of a file in a trial's folder that requests it to end at its next checkpoint."""


def estimator(
    metrics: Mapping[str, str] | None = None,
    *,
    provenance: str = "measured",
    cost: Callable[[Mapping[str, Any]], Cost] | None = None,
) -> Callable[[Callable[..., Any]], Estimator]:
    """Declare the metrics of a function, so that errors are found before it is called.

    @estimator({"accuracy": "", "latency": "ms"})
    def measure(config): ...
    """
    kind = Provenance(provenance)
    return lambda function: Estimator(function, metrics, kind, cost)


def as_estimator(thing: Estimator | Callable[..., Any]) -> Estimator:
    """Return `thing`, wrapped in an `Estimator` if it is a plain function."""
    if not callable(thing) and not isinstance(thing, Estimator):
        raise InvalidArgumentError("estimator", f"{type(thing).__name__} is not callable")
    return thing if isinstance(thing, Estimator) else Estimator(thing)


def call(function: Callable[..., Any], config: Mapping[str, Any], run: TrialRun) -> Any:
    """Call `function` with the config and, if it takes a second argument, the run."""
    if _arity(function) > 1:
        return function(config, run)
    return function(config)


_ARITY: dict[Any, int] = {}


def _arity(function: Callable[..., Any]) -> int:
    arity = _ARITY.get(function)
    if arity is None:
        parameters = inspect.signature(function).parameters.values()
        positional = [
            p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        required = [p for p in positional if p.default is p.empty]
        second = len(positional) > 1 and (len(required) > 1 or positional[1].name == "run")
        arity = _ARITY[function] = 2 if second else 1
    return arity


def values_of(returned: Any, only_metric: str) -> dict[str, Value]:
    """Convert the return value of an estimator to values by metric.

    Args:
        only_metric: metric of a bare number.

    Raises:
        ValueError: a value is not a finite number; the message names its metric.
    """
    by_metric = returned if isinstance(returned, Mapping) else {only_metric: returned}
    values = {}
    for metric, raw in by_metric.items():
        value = raw if isinstance(raw, Value) else Value(_number(raw, metric))
        if not math.isfinite(value.value):
            raise ValueError(f"{metric} is {value.value}, which is not finite")
        values[str(metric)] = value
    return values


def _number(raw: Any, metric: str) -> float:
    try:
        return float(raw)
    except (TypeError, ValueError):
        raise ValueError(f"{metric} is not a number but of type {type(raw).__name__}") from None


def load_target(target: str) -> Any:
    """Import the object ``file.py:name`` or ``module:name``.

    Raises:
        WorkloadError: the file cannot be imported, or does not define the name.
    """
    place, _, name = target.rpartition(":")
    if place.endswith(".py"):
        loaded: Any = _module_of(Path(place))
    else:
        try:
            loaded = importlib.import_module(place)
        except ImportError as error:
            raise WorkloadError(str(error), where=target, remedy="pass file.py:name") from error
    for part in name.split("."):
        if not hasattr(loaded, part):
            names = ", ".join(n for n in vars(loaded) if not n.startswith("_"))
            raise WorkloadError(f"'{part}' is not defined", where=place, remedy=f"use {names}")
        loaded = getattr(loaded, part)
    return loaded


def _module_of(path: Path) -> Any:
    path = path.resolve()
    name = f"slipstream_study_{path.stem}"
    if name in sys.modules and getattr(sys.modules[name], "__file__", "") == str(path):
        return sys.modules[name]
    if not path.is_file():
        raise WorkloadError("the file does not exist", where=str(path))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        traceback, line = error.__traceback__, 0
        while traceback is not None:
            if traceback.tb_frame.f_code.co_filename == str(path):
                line = traceback.tb_lineno
            traceback = traceback.tb_next
        raise WorkloadError(f"{type(error).__name__}: {error}", where=f"{path}:{line}") from error
    finally:
        sys.path.remove(str(path.parent))
    return module
