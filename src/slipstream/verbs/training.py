"""Predict the time to quality of a training with techniques, before it is measured.

The time per sample comes from the graph of the task's step, edited and simulated as `predict`
does. The number of samples stays equal for techniques that declare exact or equally distributed
numerics; otherwise a pilot estimates it (see `slipstream.mlperf.training.pilot`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from slipstream import mlperf
from slipstream import technique as techniques
from slipstream.errors import GraphError, UsageError
from slipstream.measure.records import PredictionRecord
from slipstream.mlperf.training.forecast import ArmForecast, PredictedRatio
from slipstream.mlperf.training.judge import BASELINE, arms_of, describe, random_seeds, spread_of
from slipstream.mlperf.training.pilot import Pilot, pilots
from slipstream.mlperf.training.tasks import Task
from slipstream.provenance import Provenance
from slipstream.technique import QualityKind
from slipstream.verbs.history import History
from slipstream.verbs.predicting import predict
from slipstream.verbs.profiling import profile
from slipstream.verbs.results import Prediction, Refused
from slipstream.workload import Workload

METRIC = "time_to_quality"
"""Metric name in the ledger."""
_STEP = Path(mlperf.__path__[0]) / "training" / "running.py"
PILOTS = 2
"""Pilots per side, each a quarter of a run, that estimate the samples to the target."""
Report = Callable[[str], None]


def predict_training(
    target: str,
    combinations: Sequence[str],
    past: History,
    *,
    against: str = "",
    runs: int = 5,
    threads: int = 1,
    batch: int | None = None,
    seeds: int = PILOTS,
    report: Report = lambda line: None,
) -> dict[str, ArmForecast]:
    """Predict what `slipstream.mlperf.training.time_to_quality` will find, by arm, for the ledger.

    Args:
        target, combinations, against, runs, threads, batch: as for `time_to_quality`.
        seeds: pilots per side, if needed; 0 for none, which leaves such arms without a prediction.

    Raises:
        UnknownNameError, UsageError, WorkloadError: as `time_to_quality`.
        UsageError: the reference of the comparison does not apply.
        ChildError: the profile or a micro-benchmark died.
    """
    first, *arms = arms_of(combinations, against)
    task = describe(target, report)
    times = _times(target, task, [first, *arms], past, threads, batch, report)
    if first != BASELINE and not times[first].applies:
        raise UsageError(times[first].basis, remedy="choose another --against")
    trained = [name for name in arms if times[name].applies]
    samples = _samples(
        target, task, first, trained, runs, threads, batch, random_seeds(seeds), report
    )
    forecasts = {}
    for name in arms:
        sample = times[name] if first == BASELINE else _over(times[name], times[first])
        forecasts[name] = ArmForecast(name, sample, samples.get(name, sample))
        if forecasts[name].time.is_predicted:
            past.record(_record(forecasts[name], task, first, runs, threads, batch, past))
    return forecasts


def _over(time: PredictedRatio, baseline: PredictedRatio) -> PredictedRatio:
    return next((p for p in (time, baseline) if not p.is_predicted), None) or time.over(baseline)


def _times(
    target: str, task: Task, names: Sequence[str], past: History, threads: int, batch: int | None,
    report: Report,
) -> dict[str, PredictedRatio]:  # fmt: skip
    parsed = {name: techniques.parse(name) for name in names if name != BASELINE}
    distributed = {
        name for name, parts in parsed.items() if any(p.traits.is_distributed for p in parts)
    }
    alone = [name for name in parsed if name not in distributed]
    expected = dict.fromkeys(
        distributed,
        PredictedRatio(basis="ranks on one machine share its cores; use predict --cluster"),
    )
    if not alone:
        return expected
    workload = Workload.parse(f"{_STEP}:first_step", task=target, batch=batch or task.batch)
    needs = {need for name in alone for part in parsed[name] for need in part.traits.needs}
    try:
        # Every run is a separate launch, so their mean covers how launches differ.
        graph = profile(workload, threads=threads, needs=needs, launches=False, report=report)
    except GraphError as error:
        return expected | dict.fromkeys(alone, PredictedRatio(basis=error.what))
    predictions = predict(graph, alone, widen=past.widen, report=report)
    past.keep(predictions, task.name)
    return expected | {p.technique: _time(p) for p in predictions}


def _time(prediction: Prediction) -> PredictedRatio:
    if isinstance(prediction, Refused):
        return PredictedRatio(basis=prediction.in_words, applies=prediction.busy)
    return PredictedRatio(prediction.ratio, prediction.low, prediction.high, "the step's graph")


def _samples(
    target: str, task: Task, first: str, arms: Sequence[str], runs: int, threads: int,
    batch: int | None, seeds: Sequence[int], report: Report,
) -> dict[str, PredictedRatio]:  # fmt: skip
    """Predict the samples to the target by arm.

    The interval is for the mean of `runs` runs, which scatter like the recorded reference's.
    """
    kinds = {
        name: techniques.quality_of(() if name == BASELINE else techniques.parse(name)).kind
        for name in (first, *arms)
    }
    retrained = QualityKind.NEEDS_TRAINING
    piloted = [name for name in arms if retrained in (kinds[first], kinds[name])]
    chance = math.sqrt(2 / runs) * spread_of(target, task)
    shown = pilots(target, task, first, piloted, seeds, threads=threads, batch=batch, report=report)
    expected = {}
    for name in arms:
        if name not in shown:
            exact = kinds[first] is kinds[name] is QualityKind.EXACT
            expected[name] = PredictedRatio.of(
                1.0, 0.0 if exact else chance, f"{kinds[name]} numerics"
            )
        else:
            expected[name] = _shown(shown[name], chance)
    return expected


def _shown(pilot: Pilot, chance: float) -> PredictedRatio:
    if pilot.reason:
        return PredictedRatio(basis=pilot.reason)
    logs = np.log(pilot.ratios)
    spread = float(np.std(logs, ddof=1)) if len(logs) > 1 else math.nan
    basis = f"{len(logs)} pilot{'s' * (len(logs) > 1)} of a quarter of a run, {pilot.cpu_s:.1f} s"
    return PredictedRatio.of(math.exp(float(np.mean(logs))), math.hypot(chance, spread), basis)


def _record(
    forecast: ArmForecast, task: Task, first: str, runs: int, threads: int, batch: int | None,
    past: History,
) -> PredictionRecord:  # fmt: skip
    time_ratio = forecast.time
    return PredictionRecord(
        task.name, forecast.name, METRIC, time_ratio.ratio, time_ratio.low, time_ratio.high,
        str(Provenance.SIMULATED), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        past.environment.env_id,
        {**forecast.to_json(), "against": first, "runs": runs, "threads": threads,
         "batch": batch or task.batch, "target": task.target},
    )  # fmt: skip
