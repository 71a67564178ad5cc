"""What turns a candidate into measurements: a function of the user's, with what it declares."""

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
    """What a candidate is expected to take of devices.

    Attributes:
        seconds: on one device by itself, for each unit of fidelity.
        gamma: over w devices it is w / (1 + gamma (w - 1)) times as fast.
        utilisation: of one device, by itself: what packing can use is the rest.
        memory: share of one device's memory.
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
        metrics: units by metric, as far as they are declared; None where nothing is.
        provenance: of what it returns.
        cost: what a candidate is expected to take, by its values; None where nobody knows.
    """

    function: Callable[..., Any]
    metrics: Mapping[str, str] | None = None
    provenance: Provenance = Provenance.MEASURED
    cost: Callable[[Mapping[str, Any]], Cost] | None = None

    @property
    def name(self) -> str:
        """The function's name."""
        return str(getattr(self.function, "__qualname__", type(self.function).__name__))

    def target(self) -> str:
        """``file.py:function`` or ``module:function``, for other processes.

        Raises:
            InvalidArgumentError: it is no function of a module.
        """
        module, name = getattr(self.function, "__module__", None), self.name
        reached: Any = sys.modules.get(module or "")
        for part in name.split("."):
            reached = getattr(reached, part, None)
        if isinstance(reached, Estimator):
            reached = reached.function
        if reached is not self.function:
            raise InvalidArgumentError(
                "estimator", f"{name} is no function of a module, which other processes could load",
                remedy="define it with def at the top of a file, or run the study inline",
            )  # fmt: skip
        file = getattr(sys.modules[str(module)], "__file__", None)
        # A file by itself may be on nobody else's path.
        if "." not in str(module) and file and Path(file).name != "__init__.py":
            return f"{Path(file).resolve()}:{name}"
        return f"{module}:{name}"


@dataclass(frozen=True)
class TrialRun:
    """What an estimator may ask about the run it is called for.

    Attributes:
        fidelity: how much to spend: epochs, samples, whatever the rung policy counts.
        seed: for random numbers; the same for the same candidate of the same study.
        folder: where the candidate's checkpoints may be, kept between its rungs; None where the
            study has no store.
        parent: the fidelity that the candidate was at before; 0.0 for the first time.
        width: devices it may use; below two, one or a part of it.
        medians: median values of the first objective over complete trials, by reported step.
        sign: 1.0 if the first objective is minimised, -1.0 if it is maximised.
        reports: what `report` recorded, by step.
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
            InvalidArgumentError: a negative step.
        """
        if not 0 <= step < 2**53:
            raise InvalidArgumentError("step", f"{step} is not a step", remedy="0, 1, 2, ...")
        self.reports.pop(int(step), None)
        self.reports[int(step)] = float(value)

    def should_prune(self) -> bool:
        """Whether the best value reported so far is worse than the median at the latest step.

        The median is of the trials that were complete when this one began. It is False before the
        first report, while fewer than five of them reported that step, and with several objectives.
        End the trial with ``raise Pruned``.
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
        """To be called where the checkpoint in `folder` is whole: a trial is resized there.

        Where the trial is to have other devices, this evaluation ends; the estimator is called
        again with another `width`, to go on from its checkpoint. Otherwise nothing happens.

        Raises:
            Resized: it ends here; not for an estimator to catch.
        """
        if self.folder is not None and Path(self.folder, RESIZE).exists():
            raise Resized


class Pruned(Exception):  # noqa: N818 - as Optuna's TrialPruned: not an error
    """An estimator ends an unpromising trial: it is `State.PRUNED`, and takes no part in ranks."""


class Resized(BaseException):
    """An evaluation has ended, so that its trial goes on on other devices."""


RESIZE = ".resize"
"""A file in a trial's folder that asks it to end at its next checkpoint."""


def estimator(
    metrics: Mapping[str, str] | None = None,
    *,
    provenance: str = "measured",
    cost: Callable[[Mapping[str, Any]], Cost] | None = None,
) -> Callable[[Callable[..., Any]], Estimator]:
    """Declare what a function reports, so that mistakes are found before it is called.

    @estimator({"accuracy": "", "latency": "ms"})
    def measure(config): ...
    """
    kind = Provenance(provenance)
    return lambda function: Estimator(function, metrics, kind, cost)


def as_estimator(thing: Estimator | Callable[..., Any]) -> Estimator:
    """`thing`, or the estimator that a plain function is."""
    if not callable(thing) and not isinstance(thing, Estimator):
        raise InvalidArgumentError("estimator", f"{type(thing).__name__} is no function")
    return thing if isinstance(thing, Estimator) else Estimator(thing)


def call(function: Callable[..., Any], config: Mapping[str, Any], run: TrialRun) -> Any:
    """What `function` returns, given as many arguments as it takes."""
    if _arity(function) > 1:
        return function(config, run)
    return function(config)


_ARITY: dict[Any, int] = {}


def _arity(function: Callable[..., Any]) -> int:
    known = _ARITY.get(function)
    if known is None:
        parameters = inspect.signature(function).parameters.values()
        places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        required = [p for p in places if p.default is p.empty]
        second = len(places) > 1 and (len(required) > 1 or places[1].name == "run")
        known = _ARITY[function] = 2 if second else 1
    return known


def values_of(returned: Any, only_metric: str) -> dict[str, Value]:
    """What an estimator returned, as values by metric.

    Args:
        only_metric: what a bare number is a value of.

    Raises:
        ValueError: it is no number, or not finite; says which metric.
    """
    given = returned if isinstance(returned, Mapping) else {only_metric: returned}
    values = {}
    for metric, one in given.items():
        value = one if isinstance(one, Value) else Value(_number(one, metric))
        if not math.isfinite(value.value):
            raise ValueError(f"{metric} is {value.value}")
        values[str(metric)] = value
    return values


def _number(one: Any, metric: str) -> float:
    try:
        return float(one)
    except (TypeError, ValueError):
        raise ValueError(f"{metric} is no number but {type(one).__name__}") from None


def load_target(target: str) -> Any:
    """The object behind ``file.py:name`` or ``module:name``.

    Raises:
        WorkloadError: the file cannot be imported, or has no such name.
    """
    place, _, name = target.rpartition(":")
    if place.endswith(".py"):
        loaded: Any = _module_of(Path(place))
    else:
        loaded = importlib.import_module(place)
    for part in name.split("."):
        if not hasattr(loaded, part):
            known = ", ".join(n for n in vars(loaded) if not n.startswith("_"))
            raise WorkloadError(f"there is no '{part}'", where=place, remedy=f"known: {known}")
        loaded = getattr(loaded, part)
    return loaded


def _module_of(path: Path) -> Any:
    path = path.resolve()
    name = f"slipstream_study_{path.stem}"
    if name in sys.modules and getattr(sys.modules[name], "__file__", "") == str(path):
        return sys.modules[name]
    if not path.is_file():
        raise WorkloadError("no such file", where=str(path))
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
