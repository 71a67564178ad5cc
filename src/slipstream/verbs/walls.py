"""Walls: limits of a training run on many workers, each with a remedy and its gain.

A run consists of steps, evaluations and a start-up. The parts of a step are predicted from the
recorded one; a `TrainingPlan` describes the rest. Source: Kumar et al., MLSys 2021, arXiv
2011.03641.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.errors import InvalidArgumentError, UnknownNameError
from slipstream.graph import Graph
from slipstream.tables import Field, Table
from slipstream.techniques.spatial.input import InputModel
from slipstream.units import format_duration, format_percent, parse_duration_ns

if TYPE_CHECKING:
    from slipstream.verbs.results import Predicted

REMEDIES: Mapping[str, tuple[str, ...]] = {
    "all-reduce": ("two_d_allreduce", "cast"),
    "update": ("sharded_update",),
}
"""By wall, techniques whose gain is predicted together with the distributed one."""
OUTSIDE = ("evaluation", "input", "start-up")
"""Walls that are not part of the recorded step."""
# Below this, statistics of a batch are too noisy.
_MIN_NORMALISED = 16
_EXAMPLE = "samples=1.2e6,evaluations=10,evaluation=20s,metric=2s,startup=30s,load=2ms"


@dataclass(frozen=True)
class TrainingPlan:
    """The parts of a training run that a recorded step does not contain.

    Attributes:
        samples: processed by the whole run; 0: unknown.
        evaluations: number of evaluations.
        evaluation_ns: time of one evaluation on a single worker, without the metric.
        metric_ns: time of a host to compute the metric of one evaluation, such as BLEU.
        startup_ns: time to start and compile, and by which the first steps take longer.
        load_ns: CPU time to load a sample; 0: unknown.
        spread: standard deviation of `load_ns`, relative to it.
        loaders: loading processes per worker.

    Raises:
        InvalidArgumentError: a value is negative or not finite, or there are no loaders.
    """

    samples: float = 0.0
    evaluations: float = 0.0
    evaluation_ns: float = 0.0
    metric_ns: float = 0.0
    startup_ns: float = 0.0
    load_ns: float = 0.0
    spread: float = 0.3
    loaders: float = 1.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not 0.0 <= value < math.inf:
                raise InvalidArgumentError(
                    field.name.removesuffix("_ns"),
                    f"{value:g} is not a finite number of at least 0",
                )
        if self.loaders < 1 or self.loaders % 1:
            raise InvalidArgumentError("loaders", f"{self.loaders:g} is not a positive integer")

    @classmethod
    def parse(cls, text: str) -> TrainingPlan:
        """Return the plan written as ``samples=1.2e6,evaluation=20s``; times have units.

        Raises:
            UnknownNameError: a key is unknown.
            InvalidArgumentError: a value is missing, or is not a number or a time.
        """
        values: dict[str, float] = {}
        fields = {field.name.removesuffix("_ns"): field.name for field in dataclasses.fields(cls)}
        for part in filter(None, text.split(",")):
            key, _, value = part.strip().partition("=")
            if key not in fields:
                raise UnknownNameError("setting of --run", key, fields)
            if fields[key].endswith("_ns"):
                values[fields[key]] = parse_duration_ns(value, f"--run {key}")
                continue
            try:
                values[key] = float(value)
            except ValueError:
                raise InvalidArgumentError(
                    f"--run {key}", f"'{value}' is not a number", remedy=f"for example {_EXAMPLE}"
                ) from None
        return cls(**values)


@dataclass(frozen=True)
class RunWall:
    """A limit of a run on some number of workers.

    Attributes:
        name: short description.
        ns: its time in a step; that of evaluations and start-up is divided among all steps. None:
            unknown.
        remedy: what reduces it.
        saved_ns: predicted saving of the remedy, in a step; None: unknown. An upper bound for a
            remedy that is not predicted.
        detail: what `ns` is based on, or how to determine it.
    """

    name: str
    ns: float | None
    remedy: str
    saved_ns: float | None
    detail: str = ""


def walls_of(
    recorded: Graph, p: Predicted, parts_ns: Mapping[str, float], plan: TrainingPlan,
    *, fixed_batch: bool, remedies: Mapping[str, Sequence[Predicted]] | None = None,
) -> tuple[RunWall, ...]:  # fmt: skip
    """Return every wall of a run of steps `p`, the largest first, unknown ones last.

    Args:
        recorded: the step of one worker.
        parts_ns: exposed parts of the predicted step, see `slipstream.verbs.scaling.PARTS`.
        fixed_batch: whether more workers share the same batch.
        remedies: by wall, the step with techniques that reduce it.
    """
    assert p.graph is not None
    workers, samples = p.graph.workers, p.samples[1]
    each = samples / workers
    tiled = any(part.traits.axis == "tile" for part in p.techniques)
    steps = plan.samples / samples if samples else 0.0
    statistic_ns = sum(
        float(p.graph.tasks.duration_ns[row.task])
        for row in p.graph.exchanges
        if row.purpose == "statistic"
    )
    exposed_ns = parts_ns["latency"] + parts_ns["bandwidth"]
    statistic_ns = min(statistic_ns, exposed_ns)
    predicted = {name: _best(name, p, (remedies or {}).get(name)) for name in REMEDIES}
    found = [
        _fixed_batch(recorded, p, parts_ns["compute"], each, fixed_batch),
        RunWall(
            "all-reduce",
            exposed_ns - statistic_ns,
            *predicted["all-reduce"],
            "gradients and halos of tiles" if tiled else "gradients",
        ),
        RunWall("update", parts_ns["update"], *predicted["update"]),
        _batch_norm(recorded, statistic_ns, workers, samples if tiled else each, tiled),
        _evaluation(plan, workers, steps, p.step_ns),
        _input(plan, workers, each, p.step_ns),
        _startup(plan, steps),
    ]
    return tuple(sorted(found, key=lambda wall: -1.0 if wall.ns is None else wall.ns, reverse=True))


def _best(name: str, p: Predicted, others: Sequence[Predicted] | None) -> tuple[str, float | None]:
    """Return the best remedy and its gain per step; None for `others` that were not predicted."""
    names = " or ".join(REMEDIES[name])
    if others is None:
        return names, None
    if not others:
        return f"none: {names} does not apply", 0.0
    best = min(others, key=lambda other: other.step_ns)
    if best.step_ns >= p.step_ns:
        return f"none: {names} would not shorten the step", 0.0
    added = [str(part) for part in best.techniques if part not in p.techniques]
    return "+".join(added), p.step_ns - best.step_ns


def _fixed_batch(
    recorded: Graph, p: Predicted, compute_ns: float, each: float, fixed: bool
) -> RunWall:
    """Compare the time to compute a sample with that in the recorded step."""
    by_samples = all(part.traits.axis == "data" for part in p.techniques)
    remedy = "several workers per sample: spatial or pipeline" if by_samples else "a larger batch"
    if not fixed:
        return RunWall("fixed batch", 0.0, remedy, 0.0, "the batch grows with the workers")
    if not recorded.samples:
        return RunWall("fixed batch", None, remedy, None, "the recording has no number of samples")
    walls = () if p.shared is None else p.shared.walls
    update_ns = sum(wall.saved_ns for wall in walls if wall.name == "update")
    alone_ns = max(p.baseline_ns - update_ns, 0.0) / recorded.samples
    lost_ns = max(0.0, compute_ns - alone_ns * each)
    detail = f"{each:.3g} sample{'s' * (each != 1)} per worker, {recorded.samples} recorded"
    return RunWall("fixed batch", lost_ns, remedy, lost_ns, detail)


def _batch_norm(
    recorded: Graph, statistic_ns: float, workers: int, each: float, tiled: bool
) -> RunWall:
    if not any("batch_norm" in name for name in recorded.strings):
        return RunWall("batch norm", 0.0, "", 0.0, "no layer normalises over the batch")
    if statistic_ns:
        remedy = "fewer tiles" if tiled else "smaller groups: batch_norm_groups"
        detail = f"sums of {'tiles' if tiled else 'groups'}"
        return RunWall("batch norm", statistic_ns, remedy, statistic_ns, detail)
    enough = each >= _MIN_NORMALISED
    # Groups divide the workers.
    groups = (n for n in range(1, workers) if workers % n == 0 and n * each >= _MIN_NORMALISED)
    remedy = "" if enough else f"batch_norm_groups:{next(groups, workers)}"
    detail = f"statistics of {each:.3g} sample{'s' * (each != 1)}" + (
        "" if enough else ", too noisy to train with"
    )
    return RunWall("batch norm", 0.0, remedy, 0.0, detail)


def _evaluation(plan: TrainingPlan, workers: int, steps: float, step_ns: float) -> RunWall:
    remedy = "spatial.Evaluation: on all workers, metric while training"
    each_ns = plan.evaluation_ns + plan.metric_ns
    if not steps or not plan.evaluations or not each_ns:
        unknown = "unknown: pass --run samples=N,evaluations=N,evaluation=TIME,metric=TIME"
        return RunWall("evaluation", None, remedy, None, unknown)
    whole_ns = plan.evaluations * each_ns
    shared_ns = plan.evaluation_ns / workers
    between_ns = steps / plan.evaluations * step_ns + shared_ns
    # The metric of the last evaluation is awaited: the evaluation tail.
    late_ns = max(0.0, plan.metric_ns - between_ns) * (plan.evaluations - 1) + plan.metric_ns
    saved_ns = max(0.0, whole_ns - plan.evaluations * shared_ns - late_ns)
    count = f"{plan.evaluations:g} evaluation{'s' * (plan.evaluations != 1)}"
    detail = f"{count} on one worker; tail {format_duration(late_ns)}"
    return RunWall("evaluation", whole_ns / steps, remedy, saved_ns / steps, detail)


def _input(plan: TrainingPlan, workers: int, each: float, step_ns: float) -> RunWall:
    if not plan.load_ns or not each:
        unknown = "unknown: pass --run load=TIME,spread=0.3,loaders=N"
        return RunWall("input", None, "more loaders", None, unknown)
    model = InputModel(math.ceil(each), plan.load_ns, plan.spread, int(plan.loaders))
    late_ns = model.waiting_ns(workers, step_ns)
    detail = f"slowest of {workers} hosts: {format_duration(model.slowest_ns(workers))} per batch"
    remedy = ""
    if late_ns:
        try:
            remedy = f"{model.loaders_for(workers, step_ns)} loaders per worker"
        except InvalidArgumentError as error:
            remedy = error.remedy or ""
    return RunWall("input", late_ns, remedy, late_ns, detail)


def _startup(plan: TrainingPlan, steps: float) -> RunWall:
    remedy = "compile once and cache; start one program per host"
    if not plan.startup_ns or not steps:
        unknown = "unknown: pass --run samples=N,startup=TIME"
        return RunWall("start-up", None, remedy, None, unknown)
    each_ns = plan.startup_ns / steps
    return RunWall("start-up", each_ns, remedy, each_ns, "divided among all steps")


def walls_table(title: str, walls: Sequence[RunWall], step_ns: float) -> Table:
    """Return a row per wall; shares are of a step with its part of evaluations and start-up."""
    total = step_ns + sum(wall.ns or 0.0 for wall in walls if wall.name in OUTSIDE)
    fields: tuple[Field[RunWall], ...] = (
        Field.of("wall", lambda wall: wall.name),
        Field.number("per step", lambda wall: _time(wall.ns)),
        Field.number("share", lambda w: "-" if w.ns is None else format_percent(w.ns / total)),
        Field.of("remedy", lambda wall: wall.remedy or "-"),
        Field.number("gain per step", lambda wall: _time(wall.saved_ns)),
        Field.of("basis", lambda wall: wall.detail),
    )
    return Table.of(walls, fields, title)


def _time(ns: float | None) -> str:
    return "-" if ns is None else format_duration(ns) if ns else "0"
