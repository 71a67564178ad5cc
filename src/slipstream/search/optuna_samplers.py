"""Optuna's samplers as strategies, and the export of studies to Optuna.

The strategies use Optuna's ask-and-tell interface with in-memory storage; trials are persisted in
the study's store only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from slipstream.errors import InvalidArgumentError, MissingExtraError
from slipstream.search.metrics import SCORED, State, Trial
from slipstream.search.parameters import Categorical, Float, Int, Parameter
from slipstream.search.space import Candidate, Space
from slipstream.search.strategies import Strategy, keep_best, summary

if TYPE_CHECKING:
    from slipstream.search.studies import Study

# With more than _MAX_HISTORY trials, the sampler learns from a summary, which is computed again
# every _REFRESH trials.
_MAX_HISTORY, _REFRESH = 512, 256


def optuna_module() -> Any:
    """Import Optuna and silence its logging.

    Raises:
        MissingExtraError: Optuna is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise MissingExtraError("this strategy", "Optuna", "search") from None
    import warnings

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    return optuna


class OptunaSampler(Strategy):
    """Strategy that proposes with one of Optuna's samplers.

    Args:
        kind: tpe, gp, nsga2, nsga3, cmaes, random or qmc.
    """

    stateless = False

    def __init__(self, kind: str) -> None:
        self.kind = kind

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.kind

    def begin(self, *args: Any) -> None:
        super().begin(*args)
        self._optuna = optuna_module()
        samplers = self._optuna.samplers
        kinds = {
            "tpe": samplers.TPESampler, "gp": samplers.GPSampler, "nsga2": samplers.NSGAIISampler,
            "nsga3": samplers.NSGAIIISampler, "cmaes": samplers.CmaEsSampler,
            "random": samplers.RandomSampler, "qmc": samplers.QMCSampler,
        }  # fmt: skip
        if self.kind not in kinds:
            raise InvalidArgumentError(
                "strategy", f"'{self.kind}' is not a supported sampler of Optuna",
                remedy=f"one of {', '.join(kinds)}",
            )  # fmt: skip
        if len(self.objectives) > 1 and self.kind in ("gp", "cmaes"):
            raise InvalidArgumentError("strategy", f"{self.kind} supports only one objective")
        self._sampler = kinds[self.kind](seed=self.seed)
        self._study = self._new_study()
        self._open: dict[int, Any] = {}
        self._finished: list[Trial] = []
        self._best: list[Trial] = []
        self._summarised = 0

    def _new_study(self) -> Any:
        directions = ["minimize" if o.sign > 0 else "maximize" for o in self.objectives]
        return self._optuna.create_study(sampler=self._sampler, directions=directions)

    def ask(self, number: int) -> Candidate | None:
        if (
            len(self._finished) - self._summarised >= _REFRESH
            and len(self._finished) > _MAX_HISTORY
        ):
            self._summarise()
        for _ in range(1000):
            trial = self._study.ask()
            values: dict[str, Any] = {}
            for leaf in self.space.leaves:
                if all(values.get(above) == value for above, value in leaf.when):
                    values[leaf.path] = _suggest(trial, leaf.path, leaf.parameter)
            candidate = Candidate(self.space, values)
            if self.space.broken_rule(candidate) is None:
                self._open[number] = trial
                return candidate
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        return self.space.sample(self.rng())

    def tell(self, trial: Trial) -> None:
        proposal = self._open.pop(trial.number, None)
        if trial.state in SCORED:
            self._finished.append(trial)
            keep_best(self._best, trial, self.objectives)
        if proposal is None:
            # Promoted, repeated, or of another study: this sampler did not propose it.
            if trial.state in SCORED:
                self._study.add_trial(self._frozen(trial))
            return
        states = self._optuna.trial.TrialState
        if trial.state is State.PRUNED and trial.reports and len(self.objectives) == 1:
            for step, value in trial.reports.items():
                proposal.report(value, step)
            self._study.tell(proposal, state=states.PRUNED)
            return
        if trial.state not in SCORED:
            self._study.tell(proposal, state=states.FAIL)
            return
        if self.limits:
            proposal.set_constraint("limits", trial.violation or -1.0)
        self._study.tell(proposal, [trial.values[o.metric] for o in self.objectives])

    def _frozen(self, trial: Trial) -> Any:
        return frozen(self._optuna, self.space, trial, [o.metric for o in self.objectives],
                      limited=bool(self.limits))  # fmt: skip

    def _summarise(self) -> None:
        """Start a new Optuna study with a summary; running trials are added when they end."""
        self._study = self._new_study()
        trials = summary(self._finished, self._best)
        self._study.add_trials([self._frozen(trial) for trial in trials])
        self._open = {}
        self._summarised = len(self._finished)


def _suggest(trial: Any, path: str, parameter: Parameter) -> Any:
    if isinstance(parameter, Float):
        if parameter.step is None:
            return trial.suggest_float(path, parameter.lo, parameter.hi, log=parameter.log)
        # Optuna would lower an upper bound that no step reaches, and warn.
        hi = parameter.from_index((parameter.size or 1) - 1)
        stepped = trial.suggest_float(path, parameter.lo, hi, step=parameter.step)
        return parameter.checked(min(stepped, hi))
    if isinstance(parameter, Int):
        step = {} if parameter.step == 1 else {"step": parameter.step}
        if parameter.log and step:
            return parameter.from_index(trial.suggest_int(path, 0, parameter.count - 1))
        return trial.suggest_int(path, parameter.lo, parameter.hi, log=parameter.log, **step)
    if isinstance(parameter, Categorical):
        if parameter.ordered:
            return parameter.choices[trial.suggest_int(path, 0, parameter.count - 1)]
        labels = _labels(parameter)
        return parameter.choices[labels.index(trial.suggest_categorical(path, labels))]
    units = [trial.suggest_float(f"{path}[{at}]", 0.0, 1.0) for at in range(parameter.units)]
    return parameter.from_units([min(u, 1.0 - 2**-53) for u in units])


def _labels(parameter: Categorical) -> list[Any]:
    """Return the choices for Optuna: distinct plain values, or else their JSON."""
    plain = all(isinstance(choice, str | int | float | None) for choice in parameter.choices)
    if plain and len(set(parameter.choices)) == parameter.count:
        return list(parameter.choices)
    return [json.dumps(choice) for choice in parameter.choices]


class _Recorder:
    """Trial that returns given parameters to `_suggest`, and records their distributions."""

    def __init__(self, optuna: Any, params: Mapping[str, Any]) -> None:
        self._distributions = optuna.distributions
        self._params = params
        self.distributions: dict[str, Any] = {}

    def suggest_float(
        self, name: str, lo: float, hi: float, *, log: bool = False, step: float | None = None
    ) -> float:
        self.distributions[name] = self._distributions.FloatDistribution(lo, hi, log=log, step=step)
        return float(self._params[name])

    def suggest_int(self, name: str, lo: int, hi: int, *, log: bool = False, step: int = 1) -> int:
        # Optuna would lower an upper bound that no step reaches, and warn.
        self.distributions[name] = self._distributions.IntDistribution(
            lo, hi - (hi - lo) % step, log=log, step=step
        )
        return int(self._params[name])

    def suggest_categorical(self, name: str, choices: list[Any]) -> Any:
        self.distributions[name] = self._distributions.CategoricalDistribution(choices)
        return self._params[name]


def _params(path: str, parameter: Parameter, value: Any) -> dict[str, Any]:
    """Return Optuna's parameters for which `_suggest` returns `value`."""
    if isinstance(parameter, Float):
        return {path: value}
    if isinstance(parameter, Int):
        stepped = parameter.log and parameter.step > 1
        return {path: parameter.to_index(value) if stepped else value}
    if isinstance(parameter, Categorical):
        at = parameter.to_index(value)
        return {path: at if parameter.ordered else _labels(parameter)[at]}
    return {f"{path}[{at}]": u for at, u in enumerate(parameter.to_units(value))}


def frozen(
    optuna: Any, space: Space, trial: Trial, metrics: list[str], *, limited: bool,
    pruned: bool = False, readable: bool = False,
) -> Any:  # fmt: skip
    """Convert a trial that ended to a frozen trial of Optuna.

    Args:
        pruned: whether its value is intermediate, since other trials reached a higher fidelity.
        readable: whether to write ordered choices as their values, for an export; otherwise as
            their indices, for `OptunaSampler`.
    """
    attributes = {
        "number": trial.number, "state": str(trial.state), "fidelity": trial.fidelity,
        **({"reason": trial.reason} if trial.reason else {}),
        **{f"{metric} ({provenance})": value.value
           for (metric, provenance), value in trial.measurements.items()},
    }  # fmt: skip
    params: dict[str, Any] = {}
    recorder = _Recorder(optuna, params)
    for path, value in trial.candidate.values.items():
        parameter = space.parameter(path)
        if parameter.units > 1:
            attributes[path] = json.dumps(value)
        if readable and isinstance(parameter, Categorical):
            parameter = Categorical(parameter.choices)
        params |= _params(path, parameter, value)
        _suggest(recorder, path, parameter)
    states = optuna.trial.TrialState
    scored = trial.state in SCORED and not pruned
    reports = trial.reports
    if pruned and not reports and len(metrics) == 1:
        reports = {round(trial.fidelity): trial.values[metrics[0]]}
    pruned = pruned or trial.state is State.PRUNED
    ended = states.COMPLETE if scored else states.PRUNED if pruned else states.FAIL
    export = optuna.trial.create_trial(
        state=ended,
        values=[trial.values[metric] for metric in metrics] if scored else None,
        params=params,
        distributions=recorder.distributions,
        constraints={"limits": trial.violation or -1.0} if limited and scored else None,
        user_attrs=attributes,
        intermediate_values=reports,
    )
    if trial.started:
        export.datetime_start = datetime.fromtimestamp(trial.started)
        export.datetime_complete = datetime.fromtimestamp(trial.ended)
    return export


def to_optuna(study: Study, storage: str | None = None) -> Any:
    """Export a study to Optuna, with the times and reports of every trial that ended.

    Args:
        storage: storage URL of Optuna, such as ``sqlite:///optuna.db``, which its dashboard opens;
            None for memory.

    Raises:
        MissingExtraError: Optuna is not installed.
    """
    optuna = optuna_module()
    directions = ["minimize" if o.sign > 0 else "maximize" for o in study.objectives]
    export = optuna.create_study(study_name=study.name, directions=directions, storage=storage)
    metrics = [objective.metric for objective in study.objectives]
    export.set_metric_names(metrics)
    ended = [trial for trial in study.trials if trial.state is not State.RUNNING]
    highest = max((trial.fidelity for trial in ended if trial.state in SCORED), default=0.0)
    export.add_trials([
        frozen(
            optuna, study.space, trial, metrics, limited=bool(study.limits),
            pruned=trial.state in SCORED and trial.fidelity < highest, readable=True,
        )
        for trial in ended
    ])  # fmt: skip
    return export
