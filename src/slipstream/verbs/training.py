"""What is to be expected of a training with techniques: time to quality, before it is measured.

Time of a sample: the graph of the task's step, edited and simulated as `predict` does. Samples to
the target: as many, where a technique declares that it leaves the numbers or their distribution
alone; else a pilot (see `slipstream.mlperf.training.pilot`).
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
from slipstream.mlperf.training.foresight import Expected, Foresight
from slipstream.mlperf.training.judge import BASELINE, arms_of, describe, drawn, spread_of
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
"""What the ledger calls it."""
_STEP = Path(mlperf.__path__[0]) / "training" / "running.py"
PILOTS = 2
"""Quarters of a run that tell how many samples a side needs."""
Say = Callable[[str], None]


def foresee(
    target: str,
    combinations: Sequence[str],
    past: History,
    *,
    against: str = "",
    runs: int = 5,
    threads: int = 1,
    batch: int | None = None,
    seeds: int = PILOTS,
    say: Say = lambda line: None,
) -> dict[str, Foresight]:
    """By arm: what `slipstream.mlperf.training.time_to_quality` will find, kept in the ledger.

    Args:
        target, combinations, against, runs, threads, batch: as there.
        seeds: pilots of each side, where one is needed; 0 for none, with no answer then.

    Raises:
        UnknownNameError, UsageError, WorkloadError: as there.
        UsageError: what the others are compared with does not apply.
        ChildError: the profile or a micro-benchmark died.
    """
    first, *arms = arms_of(combinations, against)
    task = describe(target, say)
    times = _times(target, task, [first, *arms], past, threads, batch, say)
    if first != BASELINE and not times[first].applies:
        raise UsageError(times[first].basis, remedy="another --against")
    trained = [name for name in arms if times[name].applies]
    samples = _samples(target, task, first, trained, runs, threads, batch, drawn(seeds), say)
    answer = {}
    for name in arms:
        sample = times[name] if first == BASELINE else _over(times[name], times[first])
        answer[name] = Foresight(name, sample, samples.get(name, sample))
        if answer[name].time.known:
            past.record(_record(answer[name], task, first, runs, threads, batch, past))
    return answer


def _over(one: Expected, other: Expected) -> Expected:
    return next((part for part in (one, other) if not part.known), None) or one.over(other)


def _times(
    target: str, task: Task, names: Sequence[str], past: History, threads: int, batch: int | None,
    say: Say,
) -> dict[str, Expected]:  # fmt: skip
    """Time of a sample by arm, against the task as it is."""
    parsed = {name: techniques.parse(name) for name in names if name != BASELINE}
    spread = {name for name, parts in parsed.items() if any(p.traits.is_distributed for p in parts)}
    alone = [name for name in parsed if name not in spread]
    expected = dict.fromkeys(
        spread, Expected(basis="ranks on one machine share its cores; predict --cluster tells")
    )
    if not alone:
        return expected
    workload = Workload.parse(f"{_STEP}:first_step", task=target, batch=batch or task.batch)
    needs = {need for name in alone for part in parsed[name] for need in part.traits.needs}
    try:
        # Every run is a launch of its own: what launches differ by is in the runs' mean.
        graph = profile(workload, threads=threads, needs=needs, launches=False, say=say)
    except GraphError as error:
        return expected | dict.fromkeys(alone, Expected(basis=error.what))
    predictions = predict(graph, alone, widen=past.widen, say=say)
    past.keep(predictions, task.name)
    return expected | {one.technique: _time(one) for one in predictions}


def _time(one: Prediction) -> Expected:
    if isinstance(one, Refused):
        return Expected(basis=one.in_words, applies=one.busy)
    return Expected(one.ratio, one.low, one.high, "the step's graph")


def _samples(
    target: str, task: Task, first: str, arms: Sequence[str], runs: int, threads: int,
    batch: int | None, seeds: Sequence[int], say: Say,
) -> dict[str, Expected]:  # fmt: skip
    """Samples to the target by arm.

    The interval is of what so many runs will show: they scatter as the recorded reference's do.
    """
    kinds = {
        name: techniques.quality_of(() if name == BASELINE else techniques.parse(name)).kind
        for name in (first, *arms)
    }
    anew = QualityKind.NEEDS_TRAINING
    tried = [name for name in arms if anew in (kinds[first], kinds[name])]
    chance = math.sqrt(2 / runs) * spread_of(target, task)
    shown = pilots(target, task, first, tried, seeds, threads=threads, batch=batch, say=say)
    expected = {}
    for name in arms:
        if name not in shown:
            exact = kinds[first] is kinds[name] is QualityKind.EXACT
            expected[name] = Expected.of(1.0, 0.0 if exact else chance, f"{kinds[name]} numbers")
        else:
            expected[name] = _shown(shown[name], chance)
    return expected


def _shown(pilot: Pilot, chance: float) -> Expected:
    if pilot.reason:
        return Expected(basis=pilot.reason)
    logs = np.log(pilot.ratios)
    apart = float(np.std(logs, ddof=1)) if len(logs) > 1 else math.nan
    basis = f"{len(logs)} pilot{'s' * (len(logs) > 1)} of a quarter of a run, {pilot.cpu_s:.1f} s"
    return Expected.of(math.exp(float(np.mean(logs))), math.hypot(chance, apart), basis)


def _record(
    one: Foresight, task: Task, first: str, runs: int, threads: int, batch: int | None,
    past: History,
) -> PredictionRecord:  # fmt: skip
    return PredictionRecord(
        task.name, one.name, METRIC, one.time.ratio, one.time.low, one.time.high,
        str(Provenance.SIMULATED), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        past.environment.env_id,
        {**one.to_json(), "against": first, "runs": runs, "threads": threads,
         "batch": batch or task.batch, "target": task.target},
    )  # fmt: skip
